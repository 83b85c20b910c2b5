"""Holds workers' requests during a reconfiguration or while the snapshot barrier is closed."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from syncline.core.checkpoint.snapshot import Kind, SnapshotBarrier, on_all
from syncline.core.rounds import Commit, Rounds
from syncline.core.slice_state import Identity, highest_clocks
from syncline.net.rpc import Request
from syncline.server.slices import HostedSlice
from syncline.server.tasks import RingRounds, StagedCommit, respond


class QueuedRequest(NamedTuple):
    """A held request and the action that handles it."""

    request: Request
    kind: Kind
    clock: int
    action: Callable[[], None]

    @property
    def worker(self) -> Identity:
        return (self.request.peer.name, self.request.peer.incarnation)


@dataclasses.dataclass
class CutHolds:
    """How long commits were held back for cuts that a follower reads."""

    num: int = 0
    seconds: float = 0.0
    seconds_max: float = 0.0
    _since: float = 0.0  # 0.0: not now

    def begin(self, now: float) -> None:
        """Does nothing where one has begun."""
        self._since = self._since or now

    def end(self, now: float) -> None:
        """Does nothing where none has begun."""
        if self._since:
            self.num += 1
            self.seconds += now - self._since
            self.seconds_max = max(self.seconds_max, now - self._since)
            self._since = 0.0


class AdmissionQueue:
    """Held requests in arrival order. All methods except `decide` require `state_lock`."""

    def __init__(
        self, rounds: Rounds[StagedCommit], slices: Mapping[int, HostedSlice], idle: threading.Condition
    ) -> None:
        self._rounds, self._slices, self._idle = rounds, slices, idle
        self._is_held = False  # during a reconfiguration
        self.barrier: SnapshotBarrier | None = None  # closed for a snapshot
        self._queue: collections.deque[QueuedRequest] | None = (
            None  # requests that arrived since and are not decided yet
        )
        self.loading: set[Identity] = set()  # workers that are loading rule state, on some servers before others
        self._is_deciding = False
        self._in_hand: QueuedRequest | None = None  # the request that is being decided
        self._ring: RingRounds | None = None
        self.cut_holds = CutHolds()

    def enter_ring(self, ring: RingRounds) -> None:
        self._ring = ring

    @property
    def is_on(self) -> bool:
        """Whether requests may be held; False lets callers skip the check."""
        return self._queue is not None

    @property
    def is_held(self) -> bool:
        return self._is_held

    def keeps(self, request: Request, kind: Kind, clock: int, action: Callable[[], None]) -> bool:
        """Returns whether the request is held. If so, `action` runs later and must call `keeps` again."""
        if self._queue is None:
            return False
        asked, mine = QueuedRequest(request, kind, clock, action), self._in_hand
        passes = self._passes(asked)
        if mine is not None and mine.request is request:
            self._in_hand = None
            if not passes:  # held again since it was taken out
                self._queue.appendleft(asked)
            return not passes
        if passes and not self._is_deciding and not any(self._passes(other) for other in self._queue):
            return False
        self._queue.append(asked)
        return True

    def _passes(self, asked: QueuedRequest) -> bool:
        if self._is_held:
            return False
        barrier = self.barrier
        return barrier is None or barrier.lets_pass(
            asked.kind, asked.worker, asked.clock, is_whole=not self.lacking()
        )

    def may_apply(self, commits: Iterable[Commit[StagedCommit]]) -> bool:
        """In a ring: whether a round with all votes may pass the snapshot barrier."""
        barrier = self.barrier
        return barrier is None or all(
            barrier.lets_pass("commit", (c.worker, c.item.incarnation), c.clock, is_whole=False) for c in commits
        )

    # -- what is in the slices ----------------------------------------------------------------------------

    def lacking(self) -> dict[Identity, int]:
        """The commits of the barrier's `through` that are not applied yet."""
        if self.barrier is None or not self.barrier.through:
            return {}
        return self.barrier.lacking(self.on_all(), self.there())

    def applied(self) -> dict[Identity, int]:
        """The highest clock of each worker on any slice here."""
        return highest_clocks(dict(slot.state.clocks) for slot in list(self._slices.values()))

    def on_all(self) -> dict[Identity, int]:
        """The clock of each worker that is on all slices here."""
        settled = {(s.name, s.incarnation) for s in self._rounds.standings.values() if not s.active}
        slots = list(self._slices.values())
        return on_all(((dict(slot.state.clocks), slot.copied is not None) for slot in slots), settled)

    def there(self) -> set[Identity]:
        """The workers that take part here."""
        return {(s.name, s.incarnation) for s in self._rounds.standings.values() if not (s.left or s.fenced)}

    # -- on and off ---------------------------------------------------------------------------------------

    def hold(self) -> None:
        """A reconfiguration begins: hold all requests. No snapshot is taken meanwhile."""
        self._is_held = True
        self._begin()
        self.open()

    def let_go(self) -> None:
        """The hold ends. Call `decide` afterwards, without `state_lock`."""
        self._is_held = False

    def close(self, barrier: SnapshotBarrier, *, is_save: bool) -> None:
        """Closes the barrier, or raises its clocks. Call `decide` afterwards, without `state_lock`."""
        self.barrier = barrier
        if is_save:
            self.cut_holds.end(time.monotonic())
        else:
            self.cut_holds.begin(time.monotonic())
        self._begin()
        self._idle.notify_all()

    def open(self) -> None:
        """Opens the barrier. Call `decide` afterwards, without `state_lock`."""
        self.barrier = None
        self.cut_holds.end(time.monotonic())
        self._idle.notify_all()

    def _begin(self) -> None:
        if self._queue is None:
            self._queue = collections.deque()

    def decide(self) -> None:
        """Handles the requests that may pass, in arrival order. One thread does this for all."""
        if self._ring is not None:
            self._ring.look()  # votes may count that did not before
        with self._idle:
            if self._is_deciding:
                return
            self._is_deciding = True
        asked = self._take_next()
        try:
            while asked is not None:
                respond(asked.request, asked.action)
                asked = self._take_next()
        finally:
            if asked is not None:  # an error of ours must not block the other requests
                self._is_deciding = False

    def _take_next(self) -> QueuedRequest | None:
        """The next request that may pass. None ends the deciding thread's turn."""
        with self._idle:
            queue = self._queue
            self._in_hand = next((asked for asked in queue or () if self._passes(asked)), None)
            if queue and self._in_hand is not None:
                queue.remove(self._in_hand)
                return self._in_hand
            self._is_deciding = False
            if not queue and not self._is_held and self.barrier is None:
                self._queue = None
            return None

    def waiting(self) -> Iterator[Request]:
        for asked in self._queue or ():
            yield asked.request

    def take_all(self) -> list[Request]:
        """Primaries have changed: returns all held requests, which must be sent again."""
        found = list(self.waiting())
        self._queue, self._is_held = None, False
        self.loading.clear()
        self.open()
        return found
