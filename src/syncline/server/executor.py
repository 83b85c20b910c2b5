"""The round executor: queues each round at every slice, spreads it over the pool, clips and answers it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from syncline import faults
from syncline.core.rounds import Commit, Rounds, Verdict
from syncline.core.slice_state import Identity, life_of
from syncline.errors import RuleError, SynclineError
from syncline.server.clipping import Clipping
from syncline.server.dropped_options import DroppedOptions
from syncline.server.pool import Pool, is_small
from syncline.server.pulls import Pulls
from syncline.server.slices import HostedSlice
from syncline.server.tasks import (
    FenceTask,
    Key,
    RingRounds,
    RoundTask,
    Seniority,
    SliceTask,
    StagedCommit,
    key_of,
    leading,
)

Held = Commit[StagedCommit]
_NO_CLOCKS: dict[str, int] = {}


class RoundExecutor:
    """All work under way. `state_lock` makes decisions and the slices' queues follow each other alike."""

    def __init__(
        self,
        rounds: Rounds[StagedCommit],
        slices: dict[int, HostedSlice],
        pool: Pool,
        pulls: Pulls,
        num_servers: int,
        log: Callable[[str], None],
    ) -> None:
        self._rounds, self._slices, self.pool, self._pulls = rounds, slices, pool, pulls
        self._stands_still = rounds.policy.stands_still
        self.num_servers = num_servers
        self.seniority: dict[Identity, Seniority] = {}
        self.tells_clocks = False  # with one replica a worker's copy may have to stand in for a slice
        self.state_lock = threading.RLock()
        self.idle = threading.Condition(self.state_lock)
        self.going: set[Identity] = set()  # workers that are out, and forgotten when nothing of theirs is open
        self.log = log
        self._ring: RingRounds | None = None
        self._after_rounds: list[Callable[[], None]] = []
        self._busy: set[SliceTask] = set()
        self._under_way: dict[Key, RoundTask] = {}
        self.clipping = Clipping(self)
        self._dropped = DroppedOptions(slices)
        self._parked: list[Held] = []
        self._clocks: dict[str, int] = {}  # of every worker, in what was queued so far
        self._preferred: list[int] = []
        self._leaving: frozenset[int] = frozenset()
        self._in_order: tuple[HostedSlice, ...] | None = None
        self.lag_max = 0
        self.num_rounds = 0
        self.round_seconds = 0.0  # from a whole round to its last slice, added up

    @property
    def ring(self) -> RingRounds | None:
        return self._ring

    def enter_ring(self, ring: RingRounds) -> None:
        """Rounds are applied by the votes of this ring."""
        self._ring = ring

    def call_after_rounds(self, listener: Callable[[], None]) -> None:
        """Calls it under `state_lock` whenever a round is through."""
        self._after_rounds.append(listener)

    # -- slices -------------------------------------------------------------------------------------------

    def slots_in_order(self) -> tuple[HostedSlice, ...]:
        """As they are needed first, where somebody has said so; else as they are hosted."""
        if self._in_order is None:
            place = {number: k for k, number in enumerate(self._preferred)}
            ordered = sorted(self._slices, key=lambda number: (place.get(number, len(place)), number))
            self._in_order = tuple(self._slices[number] for number in ordered if number not in self._leaving)
        return self._in_order

    def hosts_others(self, leaving: Iterable[int] = ()) -> None:
        """Under `state_lock`: there are other slices now. `leaving`: these are about to go, and take nothing more
        in."""
        self._leaving, self._in_order = frozenset(leaving), None
        self._rounds.decides, self._rounds.is_alone = 0 in self._slices, self.num_servers == 1
        self._rounds.first_segment = min((slot.part.segment for slot in self._slices.values()), default=0)
        self._pulls.hosts_others()

    def prefer(self, slices: Sequence[int]) -> None:
        """Slices are applied in this order from now on."""
        with self.state_lock:
            self._preferred = [number for number in slices if number in self._slices]
            self._in_order = None

    # -- rounds on their way ------------------------------------------------------------------------------

    def enqueue(self, verdict: Verdict[StagedCommit]) -> list[RoundTask]:
        """Under `state_lock`: every slice gets its rounds in the order in which they became whole."""
        works = []
        for commits in verdict.apply:
            if verdict.kind == "late":
                commits[0].item.void()
            slots = self.slots_in_order()
            lead = leading(commits, self.seniority)
            if len(commits) > 1 and self._rounds.decides:
                self._dropped.see(commits, lead, self.log)
            work = RoundTask(commits, slots, lead, self._rounds.policy, self._finished, self._held)
            works.append(work)
            if self._ring is not None:
                self._ring.expect(work)
            if self._rounds.policy.spare:
                work.roll = self._rounds.rolls.find(commits[0].worker, commits[0].item.incarnation, commits[0].clock)
            self._busy.add(work)
            for commit in commits:
                self._under_way[commit.worker, commit.item.incarnation, commit.clock] = work
            if self.tells_clocks:
                self._note_clocks(work)
            if not self.clipping.is_for(work) and not work.is_summed:
                for slot in slots:
                    slot.queue.append(work)
        return works

    def fence(self, workers: Sequence[tuple[str, int]], finished: Callable[[], None]) -> list[SliceTask]:
        """Under `state_lock`: a fence behind everything that is in the slices' queues."""
        slots = self.slots_in_order()

        def done(work: SliceTask) -> None:
            self.through(work)
            finished()

        work = FenceTask(workers, slots, done)
        self._busy.add(work)
        for slot in slots:
            slot.queue.append(work)
        return [work]

    def run(self, works: Iterable[SliceTask]) -> None:
        for work in works:
            if isinstance(work, RoundTask) and work.is_summed:
                assert self._ring is not None
                self._ring.reduce(work)
            elif isinstance(work, RoundTask) and self.clipping.is_for(work):
                self.clipping.measure(work)
            else:
                self.go_through(work)
        self.release()

    def summed(self, work: RoundTask) -> None:
        """Its process group has its sums."""
        if self.clipping.is_for(work):
            self.clipping.measure(work)
            return
        self.go_through(work)

    def was_dropped(self, work: RoundTask) -> bool:
        """Under `state_lock`, in a ring: whether it was to be voted on, and replica sets have changed since."""
        return work.waits_for_votes and self._ring is not None and not self._ring.expects(work)

    def held(self) -> dict[str, int]:
        """Under `state_lock`: how many there are of everything that rounds bring."""
        return {
            "parked": len(self._parked), "under way": len(self._under_way), "busy": len(self._busy),
            "clipping": len(self.clipping.works()), "going": len(self.going), "clocks told": len(self._clocks),
        }  # fmt: skip

    @property
    def is_applying(self) -> bool:
        """Under `state_lock`: a round that nothing stops any more is on its way into the slices."""
        return any(isinstance(work, RoundTask) and not work.waits_for_votes for work in self._busy)

    def go_through(self, work: SliceTask) -> None:
        """Into the slices here; in a ring, first only to where all hold it."""
        if work.is_summed:
            assert self._ring is not None and isinstance(work, RoundTask)
            if not self._ring.hold_sums(work):
                return
        if work.copies:
            assert self._ring is not None and isinstance(work, RoundTask)
            self._ring.sum_up_spread(work)
            self.drain_all(work)
        elif work.slots:
            self.drain_all(work)
        elif work.waits_for_votes:
            self._held(work)
        elif not work.has_more:
            work.end()

    def _held(self, work: SliceTask) -> None:
        assert self._ring is not None and isinstance(work, RoundTask)
        self._ring.held(work)

    def waits(self, work: RoundTask) -> None:
        """Under `state_lock`: for votes, or for its norm. What there was to do about it so far is done."""
        self._busy.discard(work)
        if not self._busy:
            self.idle.notify_all()

    def resumes(self, work: RoundTask) -> None:
        """Under `state_lock`: what it has waited for is here."""
        self._busy.add(work)

    def drain_all(self, work: SliceTask) -> None:
        """Spreads a round over the pool; a small one is done by the time another thread would have woken up."""
        small = is_small([s.part.num_bytes for s in work.slots])
        for slot in work.slots:
            if small:
                self.drain(slot)
            else:
                self.pool.submit(functools.partial(self.drain, slot))

    def drain(self, slot: HostedSlice) -> None:
        for work in slot.drain():
            if work.error is not None and work.waits_for_votes and isinstance(work, RoundTask):
                self.fail(work, work.error)  # its sum could not be made: this server will not vote for it
            work.slice_done()

    def through(self, work: SliceTask) -> None:
        """This work is on no way any more."""
        with self.state_lock:
            self._busy.discard(work)
            for key in map(key_of, work.commits):
                if self._under_way.get(key) is work:  # else it was dropped, and is made again
                    del self._under_way[key]
            if self.going:
                for listener in self._after_rounds:
                    listener()
            if not self._busy:
                self.idle.notify_all()

    @property
    def is_idle(self) -> bool:
        """Under `state_lock`: nothing is on its way but rounds that wait for votes, or for the word on their norm."""
        return not self._busy

    def _finished(self, work: SliceTask) -> None:
        """Every slice has taken the round in: who may be answered is answered."""
        assert isinstance(work, RoundTask)
        if work.error is not None:
            self.fail(work, work.error)
            return
        self._pulls.advanced()
        with self.state_lock:
            work.applied = True
            self.num_rounds += 1
            self.round_seconds += time.perf_counter() - work.began
            ready = [commit for commit in work.commits if commit.item.sayings()]
            for commit in ready:
                self.clipping.forget(commit)
                commit.item.clocks, commit.item.is_skipped = work.clocks, work.skip
            self._parked += ready
            self.through(work)
        if self._ring is not None:
            self._ring.is_through(work)
        self.release()

    def fail(self, work: RoundTask, error: Exception) -> None:
        """Everyone hears of it, once; who asks later hears it then."""
        with self.state_lock:
            if work.failed is not None:
                return
            failed = work.failed = RuleError(f"the update could not be applied: {error}")
            asked = self.take_requests(work.commits)
            self.through(work)
        if self._ring is not None:
            self._ring.is_through(work)
        self.refuse(asked, failed)

    # -- answers ------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Answers whatever the policy no longer holds back."""
        if not self._parked:
            return
        with self.state_lock:
            if self._stands_still:  # whoever is in a round that was applied is level with the rest of it
                ready, self._parked = self._parked, []
            else:
                ready = [c for c in self._parked if self._rounds.may_answer(c.worker, c.clock)[0]]
                self._parked = [c for c in self._parked if c not in ready]
                for commit in ready:
                    self.lag_max = max(self.lag_max, self._rounds.lag(commit.worker, commit.clock))
                    commit.item.clocks = self.clocks_now()
        for commit in ready:
            self.reply(commit)

    def reply(self, commit: Held) -> None:
        with self.state_lock:
            roll = self._rounds.roll_to_tell(*key_of(commit))
        for item in commit.item.sayings():
            request, answer = item.request, item.answer
            assert request is not None
            if answer is None:
                self._pulls.committed(request, commit.clock, commit.item, roll)
                continue
            for slot in self._pulls.readable():
                answer.applied(slot)  # those that it has not heard of yet
            answer.hear(commit.item, roll)
            answer.finish()
        if faults.armed is not None:
            faults.reach("commit.answered")

    def answer_later(self, key: Key, contribution: StagedCommit) -> bool:
        """Under `state_lock`: a commit is said again. Whether its first saying is on its way, and answers this
        one."""
        work = self._under_way.get(key)
        known = list(work.commits) if work is not None else self._parked
        for commit in known:
            if key_of(commit) == key:
                commit.item.say_again(contribution)
                return True
        return False

    def take_requests(self, commits: Iterable[Held]) -> list[StagedCommit]:
        """Under `state_lock`: those who are to be refused; they are not answered otherwise."""
        asked = []
        for commit in commits:
            taken = StagedCommit(commit.item.incarnation, 0, 0)
            taken.say_again(commit.item)
            asked += taken.again
            commit.item.request, commit.item.answer, commit.item.again = None, None, []
        return asked

    @staticmethod
    def refuse(asked: Iterable[StagedCommit], error: SynclineError) -> None:
        for item in asked:
            request, answer = item.request, item.answer
            assert request is not None
            if answer is not None:
                answer.finish(functools.partial(request.refuse, error))
            else:
                request.refuse(error)

    # -- workers that come and go -------------------------------------------------------------------------

    def _note_clocks(self, work: RoundTask) -> None:
        standings = self._rounds.standings
        for commit in work.commits:
            standing = standings.get(commit.worker)
            if standing is not None and standing.incarnation == commit.item.incarnation:
                self._clocks[life_of(commit.worker, standing.incarnation)] = commit.clock
        work.clocks = self._clocks.copy()

    def count_workers(self, replicas: int) -> None:
        """Under `state_lock`: others take part now."""
        waiting = {(c.worker, c.item.incarnation): c.clock for c in self._rounds.open_commits()}
        standings = [s for s in self._rounds.standings.values() if not s.left]
        self._clocks = {
            life_of(s.name, s.incarnation): waiting.get((s.name, s.incarnation), s.clock + 1) - 1 for s in standings
        }
        self.tells_clocks = replicas < 2

    def clocks_now(self) -> dict[str, int]:
        """The clocks of all workers that whatever is read here can contain, at most."""
        return self._clocks.copy() if self.tells_clocks else _NO_CLOCKS

    def of_worker(self, name: str, incarnation: int) -> list[Held]:
        """Under `state_lock`: everything of this worker that is not answered."""
        return [c for c in self.unfinished() if (c.worker, c.item.incarnation) == (name, incarnation)]

    def unfinished(self) -> list[Held]:
        """Under `state_lock`: all that is decided upon and not through, or not answered."""
        works = {*self._under_way.values(), *self.clipping.works(), *self._busy}
        return [commit for work in works for commit in work.commits] + [*self._parked, *self._rounds.open_commits()]

    def take_requests_of(self, name: str, incarnation: int) -> list[StagedCommit]:
        """Under `state_lock`: this worker is out; what it has committed counts, and is not answered."""
        commits = self.of_worker(name, incarnation)
        for commit in commits:
            commit.item.is_fenced = True
        asked = self.take_requests(commits)
        self._parked = [c for c in self._parked if not c.item.is_fenced]
        return asked

    def take_requests_in(self, works: Iterable[RoundTask]) -> list[StagedCommit]:
        """Under `state_lock`: not all slices take these rounds in here; they are not answered as if they did."""
        return self.take_requests([commit for work in works for commit in work.commits])

    def begin_anew(self, dropped: Iterable[Held]) -> list[StagedCommit]:
        """Under `state_lock`: primaries have changed; whoever waits for an answer is to make its commits again."""
        commits = [*dropped, *self._parked]
        commits += [commit for work in self.clipping.works() for commit in work.commits]
        self.clipping.clear()
        self._under_way.clear()
        self._parked = []
        return self.take_requests(commits)

    def drop(self, works: Collection[RoundTask]) -> list[StagedCommit]:
        """Under `state_lock`, in a ring: these rounds count nowhere; whoever is in them is to make them again."""
        for slot in self._slices.values():
            slot.drop(works)
        self._busy.difference_update(works)
        return self.take_requests_in(works)

    # -- what waits ---------------------------------------------------------------------------------------

    def parked(self) -> list[Held]:
        return self._parked
