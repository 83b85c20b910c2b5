"""What workers ask waits its turn: while a generation changes, or while the gate is closed for a cut."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from syncline.core.checkpoint.snapshot import Kind, SnapshotBarrier, on_all
from syncline.core.rounds import Commit, Rounds
from syncline.core.slice_state import Identity, highest_clocks
from syncline.net.rpc import Request
from syncline.server.slices import HostedSlice
from syncline.server.tasks import RingRounds, StagedCommit, respond


class QueuedRequest(NamedTuple):
    """A request that waits, and what is to be done about it then."""

    request: Request
    kind: Kind
    clock: int
    action: Callable[[], None]

    @property
    def worker(self) -> Identity:
        return (self.request.peer.name, self.request.peer.incarnation)


class AdmissionQueue:
    """All that waits, in the order in which it came. Under `state_lock`, all of it but `decide`."""

    def __init__(
        self, rounds: Rounds[StagedCommit], slices: Mapping[int, HostedSlice], idle: threading.Condition
    ) -> None:
        self._rounds, self._slices, self._idle = rounds, slices, idle
        self._is_held = False  # while a generation changes
        self.barrier: SnapshotBarrier | None = None  # closed, for a cut
        self._queue: collections.deque[QueuedRequest] | None = (
            None  # what came since, until all of it is decided upon
        )
        self.loading: set[Identity] = set()  # who gives rules their state, on some servers before others
        self._is_deciding = False
        self._in_hand: QueuedRequest | None = None  # its turn has come
        self._ring: RingRounds | None = None

    def enter_ring(self, ring: RingRounds) -> None:
        self._ring = ring

    @property
    def is_on(self) -> bool:
        """Whether anything may have to wait; else nobody need ask."""
        return self._queue is not None

    @property
    def is_held(self) -> bool:
        return self._is_held

    def keeps(self, request: Request, kind: Kind, clock: int, action: Callable[[], None]) -> bool:
        """Whether this request waits; its action is done when its turn comes, and asks here again."""
        if self._queue is None:
            return False
        asked, mine = QueuedRequest(request, kind, clock, action), self._in_hand
        passes = self._passes(asked)
        if mine is not None and mine.request is request:
            self._in_hand = None
            if not passes:  # it was held again since it was taken out
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
        """In a ring: whether a round that all have voted for passes the gate."""
        barrier = self.barrier
        return barrier is None or all(
            barrier.lets_pass("commit", (c.worker, c.item.incarnation), c.clock, is_whole=False) for c in commits
        )

    # -- what is in the slices ----------------------------------------------------------------------------

    def lacking(self) -> dict[Identity, int]:
        """What of the gate's `through` is not applied yet."""
        if self.barrier is None or not self.barrier.through:
            return {}
        return self.barrier.lacking(self.on_all(), self.there())

    def applied(self) -> dict[Identity, int]:
        """Every worker's clock in the slices here: the highest."""
        return highest_clocks(dict(slot.state.clocks) for slot in list(self._slices.values()))

    def on_all(self) -> dict[Identity, int]:
        """What of every worker is on all slices here."""
        settled = {(s.name, s.incarnation) for s in self._rounds.standings.values() if not s.active}
        slots = list(self._slices.values())
        return on_all(((dict(slot.state.clocks), slot.copied is not None) for slot in slots), settled)

    def there(self) -> set[Identity]:
        """Who takes part here."""
        return {(s.name, s.incarnation) for s in self._rounds.standings.values() if not (s.left or s.fenced)}

    # -- on and off ---------------------------------------------------------------------------------------

    def hold(self) -> None:
        """A generation is prepared: nothing is decided upon from now on. A cut is not made meanwhile."""
        self._is_held = True
        self._begin()
        self.open()

    def let_go(self) -> None:
        """The hold is over; `decide` is to follow, outside of `state_lock`."""
        self._is_held = False

    def close(self, barrier: SnapshotBarrier) -> None:
        """The gate is closed, or closed further on; `decide` is to follow, outside of `state_lock`."""
        self.barrier = barrier
        self._begin()
        self._idle.notify_all()

    def open(self) -> None:
        """It is open again; `decide` is to follow, outside of `state_lock`."""
        self.barrier = None
        self._idle.notify_all()

    def _begin(self) -> None:
        if self._queue is None:
            self._queue = collections.deque()

    def decide(self) -> None:
        """What may pass is decided upon, in the order in which it came; what comes meanwhile waits its turn. One
        thread does so for all."""
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
            if asked is not None:  # a bug of ours: others must be able to go on
                self._is_deciding = False

    def _take_next(self) -> QueuedRequest | None:
        """The next that may pass; None: whoever comes from now on sees that nobody decides."""
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
        """Primaries have changed: all that waits is to be asked again."""
        found = list(self.waiting())
        self._queue, self._is_held = None, False
        self.loading.clear()
        self.open()
        return found
