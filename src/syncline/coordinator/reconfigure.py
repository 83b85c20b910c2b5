"""How a coordinator takes its job from one generation to the next, and slices to where they should be."""

from __future__ import annotations

import threading
import time

from syncline import faults
from syncline.coordinator.job import JobContext, ServerCalls
from syncline.coordinator.leases import LeaseService
from syncline.coordinator.registration import RegistrationService
from syncline.coordinator.rendezvous import BarrierService, RosterService
from syncline.coordinator.restore import LostSlices
from syncline.coordinator.saves import SaveService
from syncline.core.members import Member
from syncline.core.reconfigure import Reconfiguration
from syncline.core.replica_sets import Plan, by_source
from syncline.core.wire.control import Enter, Host, LetGo, Prepared, Retire, SeedTo
from syncline.core.wire.leases import AskLeaseAcks
from syncline.core.wire.message import Done, Message
from syncline.errors import FencedError, ProtocolError, StoreError, SynclineError
from syncline.net.rpc import Request

#: Until a change that could not be finished is tried again.
_AGAIN_SECONDS = 0.02
#: Until a plan that had to make way is taken up again.
_LATER_SECONDS = 0.2
_LOUD_SECONDS = 1.0
#: Holds last 150 ms: servers that answer further apart than this are asked once more.
_APART_SECONDS, _MOST_TIMES = 0.1, 5


class Reconfigurer:
    """One change at a time, in a thread of its own. What is decided is the core's; here it is kept and said."""

    def __init__(
        self,
        job: JobContext,
        calls: ServerCalls,
        registration: RegistrationService,
        leases: LeaseService,
        saves: SaveService,
        lost_slices: LostSlices,
        barriers: BarrierService,
        roster: RosterService,
    ) -> None:
        self._job, self._calls, self._planner = job, calls, job.planner
        self._registration, self._leases, self._saves = registration, leases, saves
        self._lost_slices, self._barriers, self._roster = lost_slices, barriers, roster
        self._asking: dict[str, Request] = {}  # workers that enter, servers that retire
        self._trouble = ("", 0.0)  # why a change is tried again, and since when
        self._thread: threading.Thread | None = None

    def start(self, *, resume: bool) -> None:
        """Under the lock. `resume`: an earlier coordinator may have died within a change."""
        if self._thread is None:
            if resume:
                self._planner.resume()
            self._thread = threading.Thread(target=self._run, name="changes", daemon=True)
            self._thread.start()

    def close(self) -> None:
        with self._job.lock:
            self._job.is_closing = True
            self._job.wake_reconfigurer()

    # -- what happens -------------------------------------------------------------------------------------

    def member_is_out(self, member: Member) -> None:
        """Under the lock."""
        self._asking.pop(member.name, None)
        self._planner.is_out(member)
        # Also what nobody has only because a plan was taken back with it.
        self._registration.slices_are_lost(self._job.membership.state.lost)
        self._job.wake_reconfigurer()

    def member_has_left(self, name: str) -> None:
        """Under the lock: it asks for nothing any more."""
        self._asking.pop(name, None)
        self._planner.has_left(name)

    def member_is_in(self, member: Member) -> None:
        """Under the lock, with its joining: no plan may count on a server that knows nothing yet."""
        self._planner.is_in(member)
        self._job.wake_reconfigurer()

    def enter(self, request: Request, message: Enter) -> None:
        """A worker is about to push that takes part in no rounds."""
        with self._job.lock:
            place = self._planner.enter(request.peer.name, request.peer.incarnation, message.entry, message.phase)
            if place is None:
                self._asking[request.peer.name] = request
                self._job.wake_reconfigurer()
        if place is not None:
            request.reply(place)  # it asks again

    def retire(self, request: Request, message: Retire) -> None:
        """A server wants to leave: answered when nothing is left on it."""
        with self._job.lock:
            self._planner.retire(request.peer.name)
            self._job.retiring.add(request.peer.name)
            self._asking[request.peer.name] = request
            self._job.wake_reconfigurer()

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = 0.0
        while True:
            try:
                if not self._wait_for_work(pause):
                    return
                pause = self._step()
            except FencedError as error:
                self._job.superseded(str(error))
                return
            except StoreError as error:
                self._job.event(f"{error}; the change waits")
                pause = 1.0
            except SynclineError as error:
                pause = _AGAIN_SECONDS  # a server is gone, or held no longer: begun again, with what is known by then
                self._say_reason(str(error))
            except Exception as error:  # a bug of ours must end in a verdict, not in silence
                self._job.fail("coordinator", f"it has a bug: {type(error).__name__}: {error}")
                raise
            else:
                self._trouble = ("", 0.0)

    def _wait_for_work(self, pause: float) -> bool:
        """After the pause, or until there may be something to do; whether this goes on."""
        with self._job.lock:
            if pause:
                self._job.wait_for_wake(pause)
            elif not self._job.is_closing and not self._has_work():
                self._job.wait_for_wake(self._saves.seconds_left(time.monotonic()))
            return not self._job.is_closing and self._job.membership.outcome is None

    def _say_reason(self, reason: str) -> None:
        """A change that is tried again and again says why, once a second."""
        known, since = self._trouble
        if not known:
            self._trouble = (reason, time.monotonic())
        elif time.monotonic() - since >= _LOUD_SECONDS:
            self._trouble = (reason, time.monotonic())
            self._job.event(f"generation {self._job.membership.generation} could not be installed yet: {reason}")

    def _has_work(self) -> bool:
        waits = bool(self._planner.strangers or self._planner.retiring or self._leases.departed_owners())
        waits = waits or self._registration.has_uploads
        waits = waits or self._saves.has_work(time.monotonic())
        return self._planner.is_urgent or waits or not self._plan().is_empty

    def _plan(self) -> Plan:
        """Under the lock."""
        return self._planner.plan(self._job.registry.sizes, self._registration.slices_with_values())

    def _step(self) -> float:
        with self._job.lock:
            if any(name not in self._job.endpoints for name in self._job.membership.servers()):
                return _AGAIN_SECONDS  # it comes back, or is evicted: either is known soon
        self._introduce()
        with self._job.lock:
            urgent = self._planner.is_urgent
            wanted = self._plan()
        if urgent:
            return self._change(None)
        later = self._hand_back()
        if not wanted.is_empty:
            return self._carry_out(wanted)
        self._let_go()
        self._saves.run_due()
        return _LATER_SECONDS if self._planner.retiring else later

    def _hand_back(self) -> float:
        """Leases of those who are out and fenced go to others; slice 0's server says what of them counts."""
        with self._job.lock:
            if self._planner.is_urgent:
                return 0.0  # slice 0 may have another primary, or none: first all servers must know of that
            gone, replica_set = self._leases.departed_owners(), self._job.membership.state.replica_sets.get(0)
        if gone:
            answers = (
                self._calls.ask({replica_set.primary: AskLeaseAcks()})
                if replica_set is not None and replica_set.primary
                else {}
            )
            if not self._leases.reassign_departed(gone, answers.values()):
                return _AGAIN_SECONDS
        return 0.0

    def _introduce(self) -> None:
        """A server that has come hears of every segment."""
        with self._job.lock:
            members, segments = self._job.membership.state.members, list(self._job.registry.layout.segments)
            lives = {name: members[name].incarnation for name in self._planner.strangers if name in members}
        for name, incarnation in lives.items():
            for segment in segments:
                self._calls.ask({name: Host(segment, [])})
            with self._job.lock:
                if name in members and members[name].incarnation == incarnation:
                    self._planner.strangers.discard(name)

    def _let_go(self) -> None:
        """Servers on which nothing is left may end; segments whose slices have all their replica sets are ready."""
        self._registration.finish_uploads()
        with self._job.lock:
            free = self._planner.relieved()
            requests = [self._asking.pop(name) for name in free]
            for name in free:
                self._planner.has_left(name)
                self._job.membership.leave(name)
                self._job.liveness.forget(name)
                self._job.retiring.discard(name)
                self._job.heartbeats.pop(name, None)
                self._job.advanced.pop(name, None)
                self._job.registry.servers = self._job.membership.servers()
                self._job.event(f"{name} has handed over its slices and leaves")
            if free:
                self._job.try_keep()  # else it is kept with whatever comes next: nothing is left on them
        for request in requests:
            request.reply(Done())
        if requests:
            self._roster.announce()

    # -- one change ---------------------------------------------------------------------------------------

    def _change(self, wanted: Plan | None) -> float:
        with self._job.lock:
            change = self._planner.begin(wanted, self._job.registry.sizes)
            if change is None:
                return _LATER_SECONDS
            self._job.keep()
            faults.reach("change.kept")
        self._lost_slices.restore()
        self._prepare(change)
        faults.reach("change.prepared")
        if wanted is not None and change.num_orphans:
            with self._job.lock:
                self._planner.take_back()
                self._registration.slices_are_lost(self._job.membership.state.lost)
                self._job.keep()
                endpoints = [self._job.endpoints[name] for name in change.servers if name in self._job.endpoints]
            for endpoint in endpoints:
                endpoint.mention(LetGo(change.generation))
            self._registration.retry_waiting()  # what has waited for where slices are
            self._roster.announce()
            return _LATER_SECONDS
        self._install(change)
        faults.reach("change.installed")
        self._finish(change)
        return 0.0

    def _prepare(self, change: Reconfiguration) -> None:
        """All servers hold at the same time when this returns: the answers of one question, close together."""
        for _ in range(_MOST_TIMES):
            began = time.monotonic()
            for server, answer in self._calls.ask(dict.fromkeys(change.servers, change.prepare())).items():
                if not isinstance(answer, Prepared):
                    raise ProtocolError(f"{server} answered {type(answer).__name__} to Prepare")
                change.prepared(server, answer)
            if time.monotonic() - began < _APART_SECONDS:
                return

    def _install(self, change: Reconfiguration) -> None:
        with self._job.lock:
            install, lost = self._planner.install(change)
        for _, text in lost:
            self._job.event(
                f"a worker and a server were lost in one step, which is outside of what is promised: {text}"
            )
        self._calls.ask(dict.fromkeys(change.servers, install), fails_soon=True)

    def _finish(self, change: Reconfiguration) -> None:
        """Every server has the generation: rounds, barriers and places are others' from now on."""
        with self._job.lock:
            self._planner.settle(change)
            change.boundaries = {
                name: (beat.boundary, beat.stride) for name, (beat, _) in self._job.heartbeats.items()
            }
            try:
                self._job.keep()
            except StoreError:
                self._planner.reopen()  # nobody is answered before it is kept
                raise
            places = self._planner.finish(change)
            requests = [(self._asking.pop(name), place) for name, place in places.items()]
        for request, place in requests:
            request.reply(place)
        self._barriers.release()
        self._registration.retry_waiting()
        self._roster.announce()
        self._roster.answer_lives()

    # -- plans --------------------------------------------------------------------------------------------

    def _carry_out(self, wanted: Plan) -> float:
        """Seeds first, as long as they take, unless something more urgent comes up; then the replica sets."""
        with self._job.lock:
            members = dict(self._job.membership.state.members)
        jobs: dict[str, list[Message]] = {}
        # In a ring every backup is supplied within the change that names it.
        seeds = () if self._job.config.is_ring else wanted.seeds
        for (source, target), slices in by_source(seeds).items():
            if target not in members or source not in members:
                return _AGAIN_SECONDS  # it is out by now
            jobs.setdefault(source, []).append(SeedTo(slices, members[target]))
        while jobs:
            now = {source: messages.pop(0) for source, messages in jobs.items()}
            jobs = {source: messages for source, messages in jobs.items() if messages}
            if not self._calls.ask(now, gives_way=True):
                return _AGAIN_SECONDS
        faults.reach("seed.done")
        moved = self._change(wanted)
        if not moved and wanted.reason:
            self._job.event(f"seats: {wanted.reason}")
        return moved
