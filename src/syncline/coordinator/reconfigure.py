"""The reconfiguration thread: takes the job from one generation to the next, and moves slices to their servers.

A generation is kept in the journal, prepared on all servers, installed, and finished; docs/internals/design.md tells
why. The same thread runs what must not overlap with a reconfiguration: seeding of backups, leases of the dead, and
snapshots.
"""

from __future__ import annotations

import threading
import time

from syncline import faults
from syncline.coordinator.cuts import CutService
from syncline.coordinator.job import JobContext, ServerCalls
from syncline.coordinator.leases import LeaseService
from syncline.coordinator.registration import RegistrationService
from syncline.coordinator.rendezvous import BarrierService, RosterService
from syncline.coordinator.restore import LostSlices
from syncline.coordinator.saves import SaveService
from syncline.core.members import Member
from syncline.core.reconfigure import Reconfiguration
from syncline.core.replica_sets import PlacementPlan, by_source
from syncline.core.wire.control import Enter, Host, LetGo, Prepared, Retire, SeedTo
from syncline.core.wire.leases import AskLeaseAcks
from syncline.core.wire.message import Done, Message
from syncline.errors import FencedError, ProtocolError, StoreError, SynclineError
from syncline.net.rpc import Request

#: The pause before a reconfiguration is retried.
_RETRY_SECONDS = 0.02
#: The pause before a plan that gave way is tried again.
_LATER_SECONDS = 0.2
#: How often the reason of retries is reported.
_REPORT_SECONDS = 1.0
#: A hold lasts 150 ms at first. Servers whose answers are further apart than this are asked again.
_APART_SECONDS, _MOST_TRIES = 0.1, 5


class Reconfigurer:
    """One reconfiguration at a time. `core/reconfigure` decides; this class keeps a decision and sends it."""

    def __init__(
        self,
        job: JobContext,
        calls: ServerCalls,
        registration: RegistrationService,
        leases: LeaseService,
        saves: SaveService,
        cuts: CutService,
        lost_slices: LostSlices,
        barriers: BarrierService,
        roster: RosterService,
    ) -> None:
        self._job, self._calls, self._planner = job, calls, job.planner
        self._registration, self._leases, self._saves, self._cuts = registration, leases, saves, cuts
        self._lost_slices, self._barriers, self._roster = lost_slices, barriers, roster
        self._asking: dict[str, Request] = {}  # requests of workers that enter and servers that retire
        self._trouble = ("", 0.0)  # why the reconfiguration is retried, and since when
        self._num_failed = 0  # tries in a row
        self._thread: threading.Thread | None = None

    def start(self, *, resume: bool) -> None:
        """Under the lock. `resume`: an earlier coordinator may have died within a reconfiguration."""
        if self._thread is None:
            if resume:
                self._planner.resume()
            self._thread = threading.Thread(target=self._run, name="reconfigure", daemon=True)
            self._thread.start()

    def close(self) -> None:
        with self._job.lock:
            self._job.is_closing = True
            self._job.wake_reconfigurer()

    # -- members ------------------------------------------------------------------------------------------

    def member_is_out(self, member: Member) -> None:
        """Under the lock: a member was evicted."""
        self._asking.pop(member.name, None)
        self._planner.is_out(member)
        # This includes slices that are lost because a plan was undone with the eviction.
        self._registration.slices_are_lost(self._job.membership.state.lost)
        self._job.wake_reconfigurer()

    def member_has_left(self, name: str) -> None:
        """Under the lock: drops what the member asked for."""
        self._asking.pop(name, None)
        self._planner.has_left(name)

    def member_is_in(self, member: Member) -> None:
        """Under the lock that also adds the member: no plan may use a server that does not know the layout yet."""
        self._planner.is_in(member)
        self._job.wake_reconfigurer()

    def enter(self, request: Request, message: Enter) -> None:
        """A worker that is in no round is about to push. Replies when it is in the rounds."""
        with self._job.lock:
            place = self._planner.enter(request.peer.name, request.peer.incarnation, message.entry, message.phase)
            if place is None:
                self._asking[request.peer.name] = request
                self._job.wake_reconfigurer()
        if place is not None:
            request.reply(place)  # the worker has repeated its request

    def retire(self, request: Request, message: Retire) -> None:
        """A server wants to leave. Replies when it has no slices left."""
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
                self._job.event(f"{error}; the reconfiguration waits")
                pause = 1.0
            except SynclineError as error:
                pause = _RETRY_SECONDS  # a server is gone, or its hold ended
                self._num_failed += 1
                self._report_retry(str(error))
            except Exception as error:  # our own bug: the job must fail visibly, not hang
                self._job.fail("coordinator", f"it has a bug: {type(error).__name__}: {error}")
                raise
            else:
                self._trouble, self._num_failed = ("", 0.0), 0

    def _wait_for_work(self, pause: float) -> bool:
        """Waits for the pause, or until there may be work. Returns False at the end."""
        with self._job.lock:
            if pause:
                self._job.wait_for_wake(pause)
            elif not self._job.is_closing and not self._has_work():
                now = time.monotonic()
                self._job.wait_for_wake(min(self._saves.seconds_left(now), self._cuts.seconds_left(now)))
            return not self._job.is_closing and self._job.membership.outcome is None

    def _report_retry(self, reason: str) -> None:
        """Reports why a reconfiguration is retried, once a second."""
        known, since = self._trouble
        if not known:
            self._trouble = (reason, time.monotonic())
        elif time.monotonic() - since >= _REPORT_SECONDS:
            self._trouble = (reason, time.monotonic())
            self._job.event(f"generation {self._job.membership.generation} could not be installed yet: {reason}")

    def _has_work(self) -> bool:
        """Under the lock."""
        waits = bool(self._planner.strangers or self._planner.retiring or self._leases.departed_owners())
        waits = waits or self._registration.has_uploads
        waits = waits or self._saves.has_work(time.monotonic()) or self._cuts.has_work(time.monotonic())
        return self._planner.is_urgent or waits or not self._plan().is_empty

    def _plan(self) -> PlacementPlan:
        """Under the lock: what would bring the slices to where they should be."""
        return self._planner.plan(self._job.registry.sizes, self._registration.slices_with_values())

    def _step(self) -> float:
        """Does the most urgent work. Returns how long to pause."""
        with self._job.lock:
            if any(name not in self._job.endpoints for name in self._job.membership.servers()):
                return _RETRY_SECONDS  # it reconnects or is evicted soon
        self._introduce_servers()
        with self._job.lock:
            is_urgent = self._planner.is_urgent
            plan = self._plan()
        if is_urgent:
            return self._reconfigure(None)
        pause = self._reassign_leases()
        if not plan.is_empty:
            return self._carry_out(plan)
        self._release_servers()
        self._saves.run_due()
        self._cuts.run_due()
        return _LATER_SECONDS if self._planner.retiring else pause

    def _reassign_leases(self) -> float:
        """Hands the leases of fenced members to others. The server of slice 0 knows which of them were used."""
        with self._job.lock:
            if self._planner.is_urgent:
                return 0.0  # slice 0 may have a new primary or none: reconfigure first
            gone, replica_set = self._leases.departed_owners(), self._job.membership.state.replica_sets.get(0)
        if gone:
            answers = (
                self._calls.ask({replica_set.primary: AskLeaseAcks()})
                if replica_set is not None and replica_set.primary
                else {}
            )
            if not self._leases.reassign_departed(gone, answers.values()):
                return _RETRY_SECONDS
        return 0.0

    def _introduce_servers(self) -> None:
        """Tells new servers of all segments."""
        with self._job.lock:
            members, segments = self._job.membership.state.members, list(self._job.registry.layout.segments)
            lives = {name: members[name].incarnation for name in self._planner.strangers if name in members}
        for name, incarnation in lives.items():
            for segment in segments:
                self._calls.ask({name: Host(segment, [])})
            with self._job.lock:
                if name in members and members[name].incarnation == incarnation:
                    self._planner.strangers.discard(name)

    def _release_servers(self) -> None:
        """Lets servers without slices leave. Segments whose slices have all their backups become ready."""
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
                self._job.event(f"{name} has handed over its slices and leaves", "leave")
            if free:
                self._job.try_keep()  # or with the next `keep`: these servers have no slices
        for request in requests:
            request.reply(Done())
        if requests:
            self._roster.announce()

    # -- one reconfiguration ------------------------------------------------------------------------------

    def _reconfigure(self, plan: PlacementPlan | None) -> float:
        """Installs the next generation: with the replica sets of `plan`, or, without a plan, with what members that
        came or went require.

        Returns how long to pause.
        """
        with self._job.lock:
            change = self._planner.begin(plan, self._job.registry.sizes)
            if change is None:
                return _LATER_SECONDS
            self._job.keep()
            faults.reach("reconfigure.kept")
        self._lost_slices.restore()
        self._prepare(change)
        faults.reach("reconfigure.prepared")
        if plan is not None and change.num_orphans:
            with self._job.lock:
                self._planner.take_back()
                self._registration.slices_are_lost(self._job.membership.state.lost)
                self._job.keep()
                endpoints = [self._job.endpoints[name] for name in change.servers if name in self._job.endpoints]
            for endpoint in endpoints:
                endpoint.mention(LetGo(change.generation))
            self._registration.retry_waiting()  # registrations wait while slices move
            self._roster.announce()
            return _LATER_SECONDS
        self._install(change)
        faults.reach("reconfigure.installed")
        self._finish(change)
        return 0.0

    def _prepare(self, change: Reconfiguration) -> None:
        """Makes all servers hold their commits. Holds are short, so all answers must come close together."""
        prepare = change.prepare(self._num_failed)
        for _ in range(_MOST_TRIES):
            began = time.monotonic()
            for server, answer in self._calls.ask(dict.fromkeys(change.servers, prepare)).items():
                if not isinstance(answer, Prepared):
                    raise ProtocolError(f"{server} answered {type(answer).__name__} to Prepare")
                change.prepared(server, answer)
            if time.monotonic() - began < _APART_SECONDS:
                return

    def _install(self, change: Reconfiguration) -> None:
        """Tells all servers the new generation."""
        with self._job.lock:
            install, lost = self._planner.install(change)
        for _, text in lost:
            self._job.event(
                f"a worker and a server died in one step, which may be applied to some slices only: {text}"
            )
        self._calls.ask(dict.fromkeys(change.servers, install), fails_soon=True)

    def _finish(self, change: Reconfiguration) -> None:
        """All servers have the generation: keeps it, then answers the requests that wait for it."""
        with self._job.lock:
            self._planner.settle(change)
            change.boundaries = {
                name: (heartbeat.boundary, heartbeat.stride) for name, (heartbeat, _) in self._job.heartbeats.items()
            }
            try:
                self._job.keep()
            except StoreError:
                self._planner.reopen()  # no request is answered before it is kept
                raise
            places = self._planner.finish(change)
            requests = [(self._asking.pop(name), place) for name, place in places.items()]
        for request, place in requests:
            request.reply(place)
        self._barriers.release()
        self._registration.retry_waiting()
        self._roster.announce()
        self._roster.answer_lives()

    # -- plans that move slices ---------------------------------------------------------------------------

    def _carry_out(self, plan: PlacementPlan) -> float:
        """Seeds the backups of the plan, unless something more urgent comes up; then installs its replica sets."""
        with self._job.lock:
            members = dict(self._job.membership.state.members)
        jobs: dict[str, list[Message]] = {}
        # In a ring each backup is seeded within the reconfiguration that names it.
        seeds = () if self._job.config.is_ring else plan.seeds
        for (source, target), slices in by_source(seeds).items():
            if target not in members or source not in members:
                return _RETRY_SECONDS  # one of them is out by now
            jobs.setdefault(source, []).append(SeedTo(slices, members[target]))
        while jobs:
            now = {source: messages.pop(0) for source, messages in jobs.items()}
            jobs = {source: messages for source, messages in jobs.items() if messages}
            if not self._calls.ask(now, gives_way=True):
                return _RETRY_SECONDS
        faults.reach("seed.done")
        pause = self._reconfigure(plan)
        if not pause and plan.reason:
            self._job.event(f"replica sets: {plan.reason}", "promotion")
        return pause
