"""A server of a ring: votes on rounds, and applies a round when all servers hold its sums."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from syncline import faults
from syncline.core.ring import Ballot, Spread, Votes, ballot_of
from syncline.core.slice_state import Identity
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import Replicate, Vote
from syncline.net.reliable_send import Partner, ReliableSend
from syncline.net.rpc import Request
from syncline.server.backups import Backup, Backups, own_region
from syncline.server.hosting import Hosting
from syncline.server.pool import Pool, is_small
from syncline.server.replicate import Region, message_of
from syncline.server.ring_copies import Copies
from syncline.server.slices import HostedSlice
from syncline.server.tasks import RoundTask, StagedCommit

if TYPE_CHECKING:
    from syncline.server.ring_sums import RingReducer


Bytes = npt.NDArray[np.uint8]


#: Runs an action for a round unless the round was dropped. Returns whether it ran.
Holds = Callable[[RoundTask, Callable[[], None]], bool]
Held = tuple[Replicate, Region | None]


class Spreading:
    """Sums for spread slices whose primary is on another server."""

    def __init__(
        self, spread: Spread, copies: Copies, hosting: Hosting, *, fail: Callable[[RoundTask, Exception], None]
    ) -> None:
        self._spread, self._copies, self._hosting, self._fail = spread, copies, hosting, fail
        self._backups, self._storage = hosting.backups, hosting.storage
        copies.backups = hosting.backups

    def begin(self) -> None:
        """Under `state_lock`: replica sets have changed."""
        self._copies.numbers = self._hosting.spread_by(self._spread)
        for slot in list(self._hosting.slices.values()):
            slot.is_spread, slot.sum_coder = slot.part.id in self._copies.numbers, self._spread.sums

    def expect(self, work: RoundTask) -> None:
        """Under `state_lock`: a round is complete here."""
        work.is_for_copies(self._copies.slots())

    def sum_up(self, work: RoundTask, holds: Holds) -> None:
        for slot in work.copies:
            self._backups.queue_up(slot.part.id, functools.partial(self._sum_up, work, slot.part.id, holds))

    def _sum_up(self, work: RoundTask, number: int, holds: Holds) -> None:
        backup = self._backups.backups.get(number)
        if backup is None or backup.slot is None:
            return  # replica sets have changed: the round is dropped
        try:
            held = self._summed(work, backup, backup.slot)
        except Exception as error:  # callers must get an error, whatever it is
            if holds(work, lambda: None):  # else it was dropped meanwhile and its staged bytes are gone
                self._fail(work, error)
            return

        def take() -> None:
            backup.held = held

        if holds(work, take):
            if faults.armed is not None:
                faults.reach("replicate.held")
            work.slice_held()

    def _summed(self, work: RoundTask, backup: Backup, slot: HostedSlice) -> Held:
        with slot.lock, self._storage.at_work():
            update = slot.summed(work, own_region(backup, slot))
            return message_of(slot, update, work.ballot), update.region if update.has else None


class Voting:
    """The votes of a ring. Everything but applying runs under `state_lock`."""

    def __init__(
        self,
        name: str,
        state_lock: threading.RLock,
        backups: Backups,
        pool: Pool,
        *,
        partners: Callable[[Collection[str]], Iterable[Partner]],
        run: Callable[[RoundTask], None],
        waits: Callable[[RoundTask], None],
        resumes: Callable[[RoundTask], None],
        may_apply: Callable[[RoundTask], bool],
        spreading: Spreading,
    ) -> None:
        """`waits` is called when a round starts to wait for votes, `resumes` when it has them; then `run` applies the
        slices of this server. `may_apply`: whether the snapshot barrier lets the round pass.
        """
        self._name, self._state_lock, self._backups, self._pool = name, state_lock, backups, pool
        self._partners, self._run, self._waits, self._resumes = partners, run, waits, resumes
        self._may_apply, self.spreading = may_apply, spreading
        self.votes = Votes()
        self._works: dict[Ballot, RoundTask] = {}  # complete here, in order
        self._unsaid: list[RoundTask] = []  # held by all since the freeze
        self.is_frozen = False  # a reconfiguration is prepared
        self.summing: RingReducer | None = None  # set if every server computes all sums itself
        backups.enter_ring(self)

    @property
    def is_on(self) -> bool:
        """Whether there are other servers to wait for."""
        return len(self.votes.voters) > 1

    def begin(self, generation: int, voters: Collection[str]) -> None:
        """Starts a generation with these voters, while no round is in flight."""
        with self._state_lock:
            self.votes.begin(generation, voters)
            self._backups.reset()
            self.spreading.begin()
            self.is_frozen = False
            self._unsaid.clear()
            if self.summing is not None:
                self.summing.begin(generation, voters)

    def supplied(self) -> None:
        """The other servers have received what they lacked of the slices here."""
        if self.summing is not None:
            self.summing.supplied()

    # -- voting -------------------------------------------------------------------------------------------

    def expect(self, work: RoundTask) -> None:
        """A round is complete here and waits for all votes."""
        if self.is_on:
            commits = [(c.worker, c.item.incarnation, c.clock) for c in work.commits]
            work.ballot, work.waits_for_votes = ballot_of(self.votes.generation, commits), True
            self._works[work.ballot] = work
            self.spreading.expect(work)
            work.is_summed = self.summing is not None and self.summing.is_on

    def expects(self, work: RoundTask) -> bool:
        """Under `state_lock`: whether this round still waits here."""
        return work.ballot is not None and self._works.get(work.ballot) is work

    def keeps(self, work: RoundTask, take: Callable[[], None]) -> bool:
        """Takes this server's own sum for a round, unless the round was dropped or a reconfiguration is prepared. The
        reconfiguration relies on what was held before it.
        """
        with self._state_lock:
            is_wanted = self.expects(work)
            if is_wanted:
                take()
            return is_wanted

    @property
    def generation(self) -> int:
        return self.votes.generation

    def reduce(self, work: RoundTask) -> None:
        """The round is complete here: adds up its gradients."""
        assert self.summing is not None
        self.summing.submit(work)

    def hold_sums(self, work: RoundTask) -> bool:
        """Holds the sums of all slices; False while a reconfiguration is prepared."""
        assert self.summing is not None
        return self.summing.hold(work)

    def sum_up_spread(self, work: RoundTask) -> None:
        """Adds up the spread slices whose primary is on another server."""
        self.spreading.sum_up(work, self.keeps)

    def stage_early(self, worker: Identity, clock: int, staged: StagedCommit, slices: set[int]) -> None:
        """A worker has staged these slices before its commit. Not under `state_lock`."""
        if self.summing is not None:
            self.summing.stage_early(worker, clock, staged, slices)

    def is_through(self, work: RoundTask) -> None:
        """The round is applied, or was dropped. Not under `state_lock`."""
        if self.summing is not None:
            self.summing.is_through(work)

    def held(self, work: RoundTask) -> None:
        """All other servers hold the sums of the slices here."""
        with self._state_lock:
            if work.ballot is None or not self.expects(work):
                return  # dropped
            if self.is_frozen:
                self._unsaid.append(work)
                return
            self._waits(work)
            self.votes.vote(work.ballot, self._name)
            sends = [ReliableSend(partner, Vote(work.ballot)) for partner in self._partners(self.votes.voters)]
        if faults.armed is not None:
            faults.reach("vote.cast")
        for send in sends:
            send.send()
        self._look(work.ballot)

    def missing(self, now: float) -> list[tuple[list[str], float]]:
        """Rounds that wait: servers without a vote, seconds. For a round that is being summed: the servers
        whose part is missing.
        """
        cast = [work for ballot, work in self._works.items() if self._name not in self.votes.missing(ballot)]
        found = [(w.commits[0], self.votes.missing(w.ballot)) for w in cast if w.ballot is not None]
        found += [
            (w.commits[0], names) for w, names in (self.summing.waiting_for() if self.summing is not None else ())
        ]
        return [(names, now - commit.item.since) for commit, names in found if names]

    def hear(self, request: Request, message: Vote) -> None:
        with self._state_lock:
            self.votes.vote(message.ballot, request.peer.name)
        request.reply(Done())
        self._look(message.ballot)

    def holds(self, ballot: Ballot, take: Callable[[], None]) -> Literal["held", "later", "over"]:
        """A backup received an update of this round. Takes it, unless a reconfiguration is prepared or the round is
        over.
        """
        with self._state_lock:
            if ballot.generation < self.votes.generation:
                return "over"
            if self.is_frozen or ballot.generation > self.votes.generation:
                return "later"
            take()
            return "held"

    def look(self) -> None:
        """Applies the rounds that may go on now."""
        with self._state_lock:
            ballots = list(self._works)
        for ballot in ballots:
            self._look(ballot)

    def _look(self, ballot: Ballot) -> None:
        with self._state_lock:
            work = self._works.get(ballot)
            if work is None or self.is_frozen or not self.votes.is_decided(ballot) or not self._may_apply(work):
                return
            self._resumes(work)
            numbers = self._begin(ballot, work)
        self._apply(work, numbers)

    def _begin(self, ballot: Ballot, work: RoundTask) -> list[int]:
        """The round is decided and cannot be dropped any more. Returns the copies of other servers' slices to apply
        here.
        """
        del self._works[ballot]
        self.votes.forget(ballot)
        numbers = self._backups.held_for(ballot)
        work.waits_for_votes = False
        work.also(len(numbers))
        return numbers

    def _apply(self, work: RoundTask, numbers: list[int]) -> None:
        if work.slots:
            self._run(work)
        elif not numbers:
            work.end()
        small = is_small(self._backups.sizes(numbers))
        for number in numbers:
            action = functools.partial(self._backups.apply_held, number, work)
            action() if small else self._pool.submit(action)

    # -- when replica sets change --------------------------------------------------------------------------------

    def freeze(self) -> None:
        """A reconfiguration is prepared: stops votes, holds and applies."""
        self.is_frozen = True

    def thaw(self) -> None:
        """The reconfiguration was cancelled."""
        with self._state_lock:
            self.is_frozen = False
            unsaid, self._unsaid = self._unsaid, []
        for work in unsaid:
            self.held(work)
        self._backups.go_on()
        if self.summing is not None:
            self.summing.thaw()
        self.look()

    def close(self) -> None:
        if self.summing is not None:
            self.summing.close()

    def reach(self) -> list[tuple[str, int, int]]:
        """Name, incarnation and clock of commits in rounds that are completely held here."""
        works = [work for ballot, work in self._works.items() if self._is_whole(ballot, work)]
        return [(c.worker, c.item.incarnation, c.clock) for work in works for c in work.commits]

    def _is_whole(self, ballot: Ballot, work: RoundTask) -> bool:
        if set(self._backups.held_for(ballot)) != self._backups.numbers():
            return False
        return all(slot.is_summing(work) for slot in work.slots)

    def settle(self, clocks: Mapping[Identity, int]) -> tuple[list[RoundTask], Callable[[], None]]:
        """Under `state_lock`: returns all open rounds, and an action that applies those that all survivors hold. Call
        it without the lock; the others are dropped.
        """
        works, counted = list(self._works.values()), list[tuple[RoundTask, list[int]]]()
        for ballot, work in list(self._works.items()):
            counts = all(c.clock <= clocks.get((c.worker, c.item.incarnation), 0) for c in work.commits)
            if counts and self._is_whole(ballot, work):
                for slot in work.slots:
                    slot.count_on_nobody()
                self._resumes(work)
                counted.append((work, self._begin(ballot, work)))

        def apply() -> None:
            for work, numbers in counted:
                self._apply(work, numbers)

        return works, apply

    def drop(self) -> list[RoundTask]:
        """Under `state_lock`: drops the rounds that were not settled."""
        dropped = list(self._works.values())
        self._works.clear()
        self._unsaid.clear()
        self._backups.drop_held()
        if self.summing is not None:
            self.summing.end()
        return dropped
