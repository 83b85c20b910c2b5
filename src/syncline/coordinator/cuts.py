"""Cuts for followers: all parameters at one point between commits, for a process outside of the job that reads them.

A cut is taken by the reconfiguration thread, as a save's snapshot is, so no generation begins meanwhile. The snapshot
barriers close until all servers have the same commits; then each slice is marked at a backup, or at its primary if it
has none. Commits are held for `HOLD_SECONDS` at most. A cut that needs more time is tried again later: each further
try may hold them for twice as long, and comes after twice the pause, so commits wait for the same part of the time.

When all scripts have ended, followers that wait for it are told, and workers stay until each has read a last cut.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from syncline.coordinator.job import JobContext, ServerCalls
from syncline.coordinator.registration import RegistrationService
from syncline.core.checkpoint.snapshot import SnapshotAttempt
from syncline.core.members import Member
from syncline.core.replica_sets import ReplicaSet
from syncline.core.wire.checkpoints import OpenSnapshotBarrier, SnapshotBarrierClosed
from syncline.core.wire.following import AskCut, AwaitEnd, CutPlace, EndCut, GivenCut, MarkCut, MarkedCut
from syncline.core.wire.message import Done, Message
from syncline.errors import StoreError, SynclineError, WaitTimeout
from syncline.net.rpc import Endpoint, Request

#: How long commits may be held for the first try of a cut.
HOLD_SECONDS = 0.02
#: The pause before the second try.
AGAIN_SECONDS = 0.1
#: Hold and pause double with each try, up to so many times the first. All tries together take about 12 seconds.
_MOST_DOUBLED = 16
#: After so many tries the follower is told why there is no cut.
MOST_TRIES = 10
#: From this try on slices are read at their primaries: a backup may be behind for long.
_PRIMARY_TRIES = 3
#: How long the last cut may take: nothing trains any more.
LAST_HOLD_SECONDS = 1.0
#: Barriers open by themselves in time; the word that slices are marked may come later.
_ANSWER_SECONDS = 0.1


@dataclasses.dataclass
class _Asked:
    request: Request
    message: AskCut
    num_tries: int = 0
    not_before: float = 0.0


@dataclasses.dataclass
class _Follower:
    name: str
    number: int = 0  # of its cut, which it has not read yet
    servers: list[str] = dataclasses.field(default_factory=list)
    end: Request | None = None  # it wants to be told of the end
    awaits_end: bool = False
    reads_last: bool = False  # its cut was taken after the end
    has_last: bool = False


class CutService:
    """Takes cuts, one after another."""

    def __init__(self, job: JobContext, calls: ServerCalls, registration: RegistrationService) -> None:
        self._job, self._calls, self._registration = job, calls, registration
        self._asked: list[_Asked] = []
        self._followers: dict[Endpoint, _Follower] = {}
        self._ends_at = 0.0  # when the job no longer waits for them; 0: scripts run
        self._said_late: list[str] = []  # followers that were too late for the last cut

    @property
    def handlers(self) -> dict[type[Message], Callable[[Request, Any], None]]:
        return {AskCut: self.ask, AwaitEnd: self._await_end, EndCut: self._has_read}

    def ask(self, request: Request, message: AskCut) -> None:
        """A follower wants a cut."""
        with self._job.lock:
            self._follower(request)
            self._asked.append(_Asked(request, message))
            self._job.wake_reconfigurer()

    def _follower(self, request: Request) -> _Follower:
        """Under the lock."""
        if request.endpoint not in self._followers:
            self._job.event(f"{request.peer.name} follows the job", "join")
            self._followers[request.endpoint] = _Follower(request.peer.name)
        return self._followers[request.endpoint]

    def _await_end(self, request: Request, message: AwaitEnd) -> None:
        with self._job.lock:
            follower = self._follower(request)
            follower.end, follower.awaits_end = request, True
            if self._ends_at:
                self._job.wake_reconfigurer()

    def _has_read(self, request: Request, message: EndCut) -> None:
        with self._job.lock:
            follower = self._followers.get(request.endpoint)
            if follower is not None and follower.number == message.number:
                follower.number, follower.has_last = 0, follower.reads_last
                if self._ends_at:
                    self._job.wake_reconfigurer()

    def lost(self, endpoint: Endpoint) -> None:
        """A connection has ended; if it was a follower's, nothing is kept for it."""
        with self._job.lock:
            follower = self._followers.pop(endpoint, None)
            self._asked = [one for one in self._asked if one.request.endpoint is not endpoint]
            if follower is not None and self._ends_at:
                self._job.wake_reconfigurer()
        if follower is not None and follower.number:
            self._tell(follower.servers, EndCut(follower.number))

    def may_end(self, now: float) -> bool:
        """Under the lock, when all scripts have ended: whether followers have the last state, or took too long."""
        late = [one.name for one in self._followers.values() if one.awaits_end and not one.has_last]
        if not late:
            return True
        seconds = self._job.config.follower_seconds
        self._ends_at = self._ends_at or now + seconds
        if now < self._ends_at:
            return False
        if self._said_late != late:
            self._said_late = late
            self._job.event(
                f"{', '.join(late)} did not read the last step within {seconds:g} s; the job waits no longer and ends"
            )
        return True

    def scripts_run(self) -> None:
        """Under the lock: not all scripts have ended. If they had, a worker has joined since."""
        if self._ends_at:
            self._ends_at, self._said_late = 0.0, []
            for one in self._followers.values():
                one.reads_last = one.has_last = False

    @property
    def num_followers(self) -> int:
        """Connections that have asked for a cut."""
        return len(self._followers)

    def has_work(self, now: float) -> bool:
        """Under the lock: whether `run_due` has something to do."""
        return any(one.not_before <= now for one in self._asked) or bool(self._to_tell())

    def seconds_left(self, now: float) -> float:
        """Under the lock: how long the reconfiguration thread may sleep for all that is known here."""
        times = [one.not_before for one in self._asked] + ([self._ends_at] if self._ends_at > now else [])
        return max(0.01, min(times, default=now + 60.0) - now)

    def _to_tell(self) -> list[_Follower]:
        """Under the lock: followers that wait to be told of the end, which has come."""
        return [one for one in self._followers.values() if one.end is not None] if self._ends_at else []

    def run_due(self) -> None:
        """In the reconfiguration thread: tells followers of the end; takes the cut that was asked for first."""
        now = time.monotonic()
        with self._job.lock:
            told = [one.end for one in self._to_tell() if one.end is not None]
            for one in self._followers.values() if told else ():
                one.end = None
        for request in told:
            request.reply(Done())
        with self._job.lock:
            due = [one for one in self._asked if one.not_before <= now]
            if not due:
                return
            asked = due[0]
            self._asked.remove(asked)
            is_last = bool(self._ends_at)
        try:
            answer = self._cut(asked, LAST_HOLD_SECONDS if is_last else HOLD_SECONDS * _doubled(asked.num_tries))
        except SynclineError as error:
            self._again(asked, error)
            return
        with self._job.lock:
            follower = self._followers.get(asked.request.endpoint)
            servers = [place.server.name for place in answer.places]
            if follower is not None:
                follower.number, follower.servers = answer.number, servers
                follower.reads_last = is_last
        if follower is not None:
            asked.request.reply(answer)
        else:
            self._tell(servers, EndCut(answer.number))

    def _again(self, asked: _Asked, error: SynclineError) -> None:
        factor = _doubled(asked.num_tries)
        asked.num_tries += 1
        if asked.num_tries >= MOST_TRIES:
            asked.request.refuse(StoreError(f"no cut after {MOST_TRIES} tries: {error}"))
            return
        with self._job.lock:
            asked.not_before = time.monotonic() + AGAIN_SECONDS * (1 if self._ends_at else factor)
            if asked.request.endpoint in self._followers:
                self._asked.append(asked)

    def _cut(self, asked: _Asked, seconds: float) -> GivenCut:
        """SynclineError: not this time."""
        with self._job.lock:
            registry, state = self._job.registry, self._job.membership.state
            segments = list(registry.layout.segments)
            if not segments or len(registry.ready) != len(segments):
                raise StoreError("the job has no parameters yet")
            members, replica_sets = dict(state.members), dict(state.replica_sets)
            primaries = {one.primary for one in replica_sets.values()}
            if not primaries <= members.keys():
                raise StoreError("a slice has no server just now")
            state.saves.num_begun += 1
            number = state.saves.num_begun
            self._registration.hold()
        began = time.monotonic()
        attempt = SnapshotAttempt(number, primaries, began + seconds)
        try:
            self._close_barriers(attempt, seconds)
            places = places_of(replica_sets, members, at_primaries=asked.num_tries >= _PRIMARY_TRIES)
            versions = self._mark(number, places, primaries, attempt.until)
        finally:
            self._tell(primaries, OpenSnapshotBarrier(number))
            held_seconds = time.monotonic() - began
            self._registration.release()
        given = [CutPlace(members[name], slices, versions[name]) for name, slices in places.items()]
        return GivenCut(number, attempt.num_updates, segments[asked.message.num_segments :], given, held_seconds)

    def _close_barriers(self, attempt: SnapshotAttempt, seconds: float) -> None:
        verdict = "further"
        while verdict == "further":
            left = attempt.until - time.monotonic()
            if left <= 0:
                raise WaitTimeout(
                    f"the servers did not reach one point within {1000 * seconds:g} ms; the host may be overloaded"
                )
            # A server opens its barrier by then, whatever happens to this coordinator.
            message = msgspec.structs.replace(attempt.close(), is_save=False, seconds=left)
            answers = self._calls.ask(dict.fromkeys(attempt.servers, message), gives_way=True, until=attempt.until)
            closed = {name: answer for name, answer in answers.items() if isinstance(answer, SnapshotBarrierClosed)}
            if closed.keys() != set(attempt.servers):
                raise WaitTimeout("open commits did not finish in time")
            verdict = attempt.decide(closed, time.monotonic())
        if verdict == "late":
            raise WaitTimeout(f"steps of {', '.join(attempt.behind())} are on some servers only")

    def _mark(
        self, number: int, places: Mapping[str, list[int]], primaries: set[str], until: float
    ) -> dict[str, list[int]]:
        """The versions of the marked slices, by server. StoreError: a backup has another version than its primary."""
        messages = {
            name: MarkCut(number, places.get(name, []), name in primaries) for name in places.keys() | primaries
        }
        try:
            answers = self._calls.ask(messages, until=until + _ANSWER_SECONDS)
            marked = {name: answer for name, answer in answers.items() if isinstance(answer, MarkedCut)}
            if marked.keys() != messages.keys():
                raise WaitTimeout("the servers did not mark their slices in time")
            check_versions(places, marked)
        except BaseException:
            self._tell(messages, EndCut(number))
            raise
        return {name: marked[name].versions for name in places}

    def _tell(self, names: object, message: OpenSnapshotBarrier | EndCut) -> None:
        with self._job.lock:
            endpoints = [self._job.endpoints.get(name) for name in names]  # type: ignore[attr-defined]
        for endpoint in endpoints:
            if endpoint is not None:
                endpoint.mention(message)


def _doubled(num_tries: int) -> int:
    return int(min(2**num_tries, _MOST_DOUBLED))


def places_of(
    replica_sets: Mapping[int, ReplicaSet], members: Mapping[str, Member], *, at_primaries: bool
) -> dict[str, list[int]]:
    """The slices to read at each server: at a backup where there is one, which has less to do than the primary."""
    found: dict[str, list[int]] = {}
    for number, one in sorted(replica_sets.items()):
        backups = [] if at_primaries else [name for name in one.backups if name in members]
        server = backups[number % len(backups)] if backups else one.primary
        found.setdefault(server, []).append(number)
    return found


def check_versions(places: Mapping[str, list[int]], marked: Mapping[str, MarkedCut]) -> None:
    """StoreError: a slice was marked at another version than that of its primary, so the cut would be a mix."""
    known = {number: version for answer in marked.values() for number, version in answer.primaries}
    for name, slices in places.items():
        for number, version in zip(slices, marked[name].versions, strict=True):
            if known.get(number) != version:
                raise StoreError(
                    f"slice {number} has version {version} at {name}, {known.get(number)} at its primary"
                )
