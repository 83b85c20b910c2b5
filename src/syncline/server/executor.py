"""The round executor: queues each round at every slice, spreads it over the pool, clips and answers it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from syncline import faults
from syncline.core.layout import Slice
from syncline.core.rounds import Commit, Rounds, Verdict
from syncline.core.slice_state import Identity, life_of
from syncline.core.tracing import APPLY, SpanBuffer
from syncline.errors import RuleError, SynclineError
from syncline.server.clipping import Clipping
from syncline.server.dropped_options import DroppedOptions
from syncline.server.pool import Pool, is_small
from syncline.server.pulls import Pulls
from syncline.server.slices import HostedSlice
from syncline.server.tasks import (
    FenceTask,
    FlushTask,
    Key,
    RingRounds,
    RoundTask,
    Seniority,
    SliceTask,
    StagedCommit,
    answers_early,
    key_of,
    leading,
)
from syncline.server.untouched import UntouchedSlices

#: A commit that is decided and not answered yet.
Held = Commit[StagedCommit]
_NO_CLOCKS: dict[str, int] = {}


class RoundExecutor:
    """All rounds in flight. `state_lock` keeps the order of decisions equal to the order in every slice's queue."""

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
        self._answers_early = answers_early(rounds.policy)
        self.num_servers = num_servers
        self.seniority: dict[Identity, Seniority] = {}
        self.tells_clocks = False  # with one replica: a worker's copy may have to replace a slice
        self.state_lock = threading.RLock()
        self.idle = threading.Condition(self.state_lock)
        self.going: set[Identity] = set()  # removed workers; forgotten when nothing of theirs is open
        self.log = log
        self._ring: RingRounds | None = None
        self._after_rounds: list[Callable[[], None]] = []
        self._busy: set[SliceTask] = set()
        self._under_way: dict[Key, RoundTask] = {}
        self.clipping = Clipping(self)
        self._dropped = DroppedOptions(slices, counts_rates=rounds.policy.lr_per_worker)
        self._parked: list[Held] = []
        self._clocks: dict[str, int] = {}  # every worker's clock in what was queued so far
        self._preferred: list[int] = []
        self._leaving: frozenset[int] = frozenset()
        self._in_order: tuple[HostedSlice, ...] | None = None
        self._first_slices: tuple[Slice, ...] | None = None
        self._untouched = UntouchedSlices()
        self._is_zero_told = False
        self.lag_max = 0
        self.num_rounds = 0
        self.round_seconds = 0.0  # total time from complete rounds to their last slice
        self.spans: SpanBuffer | None = None  # with --trace

    @property
    def ring(self) -> RingRounds | None:
        return self._ring

    def enter_ring(self, ring: RingRounds) -> None:
        """Rounds need the votes of this ring before they are applied."""
        self._ring = ring

    def call_after_rounds(self, listener: Callable[[], None]) -> None:
        """Calls `listener` under `state_lock` after every round."""
        self._after_rounds.append(listener)

    # -- slices -------------------------------------------------------------------------------------------

    def slots_in_order(self) -> tuple[HostedSlice, ...]:
        """Slices in the preferred order, or in hosting order if no preference is set."""
        if self._in_order is None:
            place = {number: k for k, number in enumerate(self._preferred)}
            ordered = sorted(self._slices, key=lambda number: (place.get(number, len(place)), number))
            self._in_order = tuple(self._slices[number] for number in ordered if number not in self._leaving)
        return self._in_order

    def first_slices(self) -> tuple[Slice, ...]:
        """One slice of every segment that has any here."""
        if self._first_slices is None:
            self._first_slices = tuple({slot.part.segment: slot.part for slot in self._slices.values()}.values())
        return self._first_slices

    def hosts_others(self, leaving: Iterable[int] = ()) -> None:
        """Under `state_lock`: the hosted slices or the number of servers have changed. Slices in `leaving` take no
        more updates. With spare workers, the server of slice 0 closes the rounds from now on.
        """
        self._leaving, self._in_order, self._first_slices = frozenset(leaving), None, None
        self._untouched = UntouchedSlices()
        self._rounds.decides, self._rounds.is_alone = 0 in self._slices, self.num_servers == 1
        self._rounds.first_segment = min((slot.part.segment for slot in self._slices.values()), default=0)
        self._pulls.hosts_others()

    def prefer(self, slices: Sequence[int]) -> None:
        """Sets the order in which slices are applied."""
        with self.state_lock:
            self._preferred = [number for number in slices if number in self._slices]
            self._in_order = None
            self._untouched = UntouchedSlices()

    # -- rounds on their way ------------------------------------------------------------------------------

    def enqueue(self, verdict: Verdict[StagedCommit]) -> list[RoundTask]:
        """Under `state_lock`: queues complete rounds at every slice, in order."""
        works = []
        for commits in verdict.apply:
            if verdict.kind == "late":
                commits[0].item.void()
            lead = leading(commits, self.seniority)
            slots = self._slots_for(commits, lead)
            if len(commits) > 1 and self._rounds.decides:
                self._dropped.see(commits, lead, self.log)
            work = RoundTask(commits, slots, lead, self._rounds.policy, self._finished, self._held, self.fail)
            works.append(work)
            if not work.weight and not work.skip and not self._is_zero_told:
                self._tell_zero(work)
            if self._ring is not None:
                self._ring.expect(work)
            if self._rounds.policy.has_spare:
                work.round_membership = self._rounds.round_memberships.find(
                    commits[0].worker, commits[0].item.incarnation, commits[0].clock
                )
            self._busy.add(work)
            for commit in commits:
                self._under_way[commit.worker, commit.item.incarnation, commit.clock] = work
            if self.tells_clocks:
                self._note_clocks(work)
            if not self.clipping.is_for(work) and not work.is_summed:
                for slot in slots:
                    slot.put(work)
        return works

    def _slots_for(self, commits: Sequence[Held], lead: Held) -> Sequence[HostedSlice]:
        """The slices at which a round is queued; it is counted at all others."""
        slots, is_voted_on = self.slots_in_order(), self._ring is not None and self._ring.is_on
        if len(slots) < 2 or is_voted_on or self.gathers or lead.item.clip_norm is not None:
            return slots
        if self._answers_early and any(commit.item.answer is not None for commit in commits):
            return slots
        return self._untouched.count(commits, slots)

    def _tell_zero(self, work: RoundTask) -> None:
        """Says once that a script pushes gradients that do not count."""
        pushing = [commit.worker for commit in work.commits if commit.item.pushed]
        if pushing and self._rounds.decides and work.weighs:
            self._is_zero_told = True
            self.log(
                f"the pushes of {', '.join(pushing)} have weight 0, so this update changes nothing; give each push "
                "the number of its samples as its weight"
            )

    def fence(self, workers: Sequence[tuple[str, int]], finished: Callable[[], None]) -> list[SliceTask]:
        """Under `state_lock`: queues a fence behind all earlier updates."""
        slots = self.slots_in_order()

        def done(work: SliceTask) -> None:
            self.through(work)
            finished()

        work = FenceTask(workers, slots, done)
        self._busy.add(work)
        for slot in slots:
            slot.put(work)
        return [work]

    @property
    def gathers(self) -> bool:
        """Whether slices hold pushes: `async:gather=N`."""
        return self._rounds.policy.gather > 0

    def flush(self, finished: Callable[[RuleError | None], object]) -> list[SliceTask]:
        """Under `state_lock`: has slices apply what they hold, behind all earlier updates; then `finished` is called,
        with the error if a rule has raised. In a job whose slices hold nothing it is not called.
        """
        if not self.gathers:
            return []
        slots = self.slots_in_order()

        def done(work: SliceTask) -> None:
            self.through(work)
            error = work.error
            finished(RuleError(f"the pushes that were held could not be applied: {error}") if error else None)

        work = FlushTask(slots, done)
        self._busy.add(work)
        for slot in slots:
            slot.put(work)
        return [work]

    def run(self, works: Iterable[SliceTask]) -> None:
        """Not under `state_lock`: starts tasks that `enqueue` or `fence` has queued. First the sum of a ring or the
        norm for clipping, if one is needed.
        """
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
        """The process group has finished the round's sums."""
        if self.clipping.is_for(work):
            self.clipping.measure(work)
            return
        self.go_through(work)

    def was_dropped(self, work: RoundTask) -> bool:
        """Under `state_lock`, in a ring: whether the round awaited votes and replica sets have changed since."""
        return work.waits_for_votes and self._ring is not None and not self._ring.expects(work)

    def held(self) -> dict[str, int]:
        """Under `state_lock`: how many there are of everything that rounds bring."""
        return {
            "parked": len(self._parked), "under way": len(self._under_way), "busy": len(self._busy),
            "clipping": len(self.clipping.works()), "going": len(self.going), "clocks told": len(self._clocks),
        }  # fmt: skip

    @property
    def is_applying(self) -> bool:
        """Under `state_lock`: whether a decided round is being applied."""
        return any(isinstance(work, RoundTask) and not work.waits_for_votes for work in self._busy)

    def go_through(self, work: SliceTask) -> None:
        """Applies the round to the slices here. In a ring, first collects votes."""
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
        """Under `state_lock`: the round now waits for votes or for its norm."""
        self._busy.discard(work)
        if not self._busy:
            self.idle.notify_all()

    def resumes(self, work: RoundTask) -> None:
        """Under `state_lock`: the round no longer waits."""
        self._busy.add(work)

    def drain_all(self, work: SliceTask) -> None:
        """Applies a round with the pool's threads, or in this thread if it is small."""
        slots = work.slots
        small = is_small([slot.part.num_bytes for slot in slots])
        for slot in slots:
            if small:
                slot.drain()
            else:
                self.pool.submit(slot.drain)

    def through(self, work: SliceTask) -> None:
        """The round is finished or dropped."""
        with self.state_lock:
            self._busy.discard(work)
            for key in map(key_of, work.commits):
                if self._under_way.get(key) is work:  # else it was dropped and is being replayed
                    del self._under_way[key]
            if self.going:
                for listener in self._after_rounds:
                    listener()
            if not self._busy:
                self.idle.notify_all()

    @property
    def is_idle(self) -> bool:
        """Under `state_lock`: whether all rounds in flight wait for votes or for their norm."""
        return not self._busy

    def _finished(self, work: SliceTask) -> None:
        """All slices have applied the round: replies to the workers that the policy allows."""
        assert isinstance(work, RoundTask)
        if work.error is not None:
            self.fail(work, work.error)
            return
        self._pulls.advanced()
        with self.state_lock:
            work.applied = True
            self.num_rounds += 1
            now = time.perf_counter()
            self.round_seconds += now - work.began
            if self.spans is not None:
                self._trace(self.spans, work, now)
            ready = [commit for commit in work.commits if commit.item.to_answer()]
            for commit in ready:
                self.clipping.forget(commit)
                commit.item.clocks, commit.item.is_skipped = work.clocks, work.skip
            self._parked += ready
            self.through(work)
        if self._ring is not None:
            self._ring.is_through(work)
        self.release()

    @staticmethod
    def _trace(spans: SpanBuffer, work: RoundTask, now: float) -> None:
        """With `--trace`: steps of rounds are the job's, others those of the worker that has pushed."""
        if work.in_rounds:
            spans.add(APPLY, max((slot.state.version for slot in work.slots), default=0), work.began, now)
        else:
            commit = work.commits[0]
            spans.add(APPLY, commit.clock, work.began, now, commit.worker)

    def fail(self, work: RoundTask, error: Exception) -> None:
        """Sends the error to every worker of the round, and to those that ask later."""
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
        """Sends the replies that the policy no longer holds back."""
        if not self._parked:
            return
        with self.state_lock:
            if self._stands_still:  # all workers of an applied round are level
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
        """Answers a commit and its repetitions: with versions, or with the bytes of slices not sent yet."""
        with self.state_lock:
            round_membership = self._rounds.membership_to_tell(*key_of(commit))
        for item in commit.item.to_answer():
            request, answer = item.request, item.answer
            assert request is not None
            if answer is None:
                self._pulls.committed(request, commit.clock, commit.item, round_membership)
                continue
            for slot in self._pulls.readable():
                answer.applied(slot)  # the slices it was not told of yet
            answer.hear(commit.item, round_membership)
            self._pulls.land(request, item.slot, reads=True)
            answer.finish()
        if faults.armed is not None:
            faults.reach("commit.answered")

    def answer_later(self, key: Key, contribution: StagedCommit) -> bool:
        """Under `state_lock`: a commit is repeated. Returns whether the pending reply will answer it too."""
        work = self._under_way.get(key)
        known = list(work.commits) if work is not None else self._parked
        for commit in known:
            if key_of(commit) == key:
                commit.item.say_again(contribution)
                return True
        return False

    def take_requests(self, commits: Iterable[Held]) -> list[StagedCommit]:
        """Under `state_lock`: takes the pending replies out, so that the caller can refuse them."""
        asked: list[StagedCommit] = []
        for commit in commits:
            taken = StagedCommit(commit.item.incarnation, 0, 0)
            taken.say_again(commit.item)
            asked += taken.again
            commit.item.request, commit.item.answer, commit.item.again = None, None, ()
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
        """Under `state_lock`: the workers that take part have changed."""
        waiting = {(c.worker, c.item.incarnation): c.clock for c in self._rounds.open_commits()}
        standings = [s for s in self._rounds.standings.values() if not s.left]
        self._clocks = {
            life_of(s.name, s.incarnation): waiting.get((s.name, s.incarnation), s.clock + 1) - 1 for s in standings
        }
        self.tells_clocks = replicas < 2

    def clocks_now(self) -> dict[str, int]:
        """Upper bound of every worker's clock in anything that can be read here."""
        return self._clocks.copy() if self.tells_clocks else _NO_CLOCKS

    def of_worker(self, name: str, incarnation: int) -> list[Held]:
        """Under `state_lock`: all unanswered commits of this worker."""
        return [c for c in self.unfinished() if (c.worker, c.item.incarnation) == (name, incarnation)]

    def unfinished(self) -> list[Held]:
        """Under `state_lock`: all decided commits that are not applied or not answered."""
        works = {*self._under_way.values(), *self.clipping.works(), *self._busy}
        return [commit for work in works for commit in work.commits] + [*self._parked, *self._rounds.open_commits()]

    def take_requests_of(self, name: str, incarnation: int) -> list[StagedCommit]:
        """Under `state_lock`: the worker was removed. Its commits count but get no reply."""
        commits = self.of_worker(name, incarnation)
        for commit in commits:
            commit.item.is_fenced = True
        asked = self.take_requests(commits)
        self._parked = [c for c in self._parked if not c.item.is_fenced]
        return asked

    def take_requests_in(self, works: Iterable[RoundTask]) -> list[StagedCommit]:
        """Under `state_lock`: takes out the replies of rounds that not all slices here will apply."""
        return self.take_requests([commit for work in works for commit in work.commits])

    def reset(self, dropped: Iterable[Held]) -> list[StagedCommit]:
        """Under `state_lock`: primaries have changed. Returns the waiting commits, which workers must replay."""
        commits = [*dropped, *self._parked]
        commits += [commit for work in self.clipping.works() for commit in work.commits]
        self.clipping.clear()
        self._under_way.clear()
        self._parked = []
        return self.take_requests(commits)

    def drop(self, works: Collection[RoundTask]) -> list[StagedCommit]:
        """Under `state_lock`, in a ring: drops these rounds. Their workers must replay them."""
        for slot in self._slices.values():
            slot.drop(works)
        self._busy.difference_update(works)
        return self.take_requests_in(works)

    # -- what waits ---------------------------------------------------------------------------------------

    def parked(self) -> list[Held]:
        return self._parked
