"""The `servers` exchange: gradients go to the servers that host their slices, new parameters come back."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from syncline import faults
from syncline.config import JobConfig
from syncline.core.aggregate import own_of
from syncline.core.layout import Layout, Segment, Slice
from syncline.core.members import Member
from syncline.core.policy import policy_of
from syncline.core.replica_sets import ReplicaSet
from syncline.core.ring import partner_of
from syncline.core.slice_state import Copy, life_of
from syncline.core.tracing import SpanBuffer
from syncline.core.wire.control import AskWhy, GivenWhy, Passed
from syncline.core.wire.leases import LeaseAck
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import Prefer, StateEntry
from syncline.errors import ConfigError, FencedError, FrameError, SynclineError, WaitTimeout
from syncline.extensions import load
from syncline.net.link import Link
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.transport import Memory
from syncline.stats import PushBytes, WireStats
from syncline.worker.arrays import Bytes
from syncline.worker.data.leases import LeaseAcks
from syncline.worker.exchange.commit import MENDED, Push, ServersTicket
from syncline.worker.exchange.finite import FiniteCheck
from syncline.worker.exchange.norm import squared_norm
from syncline.worker.exchange.participation import Participation
from syncline.worker.exchange.replay import Replay
from syncline.worker.exchange.routes import ServerRoutes
from syncline.worker.exchange.sending import CommitSender
from syncline.worker.exchange.targets import ArrayTarget, Target
from syncline.worker.exchange.values import (
    KeptArrays,
    SliceCopies,
    are_level,
    newest,
    pull,
    read_state,
    upload,
    write_state,
)
from syncline.worker.session import CoordinatorHandlers, left
from syncline.worker.waits import LOUD_SECONDS, StepClock, TracingClock, Waits

T = TypeVar("T")
_LONG_LOOK_SECONDS, _WHY_SECONDS = 0.25, 2.0
_LEVEL_SECONDS = 0.002  # until slices of different rounds are read again
#: How long to wait at an entry for the rounds before it, and for one that does not come: a round in which all
#: gradients were refused changes no version, and rounds of several optimizers change different slices.
_ROUNDS_SECONDS, _STILL_SECONDS = 5.0, 1.0
_NOTHING = Push(pushed=())


class ServersExchange:
    """One worker's view of all servers. One thread uses it at a time. When servers change, open commits are
    replayed.
    """

    def __init__(
        self,
        config: JobConfig,
        handlers: CoordinatorHandlers,
        link: Link,
        dial: Callable[[Member], Endpoint],
        stamp: Stamp,
        *,
        name: str,
        is_late: bool,
        say: Callable[[str], None],
        finite: FiniteCheck,
    ) -> None:
        self._config, self._handlers, self._link, self._dial = config, handlers, link, dial
        self._name, self._is_closed = name, False
        self.num_slots = config.window + 1  #: of arenas: as many commits may be open
        self.clock = 0
        self.num_landed = 0  # commits that are answered and received
        self.num_late = 0  # of them, commits that arrived after their round was closed
        own = partner_of(name) if config.is_ring else ""
        self.routes = ServerRoutes(config, dial, self.num_slots, say, own)
        self.layout: Layout = self.routes.layout
        self._endpoints, self.wait_seconds = self.routes.endpoints, config.wait_seconds
        # Also the target before the last: the last may not be complete yet.
        num_kept = config.window + 2 if config.replicas < 2 else 0
        self.copies = SliceCopies(life_of(name, stamp.incarnation), self.layout, config.wait_seconds, num_kept)
        self.sender = CommitSender(self.routes, self.copies, stamp, config)
        self.encoder = self.sender.encoder  #: with --codec
        self._rosters = handlers.rosters
        self.lease_acks = LeaseAcks()
        self.spans = SpanBuffer() if config.trace else None  #: with --trace
        self.times = StepClock() if self.spans is None else TracingClock(self.spans, self._step_in)
        self._ahead = 0  # with --trace: steps of the job before this worker's first commit
        self._replay = Replay(
            self.routes, self._rosters, stamp,
            ask=self._ask_coordinator, check=handlers.check, fenced=self._fenced,
            give_up=self._give_up, replay_open=self._replay_open,
        )  # fmt: skip
        policy = policy_of(config)
        self._in_rounds = policy.in_rounds
        self._participation = Participation(
            self.routes, self._replay, link,
            policy=policy, is_late=is_late, wait_seconds=config.wait_seconds,
            is_in_loop=lambda: self.lease_acks.num_loops > 0,
        )  # fmt: skip
        self._open: collections.deque[ServersTicket] = collections.deque()
        self.finite, self.checks_finite, self.is_arena_shared = finite, config.check_finite, False
        aggregate = policy_of(config).aggregate
        own_of(aggregate, load)  # a wrong name is an error at the start
        self._clips_pushes = aggregate is not None and aggregate.kind == "norm-clipped"
        self.carried: set[int] = set()
        self.waits = Waits(name, self._ask_why, self.why, say)
        self._before_commit: list[Callable[[], None]] = []
        self._finish, self._wait_for = self.finish, self.wait_for  # bound once for all tickets
        self._rosters.listen(self.routes.hear)

    # -- layout -------------------------------------------------------------------------------------------

    def add(self, segments: Sequence[Segment], replica_sets: Sequence[ReplicaSet]) -> None:
        """The layout has grown; `replica_sets` place its slices."""
        self.times.pause()
        known = self.routes.primaries
        self.routes.add(segments, [replica_set for replica_set in replica_sets if replica_set.slice not in known])
        self.sender.forget()
        self._again(self._replay.take_over)
        self.times.resume()

    def upload(self, segment: Segment, values: Mapping[str, Bytes] | Bytes, *, again: bool = False) -> None:
        """Uploads the chief's initial values: by parameter, or all of the segment in its layout. `again`: also after
        updates, by the only worker of a job.
        """
        self._again(lambda: upload(self.routes, segment, values, self.wait_seconds, again=again))

    def _again(self, action: Callable[[], T]) -> T:
        """Runs an action with the servers, again if they change meanwhile."""
        if self._is_closed:
            raise left(self._name)
        return self._replay.again(action, self.wait_seconds)

    # -- when servers change ------------------------------------------------------------------------------

    def _ask_coordinator(self, message: Message, seconds: float) -> Message:
        return self._link.try_call(message).wait(seconds)

    def _fenced(self, error: FencedError) -> None:
        if not self._participation.is_leaving:  # a server that has processed our Leave answers the same
            self._handlers.fenced(error)

    def _give_up(self) -> None:
        """Servers have changed: nothing more is sent or received under the old roster. Open commits are kept for the
        replay.
        """
        for ticket in self._open:
            ticket.give_up()
        for action in self._before_commit:
            action()
        self.sender.forget()
        self.copies.start_over()

    def _replay_open(self) -> None:
        """Resends all open commits in clock order. The clocks on each slice tell which are new there."""
        self._participation.tell()
        before: ServersTicket | None = None
        for ticket in self._open:
            if ticket.target is not None:
                ticket.target.start_over()
            flow, before = self.sender.send(ticket, before), ticket
            self._stage_everywhere(ticket, "wait")
            if flow.is_over and flow.error is not None:
                raise flow.error

    def _mend(self, ticket: ServersTicket, error: SynclineError, began: float, until: float) -> None:
        """A commit failed: replays it, or raises an error that a replay cannot resolve."""
        if isinstance(error, FencedError):
            self._fenced(error)
        # Commits behind a failed one are refused because of it.
        errors = [error, *(other.flow.error for other in self._open)]
        broken = next((found for found in errors if isinstance(found, MENDED)), None)
        if broken is None or isinstance(error, WaitTimeout | FencedError):
            raise self._has_waited(ticket, began) if isinstance(error, WaitTimeout) else error
        try:
            if time.monotonic() > until:
                raise WaitTimeout(str(broken))
            self._replay.recover(broken, ticket.generation, until)
        except WaitTimeout:
            raise self._has_waited(ticket, began) from broken

    @property
    def open_clocks(self) -> tuple[int, ...]:
        """Commits that are not acknowledged in full."""
        return tuple(ticket.clock for ticket in self._open)

    @property
    def num_early_slices(self) -> int:
        """Slices of the next commit that are on their way already, counted for each server that they go to."""
        return self.sender.num_early_slices

    # -- pushing ------------------------------------------------------------------------------------------

    @property
    def slot(self) -> int:
        """The arena slot of the next commit; with a window there are several."""
        return (self.clock + 1) % self.num_slots

    def arena(self, segment: int) -> Bytes:
        """The arena for the gradients of the next commit; it may be written when this returns."""
        self.make_room()
        slot, known = self.slot, self.layout.segments[segment]
        if not self.routes.arenas.has(segment, slot):
            return self._again(lambda: self.routes.arenas.array(known, slot))
        return self.routes.arenas.array(known, slot)

    def arena_memory(self, segment: int) -> Memory:
        """The one arena of a job without a window, which other processes may be able to see."""
        assert self.num_slots == 1
        self.arena(segment)
        return self.routes.arenas.memory(self.layout.segments[segment], 0)

    def make_room(self) -> None:
        """Waits until the slot of the next commit is free: at most `window` + 1 commits are open."""
        while len(self._open) > self._config.window:
            self._open[0].wait()

    @property
    def early_bytes(self) -> float:
        """The size from which staging before the commit pays off: 0 if gradients travel over a socket, some size
        if servers sum them in shared memory, else infinity.
        """
        return self.routes.early_bytes

    def stage(self, slices: Sequence[Slice]) -> None:
        """These slices of the arena are filled: they may be sent and summed now. The commit decides what counts:
        slices that the push does not confirm (`Push.as_staged`) are sent again.
        """
        if not self._participation.must_enter:
            self.sender.stage(self._draft(_NOTHING, None), slices)

    def _draft(self, push: Push, target: Target | None) -> ServersTicket:
        """The ticket of the next commit."""
        part = self._participation
        return ServersTicket(
            push, target, self.clock + 1, part.phase, part.back_at, self.slot, self._finish, self._wait_for
        )

    def commit(self, push: Push, target: Target | None) -> ServersTicket:
        """Commits the arena. New parameters go into the target, if there is one."""
        if self._is_closed:
            raise left(self._name)
        self.make_room()
        push = self.finite.admit(given := push, self.clock + 1, self.layout, self.routes.arenas.array, self.slot)
        is_void = push is not given
        if self._clips_pushes and push.pushed:
            total = squared_norm(push.pushed, self.layout, self.routes.arenas.array, self.slot)
            push = dataclasses.replace(push, squared_norm=total)
        for action in self._before_commit:
            action()
        if self._replay.roster is not self._rosters.newest or (
            self._open and any(isinstance(t.flow.error, MENDED) for t in self._open)
        ):
            self._again(self._replay.take_over)
        if self._participation.must_come_back:
            self._come_back()
        ticket = self._commit(push, target, self.lease_acks.take(is_void=is_void))
        self.times.lap("stage")
        self.times.made_step(self.lease_acks.samples)
        return ticket

    def _commit(self, push: Push, target: Target | None, acks: list[LeaseAck]) -> ServersTicket:
        """Sends the commit. With several servers, returns when all have staged it and are told to commit it."""
        before = self._open[-1] if self._open else None
        self._open.append(ticket := self._draft(push, target))
        ticket.acks = acks
        self.clock = ticket.clock
        self._participation.committed(ticket.phase)
        try:
            self.sender.send(ticket, before)
            if len(ticket.server_commits) > 1:
                self._stage_everywhere(ticket, "stage")
        except (ConfigError, FrameError) as error:  # raised by the user's codec
            raise ticket.failed_by(error) from error.__cause__
        except MENDED as error:
            ticket.generation = self._replay.generation
            self._mend(ticket, error, time.monotonic(), time.monotonic() + self.wait_seconds)
        return ticket

    def _stage_everywhere(self, ticket: ServersTicket, phase: str) -> None:
        """Acts on the servers' answers without waiting for the script. `phase`: the step phase of the time so far."""
        flow, began = ticket.flow, time.monotonic()
        try:
            flow.wait_until_staged(self.wait_seconds)
            if flow.waits_for_decision:
                self.times.lap(phase)
                with self.waits.of("step", step=self._step_of(ticket), servers=ticket.unanswered):
                    flow.wait_until_decided(self.wait_seconds)
                self.times.lap("wait")
        except WaitTimeout:
            raise self._has_waited(ticket, began) from None

    # -- waiting ------------------------------------------------------------------------------------------

    def finish(self, ticket: ServersTicket, timeout_seconds: float | None) -> None:
        """Waits for a commit and receives its parameters."""
        self.times.lap("compute")
        began = time.monotonic()
        until = began + (self.wait_seconds if timeout_seconds is None else timeout_seconds)
        while True:
            try:
                if not ticket.flow.arrives(min(LOUD_SECONDS, until - began)):
                    self._await_long(ticket, began, until)
                if ticket.flow.error is not None:
                    raise ticket.flow.error
                self.times.lap("wait")
                for server_commit in ticket.server_commits:
                    server_commit.finish()
                break
            except SynclineError as error:
                self._mend(ticket, error, began, until)
        self._has_landed(ticket)
        self.times.lap("pull")

    def _has_landed(self, ticket: ServersTicket) -> None:
        """The commit is complete: its slot is free."""
        ticket.landed = True
        self.num_landed = ticket.clock
        self.copies.has_landed(ticket.target)
        told, hosted, is_late = self.copies.told, self.routes.hosted, False
        for server_commit in ticket.server_commits:
            answer, receiver = server_commit.answer, server_commit.receiver
            assert answer is not None
            parts = receiver.versions if receiver is not None else None
            told[server_commit.server] = (hosted[server_commit.server], parts or answer)
            is_late |= answer.late
        self.num_late += is_late
        self.sender.has_landed(ticket)
        self.lease_acks.answered(ticket.acks, is_late=is_late)
        self._open.remove(ticket)
        if faults.armed is not None:
            faults.reach("commit.landed")

    def _await_long(self, ticket: ServersTicket, began: float, until: float) -> None:
        with self.waits.of("step", step=self._step_of(ticket), began=began, servers=ticket.unanswered):
            while not ticket.flow.arrives(max(0.0, min(_LONG_LOOK_SECONDS, until - time.monotonic()))):
                if time.monotonic() >= until:
                    raise WaitTimeout
                ticket.flow.done()  # the failed server may not be the one whose answer is awaited
                refusal = ticket.flow.refusal()
                if refusal is not None:
                    raise refusal  # the other servers may never answer

    def wait_for(self, ticket: ServersTicket, slices: Collection[int]) -> bool:
        """Waits until these slices are received; False if the commit ends or fails first."""
        self.times.lap("compute")
        began, flow = time.monotonic(), ticket.flow
        wanted = [(x, x.receiver, x.receiver.wants(slices)) for x in ticket.server_commits if x.receiver is not None]
        try:
            while not flow.is_over:
                missing = next((found for found in wanted if not found[1].has(found[2])), None)
                if missing is None:
                    return True
                left = began + self.wait_seconds - time.monotonic()
                if left < 0:
                    raise self._has_waited(ticket, began)
                missing[0].await_more(flow, missing[2], min(left, LOUD_SECONDS))
        finally:
            self.times.lap("wait")
        return False

    def _step_of(self, ticket: ServersTicket) -> int:
        """The number of a step for people: in rounds the job's, which is equal in all workers; otherwise the number
        of commits of this process.
        """
        return self.copies.most_updates + 1 if self._in_rounds else ticket.clock

    def _step_in(self, phase: str) -> int:
        """With `--trace`: the step that a phase which ends now belongs to, numbered as in `_step_of`."""
        if phase == "pull":
            if self._in_rounds:
                self._ahead = self.copies.most_updates - self.num_landed
            clock = self.num_landed
        elif phase == "stage":
            clock = self.clock
        else:
            clock = (self.num_landed if phase == "wait" else self.clock) + 1
        return self._ahead + clock

    def _has_waited(self, ticket: ServersTicket, began: float) -> WaitTimeout:
        return WaitTimeout(f"step {self._step_of(ticket)} has waited {time.monotonic() - began:.1f} s: {self.why()}")

    def _ask_why(self, step: int, servers: Sequence[str]) -> str:
        answer = self._ask_coordinator(AskWhy(step, list(servers)), _WHY_SECONDS)
        return answer.reason if isinstance(answer, GivenWhy) else ""

    def why(self) -> str:
        """Whom this worker waits for, as the servers say."""
        return self.routes.why(_WHY_SECONDS)

    # -- pulling and state --------------------------------------------------------------------------------

    def before_commit(self, action: Callable[[], None]) -> Callable[[], None]:
        """Runs `action` before every commit, after which the servers' memory may be written. Returns a function
        that removes it.
        """
        self._before_commit.append(action)
        return lambda: self._before_commit.remove(action)

    def prefer(self, slices: Sequence[int]) -> None:
        """Tells the servers in which order this worker needs its slices."""
        self._again(lambda: self.routes.ask_all(Prefer(list(slices))))

    def pull(self, slices: Sequence[Slice], target: Target, min_version: int | None) -> list[int]:
        """Pulls parameters into the target; returns their versions."""
        self.make_room()  # so that the result includes this worker's pushes, except those in the window
        self.copies.landed_in(target)
        try:
            with self.waits.of("pull", servers=lambda: self.routes.names):
                found = self._again(lambda: pull(self.routes, slices, target, min_version))
                self.copies.pulled(found)
                return found
        except WaitTimeout:
            raise WaitTimeout(f"a pull has waited {self.wait_seconds:g} s for version {min_version}") from None

    def pull_level(self, slices: Sequence[Slice], target: Target, seconds: float) -> bool:
        """With rounds: pulls parameters of one round, the same for all slices. False if that takes too long, since
        others keep making rounds without this worker; the target has a mixture then.
        """
        until = time.monotonic() + seconds
        while True:
            versions = self.pull(slices, target, None)
            if self._again(functools.partial(are_level, self.routes, slices, versions)):
                return True
            if time.monotonic() > until:
                return False
            time.sleep(_LEVEL_SECONDS)

    def mapped(self) -> list[Bytes]:
        """The servers' parameters that are mapped into this process."""
        return self.routes.mapped()

    def read_state(self, slices: Sequence[Slice], key: str = "") -> list[tuple[StateEntry, Bytes]]:
        """The rule state of these slices; `key`: only this entry."""
        return self._again(lambda: read_state(self.routes, slices, self.wait_seconds, key))

    def write_state(self, slices: Sequence[Slice], entries: Sequence[tuple[StateEntry, Bytes]]) -> None:
        """Sets the rule state of these slices."""
        self._again(lambda: write_state(self.routes, slices, entries, self.wait_seconds))

    # -- copies -------------------------------------------------------------------------------------------

    def keep(self, target: Target, slices: Sequence[Slice], arrays: KeptArrays) -> None:
        """The target's data of these slices lies in the caller's arrays: use them as copies while they live."""
        self.copies.keep(target, slices, arrays)

    def overwrites(self, target: ArrayTarget) -> None:
        """This target writes into the caller's arrays: earlier copies in them are invalid."""
        self.copies.overwrites(target, target.slices())

    def copies_of(self, slices: list[int]) -> list[Copy]:
        """From any thread."""
        return self.copies.copies_of(slices)

    def give_copies(self, copies: list[Copy], target: Member) -> None:
        """From any thread."""
        self.copies.give(copies, target, self._dial)

    @property
    def num_updates(self) -> int:
        """The highest number of updates of any slice that this worker knows, including its own in flight."""
        return self.copies.most_updates + len(self._open)

    # -- comings and goings -------------------------------------------------------------------------------

    def enter(self) -> int:
        """Takes part in rounds from now on. Returns the job's steps before the next commit.

        The rounds before that commit are applied then, so a gradient that is computed from what is pulled next is as
        new as those of the others.
        """
        if self._participation.must_enter:
            self._come_back()
            self._await_rounds(self._participation.entered_at)
            self.has_stepped_to(self._participation.entered_at)
        return self.num_updates

    def _await_rounds(self, step: int) -> None:
        """Until the rounds that were open at the entry are applied. The next one waits for this worker."""
        parts = list(self.layout.slices())
        began = changed = time.monotonic()
        before = (-1, False)
        with self.waits.of("the entry into the rounds"):
            while parts and (now := time.monotonic()) < began + _ROUNDS_SECONDS:
                found = version, is_level = self._again(lambda: newest(self.routes, parts))
                if found != before:
                    before, changed = found, now
                if is_level and (version >= step or now > changed + _STILL_SECONDS):
                    return
                time.sleep(_LEVEL_SECONDS)

    def _come_back(self) -> None:
        with self.waits.of("the entry into the rounds"):
            self._participation.come_back()
        num_void, self._participation.num_void = self._participation.num_void, 0
        for _ in range(num_void):
            self._commit(Push(pushed=(), weight=0.0), None, []).wait()

    def has_stepped_to(self, step: int) -> None:
        """The coordinator says that the job has made this many steps."""
        self.copies.pulled([step])

    def rest(self, *, is_pause: bool = False, if_active: bool = False, if_awaited: bool = False) -> None:
        """Takes part in no more rounds of this loop; `is_pause`: until the next commit. `if_active`: only if it
        takes part now. `if_awaited`: only if a round waits for it.
        """
        self.settle()
        self.times.pause()
        self._participation.pause(
            if_active=if_active, if_awaited=if_awaited
        ) if is_pause else self._participation.rest()
        self.times.resume()

    def enter_barrier(self) -> int:
        """No round waits for this worker until its next commit. Returns the phase it was in."""
        self.settle()
        self.times.pause()
        return self._participation.enter_barrier()

    def pass_barrier(self, passed: Passed) -> None:
        """Starts the phase after a barrier, common to all workers."""
        self._participation.pass_barrier(passed)
        self.times.resume()

    def tell_channel(self) -> None:
        """A segment is to use the device channel: its servers are told."""
        self._again(self.routes.tell_channel)

    def follow(self) -> None:
        """While this worker waits: tells new servers whether it rests."""
        self._again(lambda: None)

    def settle(self) -> None:
        """Waits for all open commits."""
        while self._open:
            self._open[0].wait()

    def leave(self) -> None:
        """No round waits for this worker any more."""
        self._participation.leave()

    def stats(self) -> WireStats:
        """What went over the wire so far."""
        return self.routes.stats()

    def peers(self) -> dict[str, WireStats]:
        """What went over the connection to each server."""
        return self.routes.peers()

    @property
    def pushed_bytes(self) -> PushBytes:
        """What its pushes took so far."""
        return self.sender.pushed

    def break_off(self) -> None:
        """The job has failed, or this worker is out: ends all waits."""
        self.routes.break_off("the job has ended")

    def close(self) -> None:
        self._is_closed = True
        self.routes.close()
