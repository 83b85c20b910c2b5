"""The coordinator as a service: builds the parts of this package, connects them, and passes messages to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from syncline import config as configuration
from syncline.coordinator.checkpoint_writer import CheckpointWriter
from syncline.coordinator.cuts import CutService
from syncline.coordinator.ending import JobEnding, JobWatch
from syncline.coordinator.job import JobContext, JobJournal, ServerCalls
from syncline.coordinator.leases import LeaseService
from syncline.coordinator.members import Announcer, JoinService, MemberService
from syncline.coordinator.metrics import MetricService, StopRules
from syncline.coordinator.reconfigure import Reconfigurer
from syncline.coordinator.registration import RegistrationService
from syncline.coordinator.rendezvous import BarrierService, RosterService
from syncline.coordinator.restore import LostSlices, ResumeService
from syncline.coordinator.saves import SaveService
from syncline.coordinator.scaling import PaceService, ScaleService, WorkerSizing
from syncline.coordinator.status import StatusService
from syncline.coordinator.tracing import TraceService
from syncline.coordinator.validation import BestCheckpoint, ValidationService
from syncline.core.media import GiveMedia
from syncline.core.membership import Membership, Outcome
from syncline.core.metrics import Metrics
from syncline.core.wire.checkpoints import AskResume, Finish, NoteScript, Save
from syncline.core.wire.control import (
    AskLife,
    AskLook,
    AskNominal,
    AskPage,
    AskRoster,
    AskStats,
    AskStatus,
    AskWhy,
    Barrier,
    Died,
    Ending,
    Enter,
    Heartbeat,
    Join,
    Leave,
    Register,
    Rejoin,
    Report,
    Retire,
    Scale,
    Uploaded,
    Watch,
)
from syncline.core.wire.leases import AskLease, EndShard, LeaveEpoch, OpenEpoch
from syncline.core.wire.message import Message
from syncline.core.wire.pace import Pace
from syncline.core.wire.tracing import GiveSpans
from syncline.core.wire.validation import AskReading, AskValidationShard, Attend, Begin, Come, LocalCandidate
from syncline.errors import ProtocolError
from syncline.net.rpc import Endpoint, Request
from syncline.net.transport import Buffer, Peer
from syncline.stats import CoordinatorDebugState, thread_names


class Coordinator:
    """The service that all members and the launcher talk to: one per job, small, off the hot path."""

    def __init__(
        self,
        given: Mapping[str, Any],
        *,
        log: Callable[[str], None],
        ended: Callable[[Outcome], None] = lambda outcome: None,
        journal: JobJournal | None = None,
        job: str = "",
        term: int = 1,
        watches: bool = True,
        new_page_link: Callable[[], str] = str,
    ) -> None:
        """`given`: the settings of the launch and of syncline.toml. `ended`: is called once, with the outcome.

        `watches`: the members are other processes, which send heartbeats and may die without a word.
        `new_page_link`: makes a link that opens the web page once, or returns "" where the job has none.
        """
        self.job = context = JobContext(
            given,
            log=log,
            conclude=self._conclude,
            ended=ended,
            journal=journal,
            job_id=job,
            term=term,
            watches=watches,
        )
        # Each part knows only parts above it in this list.
        calls = ServerCalls(context)
        self.leases = LeaseService(context)
        self.stop_rules = StopRules(context, self.leases)
        self.metrics = MetricService(context, self.stop_rules)
        self.best_checkpoint = BestCheckpoint(context, self.stop_rules, self.metrics)
        self.resume = ResumeService(context)
        self.registration = RegistrationService(context, self.resume)
        writer = CheckpointWriter(context, self.stop_rules, self.best_checkpoint, self.resume)
        self.cuts = CutService(context, calls, self.registration)
        self.saves = SaveService(context, calls, self.leases, self.registration, writer, self.cuts)
        self.validation = ValidationService(
            context, self.metrics, self.best_checkpoint, self.saves.save_for_validation
        )
        self.barriers = BarrierService(context, self.validation)
        self.roster = RosterService(context)
        lost_slices = LostSlices(context, calls, self.leases)
        self.reconfigurer = Reconfigurer(
            context,
            calls,
            self.registration,
            self.leases,
            self.saves,
            self.cuts,
            lost_slices,
            self.barriers,
            self.roster,
        )
        self.pace = PaceService(context)
        self.scaling = ScaleService(context)
        self.members = MemberService(
            context,
            self.registration,
            self.roster,
            self.barriers,
            self.reconfigurer,
            self.pace,
            (self.leases, self.saves, self.metrics, self.validation),
        )
        announcers: tuple[Announcer, ...] = (self.pace, self.stop_rules, self.validation)
        self.joins = JoinService(
            context,
            self.members,
            self.resume,
            self.registration,
            self.roster,
            self.reconfigurer,
            self.stop_rules,
            announcers,
        )
        self.status = StatusService(
            context,
            self.metrics,
            self.leases,
            self.saves,
            self.registration,
            self.pace,
            (self.barriers, self.validation, self.leases, self.saves),
            new_page_link,
        )
        self.ending = JobEnding(
            context, self.members.pending, self.leases, self.stop_rules, self.best_checkpoint, self.status
        )
        self.watch = JobWatch(
            context,
            self.members,
            self.joins,
            self.status,
            self.pace,
            announcers,
            (self.stop_rules, self.barriers, self.leases, WorkerSizing(context, self.leases, self.scaling)),
        )
        self.tracing = TraceService(context)
        self._handlers = self._all_handlers()
        self.joins.start_or_continue()

    def _all_handlers(self) -> dict[type[Message], Callable[[Request, Any], None]]:
        return {
            Join: self.joins.join,
            Rejoin: self.joins.rejoin,
            Leave: self.members.leave,
            Died: self.members.died,
            AskRoster: self.roster.ask_roster,
            AskLife: self.roster.ask_life,
            Barrier: self.barriers.arrive,
            Enter: self.reconfigurer.enter,
            Retire: self.reconfigurer.retire,
            Register: self.registration.register,
            AskNominal: self.registration.nominal_weight,
            Uploaded: self.registration.uploaded,
            Heartbeat: self.status.heartbeat,
            Report: self.status.report,
            AskStats: self.status.ask_stats,
            AskWhy: self.status.ask_why,
            AskLook: self.status.ask_look,
            AskPage: self.status.ask_page,
            AskStatus: self.status.ask_status,
            Watch: self.status.watch,
            Scale: self.scaling.handle_scale,
            Pace: self.pace.handle_pace,
            Metrics: self.metrics.handle_metrics,
            GiveMedia: self.metrics.handle_media,
            OpenEpoch: self.leases.open_epoch,
            AskLease: self.leases.ask_lease,
            LeaveEpoch: self.leases.leave_epoch,
            EndShard: self.leases.end_shard,
            Come: self.validation.propose,
            Attend: self.validation.attend,
            Begin: self.validation.has_pulled,
            AskValidationShard: self.validation.ask_shard,
            AskReading: self.validation.ask_reading,
            LocalCandidate: self.validation.add_local_candidate,
            Save: self.saves.handle_save,
            Finish: self._script_has_ended,
            AskResume: self.resume.ask_resume,
            NoteScript: self.resume.note_script,
            GiveSpans: self.tracing.take,
            **self.cuts.handlers,
        }

    # -- what the endpoint calls --------------------------------------------------------------------------

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        raise ProtocolError(f"{type(message).__name__} has no payload")

    def handle(self, request: Request) -> None:
        handler = self._handlers.get(type(request.message))
        if handler is None:
            raise ProtocolError(f"the coordinator does not answer {type(request.message).__name__}")
        self.members.check_sender(request.peer, request.message)
        handler(request, request.message)

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        self.cuts.lost(endpoint)
        self.members.connection_lost(endpoint, reason)

    def _script_has_ended(self, request: Request, message: Finish) -> None:
        """A worker's script has ended: no barrier and no lease waits for it. It leaves after the last save."""
        self.saves.script_has_ended(request)
        self.barriers.release()
        self.leases.answer_requests()
        self.job.wake_reconfigurer()

    def _conclude(self) -> None:
        self.ending.conclude()

    # -- what the process calls ---------------------------------------------------------------------------

    @property
    def config(self) -> configuration.JobConfig:
        return self.job.config

    @property
    def membership(self) -> Membership:
        return self.job.membership

    def debug_state(self) -> CoordinatorDebugState:
        """What the job is at, for tests and bug reports."""
        with self.job.lock:
            state = self.membership.state
            requests, num_defaults = self.joins.waiting()
            save, next_save = self.saves.under_way()
            return CoordinatorDebugState(
                generation=state.generation,
                term=self.job.term,
                members=tuple(sorted(state.members)),
                pending_joins=tuple(requests),
                num_defaults=num_defaults,
                lease_requests=tuple(self.leases.asking()),
                num_unsaved_uses=self.leases.num_unsaved_uses,
                script_notes=self.resume.script_notes(),
                save=save,
                next_save=next_save,
                threads=thread_names(),
            )

    def start_deadline(self) -> None:
        """From now on the members have `start_seconds` to join."""
        self.job.began = time.monotonic()
        if self.job.watches:
            self.watch.start()

    def wait(self) -> None:
        """Returns when the job is over."""
        self.job.over.wait()

    def announce_end(self, seconds: float) -> None:
        """Members that are told to leave stay, since the job is saved first; for so long at most."""
        with self.job.lock:
            endpoints = list(self.job.endpoints.values())
        for endpoint in endpoints:
            if endpoint.is_open:
                endpoint.mention(Ending(seconds))

    def end_early(self, reason: str) -> None:
        """This process is told to end, and the job ends with it."""
        with self.job.lock:
            self.membership.fail("coordinator", reason)
        self.job.conclude()

    def superseded(self, reason: str) -> None:
        """A newer coordinator has the job: this one ends and tells no member."""
        self.job.superseded(reason)

    def close(self) -> None:
        self.reconfigurer.close()
        self.stop_rules.close()
        self.saves.close()
        self.watch.close()
        for endpoint in [*self.job.endpoints.values(), *self.job.launchers]:
            endpoint.close()
