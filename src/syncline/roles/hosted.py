"""A hosted slice: its bytes, its state, its rules, its lock, and the rounds that wait to be applied to it."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from syncline.core.layout import Ranges, Segment, Slice, covers, in_ranges
from syncline.core.policy import Policy
from syncline.core.rounds import Commit
from syncline.core.rule import Option
from syncline.core.slices import SliceState
from syncline.errors import RuleError
from syncline.net.rpc import Request
from syncline.net.transport import buffer_of
from syncline.roles.homes import Home
from syncline.roles.rules import SliceRules, Source

Bytes = npt.NDArray[np.uint8]
#: Memory of snapshots that a slice keeps for the next ones.
MOST_SPARE = 2


class Progress(Protocol):
    """Hears of slices as they are applied, and how it ended."""

    def count(self, num_bytes: int) -> None:
        """So much was copied for it, and for others."""

    @property
    def copies(self) -> bool:
        """Whether it sends copies of slices, since others may write them meanwhile."""

    def applied(self, slot: HostedSlice, *, snapshot: Snapshot | None = None, locked: bool = False) -> None:
        """This slice is as the commit left it, or newer; `locked`: the caller holds its lock."""

    def finish(self, end: Callable[[], None] | None = None) -> None:
        """The round is applied, or ends otherwise."""


class Contribution:
    """One worker's staged commit at this server: what it says, where its bytes lie, who wants the answer."""

    __slots__ = (
        "answer", "arrays", "back_at", "clip_norm", "incarnation", "overrides", "pushed", "request", "skip", "slot",
        "stretch", "weight",
    )  # fmt: skip

    def __init__(self, incarnation: int, stretch: int, slot: int) -> None:
        self.incarnation, self.stretch, self.slot = incarnation, stretch, slot
        self.pushed: Ranges = ()
        self.weight, self.skip = 1.0, False
        self.back_at: int | None = None
        self.clip_norm: float | None = None
        self.overrides: list[tuple[int, int, dict[str, Option]]] = []
        self.arrays: Callable[[Slice], torch.Tensor | None] = lambda part: None
        self.request: Request | None = None
        self.answer: Progress | None = None  # where the answer goes out slice by slice


Round = tuple[Commit[Contribution], ...]


class Work:
    """A round on its way through all slices of a server. The last slice to finish reports it."""

    def __init__(
        self,
        commits: Round,
        slots: Sequence[HostedSlice],
        chief: str,
        policy: Policy,
        finished: Callable[[Work], None],
    ) -> None:
        self.commits, self.slots, self.in_rounds = commits, slots, policy.in_rounds
        self._answers_early = policy.kind != "bounded"  # there, the answer may have to wait for slower workers
        leading = commits[0]
        if len(commits) == 1:
            self.skip, self.weight = leading.item.skip, leading.item.weight
        else:
            self.skip = any(commit.item.skip for commit in commits)
            self.weight = sum(commit.item.weight for commit in commits)
            leading = next((c for c in commits if c.worker == chief), leading)
        self.clip_norm = leading.item.clip_norm
        self.overrides = leading.item.overrides
        self.scale = 1.0
        self.squared_norms: dict[int, float] = {}
        self.applied = False
        self.error: Exception | None = None  # raised while it was applied
        self.failed: RuleError | None = None  # what everyone is answered then
        self.scaled = False  # whether the norm over all servers is known
        self.began = time.perf_counter()  # when the round was whole
        self._left = len(slots)
        self._lock = threading.Lock()
        self._finished = finished

    def answers(self) -> list[Progress]:
        """Those who want to hear of slices as they are applied."""
        if not self._answers_early or self.error is not None:
            return []
        return [commit.item.answer for commit in self.commits if commit.item.answer is not None]

    def slice_done(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._finished(self)

    def norm_done(self, slice_id: int, squared_norm: float) -> bool:
        """Whether this was the last slice whose share of the norm was missing."""
        with self._lock:
            self.squared_norms[slice_id] = squared_norm
            return len(self.squared_norms) == len(self.slots)

    def overrides_for(self, segment: int) -> dict[int, dict[str, Option]]:
        return {group: options for index, group, options in self.overrides if index == segment}


class Snapshot:
    """One version of a slice, copied once for several answers. Its memory is used again when all have been sent."""

    def __init__(self, slot: HostedSlice, num_users: int) -> None:
        self._slot, self._num_users = slot, num_users
        self._lock = threading.Lock()
        self._array = slot.spare.pop() if slot.spare else np.empty(slot.part.num_bytes, np.uint8)
        self.buffer = buffer_of(self._array)
        self.version = slot.copy_locked(self.buffer)

    def sent(self) -> None:
        """By one of its users."""
        with self._lock:
            self._num_users -= 1
            last = self._num_users == 0
        if last and len(self._slot.spare) < MOST_SPARE:
            self._slot.spare.append(self._array)


class HostedSlice:
    """One slice at its server. All methods that change it hold its lock; nothing is sent under it."""

    def __init__(self, segment: Segment, part: Slice, memory: Bytes, home: Home) -> None:
        self.part, self.segment = part, segment
        self.memory, self._home = memory, home
        self.rules = SliceRules(segment, part, memory, home)
        self.state = SliceState()
        self.lock = threading.Lock()
        self.uploaded = False
        self.spare: list[Bytes] = []  # memory of snapshots that were sent
        self.queue: collections.deque[Work] = collections.deque()
        self._ids = [segment.first_parameter + piece.parameter for piece in self.rules.pieces]
        self._last_has: tuple[Ranges, Sequence[bool]] = ((), [False] * len(self._ids))
        self.num_updates, self.apply_seconds = 0, 0.0
        self.staleness_sum, self.staleness_max, self.staleness_count = 0, 0, 0

    def drain(self) -> list[Work]:
        """Applies what waits, in order, unless a reader has pinned the slice; returns what is done."""
        done = []
        with self.lock:
            while self.queue and not self.state.pins:
                work = self.queue.popleft()
                try:
                    with self._home.at_work():
                        self._apply(work)
                except Exception as error:  # whoever waits must hear of it, whatever it is
                    work.error = work.error or error
                done.append(work)
            answers = [answer for work in done for answer in work.answers()]
            if answers:
                self._tell(answers)
        return done

    def _tell(self, answers: Sequence[Progress]) -> None:
        """Under the lock: whoever wants this slice's bytes has them copied now; several share one copy."""
        sharing = [answer for answer in answers if answer.copies]
        snapshot = Snapshot(self, len(sharing)) if len(sharing) > 1 else None
        if snapshot is not None:
            sharing[0].count(self.part.num_bytes)
        for answer in answers:
            answer.applied(self, snapshot=snapshot if answer.copies else None, locked=True)

    def _apply(self, work: Work) -> None:
        began = time.perf_counter()
        state = self.state
        commits = [c for c in work.commits if state.admit((c.worker, c.item.incarnation), c.clock) == "new"]
        changed = False
        if not work.skip and commits:
            gradients = self.gradients(commits, work)
            if any(gradient is not None for gradient in gradients):
                state.writing = changed = True
                for commit in commits:
                    self._measure(state.staleness(commit.worker))
                try:
                    self.rules.apply(gradients, work.overrides_for(self.part.segment), work.scale)
                finally:
                    # Whatever a rule that raised has left behind is another version too.
                    state.applied([], changed)
                    state.writing = False
        state.applied([((c.worker, c.item.incarnation), c.clock) for c in commits], False)
        self.num_updates += changed
        self.apply_seconds += time.perf_counter() - began

    def _measure(self, staleness: int) -> None:
        self.staleness_sum += staleness
        self.staleness_count += 1
        self.staleness_max = max(self.staleness_max, staleness)

    def gradients(self, commits: Sequence[Commit[Contribution]], work: Work) -> list[torch.Tensor | None]:
        """The round's gradient for each piece of this slice. Outside of rounds weights do not count."""
        sources: list[Source] = []
        for commit in commits:
            has = self._has(commit.item.pushed)
            if any(has) and (commit.item.weight > 0 or not work.in_rounds):
                array = commit.item.arrays(self.part)
                assert array is not None, "pushed, and not staged"
                sources.append((array, commit.item.weight, has))
        if not sources:
            return [None] * len(self.rules.pieces)
        return self.rules.reduced(sources, work.weight)

    def _has(self, pushed: Ranges) -> Sequence[bool]:
        """Which pieces of this slice are pushed; the same as last time, mostly."""
        known = self._last_has
        if known[0] != pushed:
            if self._ids and covers(pushed, self._ids[0], self._ids[-1] + 1):
                has: Sequence[bool] = (True,) * len(self._ids)
            else:
                has = [in_ranges(pushed, number) for number in self._ids]
            known = self._last_has = (pushed, has)
        return known[1]

    def touched_by(self, pushed: Ranges) -> bool:
        return any(self._has(pushed))

    def norm(self, work: Work) -> float:
        """This slice's share of the squared norm of a round."""
        with self._home.at_work():
            return self.rules.squared_norm(self.gradients(work.commits, work))

    def copy_into(self, target: memoryview) -> int:
        """A whole, untorn copy; returns its version."""
        with self.lock:
            return self.copy_locked(target)

    def copy_locked(self, target: memoryview) -> int:
        """The same for a caller that holds the lock."""
        target[:] = buffer_of(self.memory)
        return self.state.version

    def pin(self) -> int:
        with self.lock:
            self.state.pins += 1
            return self.state.version

    def unpin(self) -> None:
        with self.lock:
            self.state.pins -= 1
