"""Removes workers that leave or are fenced: settles their commits, then frees everything of theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from syncline.core.rounds import Rounds
from syncline.core.slice_state import Identity
from syncline.server.executor import RoundExecutor
from syncline.server.slices import HostedSlice
from syncline.server.staging import Staging
from syncline.server.tasks import Key, RoundTask, StagedCommit, key_of

#: A staged commit, and the slices whose bytes came over a socket.
Staged = tuple[StagedCommit, set[int]]


class WorkerRemoval:
    """Removes workers. All methods require `state_lock`."""

    def __init__(
        self,
        rounds: Rounds[StagedCommit],
        slices: Mapping[int, HostedSlice],
        flow: RoundExecutor,
        staging: Staging,
        staged: dict[Key, Staged],
        *,
        gone: Callable[[], None],
    ) -> None:
        self._rounds, self._slices, self._flow, self._staging, self._staged = rounds, slices, flow, staging, staged
        self._gone = gone
        flow.call_after_rounds(self._forget_gone)
        self._staged_by: Callable[[str], Iterable[HostedSlice]] = self.staged_here
        self._is_staged_as_hosted = True

    def stage_by(self, slices_of: Callable[[str], Iterable[HostedSlice]] | None) -> None:
        """`slices_of` gives the slices whose pushes a worker stages here; for other slices it only announces them.
        None: all slices here.
        """
        self._staged_by, self._is_staged_as_hosted = slices_of or self.staged_here, slices_of is None

    def staged_here(self, worker: str) -> Iterable[HostedSlice]:
        """The slices a worker stages here; in a ring also spread ones."""
        return (*self._slices.values(), *self._staging.copies.slots())

    def fence(self, name: str, incarnation: int) -> list[StagedCommit]:
        """Refuses further messages of this worker. Returns its waiting commits, which must be refused."""
        self._rounds.fence(name, incarnation)
        self._gone()
        asked = self._flow.take_requests_of(name, incarnation)
        self._rounds.drop_undecided(name, incarnation)
        return asked

    def staged_whole(self, name: str, incarnation: int) -> int:
        """The clock up to which this worker's commits are completely staged."""
        clock = self._rounds.reach(name, incarnation)
        while True:
            staged = self._staged.get((name, incarnation, clock + 1))
            if staged is None or not staged[0].is_told or self.not_staged((name, incarnation), *staged) is not None:
                return clock
            clock += 1

    def reach(self, name: str, incarnation: int, *, moves: bool) -> int:
        """The clock that slices here can reach with commits of a removed worker.

        If primaries change (`moves`), rounds that wait for a norm are dropped, and a removed worker does not replay.
        """
        clock = self.staged_whole(name, incarnation)
        if not moves:
            return clock
        commits = [commit for work in self._flow.clipping.works() if not work.scaled for commit in work.commits]
        commits += [commit for commit in self._rounds.open_commits() if self._needs_norm(commit.item)]
        keys = [key_of(commit) for commit in commits]
        keys += [key for key, (contribution, _) in self._staged.items() if self._needs_norm(contribution)]
        return min([clock, *(key[2] - 1 for key in keys if key[:2] == (name, incarnation))])

    def _needs_norm(self, contribution: StagedCommit) -> bool:
        return self._flow.num_servers > 1 and contribution.clip_norm is not None and not contribution.skip

    def settle(self, name: str, incarnation: int, clock: int) -> list[RoundTask]:
        """Commits a removed worker's staged steps up to this clock, because other servers have them."""
        standing = self._rounds.standings.get(name)
        if standing is None or standing.incarnation != incarnation or standing.left:
            return []
        works: list[RoundTask] = []
        for each in range(standing.clock + 1, min(clock, self.staged_whole(name, incarnation)) + 1):
            if not self._rounds.is_decided(name, incarnation, each):
                break  # the surviving workers replay it
            contribution, _ = self._staged.pop((name, incarnation, each))
            contribution.is_fenced, contribution.since = standing.fenced, time.monotonic()
            phase, back_at = contribution.phase, contribution.back_at
            if standing.fenced:
                verdict = self._rounds.settle(name, each, phase, contribution, back_at)
            else:
                verdict = self._rounds.commit(name, incarnation, each, phase, contribution, back_at)
            works += self._flow.enqueue(verdict)
        return works

    def let_out(self, name: str, incarnation: int) -> list[RoundTask]:
        """Rounds no longer wait for this fenced worker, and its data is freed."""
        works = self._flow.enqueue(self._rounds.leave_fenced(name, incarnation))
        self.let_go((name, incarnation))
        return works

    def let_go(self, worker: Identity) -> None:
        for key in [k for k in self._staged if k[:2] == worker]:
            del self._staged[key]
        self._flow.going.add(worker)
        self._gone()
        self._forget_gone()

    def _forget_gone(self) -> None:
        """Frees everything of removed workers without open commits."""
        for worker in [w for w in self._flow.going if not self._flow.of_worker(*w)]:
            name, incarnation = worker
            self._flow.going.discard(worker)
            standing = self._rounds.standings.get(name)
            if standing is None or standing.incarnation == incarnation:
                self._rounds.forget_left(name)
                for slot in self._slices.values():
                    slot.state.forget_reader(name)
            self._staging.forget_worker(worker)
            for slot in (*self._slices.values(), *self._staging.copies.slots()):
                slot.rules.forget_staged()

    def lost(self, worker: Identity) -> None:
        """The worker's last connection is closed. A worker that takes part may return; data of others is freed."""
        with self._flow.state_lock:
            standing = self._rounds.standings.get(worker[0])
            if (standing is None or standing.incarnation != worker[1]) and worker not in self._flow.going:
                self._staging.forget_worker(worker)

    def not_staged(self, worker: Identity, contribution: StagedCommit, have: set[int]) -> int | None:
        """A slice here whose bytes this commit lacks."""
        if self._are_all_shared(worker, contribution.slot):
            return None
        shared: dict[int, bool] = {}  # by segment
        for slot in self._staged_by(worker[0]):
            segment = slot.part.segment
            if segment not in shared:
                shared[segment] = self._staging.is_shared(worker, contribution.slot, slot.part)
            if shared[segment] or slot.part.id in have:
                continue
            if slot.touched_by(contribution.pushed):
                return slot.part.id
        return None

    def _are_all_shared(self, worker: Identity, slot: int) -> bool:
        """Whether all slices that a worker stages here lie in its shared memory. Looks at segments: a large model has
        hundreds of slices, and this is asked at every commit.
        """
        if not self._is_staged_as_hosted or self._staging.copies.numbers:
            return False
        for part in self._flow.first_slices():  # noqa: SIM110 - `all` of a generator takes longer than the few
            if not self._staging.is_shared(worker, slot, part):
                return False
        return True
