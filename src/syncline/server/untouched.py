"""Rounds at slices that they do not touch: counted for all of them at once, and queued at none.

A step of one small parameter takes no longer for each other slice of a large model. Rings, `gather`, clipping by the
global norm and answers in parts do not come here: there every slice has something to do in every round.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from syncline.core.layout import Ranges
from syncline.core.rounds import Commit
from syncline.core.slice_state import CommonClocks
from syncline.server.slices import HostedSlice
from syncline.server.tasks import StagedCommit

_MOST_KINDS = 64  # of pushes, whose slices are remembered


class UntouchedSlices:
    """The slices of one server that share their clocks. Methods require `state_lock`.

    It is made for one set of slices. When that changes, another is made: slices that still share the clocks of this
    one keep what they have, since nothing advances them any more, and count the next round by themselves.
    """

    def __init__(self) -> None:
        self._common = CommonClocks(threading.Lock())
        self._touched: dict[Ranges, tuple[HostedSlice, ...]] = {}

    def count(self, commits: Sequence[Commit[StagedCommit]], slots: tuple[HostedSlice, ...]) -> Sequence[HostedSlice]:
        """Counts a round at slices that it does not touch, and returns the slices at which it must be queued.
        `slots`: all slices, always the same ones.
        """
        touched = self._touched_by(commits, slots)
        if len(touched) == len(slots):
            return slots
        workers = [((commit.worker, commit.item.incarnation), commit.clock) for commit in commits]
        for slot in touched:
            slot.state.stand_apart()
        apart: list[HostedSlice] = []
        common = self._common
        with common.lock:
            if common.num_slices and not common.advance(workers):
                return slots  # each tells what is wrong with it
            if common.num_slices + len(touched) < len(slots):
                others = set(slots).difference(touched)
                apart = [slot for slot in slots if slot in others and not slot.state.shares(common)]
        return [*touched, *(slot for slot in apart if not slot.passes(workers, common))]

    def _touched_by(
        self, commits: Sequence[Commit[StagedCommit]], slots: tuple[HostedSlice, ...]
    ) -> Sequence[HostedSlice]:
        """The slices with a gradient in this round; slice 0 also keeps the lease ranges of its commits."""
        found = [self._with_gradients(pushed, slots) for pushed in {commit.item.pushed for commit in commits}]
        touched: Sequence[HostedSlice] = max(found, key=len)
        if len(found) > 1 and len(touched) < len(slots):
            together = {slot for each in found for slot in each}
            touched = [slot for slot in slots if slot in together]
        if any(commit.item.acks for commit in commits):
            zero = (slot for slot in slots if slot.part.id == 0 and slot not in touched)
            touched = (*touched, *zero)
        return touched

    def _with_gradients(self, pushed: Ranges, slots: tuple[HostedSlice, ...]) -> tuple[HostedSlice, ...]:
        found = self._touched.get(pushed)
        if found is None:
            if len(self._touched) >= _MOST_KINDS:
                self._touched.clear()
            found = self._touched[pushed] = tuple(slot for slot in slots if slot.touched_by(pushed))
        return found
