"""Who is in the job: joining, the start of the job, coming back, leaving and eviction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from syncline import config as configuration
from syncline.coordinator.job import JobContext
from syncline.coordinator.metrics import StopRules
from syncline.coordinator.reconfigure import Reconfigurer
from syncline.coordinator.registration import RegistrationService
from syncline.coordinator.rendezvous import BarrierService, RosterService
from syncline.coordinator.restore import ResumeService
from syncline.coordinator.scaling import PaceService, remind_to_retire
from syncline.core.checkpoint.schedule import check_words
from syncline.core.members import Member
from syncline.core.ring import partner_of
from syncline.core.settings import check_settings
from syncline.core.versions import MemberVersions
from syncline.core.wire.control import Died, Join, Joined, Leave, Rejoin, Report
from syncline.core.wire.message import Done, Message
from syncline.errors import ConfigError, JobFailed, ProtocolError
from syncline.net.rpc import Endpoint, Request
from syncline.net.transport import Peer


class Announcer(Protocol):
    """A part that tells workers something which each life of a worker must know."""

    def announce(self) -> None:
        """Tells the workers that have not heard it over their current connection."""


class RemovalListener(Protocol):
    """A part that has something to do when a member is gone."""

    def member_is_out(self, member: Member) -> None:
        """Under the lock: this member was evicted, or has left."""


class PendingJoins:
    """Members that have joined before the job is complete, and wait for its start."""

    def __init__(self) -> None:
        self.defaults: dict[str, dict[str, Any]] = {}  # the settings in each member's script
        self.requests: dict[str, Request] = {}
        self.versions = MemberVersions("worker-0")  # rank 0

    def forget(self, name: str) -> None:
        self.versions.forget(name)
        self.defaults.pop(name, None)
        self.requests.pop(name, None)

    def take_requests(self) -> list[Request]:
        """Removes and returns the requests that wait."""
        requests, self.requests = list(self.requests.values()), {}
        return requests


class MemberService:
    """Members that leave or die. All that is known of a member is removed here, in one place."""

    def __init__(
        self,
        job: JobContext,
        registration: RegistrationService,
        roster: RosterService,
        barriers: BarrierService,
        reconfigurer: Reconfigurer,
        pace: PaceService,
        listeners: Sequence[RemovalListener],
    ) -> None:
        self._job, self._registration, self._roster = job, registration, roster
        self._barriers, self._reconfigurer, self._pace = barriers, reconfigurer, pace
        self._listeners = listeners
        self.pending = PendingJoins()

    # -- who speaks ---------------------------------------------------------------------------------------

    def check_sender(self, peer: Peer, message: Message) -> None:
        """Refuses a message of a process that is out of the job. Its last report and its leave are accepted."""
        if peer.role not in ("worker", "server") or isinstance(message, Join | Rejoin | Leave | Report):
            return
        member = self._job.membership.state.members.get(peer.name)
        if member is None or member.incarnation != peer.incarnation:
            self._job.refuse_fenced(peer.name, peer.incarnation)

    # -- leaving ------------------------------------------------------------------------------------------

    def leave(self, request: Request, message: Leave) -> None:
        name = request.peer.name
        with self._job.lock:
            member = self._job.membership.state.members.get(name)
            if member is not None and member.incarnation == request.peer.incarnation:
                self._job.membership.leave(name, message.retired, comes_back=message.comes_back)
                self._job.mark(f"{name} has {'left' if message.retired else 'finished'}", "leave")
                self._reconfigurer.member_has_left(name)
                self._pace.member_left(name)
                self._job.liveness.forget(name)
                self._job.retiring.discard(name)
                self._job.endpoints.pop(name, None)
                self._job.heartbeats.pop(name, None)
                self._job.member_stats.pop(name, None)
                self._job.advanced.pop(name, None)
                for listener in self._listeners:
                    listener.member_is_out(member)
                self._job.try_keep()
        request.reply(Done())
        self._job.wake_reconfigurer()
        self._barriers.release()
        self._registration.retry_waiting()
        self._roster.announce()
        self._job.conclude()

    # -- dying --------------------------------------------------------------------------------------------

    def connection_lost(self, endpoint: Endpoint, reason: str) -> None:
        """Suspects the member: it may come back, or the launcher will say how it died.

        Before the job has started, and inside one process, the member is evicted at once.
        """
        with self._job.lock:
            self._job.launchers.discard(endpoint)
            name = next((name for name, known in self._job.endpoints.items() if known is endpoint), None)
            if name is None or self._job.membership.outcome is not None:
                return
            del self._job.endpoints[name]
            self.pending.forget(name)
            self._roster.forget(name)
            if name not in self._job.membership.state.members:
                return
            if not self._job.membership.formed or not self._job.watches:
                self.evict(name, f"is gone: {reason}")
            else:
                self._job.liveness.suspect(name, time.monotonic(), reason)

    def died(self, request: Request, message: Died) -> None:
        """The launcher knows that a process has ended, and whether it starts the process again."""
        membership = self._job.membership
        with self._job.lock:
            ended = [message.name, *([partner_of(message.name)] if self._job.config.is_ring else [])]
            for name in ended:
                if message.comes_back:
                    membership.await_return(name)
                self.evict(name, message.reason)
            if not message.comes_back and message.ends_job and message.name not in membership.state.left:
                membership.give_up_on(message.name, message.reason)
            elif not message.comes_back:
                for name in ended:
                    membership.awaited.pop(name, None)
                membership.end_if_done()
        self._job.conclude()
        request.reply(Done())

    def evict(self, name: str, reason: str) -> None:
        """Removes a member that is dead, or counts as dead; in a ring also its partner in the same process.

        Every death comes here. If a server died, `Membership.evict` promotes its backups on paper; the
        reconfiguration thread then installs that on the servers.
        """
        membership = self._job.membership
        with self._job.lock:
            member = membership.state.members.get(name)
            if member is None or membership.outcome is not None:
                return
            self._job.evicted[name], beside = reason, membership.beside(name)
            self._registration.slices_are_lost(membership.evict(name, reason))
            self._job.liveness.forget(name)
            self.pending.forget(name)
            self._roster.forget(name)
            self._job.heartbeats.pop(name, None)
            self._job.member_stats.pop(name, None)
            self._job.advanced.pop(name, None)
            self._job.reports.pop(name, None)
            self._job.retiring.discard(name)
            endpoint = self._job.endpoints.pop(name, None)
            self._job.registry.servers = membership.servers()
            if membership.formed:
                self._job.event(f"{name} (incarnation {member.incarnation}) is out: {reason}", "death")
                self._job.try_keep()  # a member may hear of the new generation: its number is never used again
            self._reconfigurer.member_is_out(member)
            for listener in self._listeners:
                listener.member_is_out(member)
            self._fail_without_workers(name, reason)
            if beside and membership.formed:
                self.evict(beside, f"it is in one process with {name}")
        if endpoint is not None:
            endpoint.close("evicted")
        self._job.conclude()

    def _fail_without_workers(self, name: str, reason: str) -> None:
        """Inside one process no worker comes back."""
        membership = self._job.membership
        if not self._job.watches and membership.formed and not membership.workers():
            membership.fail(name, f"{name} {reason}")


class JoinService:
    """Members that join or come back, and the start of the job."""

    def __init__(
        self,
        job: JobContext,
        members: MemberService,
        resume: ResumeService,
        registration: RegistrationService,
        roster: RosterService,
        reconfigurer: Reconfigurer,
        stop_rules: StopRules,
        announcers: Sequence[Announcer],
    ) -> None:
        self._job, self._members, self._pending, self._resume = job, members, members.pending, resume
        self._registration, self._roster, self._reconfigurer = registration, roster, reconfigurer
        self._stop_rules, self._announcers = stop_rules, announcers

    def waiting(self) -> tuple[list[str], int]:
        """Under the lock: members that wait for an answer, and of how many the settings are kept."""
        return sorted(self._pending.requests), len(self._pending.defaults)

    def start_or_continue(self) -> None:
        """Continues the job of an earlier coordinator, or looks for a checkpoint before the first member joins."""
        if self._job.membership.formed:
            self._continue_job()
        else:
            self._is_checkpoint_chosen()

    def _continue_job(self) -> None:
        """Each member has one full deadline to send a heartbeat."""
        now = time.monotonic()
        for name in self._job.membership.state.members:
            self._job.liveness.watch(name, now, full=True)
        self._job.event(f"the coordinator is back, in generation {self._job.membership.generation}", "coordinator")
        self._stop_rules.start()
        self._reconfigurer.start(resume=True)

    # -- joining ------------------------------------------------------------------------------------------

    def join(self, request: Request, message: Join) -> None:
        """Replies when the job has started; at once when it is already running."""
        if message.role != request.peer.role:
            raise ProtocolError(f"{request.peer} cannot join as a {message.role}: its handshake says otherwise")
        with self._job.lock:
            if self._job.membership.outcome is not None:
                raise JobFailed(self._job.membership.outcome.reason)
            self._evict_predecessor(message)
            member = self._job.membership.join(
                message.role,
                message.name,
                message.host,
                message.address,
                message.process,
                message.kind,
                message.cores,
                message.pid,
                message.num_cores,
            )
            self._job.endpoints[member.name] = request.endpoint
            request.endpoint.peer = Peer(member.role, member.name, member.incarnation)
            self._pending.defaults[member.name] = message.defaults
            if not self._job.membership.formed:
                self._pending.requests[member.name] = request
                if message.versions is not None:
                    self._pending.versions.add(member.name, message.host, message.versions)
                if not self._is_refused_for_versions():
                    self.form_if_ready(False)
                return
            self._watch(member.name)
            self._job.registry.servers = self._job.membership.servers()
            self._job.keep()
            is_late = member.name not in self._job.membership.state.entered
            answer = self._joined(member.incarnation, member.since, is_late)
            self._job.event(f"{member.name} (incarnation {member.incarnation}) has joined", "join")
            self._reconfigurer.member_is_in(member)
            request.reply(answer)  # before a reconfiguration has anything to tell it
        self._roster.announce()
        self._announce_all()

    def _watch(self, name: str) -> None:
        """Under the lock: a new process. In a ring all of them run a script."""
        state = self._job.membership.state
        starting = state.config.is_ring or state.members[name].role == "worker"
        self._job.liveness.watch(name, time.monotonic(), starting=starting)

    def _is_refused_for_versions(self) -> bool:
        """Under the lock: ranks with other versions than rank 0 end the job before it begins; all hear why."""
        for name, told in self._pending.versions.differing().items():
            self._job.membership.fail(name, told)
            self._job.conclude()
            return True
        return False

    def _evict_predecessor(self, message: Join) -> None:
        """A new process joins under the name of a member without a connection: that member is dead."""
        known = message.name in self._job.membership.state.members
        same = self._job.membership.state.processes.get(message.name) == message.process
        if known and not same and message.name not in self._job.endpoints and self._job.membership.formed:
            self._members.evict(message.name, "was replaced by a new process of its name")

    def _joined(self, incarnation: int, generation: int, is_late: bool = False) -> Joined:
        """Under the lock."""
        state, resumed = self._job.membership.state, self._job.membership.state.saves.resumed_from
        return Joined(
            incarnation,
            generation,
            self._job.membership.ordered(),
            state.config,
            is_late,
            finished=list(state.finished.values()),
            is_chief_done=bool(state.chief_done),
            step=resumed.step if resumed is not None else 0,
            seconds=self._job.clock.seconds(),
        )

    def rejoin(self, request: Request, message: Rejoin) -> None:
        """A member has a new connection, to this coordinator or to one that came after a crash."""
        with self._job.lock:
            member = self._job.membership.state.members.get(message.name)
            if member is None or member.incarnation != message.incarnation:
                self._job.refuse_fenced(message.name, message.incarnation)
            before = self._job.endpoints.get(member.name)
            self._job.endpoints[member.name] = request.endpoint
            request.endpoint.peer = Peer(member.role, member.name, member.incarnation)
            self._job.liveness.heard(member.name, time.monotonic())
            is_server = member.role == "server"
            # While primaries are about to change, the roster follows when that is settled.
            answer = Done() if self._job.is_moving else self._job.roster()
        if before is not None and before is not request.endpoint:
            before.close("it has come back by another connection")  # ends the calls that wait on it
        request.reply(answer)
        if is_server:
            self._registration.retry_waiting()
        remind_to_retire(self._job, message.name)
        self._announce_all()

    def _announce_all(self) -> None:
        for announcer in self._announcers:
            announcer.announce()

    # -- the start of the job -----------------------------------------------------------------------------

    def form_if_ready(self, has_gathered: bool) -> None:
        """Under the lock: starts the job if enough members are there and the checkpoint to resume is chosen.

        `has_gathered`: the time to wait for more members than the least number is over.
        """
        membership, state = self._job.membership, self._job.membership.state
        if not membership.may_form(has_gathered):
            return
        try:
            self._use_defaults(self._pending.defaults.get(membership.chief, {}))
        except ConfigError as error:
            self._refuse_defaults(error)
            return
        if not self._is_checkpoint_chosen():
            return
        self._resume.apply_choice()
        membership.form()
        self._job.formed_at = time.monotonic()
        self._job.mark(f"the job has formed: {', '.join(self._job.membership.state.members)}", "join")
        for line in self._pending.versions.torch_told():
            self._job.event(line)
        self._job.registry.servers = membership.servers()
        self._job.registry.use_slices_of(state.config.slice_bytes)
        for name in state.members:
            self._watch(name)
        self._job.keep()
        requests = self._pending.requests
        self._pending.requests, self._pending.defaults = {}, {}
        self._reconfigurer.start(resume=False)
        # Servers first: a worker must find them ready.
        for name in sorted(requests, key=lambda name: state.members[name].role != "server"):
            requests[name].reply(self._joined(state.members[name].incarnation, state.generation))
        self._stop_rules.start()

    def _is_checkpoint_chosen(self) -> bool:
        """Under the lock: if not, the search is under way, and calls `form_if_ready` at its end."""
        return self._resume.is_chosen(self._job.config, lambda: self.form_if_ready(False))

    def _use_defaults(self, defaults: dict[str, Any]) -> None:
        """The chief's script sets what neither the launch nor syncline.toml has set."""
        known = configuration.check_known(defaults, "init()")
        config = configuration.resolve(self._job.given, known)
        check_settings(config)
        check_words(config)
        self._job.membership.state.config = config

    def _refuse_defaults(self, error: ConfigError) -> None:
        """The settings in the chief's script are invalid: the chief gets the error, and the job ends."""
        chief = self._job.membership.chief
        request = self._pending.requests.pop(chief, None)
        self._job.membership.fail(chief, f"{chief}: {error}")
        if request is not None:
            request.refuse(error)
        self._job.conclude()
