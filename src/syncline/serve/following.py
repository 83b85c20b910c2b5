"""Versions from a running job: one consistent cut of its parameters after another, read from its servers."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from syncline.core.layout import Segment, Slice
from syncline.core.members import Member
from syncline.core.wire.following import AskCut, AwaitEnd, CutPlace, EndCut, GivenCut, GivenSlices, ReadCut
from syncline.core.wire.message import Done, Message
from syncline.errors import ConfigError, ConnectionLost, ProtocolError, StoreError, SynclineError
from syncline.net import tcp
from syncline.net.connection import SocketConnection
from syncline.net.rpc import Call, Endpoint, Stamp
from syncline.net.transport import Buffer, Peer, buffer_of
from syncline.serve.datatypes import Array
from syncline.serve.model import SavedWeights
from syncline.serve.reading import Candidate, VersionSource, open_source
from syncline.store.weights import Weight, names_of

log = logging.getLogger("syncline.serve")

_CONNECT_SECONDS = 5.0
#: The coordinator tries for two seconds; a reconfiguration may come before.
_CUT_SECONDS = 20.0
_READ_SECONDS = 60.0
#: For a job that has just begun.
_FIRST_SECONDS = 60.0
_MOST_NAMES = 1024
_MOST_NAME = 60  # characters of a follower's name


class FollowedJob(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job's coordinator is, and what proves that we may follow it."""

    job: str
    token: str  #: hexadecimal
    host: str
    port: int
    name: str = ""  #: for people

    def __repr__(self) -> str:
        return f"FollowedJob(job={self.job!r}, host={self.host!r}, port={self.port})"


def source_of(
    weights: str | None, pick: str, follow: FollowedJob | None, name: str, *, copies: bool
) -> VersionSource | None:
    """Where versions come from: saved weights, or a job; None: the model as it is made. `copies`: see `JobSource`."""
    if follow is None:
        return open_source(weights, pick) if weights is not None else None
    if weights is not None:
        raise ConfigError("--from and --follow: give one of them")
    return JobSource(follow, f"serve-{name}"[:_MOST_NAME], copies=copies)


class JobParameters:
    """The parameters of a job as of its last cut, in memory of this process."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._bytes: list[Array] = []
        self._parts: dict[int, Slice] = {}
        self.versions: dict[int, int] = {}  #: of slices
        self._lives: frozenset[tuple[str, int]] = frozenset()  # of the servers that gave them

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def add(self, segments: Sequence[Segment]) -> None:
        """Parameters that were registered since."""
        for segment in segments:
            if segment.index != len(self._segments):
                raise ProtocolError(f"the job describes segment {segment.index}; {len(self._segments)} was expected")
            self._segments.append(segment)
            self._bytes.append(np.zeros(segment.num_bytes, np.uint8))
            self._parts.update({part.id: part for part in segment.slices})

    def room(self, number: int) -> Buffer:
        """Where the bytes of a slice belong. Its version is unknown until they have come."""
        part = self._parts.get(number)
        if part is None:
            raise ProtocolError(f"the job has described no slice {number}")
        self.versions.pop(number, None)
        return buffer_of(self._bytes[part.segment][part.offset : part.offset + part.num_bytes])

    def check(self, places: Sequence[CutPlace]) -> None:
        """ProtocolError: a cut without all slices.

        Versions are forgotten if its servers are not those of the last cut: a server that took slices from a
        checkpoint after a death may give other bytes the same version.
        """
        if sorted(number for place in places for number in place.slices) != sorted(self._parts):
            raise ProtocolError("the job's cut has other slices than the job")
        lives = frozenset((place.server.name, place.server.incarnation) for place in places)
        if lives != self._lives:
            self._lives = lives
            self.versions.clear()

    @property
    def digest(self) -> str:
        """Differs if any bytes may."""
        told = f"{sorted(self._lives)} {sorted(self.versions.items())}"
        return hashlib.sha256(told.encode()).hexdigest()[:32]

    def weights(self) -> SavedWeights:
        """By the model's names. They change with the next cut."""
        own = names_of(self._segments)
        found = {}
        for segment, content in zip(self._segments, self._bytes, strict=True):
            for parameter, offset in zip(segment.parameters, segment.offsets, strict=True):
                name = own.get(parameter.name)
                if name is not None:
                    weight = Weight(name, parameter.dtype, parameter.shape)
                    found[name] = (weight, content[offset : offset + parameter.num_bytes])
        return found


class JobFollower:
    """Reads cuts of a job. One thread at a time."""

    def __init__(self, job: FollowedJob, me: str, on_end: Callable[[], None] = lambda: None) -> None:
        """`me`: what this follower is called in the job's log. `on_end` is called in another thread when all scripts
        have ended: the job waits a few seconds for a last `read_cut`.
        """
        self._on_end = on_end
        self._job = job
        self._identity = tcp.Identity(job.job, bytes.fromhex(job.token), Peer("follower", me, 0))
        self._stamp = Stamp(job.job)
        self._coordinator: Endpoint | None = None
        self._servers: dict[tuple[str, int], Endpoint] = {}
        self.has_ended = False  #: all scripts have
        self.parameters = JobParameters()
        self.step = 0  #: of the last cut
        self.num_bytes = 0  #: that were read for it
        self.held_seconds = 0.0  #: that the job's commits were held for it

    def read_cut(self) -> bool:
        """Brings `parameters` to the job's newest state; False: nothing has changed. A SynclineError or OSError: the
        job is not there, or cannot give a cut now. Then `parameters` are none of the job's, until this succeeds.
        """
        try:
            coordinator = self._reach_coordinator()
            cut = self._ask_for_cut(coordinator)
            try:
                return self._read(cut)
            finally:
                for place in cut.places:
                    known = self._servers.get((place.server.name, place.server.incarnation))
                    if known is not None:
                        known.mention(EndCut(cut.number))
                coordinator.mention(EndCut(cut.number))
        except StoreError:
            raise  # the job has no cut now; it is there
        except (SynclineError, OSError):
            self.close()
            raise

    def close(self) -> None:
        """Ends all connections; the next cut makes new ones."""
        endpoints = [*self._servers.values(), *([self._coordinator] if self._coordinator is not None else [])]
        self._coordinator, self._servers = None, {}
        for endpoint in endpoints:
            endpoint.close()

    def _reach_coordinator(self) -> Endpoint:
        if self._coordinator is None or not self._coordinator.is_open:
            connection = tcp.connect_tcp(self._job.host, self._job.port, self._identity, _CONNECT_SECONDS)
            self._coordinator = Endpoint(connection, self._stamp)
            self._coordinator.call(AwaitEnd(), then=self._hear_end)
        return self._coordinator

    def _hear_end(self, call: Call) -> None:
        if isinstance(call.answer, Done):  # else the connection has ended
            self.has_ended = True
            self._on_end()

    def _ask_for_cut(self, coordinator: Endpoint) -> GivenCut:
        answer = coordinator.call(AskCut(self.parameters.num_segments)).wait(_CUT_SECONDS)
        if not isinstance(answer, GivenCut):
            raise ProtocolError(f"the coordinator answers {type(answer).__name__} to AskCut")
        self.parameters.add(answer.segments)
        self.parameters.check(answer.places)
        return answer

    def _read(self, cut: GivenCut) -> bool:
        wanted = {}
        for place in cut.places:
            changed = [
                (number, version)
                for number, version in zip(place.slices, place.versions, strict=True)
                if self.parameters.versions.get(number) != version
            ]
            if changed:
                wanted[place.server.name] = (place.server, dict(changed))
        self.num_bytes = 0
        calls = {name: self._ask(server, cut.number, versions) for name, (server, versions) in wanted.items()}
        until = time.monotonic() + _READ_SECONDS
        for name, (call, given) in calls.items():
            call.wait(max(0.0, until - time.monotonic()))
            versions = wanted[name][1]
            if sorted(given) != sorted(versions):
                raise ProtocolError(f"{name} gave other slices than it was asked for")
            self.parameters.versions.update(versions)
        self.step, self.held_seconds = cut.step, cut.held_seconds
        return bool(wanted)

    def _ask(self, server: Member, number: int, versions: dict[int, int]) -> tuple[Call, list[int]]:
        given: list[int] = []

        def room(message: Message) -> list[Buffer]:
            if not isinstance(message, GivenSlices) or not versions.keys() >= set(message.slices):
                raise ProtocolError(f"{server.name} gives what was not asked for")
            given.extend(message.slices)
            found = [self.parameters.room(one) for one in message.slices]
            self.num_bytes += sum(len(buffer) for buffer in found)
            return found

        message = ReadCut(number, list(versions))
        return self._reach(server).call(message, into=room, on_part=lambda part: None), given

    def _reach(self, server: Member) -> Endpoint:
        key = (server.name, server.incarnation)
        known = self._servers.get(key)
        if known is None or not known.is_open:
            known = self._servers[key] = Endpoint(self._connect(server), self._stamp)
        return known

    def _connect(self, server: Member) -> SocketConnection:
        address = server.address
        if address is None:
            raise ConnectionLost(f"{server.name} has no address")
        if address.unix:
            with contextlib.suppress(OSError):  # it is on another host
                return tcp.connect_unix(address.unix, self._identity, _CONNECT_SECONDS)
        return tcp.connect_tcp(address.host, address.port, self._identity, _CONNECT_SECONDS)


ENDED = "the job has ended"


class JobSource:
    """Each cut in which something has changed is a version, named by its step."""

    def __init__(self, job: FollowedJob, me: str, *, copies: bool) -> None:
        """`copies`: a version's weights stay as they are; else they change with the next look."""
        self._job, self._copies = job, copies
        self._follower = JobFollower(job, me, self._hear_end)
        self._call_at_end: list[Callable[[], None]] = []
        self._is_over = False  # the last cut was read
        self._candidate: Candidate | None = None
        self._names: dict[str, str] = {}  # of versions, with their digests
        self._trouble = ""
        self._has_begun = False
        self.where = f"job {job.name or job.job}"

    @property
    def trouble(self) -> str:
        """Why the job cannot be followed now; '': it is followed."""
        return self._trouble

    def resume(self, name: str, digest: str) -> None:
        if name:
            self._names[name] = digest
            self._has_begun = True  # a job that is gone since is no reason to fail

    def look(self) -> Iterator[Candidate]:
        """The newest cut. StoreError: there was none yet."""
        if not self._is_over and not self._look():
            return
        assert self._candidate is not None
        yield self._candidate

    def _look(self) -> bool:
        has_ended = self._follower.has_ended
        try:
            has_changed = self._read_cut()
        except (SynclineError, OSError) as error:
            self._failed(ENDED if has_ended else str(error) or type(error).__name__)
            return False
        if self._trouble:
            log.info("%s is followed again", self.where)
        self._trouble, self._has_begun = "", True
        if has_changed or self._candidate is None:
            self._candidate = self._new_candidate()
        if has_ended:
            self._is_over, self._trouble = True, ENDED
            self._follower.close()
            log.info("%s: %s; the server goes on with its last state", self.where, ENDED)
        return True

    def call_at_end(self, action: Callable[[], None]) -> None:
        """Calls `action` in another thread when the job ends: a last `look` should come soon."""
        self._call_at_end.append(action)

    def _hear_end(self) -> None:
        for action in self._call_at_end:
            action()

    def close(self) -> None:
        self._follower.close()

    def _read_cut(self) -> bool:
        """A job that has just begun may have no parameters yet: the first cut is waited for."""
        until = time.monotonic() + _FIRST_SECONDS
        while True:
            try:
                return self._follower.read_cut()
            except StoreError:
                if self._has_begun or time.monotonic() > until:
                    raise

    def _failed(self, words: str) -> None:
        self._candidate = None  # what was read may be a part of a newer cut
        was_known, self._trouble = bool(self._trouble), words
        if not self._has_begun:
            raise StoreError(f"{self.where} cannot be followed: {words}; does it run?") from None
        if not was_known:
            log.warning("%s cannot be followed now (%s); the server goes on with what it has", self.where, words)

    def _new_candidate(self) -> Candidate:
        follower = self._follower
        digest = f"{self._job.job} {follower.step} {follower.parameters.digest}"
        name = base = str(follower.step)
        number = 1
        while self._names.get(name, digest) != digest:  # the job went back to a checkpoint
            number += 1
            name = f"{base}-{number}"
        self._names[name] = digest
        if len(self._names) > _MOST_NAMES:
            del self._names[next(iter(self._names))]
        return Candidate(name, digest, self.where, follower.step, self._weights)

    def _weights(self) -> SavedWeights:
        weights = self._follower.parameters.weights()
        if not self._copies:
            return weights
        return {name: (weight, data.copy()) for name, (weight, data) in weights.items()}
