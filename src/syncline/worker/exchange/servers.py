"""The `servers` exchange: gradients go to the servers that host their slices, new parameters come back."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from syncline import faults
from syncline.config import JobConfig
from syncline.core.layout import Layout, Segment, Slice
from syncline.core.members import Member
from syncline.core.policy import policy_of
from syncline.core.replica_sets import ReplicaSet
from syncline.core.ring import partner_of
from syncline.core.slice_state import Copy, life_of
from syncline.core.wire.control import AskWhy, GivenWhy, Passed
from syncline.core.wire.leases import Use
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import Prefer, StateEntry
from syncline.errors import ConfigError, FencedError, FrameError, SynclineError, WaitTimeout
from syncline.net.link import Link
from syncline.net.rpc import Endpoint, Stamp
from syncline.stats import PushBytes, WireStats
from syncline.worker.arrays import Bytes
from syncline.worker.data.leases import LeaseAcks
from syncline.worker.exchange.commit import MENDED, Push, ServersTicket
from syncline.worker.exchange.finite import FiniteCheck
from syncline.worker.exchange.participation import Participation
from syncline.worker.exchange.replay import Replay
from syncline.worker.exchange.routes import ServerRoutes
from syncline.worker.exchange.sending import CommitSender
from syncline.worker.exchange.targets import ArrayTarget, Target
from syncline.worker.exchange.values import KeptArrays, SliceCopies, pull, read_state, upload, write_state
from syncline.worker.session import CoordinatorHandlers, left
from syncline.worker.waits import LOUD_SECONDS, StepClock, Waits

T = TypeVar("T")
_LONG_LOOK_SECONDS, _WHY_SECONDS = 0.25, 2.0
_NOTHING = Push(pushed=())


class ServersExchange:
    """One worker's view of all servers; one thread uses it at a time. When servers change, what is open is
    replayed."""

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
        self._num_slots = config.window + 1
        self.clock = 0
        self.num_landed = 0  # commits that are acknowledged, and have landed
        self.num_late = 0  # of them: those that came when their round was closed
        own = partner_of(name) if config.is_ring else ""
        self.routes = ServerRoutes(config, dial, self._num_slots, say, own)
        self.layout: Layout = self.routes.layout
        self._endpoints, self.wait_seconds = self.routes.endpoints, config.wait_seconds
        # The one before the last as well: of the last, not all may have come yet.
        num_kept = config.window + 2 if config.replicas < 2 else 0
        self.copies = SliceCopies(life_of(name, stamp.incarnation), self.layout, config.wait_seconds, num_kept)
        self.sender = CommitSender(self.routes, self.copies, stamp, config)
        self.encoder = self.sender.encoder  #: with --codec
        self._rosters = handlers.rosters
        self.times, self.lease_acks = StepClock(), LeaseAcks()
        self._replay = Replay(
            self.routes, self._rosters, stamp,
            ask=self._ask_coordinator, check=handlers.check, fenced=self._fenced,
            give_up=self._give_up, replay_open=self._replay_open,
        )  # fmt: skip
        self._participation = Participation(
            self.routes, self._replay, link,
            policy=policy_of(config), is_late=is_late, wait_seconds=config.wait_seconds,
            is_in_loop=lambda: self.lease_acks.num_loops > 0,
        )  # fmt: skip
        self._open: collections.deque[ServersTicket] = collections.deque()
        self.finite, self.checks_finite, self.is_arena_shared = finite, config.check_finite, False
        self.carried: set[int] = set()
        self.waits = Waits(name, self._ask_why, self.why, say)
        self._before_commit: list[Callable[[], None]] = []
        self._finish, self._wait_for = self.finish, self.wait_for  # bound once: every ticket has them
        self._rosters.listen(self.routes.hear)

    # -- layout -------------------------------------------------------------------------------------------

    def add(self, segments: Sequence[Segment], replica_sets: Sequence[ReplicaSet]) -> None:
        """The job's layout has grown; these servers have its slices."""
        self.times.pause()
        known = self.routes.primaries
        self.routes.add(segments, [replica_set for replica_set in replica_sets if replica_set.slice not in known])
        self.sender.forget()
        self._again(self._replay.take_over)
        self.times.resume()

    def upload(self, segment: Segment, values: Bytes, *, again: bool = False) -> None:
        """The chief's first values. `again`: also after updates, by the only worker of a job."""
        self._again(lambda: upload(self.routes, segment, values, self.wait_seconds, again=again))

    def _again(self, action: Callable[[], T]) -> T:
        """Something is said to the servers, and again when they change."""
        if self._is_closed:
            raise left(self._name)
        return self._replay.again(action, self.wait_seconds)

    # -- when servers change ------------------------------------------------------------------------------

    def _ask_coordinator(self, message: Message, seconds: float) -> Message:
        return self._link.try_call(message).wait(seconds)

    def _fenced(self, error: FencedError) -> None:
        if not self._participation.is_leaving:  # a server that has taken our leave already says the same
            self._handlers.fenced(error)

    def _give_up(self) -> None:
        for ticket in self._open:
            ticket.give_up()
        for action in self._before_commit:
            action()
        self.sender.forget()
        self.copies.start_over()

    def _replay_open(self) -> None:
        """All that is open, in the order of the clocks, whole: the clocks on each slice decide what is new there."""
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
        """A commit failed: it is under way again after this, or whatever cannot be mended is raised."""
        if isinstance(error, FencedError):
            self._fenced(error)
        # Behind a commit that is to be made again, others are refused for want of it.
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
        """Which of its arenas the next commit takes: with a window there are several."""
        return (self.clock + 1) % self._num_slots

    def arena(self, segment: int) -> Bytes:
        """Where the gradients of the next commit are written; free to be written when this returns."""
        self.make_room()
        slot, known = self.slot, self.layout.segments[segment]
        if not self.routes.arenas.has(segment, slot):
            return self._again(lambda: self.routes.arenas.array(known, slot))
        return self.routes.arenas.array(known, slot)

    def make_room(self) -> None:
        """One open clock at a time, and `window` more: the slot of the next commit is free after this."""
        while len(self._open) > self._config.window:
            self._open[0].wait()

    @property
    def early_bytes(self) -> float:
        """So many bytes are worth staging before the commit: any, where gradients travel over a socket; some, where
        servers add them up in shared memory; else no number of them (inf)."""
        return self.routes.early_bytes

    def stage(self, slices: Sequence[Slice]) -> None:
        """These slices of the arena are filled: they may travel and be added up now. They count at the commit, as
        they are then: what a push does not vouch for by that goes again (`Push.as_staged`)."""
        if not self._participation.must_enter:
            self.sender.stage(self._draft(_NOTHING, None), slices)

    def _draft(self, push: Push, target: Target | None) -> ServersTicket:
        """The next commit."""
        part = self._participation
        return ServersTicket(
            push, target, self.clock + 1, part.phase, part.back_at, self.slot, self._finish, self._wait_for
        )

    def commit(self, push: Push, target: Target | None) -> ServersTicket:
        """The arena counts from now on; new parameters go into the target, if there is one."""
        if self._is_closed:
            raise left(self._name)
        self.make_room()
        push = self.finite.admit(given := push, self.clock + 1, self.layout, self.routes.arenas.array, self.slot)
        for action in self._before_commit:
            action()
        if self._replay.roster is not self._rosters.newest or any(
            isinstance(t.flow.error, MENDED) for t in self._open
        ):
            self._again(self._replay.take_over)
        if self._participation.must_come_back:
            self._come_back()
        ticket = self._commit(push, target, self.lease_acks.take(is_void=push is not given))
        self.times.lap("stage")
        self.times.made_step(self.lease_acks.samples)
        return ticket

    def _commit(self, push: Push, target: Target | None, uses: list[Use]) -> ServersTicket:
        before = self._open[-1] if self._open else None
        self._open.append(ticket := self._draft(push, target))
        ticket.uses = uses
        self.clock = ticket.clock
        self._participation.committed(ticket.phase)
        try:
            self.sender.send(ticket, before)
            if len(ticket.server_commits) > 1:
                self._stage_everywhere(ticket, "stage")
        except (ConfigError, FrameError) as error:  # of the user's codec
            raise ticket.failed_by(error) from error.__cause__
        except MENDED as error:
            ticket.generation = self._replay.generation
            self._mend(ticket, error, time.monotonic(), time.monotonic() + self.wait_seconds)
        return ticket

    def _stage_everywhere(self, ticket: ServersTicket, phase: str) -> None:
        """What follows from the servers' answers must not wait until the script does. `phase`: of the time so far."""
        flow, began = ticket.flow, time.monotonic()
        try:
            flow.wait_until_staged(self.wait_seconds)
            if flow.waits_for_decision:
                self.times.lap(phase)
                with self.waits.of("step", step=ticket.clock, servers=ticket.unanswered):
                    flow.wait_until_decided(self.wait_seconds)
                self.times.lap("wait")
        except WaitTimeout:
            raise self._has_waited(ticket, began) from None

    # -- waiting ------------------------------------------------------------------------------------------

    def finish(self, ticket: ServersTicket, timeout_seconds: float | None) -> None:
        """Waits for a commit and lands its parameters."""
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
        """Its slot may be used again."""
        ticket.landed = True
        self.num_landed = ticket.clock
        self.copies.has_landed(ticket.target)
        told, hosted = self.copies.told, self.routes.hosted
        for server_commit in ticket.server_commits:
            assert server_commit.answer is not None
            parts = server_commit.receiver.versions if server_commit.receiver is not None else None
            told[server_commit.server] = (hosted[server_commit.server], parts or server_commit.answer)
        self.num_late += (
            is_late := any(
                server_commit.answer.late
                for server_commit in ticket.server_commits
                if server_commit.answer is not None
            )
        )
        self.sender.has_landed(ticket)
        self.lease_acks.answered(ticket.uses, is_late=is_late)
        self._open.remove(ticket)
        if faults.armed is not None:
            faults.reach("commit.landed")

    def _await_long(self, ticket: ServersTicket, began: float, until: float) -> None:
        with self.waits.of("step", step=ticket.clock, began=began, servers=ticket.unanswered):
            while not ticket.flow.arrives(max(0.0, min(_LONG_LOOK_SECONDS, until - time.monotonic()))):
                if time.monotonic() >= until:
                    raise WaitTimeout
                ticket.flow.done()  # one that is gone may not be the one whose answer is awaited
                refusal = ticket.flow.refusal()
                if refusal is not None:
                    raise refusal  # the others may wait for ever

    def wait_for(self, ticket: ServersTicket, slices: Collection[int]) -> bool:
        """Waits until these slices have landed; False when the whole commit is answered, or broken, before that."""
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

    def _has_waited(self, ticket: ServersTicket, began: float) -> WaitTimeout:
        return WaitTimeout(f"step {ticket.clock} has waited {time.monotonic() - began:.1f} s: {self.why()}")

    def _ask_why(self, step: int, servers: Sequence[str]) -> str:
        answer = self._ask_coordinator(AskWhy(step, list(servers)), _WHY_SECONDS)
        return answer.reason if isinstance(answer, GivenWhy) else ""

    def why(self) -> str:
        """For whom this worker waits, by the servers' own words."""
        return self.routes.why(_WHY_SECONDS)

    # -- pulling and state --------------------------------------------------------------------------------

    def before_commit(self, action: Callable[[], None]) -> Callable[[], None]:
        """Runs the action before every commit: the servers' memory may be written after it. Returns what ends it."""
        self._before_commit.append(action)
        return lambda: self._before_commit.remove(action)

    def prefer(self, slices: Sequence[int]) -> None:
        """The order in which this worker needs its slices, by their ids: they are applied in it."""
        self._again(lambda: self.routes.ask_all(Prefer(list(slices))))

    def pull(self, slices: Sequence[Slice], target: Target, min_version: int | None) -> list[int]:
        """Pulls parameters into the target; returns their versions."""
        self.make_room()  # what is read has this worker's own pushes, but for those in the window
        self.copies.landed_in(target)
        try:
            with self.waits.of("pull", servers=lambda: self.routes.names):
                found = self._again(lambda: pull(self.routes, slices, target, min_version))
                self.copies.pulled(found)
                return found
        except WaitTimeout:
            raise WaitTimeout(f"a pull has waited {self.wait_seconds:g} s for version {min_version}") from None

    def mapped(self) -> list[Bytes]:
        """The servers' parameters, as far as they are mapped into this process."""
        return self.routes.mapped()

    def read_state(self, slices: Sequence[Slice], key: str = "") -> list[tuple[StateEntry, Bytes]]:
        """What the rules remember about these slices; `key`: only this of it."""
        return self._again(lambda: read_state(self.routes, slices, self.wait_seconds, key))

    def write_state(self, slices: Sequence[Slice], entries: Sequence[tuple[StateEntry, Bytes]]) -> None:
        """Gives the rules their state on these slices."""
        self._again(lambda: write_state(self.routes, slices, entries, self.wait_seconds))

    # -- copies -------------------------------------------------------------------------------------------

    def keep(self, target: Target, slices: Sequence[Slice], arrays: KeptArrays) -> None:
        """What a target has of these slices lies in the caller's arrays: a copy for as long as they live."""
        self.copies.keep(target, slices, arrays)

    def overwrites(self, target: ArrayTarget) -> None:
        """This target lies in the caller's own arrays, whatever they have held so far."""
        self.copies.overwrites(target, target.slices())

    def copies_of(self, slices: list[int]) -> list[Copy]:
        """From any thread."""
        return self.copies.copies_of(slices)

    def give_copies(self, copies: list[Copy], target: Member) -> None:
        """From any thread."""
        self.copies.give(copies, target, self._dial)

    @property
    def num_updates(self) -> int:
        """That parameters have had, by what this worker knows, and with its own that are under way."""
        return self.copies.most_updates + len(self._open)

    # -- comings and goings -------------------------------------------------------------------------------

    def enter(self) -> int:
        """Takes part in the rounds from now on, where it does not yet; the job's steps before its next commit."""
        if self._participation.must_enter:
            self._come_back()
            self.has_stepped_to(self._participation.entered_at)
        return self.num_updates

    def _come_back(self) -> None:
        with self.waits.of("the entry into the rounds"):
            self._participation.come_back()
        num_void, self._participation.num_void = self._participation.num_void, 0
        for _ in range(num_void):
            self._commit(Push(pushed=(), weight=0.0), None, []).wait()

    def has_stepped_to(self, step: int) -> None:
        """The job has made so many steps, by the coordinator's word."""
        self.copies.pulled([step])

    def rest(self, *, is_pause: bool = False, if_active: bool = False, if_awaited: bool = False) -> None:
        """Takes part in no more rounds of this loop; `is_pause`: until its next commit. `if_active`: unless it rests
        already; `if_awaited`: and only when a round waits for it."""
        self.settle()
        self.times.pause()
        self._participation.pause(
            if_active=if_active, if_awaited=if_awaited
        ) if is_pause else self._participation.rest()
        self.times.resume()

    def step_aside(self) -> int:
        """No round waits for this worker until its next commit; the phase it was in."""
        self.settle()
        self.times.pause()
        return self._participation.step_aside()

    def pass_barrier(self, passed: Passed) -> None:
        """Behind a barrier everyone is in the same, new phase."""
        self._participation.pass_barrier(passed)
        self.times.resume()

    def follow(self) -> None:
        """While this worker waits: servers that have come since are told whether it rests."""
        self._again(lambda: None)

    def settle(self) -> None:
        """Waits for everything that is still open."""
        while self._open:
            self._open[0].wait()

    def leave(self) -> None:
        """No round waits for this worker any more."""
        self._participation.leave()

    def stats(self) -> WireStats:
        """What went over the wire so far."""
        return self.routes.stats()

    @property
    def pushed_bytes(self) -> PushBytes:
        """What its pushes took so far."""
        return self.sender.pushed

    def break_off(self) -> None:
        """The job has failed, or this worker is out: every wait ends now."""
        self.routes.break_off("the job has ended")

    def close(self) -> None:
        self._is_closed = True
        self.routes.close()
