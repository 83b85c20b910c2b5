"""A worker's boundaries: the moments when everything that its script has read is in commits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

#: A place in the script: the loop over an epoch, a barrier and its turn, a step, the end.
Position = tuple[str, str, int]
STEP: Position = ("step", "", 0)
END: Position = ("end", "", 0)


class Watcher(Protocol):
    """Observes a script's boundaries."""

    def at(self, position: Position, after: int, clock: int, *, waits: bool) -> None:
        """The script is at a boundary, the first one after the clock `after`. `waits`: it waits there for others;
        this may run in another thread.
        """

    def handed_out(self) -> None:
        """The script has received a batch."""


class ScriptClock(Protocol):
    """What the script has committed."""

    @property
    def clock(self) -> int:
        """Commits begun so far."""


class ScriptReads(Protocol):
    """What the script has read."""

    @property
    def num_loops(self) -> int:
        """Loops over our loaders that the script is in."""

    @property
    def is_any_held(self) -> bool:
        """Whether it has read something that is not in a commit."""


class Boundary:
    """Passed by the script's thread at every batch; costs one flag check without a watcher."""

    def __init__(self, committed: ScriptClock, has_read: ScriptReads) -> None:
        self._committed, self._has_read = committed, has_read
        self.stride = 0  #: commits between the last two distinct boundaries; 0: unknown
        self._pending: list[Callable[[], bool]] = []
        self._before_place: list[Callable[[], object]] = []
        self._before_epoch: list[Callable[[], object]] = []
        self._on_stop: Callable[[Position, int], None] | None = None
        self.notes_stop = False  #: whether the end of training by a rule must still be noted
        self._lock = threading.RLock()
        self._watchers: tuple[Watcher, ...] = ()
        self._last = -1  # the clock at the last boundary
        self._stopped_at = -1  # the clock where training ended by a rule
        self._position = STEP
        self._waits_at: Position | None = None
        self._turns: dict[tuple[str, str], int] = {}

    def hold_back(self, is_pending: Callable[[], bool]) -> None:
        """While `is_pending` is true, uncommitted work exists: the script is at no boundary."""
        self._pending.append(is_pending)

    def before_place(self, action: Callable[[], object]) -> None:
        """Runs `action` before the script waits at a barrier or a save."""
        self._before_place.append(action)

    def before_epoch(self, action: Callable[[], object]) -> None:
        """The script calls this when it begins to loop over an epoch, before the first boundary there."""
        self._before_epoch.append(action)

    def note_stop(self, action: Callable[[Position, int], None]) -> None:
        """Runs `action` where training ends by a rule."""
        self._on_stop, self.notes_stop = action, True

    @property
    def clock(self) -> int:
        """Commits begun so far."""
        return self._committed.clock

    @property
    def is_in_loop(self) -> bool:
        """Whether the script is in a loop over one of our loaders."""
        return self._has_read.num_loops > 0

    @property
    def is_clean(self) -> bool:
        """Whether everything that the script has read is in commits."""
        return not (self._has_read.is_any_held or any(is_pending() for is_pending in self._pending))

    @property
    def last(self) -> int:
        """The clock at the last boundary."""
        return max(0, self._last)

    @property
    def is_watched(self) -> bool:
        """Whether anything looks at the next boundary."""
        return bool(self._watchers)

    def watch(self, watcher: Watcher) -> None:
        with self._lock:
            if watcher not in self._watchers:
                self._watchers += (watcher,)

    def unwatch(self, watcher: Watcher) -> None:
        with self._lock:
            self._watchers = tuple(known for known in self._watchers if known is not watcher)

    def watch_while(self, watcher: Watcher, is_wanted: Callable[[], bool]) -> None:
        """Adds or removes the watcher, depending on `is_wanted` at the last of several calls."""
        with self._lock:
            (self.watch if is_wanted() else self.unwatch)(watcher)

    def passed(self, position: Position) -> None:
        """The script asks for its next batch or begins its next step; nothing of it is read yet."""
        clock = self._committed.clock
        after, self._position = self._go_to(clock), position
        if self._watchers:
            self._look(position, after, clock, waits=False)

    def _go_to(self, clock: int) -> int:
        """Moves to this boundary. Returns the clock after which it is the first one."""
        before, self._last = self._last, clock
        if 0 <= before < clock:
            self.stride = clock - before
        return min(before, clock - 1)

    def stepped(self) -> None:
        """A step was made or may begin: a boundary in a script without our loaders, once per clock."""
        if self._committed.clock != self._last and not self._has_read.num_loops:
            self.passed(STEP)

    def stops(self, position: Position) -> None:
        """A rule ends training here. A resumed job continues from here, whatever the script does until its end.
        Outside of loops the last call counts: each of several optimizers may finish its step.
        """
        action, clock = self._on_stop, self.clock
        if position != STEP:
            self._on_stop, self.notes_stop = None, False
        elif clock == self._stopped_at:
            return
        self._stopped_at = clock
        if action is not None and self.is_clean:
            action(position, clock)

    def hands_out(self) -> None:
        """The script receives a batch."""
        for watcher in self._watchers:
            watcher.handed_out()

    @contextlib.contextmanager
    def waiting(self, position: Position | None = None) -> Iterator[None]:
        """Context in which the script waits at the current boundary; other threads may observe it."""
        with self._lock:
            before, self._waits_at = self._waits_at, position or self._position
        try:
            self.look_where_it_waits()
            yield
        finally:
            with self._lock:  # not while a watcher observes
                self._waits_at = before

    def place(self, kind: str, name: str) -> Position:
        """The place that the script reaches now. Places within a loop are not counted, since finished batches are
        not repeated.
        """
        self.comes_to_place()
        turn = self._turns.get((kind, name), 0) + (not self.is_in_loop)
        self._turns[kind, name] = turn
        return kind, name, turn

    def begins_epoch(self) -> None:
        """The script is about to read an epoch: what it does between two epochs is done."""
        for action in self._before_epoch:
            action()

    def comes_to_place(self) -> None:
        """The script is about to wait at a barrier or a save."""
        for action in self._before_place:
            action()

    def standing(self, position: Position | None = None) -> contextlib.AbstractContextManager[None]:
        """Like `waiting`, but no boundary inside a loop: there the batch is already read."""
        return contextlib.nullcontext() if self.is_in_loop else self.waiting(position)

    def look_where_it_waits(self) -> None:
        """From any thread: tells watchers if the script waits at a boundary."""
        with self._lock:
            if self._watchers and self._waits_at is not None:
                clock = self.clock
                self._look(self._waits_at, self._go_to(clock), clock, waits=True)

    def _look(self, position: Position, after: int, clock: int, *, waits: bool) -> None:
        with self._lock:
            if self.is_clean:
                for watcher in self._watchers:
                    watcher.at(position, after, clock, waits=waits)
