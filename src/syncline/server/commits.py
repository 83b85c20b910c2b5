"""Commits at a server: staged, held while the generation changes, and decided by the core."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from syncline import faults
from syncline.core.layout import Segment, Slice
from syncline.core.members import Member, Standing, by_name
from syncline.core.rounds import Commit, RoundMembership, Rounds
from syncline.core.slice_state import Identity
from syncline.core.wire.message import Done, Message
from syncline.core.wire.traffic import (
    AskClip,
    AskPlace,
    CommitStaged,
    GiveClip,
    GivenPlace,
    LoadState,
    Prefer,
    Rest,
    Stage,
)
from syncline.errors import ProtocolError, Refresh, RuleError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Memory, Peer
from syncline.server.admission_queue import AdmissionQueue
from syncline.server.executor import RoundExecutor
from syncline.server.pulls import Pulls
from syncline.server.slices import HostedSlice
from syncline.server.staging import Decoding, Staging, check_stage
from syncline.server.tasks import Key, SliceTask, StagedCommit, key_of
from syncline.server.worker_removal import Staged, WorkerRemoval


class Ranks:
    """Workers by seniority, as the coordinator lists them."""

    def __init__(self, rounds: Rounds[StagedCommit], flow: RoundExecutor) -> None:
        self._rounds, self._flow = rounds, flow
        self._names: list[str] = []  # the chief first
        self._chief = ""  # the most senior worker that takes part here

    def hear(self, members: Iterable[Member]) -> None:
        """Updates the list of workers. A worker with commits here keeps its place in its rounds."""
        workers = {(m.name, m.incarnation): (m.since, by_name(m.name)) for m in members if m.role == "worker"}
        with self._flow.state_lock:
            self._names = [name for name, _ in workers]
            here = {(s.name, s.incarnation) for s in self._rounds.standings.values()}
            gone = {life: place for life, place in self._flow.seniority.items() if life in here}
            self._flow.seniority = {**gone, **workers}
            self.choose_chief()

    def choose_chief(self) -> None:
        """Under `state_lock`."""
        there = [s.name for s in self._rounds.standings.values() if not (s.left or s.fenced)]
        self._chief = next((name for name in [*self._names, *there] if name in there), "")

    @property
    def num_workers(self) -> int:
        return len(self._names)

    def check_chief(self, peer: Peer, doing: str) -> None:
        first = self._names[0] if self._names else ""
        if peer.name not in (self._chief, first):
            raise ProtocolError(f"{peer} {doing}; only the chief's count")


class Commits:
    """Commits of all workers: staged, held, decided."""

    def __init__(
        self,
        rounds: Rounds[StagedCommit],
        slices: dict[int, HostedSlice],
        flow: RoundExecutor,
        pulls: Pulls,
        staging: Staging,
        *,
        segments: Mapping[int, Segment],
        find: Callable[[int], tuple[Segment, Slice]],
    ) -> None:
        self.rounds, self._slices, self.flow, self._pulls, self.staging = rounds, slices, flow, pulls, staging
        self._segments, self._find = segments, find
        self.decoding = Decoding(slices, staging, find, self._is_taken)
        self._stands_still = rounds.policy.stands_still
        self.state_lock = flow.state_lock
        pulls.form(flow.state_lock, check=self.check_generation, clocks=flow.clocks_now)
        self.moved = 0  # the generation in which primaries last changed; requests of older generations get a Refresh
        self.entered: dict[str, int] = {}  # worker -> the generation in which it last entered
        self.ranks = Ranks(rounds, flow)
        self._staged: dict[Key, Staged] = {}
        self.worker_removal = WorkerRemoval(rounds, slices, flow, staging, self._staged, gone=self.ranks.choose_chief)
        self.admission_queue = AdmissionQueue(rounds, slices, flow.idle)
        self._set_back: dict[Identity, int] = {}  # how many clocks workers were moved back here
        self.num_commits = self.num_late = 0

    def learn(self, round_membership: RoundMembership) -> None:
        """With spare workers: the server of slice 0 has closed a round; `round_membership` is its membership."""
        with self.state_lock:
            self.rounds.learn(round_membership)

    def _hear_membership(self, peer: Peer, message: CommitStaged, round_membership: RoundMembership) -> None:
        """Under `state_lock`: a worker reports the membership of its round."""
        if self.rounds.decides:
            raise ProtocolError(f"{peer} announces a round's members to the server that decides them")
        if (peer.name, peer.incarnation, message.clock) not in (*round_membership.members, *round_membership.late):
            raise ProtocolError(f"{peer} announces a round's members, and was neither in that round nor late for it")
        self.rounds.learn(round_membership)

    def learn_held(self) -> None:
        """Under `state_lock`: learns the round memberships that held commits carry."""
        for request in self.admission_queue.waiting():
            message = request.message
            if not isinstance(message, CommitStaged) or request.generation < self.moved:
                continue
            if message.round_membership is not None:
                with contextlib.suppress(ProtocolError):  # it is refused when its turn comes
                    self._hear_membership(request.peer, message, message.round_membership)

    # -- staging ------------------------------------------------------------------------------------------

    def buffers_for(self, peer: Peer, message: Stage) -> Sequence[Buffer]:
        """Receive buffers for staged bytes."""
        check_stage(peer, message, self._segments)
        return self.decoding.buffers_for(peer, message)

    def _is_taken(self, peer: Peer) -> bool:
        standing = self.rounds.standings.get(peer.name)
        return standing is not None and standing.incarnation == peer.incarnation and not standing.fenced

    def check_generation(self, request: Request) -> None:
        """Raises Refresh if the request is older than the last change of primaries."""
        if request.generation < self.moved:
            raise Refresh(f"primaries have changed: {request.peer} is to look at generation {self.moved}")

    def stage(self, request: Request, message: Stage) -> None:
        """Stages bytes for a commit. The message may contain the commit itself."""
        peer = request.peer
        check_stage(peer, message, self._segments)
        worker = (peer.name, peer.incarnation)
        if message.codec and not self.decoding.decode(request, message):
            return
        for number in message.ready:
            if not self.staging.is_shared(worker, message.slot, self._find(number)[1]):
                raise ProtocolError(f"{peer} is ready with slice {number}, which does not lie in shared memory")
        with self.state_lock:
            if request.generation < self.moved:
                self.check_generation(request)
            standing = self.rounds.standing(*worker)
            standing.num_segments = message.num_segments or standing.num_segments
            key = (*worker, message.clock)
            staged = self._staged.get(key)
            if staged is None:
                staged = (StagedCommit(peer.incarnation, message.phase, message.slot), set())
                self._staged[key] = staged
            contribution, have = staged
            have.update(message.slices)
            contribution.phase = message.phase  # the worker may have rested between the early bytes and the commit
            contribution.pushed, contribution.weight = message.pushed, message.weight
            contribution.nominal, contribution.squared_norm = message.nominal, message.squared_norm
            contribution.skip, contribution.clip_norm = message.skip, message.clip_norm
            contribution.overrides, contribution.back_at = message.overrides, message.back_at
            contribution.acks = message.acks
            contribution.is_early, contribution.is_edited = message.early, message.edited
            contribution.is_told = bool(message.pushed) or not (message.slices or message.ready)
            contribution.arrays = functools.partial(self.staging.tensor, worker, message.slot)
        if faults.armed is not None:
            faults.reach("commit.staged")
        if message.commit:
            self._commit(request, message)
        else:
            if self.flow.ring is not None:
                self.flow.ring.stage_early(worker, message.clock, contribution, {*message.slices, *message.ready})
            request.reply(Done())

    # -- committing ---------------------------------------------------------------------------------------

    def commit(self, request: Request, message: CommitStaged) -> None:
        """Commits what is staged."""
        self._commit(request, message)

    def _commit(self, request: Request, message: Stage | CommitStaged) -> None:
        """Passes a commit to the core, and the rounds that it completes to the executor.

        During a reconfiguration the commit is held, and comes here again afterwards. The request is answered when its
        round is applied (`RoundExecutor.release`); a repeated commit may be answered at once.
        """
        peer, clock = request.peer, message.clock
        with self.state_lock:
            if self.admission_queue.is_on:
                later = functools.partial(self._commit, request, message)
                if self.admission_queue.keeps(request, "commit", clock, later):
                    return
            if request.generation < self.moved:
                self.check_generation(request)
            standing = self.rounds.standing(peer.name, peer.incarnation)
            key = (peer.name, peer.incarnation, clock)
            if isinstance(message, CommitStaged) and message.round_membership is not None:
                self._hear_membership(peer, message, message.round_membership)
            contribution = self._contribution(peer, standing, clock, self._staged.pop(key, None))
            self._ask_for(contribution, request, message)
            if clock > standing.clock + 1:
                self._catch_up(standing, clock)
            verdict = self.rounds.commit(
                peer.name, peer.incarnation, clock, contribution.phase, contribution, contribution.back_at
            )
            contribution.since = time.monotonic()
            self.num_commits += verdict.kind == "new"
            self.num_late += verdict.kind == "late" and bool(verdict.apply) and self.rounds.decides
            again = verdict.kind in ("already applied", "late") and not verdict.apply
            if again:
                contribution.is_late = verdict.kind == "late"
                contribution.clocks = self.flow.clocks_now()
            if verdict.kind != "late":
                self._note_uses(key, contribution)
            if again and (self._is_asked_again(key, request) or self.flow.answer_later(key, contribution)):
                return
            works = self.flow.enqueue(verdict)
        if faults.armed is not None:
            faults.reach("commit.decided")
        if again:
            self.flow.reply(Commit(peer.name, peer.incarnation, clock, contribution))
        self.flow.run(works)

    def _note_uses(self, key: Key, contribution: StagedCommit) -> None:
        """Records the lease acks of a replayed commit. A slice 0 restored from a worker's copy has lost them. This
        also applies to commits that are new here, because other slices may lack them.
        """
        slot = self._slices.get(0)
        if slot is not None and slot.copied is not None:
            with slot.lock:
                if slot.state.clocks.get(key[:2], 0) >= key[2]:
                    slot.state.used(contribution.acks)

    def _contribution(self, peer: Peer, standing: Standing, clock: int, staged: Staged | None) -> StagedCommit:
        """The contribution of this commit: the staged one, or the earlier one if the commit is repeated."""
        known = self.rounds.open_commit(peer.name, clock) if clock == standing.clock else None
        if staged is not None:
            missing = self.worker_removal.not_staged((peer.name, peer.incarnation), *staged)
            if missing is not None and clock >= standing.clock:
                raise ProtocolError(f"{peer} commits slice {missing}, whose bytes it has not staged")
            contribution = staged[0]
            if known is not None:
                contribution.say_again(known)
            return contribution
        if clock > standing.clock:
            raise ProtocolError(f"{peer} commits clock {clock}, for which nothing is staged")
        if known is None:
            return StagedCommit(peer.incarnation, standing.phase, 0)
        first = StagedCommit(peer.incarnation, known.phase, known.slot)
        first.request, first.answer = known.request, known.answer
        known.again = (*known.again, first)
        return known

    def _is_asked_again(self, key: Key, request: Request) -> bool:
        """Under `state_lock`: if the round waits for a norm, sends the lost AskClip again."""
        work = self.flow.clipping.asked_for(key)
        if work is None or work.applied:
            return False
        request.reply(AskClip(key[2], work.share, work.round_membership))
        return True

    def _catch_up(self, standing: Standing, clock: int) -> None:
        """Accepts a worker whose earlier commits these slices lack, if the slices were restored from a worker's copy
        or were never used. Any other gap is refused.
        """
        worker = (standing.name, standing.incarnation)
        behind = [slot for slot in self._slices.values() if slot.state.clocks.get(worker, 0) < clock - 1]
        if all(slot.copied is not None or worker not in slot.state.clocks for slot in behind):
            if standing.phase and all(worker not in slot.state.clocks for slot in self._slices.values()):
                # The phase began before the worker's first commit arrived here, counting commits that were not for
                # this server.
                standing.phase_began += clock - 1 - standing.clock
            for slot in behind:
                with slot.lock:
                    slot.state.level({worker: clock - 1})
            standing.position += min(clock - 1 - standing.clock, self._set_back.pop(worker, 0))
            standing.clock = clock - 1

    def _ask_for(
        self, contribution: StagedCommit, request: Request, message: Stage | CommitStaged | GiveClip
    ) -> None:
        """Sets up the reply: in parts if the worker wants bytes or early notice of slices."""
        contribution.request, contribution.answer = request, None
        if not (message.pull or message.parts):
            return
        # If no slice can change before this worker's next commit, the reply needs no copy.
        worker = (request.peer.name, request.peer.incarnation)
        make = None if self._stands_still else functools.partial(self.staging.buffer, worker, contribution.slot)
        contribution.answer = self._pulls.answer_in_parts(request, message.clock, message.pull, make)

    def give_clip(self, request: Request, message: GiveClip) -> None:
        """Receives the norm over all servers. The first worker that brings it starts the update."""
        key = (request.peer.name, request.peer.incarnation, message.clock)
        with self.state_lock:
            later = functools.partial(self.give_clip, request, message)
            if self.admission_queue.keeps(request, "clip", message.clock, later):
                return
            self.check_generation(request)
            work = self.flow.clipping.asked_for(key)
            if work is None:
                raise ProtocolError(f"{request.peer} gives a norm for clock {message.clock}, which asks for none")
            if work.failed is not None:
                raise work.failed
            commit = next(c for c in work.commits if key_of(c) == key)
            self._ask_for(commit.item, request, message)
            action = self.flow.clipping.give(work, commit, message.squared_norm)
        action()

    # -- comings and goings -------------------------------------------------------------------------------

    def attach(self, peer: Peer, segment: int, slot: int, arena: Memory) -> None:
        self.staging.attach((peer.name, peer.incarnation), segment, slot, arena)

    def rest(self, request: Request, message: Rest) -> None:
        peer = request.peer
        with self.state_lock:
            if self.admission_queue.keeps(request, "rest", 0, functools.partial(self.rest, request, message)):
                return
            self.check_generation(request)
            if request.generation < self.entered.get(peer.name, 0):
                raise Refresh(f"{peer} has entered since it said that it rests")
            verdict = self.rounds.rest(peer.name, peer.incarnation, message.phase, message.at_barrier)
            works = [*self.flow.enqueue(verdict), *self.flow.flush(functools.partial(_flushed, request))]
        self.flow.run(works)
        if not self.flow.gathers:
            request.reply(Done())

    def prefer(self, request: Request, message: Prefer) -> None:
        self.flow.prefer(message.slices)
        request.reply(Done())

    def about_to_load(self, request: Request, message: LoadState) -> None:
        """No snapshot may fall between the loads of several servers."""
        with self.state_lock:
            later = functools.partial(self.about_to_load, request, message)
            if message.about == 1 and self.admission_queue.keeps(request, "rest", 0, later):
                return
            self.check_generation(request)
            worker = (request.peer.name, request.peer.incarnation)
            self.admission_queue.loading.discard(worker)
            if message.about == 1 and request.endpoint.is_open:
                self.admission_queue.loading.add(worker)
        request.reply(Done())

    def lost(self, worker: Identity) -> None:
        """The worker's last connection is closed."""
        with self.state_lock:
            self.admission_queue.loading.discard(worker)
        self.worker_removal.lost(worker)

    def leave(self, request: Request) -> None:
        peer = request.peer
        with self.state_lock:
            if self.admission_queue.keeps(request, "leave", 0, functools.partial(self.leave, request)):
                return
            works: list[SliceTask] = []
            if peer.name in self.rounds.standings:
                works += self.flow.enqueue(self.rounds.leave(peer.name, peer.incarnation))
                self.worker_removal.let_go((peer.name, peer.incarnation))
            works += self.flow.flush(functools.partial(_flushed, request))
        self.flow.run(works)
        if not self.flow.gathers:
            request.reply(Done())

    @property
    def hosts_any(self) -> bool:
        return bool(self._slices)

    def hosted(self) -> list[HostedSlice]:
        """Under `state_lock`: the slices whose primary is here, in update order."""
        return list(dict.fromkeys([*self.flow.slots_in_order(), *self._slices.values()]))

    def slowest(self) -> int:
        with self.state_lock:
            return self.rounds.slowest()

    def clocks(self) -> dict[Identity, int]:
        """Every worker's clock. Under `state_lock`: the clocks that a newly hosted slice begins with."""
        with self.state_lock:
            return {(name, inc): clock for name, (inc, clock) in self.rounds.clocks().items()}

    def held(self) -> dict[str, int]:
        """How many there are of everything that workers bring."""
        with self.state_lock:
            standings, open_rounds = len(self.rounds.standings), self.rounds.num_open
            return {
                "standings": standings, "open rounds": open_rounds, "staged": len(self._staged), **self.flow.held()
            }  # fmt: skip

    def why(self, worker: str) -> tuple[str, bool]:
        """Explains whom this worker waits for, and whether a round waits for this worker."""
        with self.state_lock:
            parked = [c for c in self.flow.parked() if c.worker == worker]
            if parked:
                return self.rounds.may_answer(worker, parked[0].clock)[1], False
            return self.rounds.waiting_reason(), worker in self.rounds.missing()

    # -- a generation changes -----------------------------------------------------------------------------

    def reset(
        self, generation: int, standings: Sequence[Standing], clocks: Mapping[Identity, int]
    ) -> tuple[list[StagedCommit], list[Request]]:
        """Under `state_lock`: primaries have changed. Drops open commits; returns them and the held requests, which
        get a Refresh.
        """
        self.moved = generation
        self._set_back = {(s.name, s.incarnation): s.clock for s in standings}
        dropped = self.rounds.reset(standings, clocks)
        self._set_back = {w: clock - clocks.get(w, 0) for w, clock in self._set_back.items()}
        asked = self.flow.reset(dropped)
        self._staged.clear()
        if not self.decoding.takes_all:
            self.staging.keep_only(self._slices)
        self.ranks.choose_chief()
        return asked, self.admission_queue.take_all()


def _flushed(request: Request, error: RuleError | None) -> None:
    """What was held is applied: answers the worker that rests or leaves."""
    if error is not None:
        request.refuse(error)
    else:
        request.reply(Done())


def commit_handlers(commits: Callable[[], Commits]) -> dict[type[Message], Callable[[Request, Any], None]]:
    """Handlers for rare requests of workers."""
    return {
        Rest: lambda request, message: commits().rest(request, message),
        Prefer: lambda request, message: commits().prefer(request, message),
        AskPlace: lambda request, message: request.reply(GivenPlace(commits().slowest())),
    }
