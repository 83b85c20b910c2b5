"""Commits at a server: staged, decided upon by the core, spread over the pool slice by slice, answered."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Sequence

from syncline.core.layout import Segment
from syncline.core.messages import AskClip, CommitStaged, Done, GiveClip, Rest, Stage
from syncline.core.rounds import Commit, Rounds, Verdict, by_name
from syncline.core.rule import Option, RuleSpec, check_rule
from syncline.errors import ProtocolError, RuleError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Memory, Peer
from syncline.roles.hosted import Contribution, HostedSlice, Work
from syncline.roles.pool import Pool
from syncline.roles.pulls import Pulls
from syncline.roles.staging import Staging

Held = Commit[Contribution]
#: A round of at most this many bytes is applied by the thread that completes it.
INLINE_BYTES, INLINE_SLICES = 1 << 18, 16


class Commits:
    """All workers' commits. `order` makes decisions and the slices' queues follow each other alike."""

    def __init__(
        self,
        rounds: Rounds[Contribution],
        slices: dict[int, HostedSlice],
        pool: Pool,
        pulls: Pulls,
        num_servers: int,
    ) -> None:
        self._rounds, self._slices, self._pool, self._pulls = rounds, slices, pool, pulls
        self._num_servers, self._in_rounds = num_servers, rounds.policy.in_rounds
        self.segments: dict[int, Segment] = {}
        self._chief = min(rounds.standings, key=by_name)
        self.order = threading.RLock()
        self.staging = Staging()
        self._staged: dict[tuple[str, int], tuple[Contribution, set[int]]] = {}
        self._parked: list[Held] = []
        self._preferred: list[int] = []
        self._in_order: tuple[HostedSlice, ...] = ()
        self._clipping: dict[tuple[str, int], Work] = {}
        self.num_commits = 0
        self.lag_max = 0
        self.num_rounds = 0
        self.round_seconds = 0.0  # from a whole round to its last slice, added up

    # -- staging ------------------------------------------------------------------------------------------

    def landing(self, peer: Peer, message: Stage) -> Sequence[Buffer]:
        self._check(peer, message)
        return [self.staging.buffer(peer.name, message.slot, self._slot(n).part) for n in message.slices]

    def _slot(self, number: int) -> HostedSlice:
        slot = self._slices.get(number)
        if slot is None:
            raise ProtocolError(f"slice {number} is not hosted here")
        return slot

    def _check(self, peer: Peer, message: Stage) -> None:
        if not (math.isfinite(message.weight) and message.weight >= 0):
            raise ProtocolError(f"{peer} pushes with weight {message.weight}; it must be a number from 0 on")
        if not 0 <= message.slot < 1 << 10:
            raise ProtocolError(f"{peer} names slot {message.slot}")
        for segment, group, options in message.overrides:
            self._check_override(peer, segment, group, options)
        before = -1
        for start, stop in message.pushed:
            if not before <= start < stop:
                raise ProtocolError(f"{peer} pushes ranges that are empty or out of order")
            before = stop
        if message.rows is not None:
            raise ProtocolError(f"{peer} pushes rows; sparse gradients are not supported yet")
        self._rounds.standing(peer.name, peer.incarnation)

    def _check_override(self, peer: Peer, segment: int, group: int, options: dict[str, Option]) -> None:
        """Hyperparameters that travel with a commit are held to the same rules as registered ones."""
        known = self.segments.get(segment)
        if known is not None:
            if not 0 <= group < len(known.rules):
                raise ProtocolError(f"{peer} names rule {group} of segment {segment}")
            check_rule(RuleSpec(known.rules[group].name, options))

    def stage(self, request: Request, message: Stage) -> None:
        """Bytes are here. They wait for the commit, or bring it along."""
        peer = request.peer
        self._check(peer, message)
        with self.order:
            key = (peer.name, message.clock)
            contribution, have = self._staged.setdefault(
                key, (Contribution(peer.incarnation, message.stretch, message.slot), set())
            )
            have.update(message.slices)
            contribution.stretch = message.stretch  # a rest may lie between bytes sent early and the commit
            contribution.pushed, contribution.weight = message.pushed, message.weight
            contribution.skip, contribution.clip_norm = message.skip, message.clip_norm
            contribution.overrides, contribution.back_at = message.overrides, message.back_at
            contribution.arrays = functools.partial(self.staging.tensor, peer.name, message.slot)
        if message.commit:
            self._commit(request, message)
        else:
            request.reply(Done())

    def commit(self, request: Request, message: CommitStaged) -> None:
        """What is staged counts from now on."""
        self._commit(request, message)

    def _commit(self, request: Request, message: Stage | CommitStaged) -> None:
        peer, clock = request.peer, message.clock
        with self.order:
            standing = self._rounds.standing(peer.name, peer.incarnation)
            staged = self._staged.pop((peer.name, clock), None)
            if clock > standing.clock:
                if staged is None:
                    raise ProtocolError(f"{peer} commits clock {clock}, for which nothing is staged")
                self._check_staged(peer, *staged)
            contribution = staged[0] if staged else Contribution(peer.incarnation, standing.stretch, 0)
            self._ask_for(contribution, request, message)
            verdict = self._rounds.commit(
                peer.name, peer.incarnation, clock, contribution.stretch, contribution, contribution.back_at
            )
            self.num_commits += verdict.kind == "new"
            works = self._enqueue(verdict)
        if verdict.kind == "already applied":
            self._reply(Commit(peer.name, clock, contribution))
        self._run(works)

    def _ask_for(
        self, contribution: Contribution, request: Request, message: Stage | CommitStaged | GiveClip
    ) -> None:
        """Whom to answer, and how: in parts, where bytes are wanted or the worker wants to hear of slices early."""
        contribution.request = request
        if not (message.pull or message.parts):
            return
        peer = request.peer
        # In rounds nobody may write before this worker's next commit; otherwise what is sent is a copy.
        make = None if self._in_rounds else functools.partial(self.staging.buffer, peer.name, contribution.slot)
        contribution.answer = self._pulls.answer_in_parts(request, message.clock, message.pull, make)

    def _check_staged(self, peer: Peer, contribution: Contribution, have: set[int]) -> None:
        for number, slot in self._slices.items():
            if number in have or self.staging.is_shared(peer.name, contribution.slot, slot.part):
                continue
            if slot.touched_by(contribution.pushed):
                raise ProtocolError(f"{peer} commits slice {number}, whose bytes it has not staged")

    # -- rounds on their way ------------------------------------------------------------------------------

    def _enqueue(self, verdict: Verdict[Contribution]) -> list[Work]:
        """Under `order`: every slice gets its rounds in the order in which they became whole."""
        works = []
        for commits in verdict.apply:
            slots = self._slots_in_order()
            work = Work(commits, slots, self._chief, self._rounds.policy, self._finished)
            works.append(work)
            if not self._clips(work):
                for slot in slots:
                    slot.queue.append(work)
        return works

    def _slots_in_order(self) -> tuple[HostedSlice, ...]:
        """As they are needed first, where somebody has said so; else as they are hosted."""
        if len(self._in_order) != len(self._slices):
            place = {number: k for k, number in enumerate(self._preferred)}
            ordered = sorted(self._slices, key=lambda number: place.get(number, len(place)))
            self._in_order = tuple(self._slices[number] for number in ordered)
        return self._in_order

    def hosts_more(self) -> None:
        """Under `order`: there are other slices now."""
        self._in_order = ()

    def prefer(self, slices: Sequence[int]) -> None:
        """Slices are applied in this order from now on."""
        with self.order:
            self._preferred = [number for number in slices if number in self._slices]
            self._in_order = ()

    def _clips(self, work: Work) -> bool:
        return work.clip_norm is not None and not work.skip and bool(work.slots or self._num_servers > 1)

    def _run(self, works: list[Work]) -> None:
        for work in works:
            if self._clips(work):
                self._measure_norms(work)
            elif work.slots:
                self._drain_all(work)
            else:
                self._finished(work)
        self._release()

    def _drain_all(self, work: Work) -> None:
        """Spreads a round over the pool; a small one is done by the time another thread would have woken up."""
        small = len(work.slots) <= INLINE_SLICES and sum([s.part.num_bytes for s in work.slots]) <= INLINE_BYTES
        for slot in work.slots:
            if small:
                self.drain(slot)
            else:
                self._pool.submit(functools.partial(self.drain, slot))

    def drain(self, slot: HostedSlice) -> None:
        for work in slot.drain():
            work.slice_done()

    def _finished(self, work: Work) -> None:
        """Every slice has taken the round in: who may be answered is answered."""
        if work.error is not None:
            self._fail(work, work.error)
            return
        self._pulls.advanced()
        with self.order:
            work.applied = True
            self.num_rounds += 1
            self.round_seconds += time.perf_counter() - work.began
            ready = [commit for commit in work.commits if commit.item.request is not None]
            if self._clips(work) and self._num_servers > 1:
                ready = [c for c in ready if self._clipping.pop((c.worker, c.clock), None) is not None]
            self._parked += ready
        self._release()

    def _fail(self, work: Work, error: Exception) -> None:
        """Everyone hears of it, once; who asks later hears it then."""
        with self.order:
            if work.failed is not None:
                return
            failed = work.failed = RuleError(f"the update could not be applied: {error}")
            asked = [(commit.item.request, commit.item.answer) for commit in work.commits]
            for commit in work.commits:
                commit.item.request = commit.item.answer = None
        for request, answer in asked:
            if request is not None and answer is not None:
                answer.finish(functools.partial(request.refuse, failed))
            elif request is not None:
                request.refuse(failed)

    def _release(self) -> None:
        """Answers whatever the policy no longer holds back."""
        if not self._parked:
            return
        with self.order:
            if self._in_rounds:  # whoever is in a round that was applied is level with the rest of it
                ready, self._parked = self._parked, []
            else:
                ready = [c for c in self._parked if self._rounds.may_answer(c.worker, c.clock)[0]]
                self._parked = [c for c in self._parked if c not in ready]
                for commit in ready:
                    self.lag_max = max(self.lag_max, self._rounds.lag(commit.worker, commit.clock))
        for commit in ready:
            self._reply(commit)

    def _reply(self, commit: Held) -> None:
        request, answer = commit.item.request, commit.item.answer
        assert request is not None
        if answer is None:
            self._pulls.committed(request, commit.clock)
            return
        for slot in list(self._slices.values()):
            answer.applied(slot)  # those that it has not heard of yet
        answer.finish()

    # -- clipping by the norm over all servers ------------------------------------------------------------

    def _measure_norms(self, work: Work) -> None:
        if not work.slots:
            self._norms_known(work)
        for slot in work.slots:
            self._pool.submit(functools.partial(self._measure_norm, work, slot))

    def _measure_norm(self, work: Work, slot: HostedSlice) -> None:
        try:
            share = slot.norm(work)
        except Exception as error:  # whoever waits must hear of it, whatever it is
            self._fail(work, error)
            return
        if work.norm_done(slot.part.id, share):
            self._norms_known(work)

    def _norms_known(self, work: Work) -> None:
        own = math.fsum(work.squared_norms[number] for number in sorted(work.squared_norms))
        if self._num_servers == 1:
            self._apply_clipped(work, own)
            return
        with self.order:
            requests = [(commit, commit.item.request) for commit in work.commits]
            for commit in work.commits:
                commit.item.request = commit.item.answer = None  # GiveClip asks anew
                self._clipping[commit.worker, commit.clock] = work
        for commit, request in requests:
            assert request is not None
            request.reply(AskClip(commit.clock, own))

    def give_clip(self, request: Request, message: GiveClip) -> None:
        """The norm over all servers; the first worker to bring it has the round applied."""
        with self.order:
            work = self._clipping.get((request.peer.name, message.clock))
            if work is None:
                raise ProtocolError(f"{request.peer} gives a norm for clock {message.clock}, which asks for none")
            if work.failed is not None:
                raise work.failed
            commit = next(c for c in work.commits if c.worker == request.peer.name)
            self._ask_for(commit.item, request, message)
            applied, scaled = work.applied, work.scaled
            work.scaled = True
            if applied:
                del self._clipping[request.peer.name, message.clock]
        if applied:
            self._reply(commit)
        elif not scaled:
            self._apply_clipped(work, message.squared_norm)

    def _apply_clipped(self, work: Work, squared_norm: float) -> None:
        assert work.clip_norm is not None
        # As torch.nn.utils.clip_grad_norm_ has it.
        work.scale = min(1.0, work.clip_norm / (math.sqrt(squared_norm) + 1e-6))
        if math.isnan(squared_norm):
            work.scale = math.nan
        with self.order:
            for slot in work.slots:
                slot.queue.append(work)
        if not work.slots:
            self._finished(work)
        self._drain_all(work)

    # -- comings and goings -------------------------------------------------------------------------------

    def attach(self, peer: Peer, segment: int, slot: int, arena: Memory) -> None:
        self.staging.attach(peer.name, segment, slot, arena)

    def rest(self, peer: Peer, message: Rest) -> None:
        with self.order:
            verdict = self._rounds.rest(peer.name, peer.incarnation, message.stretch, message.away)
            works = self._enqueue(verdict)
        self._run(works)

    def leave(self, peer: Peer) -> None:
        with self.order:
            works = self._enqueue(self._rounds.leave(peer.name, peer.incarnation))
        self._run(works)

    def slowest(self) -> int:
        with self.order:
            return self._rounds.slowest()

    def check_chief(self, peer: Peer, doing: str) -> None:
        if peer.name != self._chief:
            raise ProtocolError(f"{peer} {doing}; only the chief's count")

    def clocks(self) -> dict[tuple[str, int], int]:
        """Where every worker stands; under `order`, what a slice that is hosted from now on begins with."""
        with self.order:
            return {(name, inc): clock for name, (inc, clock) in self._rounds.clocks().items()}

    def why(self, worker: str) -> str:
        """For whom this worker waits."""
        with self.order:
            parked = [c for c in self._parked if c.worker == worker]
            if parked:
                return self._rounds.may_answer(worker, parked[0].clock)[1]
            return self._rounds.waiting_reason()
