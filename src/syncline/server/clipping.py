"""Clips a round's mean by its norm over all servers. Each server has a share; the workers bring the sum back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from syncline.core.rounds import Commit
from syncline.core.wire.traffic import AskClip
from syncline.server.slices import HostedSlice
from syncline.server.tasks import Key, RoundTask, SliceTask, StagedCommit, key_of

if TYPE_CHECKING:
    from syncline.server.executor import RoundExecutor

Held = Commit[StagedCommit]


class Clipping:
    """Rounds that wait for the norm over all servers."""

    def __init__(self, flow: RoundExecutor) -> None:
        self._flow = flow
        self._works: dict[Key, RoundTask] = {}

    def is_for(self, work: SliceTask) -> bool:
        return work.clip_norm is not None and not work.skip and bool(work.slots or self._flow.num_servers > 1)

    def works(self) -> set[RoundTask]:
        return set(self._works.values())

    def forget(self, commit: Held) -> None:
        if self._works:
            self._works.pop(key_of(commit), None)

    def clear(self) -> None:
        self._works.clear()

    def measure(self, work: RoundTask) -> None:
        if not work.slots:
            self._norms_known(work)
        for slot in work.slots:
            self._flow.pool.submit(functools.partial(self._measure_norm, work, slot))

    def _measure_norm(self, work: RoundTask, slot: HostedSlice) -> None:
        try:
            share = slot.norm(work)
        except Exception as error:  # callers must get an error, whatever it is
            with self._flow.state_lock:
                is_dropped = self._flow.was_dropped(work)  # and its staged bytes are gone
            if not is_dropped:
                self._flow.fail(work, error)
            return
        if work.norm_done(slot.part.id, share):
            self._norms_known(work)

    def _norms_known(self, work: RoundTask) -> None:
        work.share = math.fsum(work.squared_norms[number] for number in sorted(work.squared_norms))
        if self._flow.num_servers == 1:
            self._apply_clipped(work, work.share)
            return
        with self._flow.state_lock:
            if self._flow.was_dropped(work):
                return  # its workers replay it
            requests = [(c.clock, item.request) for c in work.commits for item in c.item.to_answer()]
            for commit in work.commits:
                self._flow.take_requests([commit])  # GiveClip asks again
                self._works[key_of(commit)] = work
            self._flow.waits(work)
            for line in self.forget_orphans():  # all its workers may have died since the round was complete
                self._flow.log(line)
        for clock, request in requests:
            if request is not None:
                request.reply(AskClip(clock, work.share, work.round_membership))

    def asked_for(self, key: Key) -> RoundTask | None:
        """The round of this commit, if it waits for the norm over all servers."""
        return self._works.get(key)

    def give(self, work: RoundTask, commit: Held, squared_norm: float) -> Callable[[], None]:
        """Under `state_lock`: takes the norm. Returns the action that applies the round; call it without the lock."""
        scaled, work.scaled = work.scaled, True
        if work.applied:
            del self._works[key_of(commit)]
            commit.item.clocks = work.clocks
            return functools.partial(self._flow.reply, commit)
        if scaled:
            return lambda: None
        self._flow.resumes(work)
        return functools.partial(self._apply_clipped, work, squared_norm)

    def _apply_clipped(self, work: RoundTask, squared_norm: float) -> None:
        assert work.clip_norm is not None
        # The formula of torch.nn.utils.clip_grad_norm_.
        work.scale = min(1.0, work.clip_norm / (math.sqrt(squared_norm) + 1e-6))
        if math.isnan(squared_norm):
            work.scale = math.nan
        with self._flow.state_lock:
            if self._flow.was_dropped(work):
                return
            for slot in work.slots if not work.is_summed else ():
                slot.put(work)
        self._flow.go_through(work)

    def num_orphans(self) -> int:
        """Under `state_lock`: commits of removed workers in rounds that wait for their norm."""
        return sum(commit.item.is_fenced for work in self.works() for commit in work.commits)

    def forget_orphans(self) -> list[str]:
        """Under `state_lock`: gives up rounds whose workers are all removed, because no norm will come."""
        lost = []
        for work in self.works():
            if all(commit.item.is_fenced for commit in work.commits) and not work.scaled:
                names = ", ".join(f"step {c.clock} of {c.worker}" for c in work.commits)
                lost.append(f"{names} was committed and not clipped when its workers were lost: it is dropped")
                for commit in work.commits:
                    self._works.pop(key_of(commit), None)
                self._flow.through(work)
            for commit in work.commits:
                if commit.item.is_fenced:
                    self._works.pop(key_of(commit), None)
        return lost
