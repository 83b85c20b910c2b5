"""Workers that go: by themselves or fenced. What of them counts is settled; then they leave no trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from syncline.core.rounds import Rounds
from syncline.core.slice_state import Identity
from syncline.server.executor import RoundExecutor
from syncline.server.slices import HostedSlice
from syncline.server.staging import Staging
from syncline.server.tasks import Key, RoundTask, StagedCommit, key_of

#: What is staged for a commit: what it says, and the slices whose bytes came over a socket.
Staged = tuple[StagedCommit, set[int]]


class WorkerRemoval:
    """Everything that ends with a worker, under `state_lock` all of it."""

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

    def stage_by(self, slices_of: Callable[[str], Iterable[HostedSlice]] | None) -> None:
        """`slices_of` says of which slices a worker, by name, stages its pushes here. Of others it only says so.
        None: of all slices that are here."""
        self._staged_by = slices_of or self.staged_here

    def staged_here(self, worker: str) -> Iterable[HostedSlice]:
        """By every worker, of the slices here; in a ring, of spread ones too."""
        return (*self._slices.values(), *self._staging.copies.slots())

    def fence(self, name: str, incarnation: int) -> list[StagedCommit]:
        """Nothing more is taken from this worker; whom to tell that it is out."""
        self._rounds.fence(name, incarnation)
        self._gone()
        asked = self._flow.take_requests_of(name, incarnation)
        self._rounds.drop_undecided(name, incarnation)
        return asked

    def staged_whole(self, name: str, incarnation: int) -> int:
        """Up to which clock this worker's commits could be made without it."""
        clock = self._rounds.reach(name, incarnation)
        while True:
            staged = self._staged.get((name, incarnation, clock + 1))
            if staged is None or not staged[0].is_told or self.not_staged((name, incarnation), *staged) is not None:
                return clock
            clock += 1

    def reach(self, name: str, incarnation: int, *, moves: bool) -> int:
        """How far slices here can come with the steps of a worker that is out.

        Where primaries change (`moves`), rounds that wait for the norm over all servers are dropped, and who is out
        makes nothing again.
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
        """A worker's staged commits up to this clock count, since other servers have them."""
        standing = self._rounds.standings.get(name)
        if standing is None or standing.incarnation != incarnation or standing.left:
            return []
        works: list[RoundTask] = []
        for each in range(standing.clock + 1, min(clock, self.staged_whole(name, incarnation)) + 1):
            if not self._rounds.is_decided(name, incarnation, each):
                break  # whoever lives makes it again
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
        """No round waits for this fenced worker any more, and nothing else of it is kept."""
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
        """Who is out, and has nothing open, leaves no trace here."""
        for worker in [w for w in self._flow.going if not self._flow.of_worker(*w)]:
            name, incarnation = worker
            self._flow.going.discard(worker)
            standing = self._rounds.standings.get(name)
            if standing is None or standing.incarnation == incarnation:
                self._rounds.forget_left(name)
                for slot in self._slices.values():
                    slot.state.seen.pop(name, None)
            self._staging.forget_worker(worker)
            for slot in (*self._slices.values(), *self._staging.copies.slots()):
                slot.rules.forget_staged()

    def lost(self, worker: Identity) -> None:
        """Its last connection is gone. Who takes part may come back; of who never did, nothing is kept."""
        with self._flow.state_lock:
            standing = self._rounds.standings.get(worker[0])
            if (standing is None or standing.incarnation != worker[1]) and worker not in self._flow.going:
                self._staging.forget_worker(worker)

    def not_staged(self, worker: Identity, contribution: StagedCommit, have: set[int]) -> int | None:
        """A slice here whose bytes a commit would need, and does not have."""
        for slot in self._staged_by(worker[0]):
            if slot.part.id in have or self._staging.is_shared(worker, contribution.slot, slot.part):
                continue
            if slot.touched_by(contribution.pushed):
                return slot.part.id
        return None
