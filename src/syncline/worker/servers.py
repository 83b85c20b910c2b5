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
from syncline.worker.commit import MENDED
from syncline.worker.copies import Copies, KeptArrays
from syncline.worker.exchange import Push, left
from syncline.worker.finite import FiniteCheck
from syncline.worker.hearing import FromCoordinator
from syncline.worker.leases import Uses
from syncline.worker.placement import Placement
from syncline.worker.redo import Redo
from syncline.worker.sending import Sending
from syncline.worker.sinks import ArraySink, Sink
from syncline.worker.states import read_state, write_state
from syncline.worker.taking_part import TakingPart
from syncline.worker.ticket import ServersTicket
from syncline.worker.times import StepClock
from syncline.worker.values import pull, upload
from syncline.worker.waits import LOUD_SECONDS, Waits

T = TypeVar("T")
_LONG_LOOK_SECONDS, _WHY_SECONDS = 0.25, 2.0
_NOTHING = Push(pushed=())


class ServersExchange:
    """One worker's view of all servers. What it says, it says again when they change (`redo`)."""

    def __init__(
        self,
        config: JobConfig,
        hearing: FromCoordinator,
        link: Link,
        dial: Callable[[Member], Endpoint],
        stamp: Stamp,
        *,
        name: str,
        is_late: bool,
        say: Callable[[str], None],
        finite: FiniteCheck,
    ) -> None:
        self._config, self._hearing, self._link, self._dial = config, hearing, link, dial
        self._name, self._is_closed = name, False
        self._num_slots = config.window + 1
        self.clock = 0
        self.num_landed = 0  # commits that are acknowledged, and have landed
        self.num_late = 0  # of them: those that came when their round was closed
        own = partner_of(name) if config.is_ring else ""
        self.placement = self._placement = Placement(config, dial, self._num_slots, say, own)
        self.layout: Layout = self._placement.layout
        self._endpoints, self._wait_seconds = self._placement.endpoints, config.wait_seconds
        # The one before the last as well: of the last, not all may have come yet.
        num_kept = config.window + 2 if config.replicas < 2 else 0
        self._copies = Copies(life_of(name, stamp.incarnation), self.layout, config.wait_seconds, num_kept)
        self._sending = Sending(self._placement, self._copies, stamp, config)
        self.encoder = self._sending.encoder  #: with --codec
        self._part = TakingPart(
            self._placement, link, policy=policy_of(config), is_late=is_late, wait_seconds=config.wait_seconds
        )
        self._rosters = hearing.rosters
        self._redo = self._part.redo = Redo(
            self._placement, self._rosters, stamp,
            ask=self._ask_coordinator, check=hearing.check, fenced=self._fenced,
            give_up=self._give_up, make_anew=self._make_anew,
        )  # fmt: skip
        self._open: collections.deque[ServersTicket] = collections.deque()
        self.times, self.uses = StepClock(), Uses()
        self._part.is_in_loop = lambda: self.uses.num_loops > 0
        self.finite, self.checks_finite, self.is_arena_lent = finite, config.check_finite, False
        self.carried: set[int] = set()
        self.waits = Waits(name, self._ask_why, self.why, say)
        self._before_commit: list[Callable[[], None]] = []
        self._rosters.listen(self._placement.hear)

    # -- layout -------------------------------------------------------------------------------------------

    def add(self, segments: Sequence[Segment], replica_sets: Sequence[ReplicaSet]) -> None:
        self.times.pause()
        known = self._placement.primaries
        self._placement.add(segments, [replica_set for replica_set in replica_sets if replica_set.slice not in known])
        self._sending.forget()
        self._again(self._redo.take_over)
        self.times.resume()

    def upload(self, segment: Segment, values: Bytes, *, again: bool = False) -> None:
        self._again(lambda: upload(self._placement, segment, values, self._wait_seconds, again=again))

    def _again(self, action: Callable[[], T]) -> T:
        """Something is said to the servers, and again when they change."""
        if self._is_closed:
            raise left(self._name)
        return self._redo.again(action, self._wait_seconds)

    # -- when servers change ------------------------------------------------------------------------------

    def _ask_coordinator(self, message: Message, seconds: float) -> Message:
        return self._link.try_call(message).wait(seconds)

    def _fenced(self, error: FencedError) -> None:
        if not self._part.is_leaving:  # a server that has taken our leave already says the same
            self._hearing.fenced(error)

    def _give_up(self) -> None:
        for ticket in self._open:
            ticket.give_up()
        for action in self._before_commit:
            action()
        self._sending.forget()
        self._copies.begin_anew()

    def _make_anew(self) -> None:
        """All that is open, in the order of the clocks, whole: the clocks on each slice decide what is new there."""
        self._part.tell()
        before: ServersTicket | None = None
        for ticket in self._open:
            if ticket.sink is not None:
                ticket.sink.begin_anew()
            flow, before = self._sending.send(ticket, before), ticket
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
            self._redo.recover(broken, ticket.generation, until)
        except WaitTimeout:
            raise self._has_waited(ticket, began) from broken

    # -- pushing ------------------------------------------------------------------------------------------

    @property
    def slot(self) -> int:
        return (self.clock + 1) % self._num_slots

    def arena(self, segment: int) -> Bytes:
        self.make_room()
        slot, known = self.slot, self.layout.segments[segment]
        if not self._placement.arenas.has(segment, slot):
            return self._again(lambda: self._placement.arenas.array(known, slot))
        return self._placement.arenas.array(known, slot)

    def make_room(self) -> None:
        """One open clock at a time, and `window` more: the slot of the next commit is free after this."""
        while len(self._open) > self._config.window:
            self._open[0].wait()

    @property
    def early_bytes(self) -> float:
        return self._placement.early_bytes

    def stage(self, slices: Sequence[Slice]) -> None:
        if not self._part.must_enter:
            self._sending.stage(self._draft(_NOTHING, None), slices)

    def _draft(self, push: Push, sink: Sink | None) -> ServersTicket:
        """The next commit."""
        part = self._part
        return ServersTicket(self, push, sink, self.clock + 1, part.phase, part.back_at, self.slot)

    def commit(self, push: Push, sink: Sink | None) -> ServersTicket:
        if self._is_closed:
            raise left(self._name)
        self.make_room()
        push = self.finite.admit(given := push, self.clock + 1, self.layout, self._placement.arenas.array, self.slot)
        for action in self._before_commit:
            action()
        if self._redo.roster is not self._rosters.newest or any(isinstance(t.flow.error, MENDED) for t in self._open):
            self._again(self._redo.take_over)
        if self._part.must_come_back:
            self._come_back()
        ticket = self._commit(push, sink, self.uses.take(is_void=push is not given))
        self.times.lap("stage")
        self.times.made_step(self.uses.samples)
        return ticket

    def _commit(self, push: Push, sink: Sink | None, uses: list[Use]) -> ServersTicket:
        before = self._open[-1] if self._open else None
        self._open.append(ticket := self._draft(push, sink))
        ticket.uses = uses
        self.clock = ticket.clock
        self._part.committed(ticket.phase)
        try:
            self._sending.send(ticket, before)
            if len(ticket.lanes) > 1:
                self._stage_everywhere(ticket, "stage")
        except (ConfigError, FrameError) as error:  # of the user's codec
            raise ticket.failed_by(error) from error.__cause__
        except MENDED as error:
            ticket.generation = self._redo.generation
            self._mend(ticket, error, time.monotonic(), time.monotonic() + self._wait_seconds)
        return ticket

    def _stage_everywhere(self, ticket: ServersTicket, phase: str) -> None:
        """What follows from the servers' answers must not wait until the script does. `phase`: of the time so far."""
        flow, began = ticket.flow, time.monotonic()
        try:
            flow.wait_until_staged(self._wait_seconds)
            if flow.waits_for_decision:
                self.times.lap(phase)
                with self.waits.of("step", step=ticket.clock, servers=ticket.unanswered):
                    flow.wait_until_decided(self._wait_seconds)
                self.times.lap("wait")
        except WaitTimeout:
            raise self._has_waited(ticket, began) from None

    # -- waiting ------------------------------------------------------------------------------------------

    def finish(self, ticket: ServersTicket, timeout_seconds: float | None) -> None:
        """Waits for a commit and lands its parameters."""
        self.times.lap("compute")
        began = time.monotonic()
        until = began + (self._wait_seconds if timeout_seconds is None else timeout_seconds)
        while True:
            try:
                if not ticket.flow.arrives(min(LOUD_SECONDS, until - began)):
                    self._await_long(ticket, began, until)
                if ticket.flow.error is not None:
                    raise ticket.flow.error
                self.times.lap("wait")
                for lane in ticket.lanes:
                    lane.finish()
                break
            except SynclineError as error:
                self._mend(ticket, error, began, until)
        self._has_landed(ticket)
        self.times.lap("pull")

    def _has_landed(self, ticket: ServersTicket) -> None:
        """Its slot may be used again."""
        ticket.landed = True
        self.num_landed = ticket.clock
        self._copies.has_landed(ticket.sink)
        told, hosted = self._copies.told, self._placement.hosted
        for lane in ticket.lanes:
            assert lane.answer is not None
            parts = lane.landing.versions if lane.landing is not None else None
            told[lane.server] = (hosted[lane.server], parts or lane.answer)
        self.num_late += (is_late := any(lane.answer.late for lane in ticket.lanes if lane.answer is not None))
        self._sending.has_landed(ticket)
        self.uses.answered(ticket.uses, is_late=is_late)
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
        wanted = [(x, x.landing, x.landing.wants(slices)) for x in ticket.lanes if x.landing is not None]
        try:
            while not flow.is_over:
                missing = next((found for found in wanted if not found[1].has(found[2])), None)
                if missing is None:
                    return True
                left = began + self._wait_seconds - time.monotonic()
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
        return self._placement.why(_WHY_SECONDS)

    # -- pulling and state --------------------------------------------------------------------------------

    def before_commit(self, action: Callable[[], None]) -> Callable[[], None]:
        self._before_commit.append(action)
        return lambda: self._before_commit.remove(action)

    def prefer(self, slices: Sequence[int]) -> None:
        self._again(lambda: self._placement.ask_all(Prefer(list(slices))))

    def pull(self, slices: Sequence[Slice], sink: Sink, min_version: int | None) -> list[int]:
        self.make_room()  # what is read has this worker's own pushes, but for those in the window
        self._copies.landed_in(sink)
        try:
            with self.waits.of("pull", servers=lambda: self._placement.names):
                found = self._again(lambda: pull(self._placement, slices, sink, min_version))
                self._copies.pulled(found)
                return found
        except WaitTimeout:
            raise WaitTimeout(f"a pull has waited {self._wait_seconds:g} s for version {min_version}") from None

    def mapped(self) -> list[Bytes]:
        return self._placement.mapped()

    def read_state(self, slices: Sequence[Slice], key: str = "") -> list[tuple[StateEntry, Bytes]]:
        return self._again(lambda: read_state(self._placement, slices, self._wait_seconds, key))

    def write_state(self, slices: Sequence[Slice], entries: Sequence[tuple[StateEntry, Bytes]]) -> None:
        self._again(lambda: write_state(self._placement, slices, entries, self._wait_seconds))

    # -- copies -------------------------------------------------------------------------------------------

    def keep(self, sink: Sink, slices: Sequence[Slice], arrays: KeptArrays) -> None:
        self._copies.keep(sink, slices, arrays)

    def overwrites(self, sink: ArraySink) -> None:
        self._copies.overwrites(sink, sink.slices())

    def copies_of(self, slices: list[int]) -> list[Copy]:
        """From any thread."""
        return self._copies.copies_of(slices)

    def give_copies(self, copies: list[Copy], target: Member) -> None:
        """From any thread."""
        self._copies.give(copies, target, self._dial)

    @property
    def num_updates(self) -> int:
        return self._copies.most_updates + len(self._open)

    # -- comings and goings -------------------------------------------------------------------------------

    def enter(self) -> int:
        """Takes part in the rounds from now on, where it does not yet; the job's steps before its next commit."""
        if self._part.must_enter:
            self._come_back()
            self.has_stepped_to(self._part.entered_at)
        return self.num_updates

    def _come_back(self) -> None:
        with self.waits.of("the entry into the rounds"):
            self._part.come_back()
        num_void, self._part.num_void = self._part.num_void, 0
        for _ in range(num_void):
            self._commit(Push(pushed=(), weight=0.0), None, []).wait()

    def has_stepped_to(self, step: int) -> None:
        """The job has made so many steps, by the coordinator's word."""
        self._copies.pulled([step])

    def rest(self, *, is_pause: bool = False, if_active: bool = False, if_awaited: bool = False) -> None:
        self.settle()
        self.times.pause()
        self._part.pause(if_active=if_active, if_awaited=if_awaited) if is_pause else self._part.rest()
        self.times.resume()

    def step_aside(self) -> int:
        self.settle()
        self.times.pause()
        return self._part.step_aside()

    def pass_barrier(self, passed: Passed) -> None:
        self._part.pass_barrier(passed)
        self.times.resume()

    def follow(self) -> None:
        """While this worker waits: servers that have come since are told whether it rests."""
        self._again(lambda: None)

    def settle(self) -> None:
        """Waits for everything that is still open."""
        while self._open:
            self._open[0].wait()

    def leave(self) -> None:
        self._part.leave()

    def stats(self) -> WireStats:
        return self._placement.stats()

    @property
    def pushed_bytes(self) -> PushBytes:
        return self._sending.pushed

    def break_off(self) -> None:
        """The job has failed, or this worker is out: every wait ends now."""
        self._placement.break_off("the job has ended")

    def close(self) -> None:
        self._is_closed = True
        self._placement.close()
