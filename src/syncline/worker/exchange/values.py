"""Values outside of commits: initial values, pulls, rule state, and this worker's copies of slices.

The copies restore a slice whose only server is gone.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from syncline.core.layout import Layout, Segment, Slice
from syncline.core.members import Member
from syncline.core.slice_state import Copy
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import AskState, Committed, GivenState, LoadState, Restore, StateEntry, Upload
from syncline.errors import ProtocolError, SynclineError
from syncline.net.rpc import Call, Endpoint, wait_all
from syncline.net.transport import buffer_of
from syncline.worker.arrays import Bytes
from syncline.worker.exchange.routes import ServerRoutes
from syncline.worker.exchange.targets import Landed, Target, gathered, holds_all

_MOST_OPEN = 16


def upload(
    routes: ServerRoutes,
    segment: Segment,
    values: Mapping[str, Bytes] | Bytes,
    seconds: float,
    *,
    again: bool = False,
) -> None:
    """Uploads the values of a whole segment: by parameter, or as one run of bytes.

    Those of parameters are put together slice by slice: a large model is never here twice.
    """
    # Limit the open requests: unread answers would fill the socket and block the server.
    calls: collections.deque[Call] = collections.deque()
    for part in segment.slices:
        view = _slice_of(routes.layout, part, values)
        endpoint = routes.endpoints[routes.primaries[part.id]]
        message = Upload(segment.index, [part.id], again)
        calls.append(endpoint.call(message, buffers=[buffer_of(view)], payload_bytes=view.nbytes))
        if len(calls) >= _MOST_OPEN:
            wait_all([calls.popleft()], seconds)
    wait_all(list(calls), seconds)


def _slice_of(layout: Layout, part: Slice, values: Mapping[str, Bytes] | Bytes) -> Bytes:
    if isinstance(values, np.ndarray):
        return values[part.offset : part.offset + part.num_bytes]
    found = gathered(layout, part, values.get)
    assert found is not None
    return found


def pull(routes: ServerRoutes, slices: Sequence[Slice], target: Target, min_version: int | None) -> list[int]:
    """Reads slices into the target; returns their versions."""
    versions: dict[int, int] = {}
    for server, reader in routes.readers.items():
        parts = [part for part in slices if routes.source(part.id) == server]
        if parts:
            found = reader.pull(parts, target, min_version)
            versions.update(zip((part.id for part in parts), found, strict=True))
    return [versions[part.id] for part in slices]


def are_level(routes: ServerRoutes, slices: Sequence[Slice], versions: Sequence[int]) -> bool:
    """Whether these versions are those after one round, the same for all slices. False as well if some slices have
    changed since: then nothing is known.
    """
    by_id = {part.id: version for part, version in zip(slices, versions, strict=True)}
    counts: set[int] = set()
    for server, reader in routes.readers.items():
        own = [number for number in by_id if routes.source(number) == server]
        if own:
            answer = reader.verify(own, [by_id[number] for number in own])
            if answer.stale or len(answer.counts) != len(own):
                return False
            counts.update(answer.counts)
    return len(counts) <= 1


def newest(routes: ServerRoutes, slices: Sequence[Slice]) -> tuple[int, bool]:
    """The highest version of these slices now, and whether all have counted the same rounds."""
    highest, counts = 0, set[int]()
    for server, reader in routes.readers.items():
        own = [part.id for part in slices if routes.source(part.id) == server]
        if own:
            answer = reader.verify(own, [-1] * len(own))  # no slice has it, so all versions are told
            highest = max(highest, *answer.versions)
            counts.update(answer.counts)
    return highest, len(counts) <= 1


Entries = Sequence[tuple[StateEntry, Bytes]]


def read_state(
    routes: ServerRoutes, slices: Sequence[Slice], seconds: float, key: str = ""
) -> list[tuple[StateEntry, Bytes]]:
    """The rule state of these slices, slice by slice; `key`: only this entry."""
    found: list[tuple[StateEntry, Bytes]] = []
    for part in slices:
        found += _read_one(routes.endpoints[routes.primaries[part.id]], part.id, seconds, key)
    return found


def _read_one(endpoint: Endpoint, number: int, seconds: float, key: str) -> list[tuple[StateEntry, Bytes]]:
    landed: list[Bytes] = []

    def buffers_for(answer: Message) -> list[memoryview]:
        if isinstance(answer, GivenState):
            landed.extend(np.empty(entry.num_bytes, np.uint8) for entry in answer.entries)
        return [buffer_of(array) for array in landed]

    answer = endpoint.call(AskState([number], key), into=buffers_for).wait(seconds)
    if not isinstance(answer, GivenState):
        raise ProtocolError(f"state was answered with {type(answer).__name__}")
    return list(zip(answer.entries, landed, strict=True)) if landed else []


def write_state(routes: ServerRoutes, slices: Sequence[Slice], entries: Entries, seconds: float) -> None:
    """Sets the rule state of these slices. A snapshot contains all of them or none."""
    endpoints = list(routes.endpoints.values())
    wait_all([endpoint.call(LoadState([], [], about=1)) for endpoint in endpoints], seconds)
    try:
        _write_state(routes, slices, entries, seconds)
    finally:
        with contextlib.suppress(SynclineError):  # a server that is gone or has other slices has dropped it
            wait_all([endpoint.call(LoadState([], [], about=2)) for endpoint in endpoints], seconds)


def _write_state(routes: ServerRoutes, slices: Sequence[Slice], entries: Entries, seconds: float) -> None:
    calls = []
    for server, endpoint in routes.endpoints.items():
        numbers = [part.id for part in slices if routes.primaries[part.id] == server]
        mine = [(entry, data) for entry, data in entries if entry.slice in set(numbers)]
        if numbers:
            message = LoadState(numbers, [entry for entry, _ in mine])
            buffers = [buffer_of(data) for _, data in mine]
            calls.append(endpoint.call(message, buffers=buffers, payload_bytes=sum(map(len, buffers))))
    wait_all(calls, seconds)


_MOST_OPEN_COPIES = 4
Told = Committed | Mapping[int, int]  # versions of all slices of a server, or of some


class KeptArrays:
    """Arrays of the caller that hold copies of slices while they live."""

    def __init__(self, layout: Layout, arrays: Mapping[str, Callable[[], Bytes | None]]) -> None:
        self._layout, self._arrays = layout, arrays

    def holds(self, part: Slice) -> bool:
        return holds_all(self._layout, part, lambda name: self._bytes_of(name) is not None)

    def copy_of(self, part: Slice) -> Bytes | None:
        return gathered(self._layout, part, self._bytes_of)

    def _bytes_of(self, name: str) -> Bytes | None:
        array = self._arrays.get(name)
        return array() if array is not None else None


class SliceCopies:
    """All copies of this worker. The script's thread uses `told` and `landed_in`; any thread may ask for copies."""

    def __init__(self, name: str, layout: Layout, wait_seconds: float, num_kept: int) -> None:
        """`num_kept`: how many of the last targets to keep alive; not needed with two replicas."""
        self._name, self._layout, self._wait_seconds = name, layout, wait_seconds
        self._targets: list[weakref.ref[Target]] = []
        self._last: collections.deque[Target] = collections.deque(maxlen=num_kept)
        self._arrays: dict[int, tuple[Landed, KeptArrays]] = {}  # by slice
        self.told: dict[str, tuple[Sequence[Slice], Told]] = {}  # by server: its last answer
        self._known: dict[int, int] = {}  # the highest version of a slice before that
        self._most_updates = 0  # of any slice

    def landed_in(self, target: Target) -> None:
        """This target receives slices from now on."""
        refs = [ref for ref in self._targets if ref() is not None and ref() is not target]
        self._targets = [*refs, weakref.ref(target)]
        if not any(known is target for known in self._last):
            self._last.append(target)

    def has_landed(self, target: Target | None) -> None:
        """A commit is completely received. If its target takes everything, older copies are dropped."""
        if len(self._last) > 1 and self._last[-1] is target and all(map(target.wants, self._layout.slices())):
            self._last = collections.deque([target], self._last.maxlen)

    def _alive(self) -> list[Target]:
        return [target for ref in self._targets if (target := ref()) is not None]

    def keep(self, target: Target, parts: Sequence[Slice], arrays: KeptArrays) -> None:
        """The target's data lies in arrays of the caller, which outlive it."""
        for part in parts:
            found = _in_target(target, part)
            if found is not None:
                self._arrays[part.id] = (found, arrays)

    def overwrites(self, target: Target, parts: Sequence[Slice]) -> None:
        """This target writes into arrays of the caller, which may invalidate earlier copies."""
        for part in parts:
            self._arrays.pop(part.id, None)
            for other in self._alive():
                if other is not target:
                    other.kept[part.id] = None

    def pulled(self, versions: Sequence[int]) -> None:
        """Slices were read outside of a commit."""
        self._most_updates = max(self._most_updates, *versions, 0)

    @property
    def most_updates(self) -> int:
        """The highest number of updates of any slice, by all answers so far."""
        for hosted, said in list(self.told.values()):
            self._most_updates = max(self._most_updates, *_versions(hosted, said).values(), 0)
        return self._most_updates

    def start_over(self) -> None:
        """Servers change: stores by slice what was known by server."""
        self._most_updates = self.most_updates
        for hosted, said in self.told.values():
            for number, version in _versions(hosted, said).items():
                self._known[number] = max(version, self._known.get(number, 0))
        self.told.clear()
        for target in self._alive():
            for wanted in target.wanted.values():
                for number, found in wanted.landed().items():
                    target.kept.setdefault(number, found)
            target.wanted.clear()

    # -- what the coordinator asks ------------------------------------------------------------------------

    def copies_of(self, slices: Sequence[int]) -> list[Copy]:
        """The newest copy of each of these slices."""
        found = []
        parts = self._parts()
        for number in slices:
            part = parts.get(number)
            newest = self._newest(part) if part is not None else None
            if newest is not None:
                found.append(self._described(number, newest[0]))
        return found

    def _parts(self) -> dict[int, Slice]:
        return {part.id: part for segment in list(self._layout.segments) for part in segment.slices}

    def _newest(self, part: Slice) -> tuple[Landed, Target | KeptArrays] | None:
        found: list[tuple[Landed, Target | KeptArrays]] = []
        kept = self._arrays.get(part.id)
        if kept is not None:
            found.append(kept)
        for target in self._alive():
            landed = _in_target(target, part)
            if landed is not None:
                found.append((landed, target))
        found.sort(key=lambda pair: pair[0].version, reverse=True)
        return next((pair for pair in found if pair[1].holds(part)), None)

    def _described(self, number: int, landed: Landed) -> Copy:
        clocks = dict(landed.clocks)
        # Later acknowledgements to this worker are revoked with the server; those commits are never replayed.
        own = max([landed.own, *(said.clock for parts, said in self._said() if number in parts)])
        if own:
            clocks[self._name] = max(own, clocks.get(self._name, 0))
        known = [landed.version, self._known.get(number, 0)]
        known += [_versions(hosted, said).get(number, 0) for hosted, said in list(self.told.values())]
        return Copy(number, landed.version, clocks, max(known))

    def _said(self) -> list[tuple[set[int], Committed]]:
        """The last acknowledgement of every server, with its slices."""
        told = list(self.told.values())
        return [({part.id for part in hosted}, said) for hosted, said in told if isinstance(said, Committed)]

    def bytes_of(self, copy: Copy) -> Bytes:
        """The bytes of an announced copy; an error if it is gone."""
        part = self._parts().get(copy.slice)
        newest = self._newest(part) if part is not None else None
        if part is not None and newest is not None and newest[0].version == copy.version:
            landed, source = newest
            data = source.copy_of(part)
            again = self._newest(part)
            if data is not None and again is not None and again[0] == landed:
                return data
        raise SynclineError(f"{self._name} has no copy of slice {copy.slice} at version {copy.version} any more")

    def give(self, copies: Sequence[Copy], target: Member, dial: Callable[[Member], Endpoint]) -> None:
        """Sends copies to the server that will host these slices."""
        endpoint = dial(target)
        calls: collections.deque[Call] = collections.deque()
        try:
            for copy in copies:
                data = self.bytes_of(copy)
                calls.append(endpoint.call(Restore(copy), buffers=[buffer_of(data)], payload_bytes=data.nbytes))
                if len(calls) >= _MOST_OPEN_COPIES:
                    calls.popleft().wait(self._wait_seconds)
            for call in calls:
                call.wait(self._wait_seconds)
        finally:
            endpoint.close()


def _in_target(target: Target, part: Slice) -> Landed | None:
    if part.id in target.kept:
        return target.kept[part.id]
    for wanted in list(target.wanted.values()):
        if part.id in wanted.by_id:
            return wanted.landed().get(part.id)
    return None


def _versions(hosted: Sequence[Slice], said: Told) -> Mapping[int, int]:
    if not isinstance(said, Committed):
        return said
    if len(said.versions) != len(hosted):
        return {}
    return {part.id: version for part, version in zip(hosted, said.versions, strict=True)}
