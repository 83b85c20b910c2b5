"""What a coordinator hears from members and tells people: heartbeats, reports, job stats, status, waits, profile."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from syncline.config import JobConfig
from syncline.coordinator.job import JobContext
from syncline.coordinator.leases import LeaseService
from syncline.coordinator.metrics import MetricService
from syncline.coordinator.registration import RegistrationService
from syncline.coordinator.saves import SaveService
from syncline.coordinator.scaling import PaceService
from syncline.core.leasing.progress import progress, shares
from syncline.core.liveness import FRESH_SECONDS, PIPELINE_OF, Known, causes, why
from syncline.core.members import by_name
from syncline.core.observing import JobTotals, MemberTotals
from syncline.core.pipelining.telling import pipeline_lines
from syncline.core.ring import protection_of
from syncline.core.units import pushed_told
from syncline.core.wire.control import (
    AskLook,
    AskPage,
    AskServerStats,
    AskStats,
    AskStatus,
    AskWhy,
    GivenLook,
    GivenPage,
    GivenServerStats,
    GivenStats,
    GivenStatus,
    GivenWhy,
    Heartbeat,
    Report,
    Standings,
    Watch,
)
from syncline.core.wire.message import Done
from syncline.net.rpc import Call, Request
from syncline.stats import (
    JobStatus,
    MemberStats,
    MemberStatus,
    PushBytes,
    SaveCounts,
    ServerStats,
    StageStats,
    StepTimes,
    Wait,
    apply_seconds,
)

_NO_REPORT, _NO_STATS = Report(0, 0, 0.0, 0, 0, 0), MemberStats()


class WaitSource(Protocol):
    """A part in which members wait for each other."""

    def waits(self, now: float) -> list[Wait]:
        """Under the lock: who waits for whom."""


class StatusService:
    """Collects heartbeats and reports, and answers questions about the job."""

    def __init__(
        self,
        job: JobContext,
        metrics: MetricService,
        leases: LeaseService,
        saves: SaveService,
        registration: RegistrationService,
        pace: PaceService,
        wait_sources: Sequence[WaitSource],
        new_page_link: Callable[[], str],
    ) -> None:
        """`new_page_link`: makes a link that opens the web page once, or returns "" where the job has none."""
        self._job, self._metrics, self._leases, self._saves = job, metrics, leases, saves
        self._registration, self._pace, self._wait_sources = registration, pace, wait_sources
        self._new_page_link = new_page_link

    # -- heartbeats, reports, job stats -------------------------------------------------------------------

    def heartbeat(self, request: Request, message: Heartbeat) -> None:
        """A member is alive, and tells its step."""
        now = time.monotonic()
        with self._job.lock:
            name = request.peer.name
            self._job.liveness.heard(name, now)
            if message.step and self._job.liveness.has_stepped(name):
                self._job.liveness.has_stepped(self._job.membership.beside(name))
            before = self._job.heartbeats.get(name)
            if before is None or before[0].step != message.step:
                self._job.advanced[name] = now
            if message.stats is not None:
                self._job.member_stats[name] = message.stats
            self._job.heartbeats[name] = (message, now)
            self._leases.note_heartbeat(name, message)
            self._saves.note_progress()
        request.reply(Done())

    def report(self, request: Request, message: Report) -> None:
        """A worker reports its numbers."""
        with self._job.lock:
            self._job.reports[request.peer.name] = message
            if message.rates:
                self._job.rates[request.peer.name] = message.rates
            if message.committed.commits:
                self._job.committed[request.peer.name] = message.committed
            self._saves.note_progress()
        if request.number:
            request.reply(Done())

    def ask_stats(self, request: Request, message: AskStats) -> None:
        """Replies with the job stats, once all servers have sent theirs."""

        def gathered(calls: list[Call]) -> None:
            servers = [call.answer.stats for call in calls if isinstance(call.answer, GivenServerStats)]
            with self._job.lock:
                samples = sum(report.samples for report in self._job.reports.values())
                busy = max((report.seconds for report in self._job.reports.values()), default=0.0)
                revoked = self._job.membership.state.num_revoked
                by_worker, epochs = self.worker_shares(), progress(self._job.membership.state.leases)
                pushed = self.pushed()
            request.reply(GivenStats(self._job.seconds(), samples, busy, servers, revoked, by_worker, epochs, pushed))

        self._job.ask_all_servers(AskServerStats(), gathered)

    def worker_shares(self) -> dict[str, float]:
        """The shares of workers that are members or have finished; those of retired workers are left out."""
        state = self._job.membership.state
        there = state.members.keys() | state.finished.keys()
        return shares({name: report.samples for name, report in self._job.reports.items() if name in there})

    def watch(self, request: Request, message: Watch) -> None:
        """Replies to a launcher with all that it shows and acts on."""
        with self._job.lock:
            self._job.launchers.add(request.endpoint)
            membership, outcome = self._job.membership, self._job.membership.outcome
            state = membership.state
            hosting = {name for replica_set in state.replica_sets.values() for name in replica_set.names}
            stepped = {name for name, (heartbeat, _) in self._job.heartbeats.items() if heartbeat.step}
            standings = Standings(
                formed=membership.formed,
                missing=membership.missing(),
                seconds=self._job.seconds(),
                reports=dict(self._job.reports),
                left=sorted(state.left, key=by_name),
                verdict=outcome.reason if outcome else "",
                culprit=outcome.culprit if outcome else "",
                incarnations={name: member.incarnation for name, member in state.members.items()},
                pushed=sorted((stepped | hosting) & set(state.members), key=by_name),
                wanted={r: n for r, n in state.wanted.items() if r == "worker" or not self._job.config.is_ring},
                num_scalings=state.num_scalings,
                retiring=sorted(self._job.retiring, key=by_name),
                epochs=progress(state.leases),
                step=self._job.step(),
                readings=self._metrics.values(),
                stop=state.steering.steer.stop,
                saves=self.save_counts(),
                settled={name: commits for name, (_, commits) in state.settled.items()},
                unsettled=sorted(state.fencing),
                is_chief_done=bool(state.chief_done),
                policy=self._job.config.policy,
                num_revoked=state.num_revoked,
                best=state.validations.best.told if state.validations.best is not None else "",
                pushed_told=self.pushed_text(),
                lag=self._lag(),
                long_wait=self._job.long_wait,
                verdicts=list(self._job.verdicts),
            )
        request.reply(standings)

    def _lag(self) -> int:
        """Under the lock: how far the slowest worker in the rounds is behind the fastest."""
        entered = self._job.membership.state.entered
        steps = [known.step for name, (known, _) in self._job.heartbeats.items() if name in entered]
        return max(steps, default=0) - min(steps, default=0)

    def pushed(self) -> PushBytes:
        """Under the lock: the bytes that all workers have pushed."""
        return sum((report.pushed for report in self._job.reports.values()), PushBytes())

    def pushed_text(self) -> str:
        """Under the lock: the pushed bytes per step; empty for a job whose pushes all go through shared memory.

        At the end of a job the reports may be newer than the heartbeats: the higher step counts.
        """
        pushed, config = self.pushed(), self._job.config
        if not (pushed.socket or config.steps_locally or config.codec):
            return ""
        return pushed_told(pushed, max([self._job.step(), *(r.job_step for r in self._job.reports.values())]))

    def save_counts(self) -> SaveCounts:
        """Under the lock."""
        saves = self._job.membership.state.saves
        return SaveCounts(
            folder=self._job.config.checkpoint,
            resumed_from=saves.resumed_from.name if saves.resumed_from is not None else "",
            last=saves.last.name if saves.last is not None else "",
            step=saves.last.step if saves.last is not None else 0,
            num_saved=saves.num_saved,
            num_failed=saves.num_failed,
            failure=saves.failure,
        )

    # -- who waits for whom -------------------------------------------------------------------------------

    def waits(self) -> list[Wait]:
        """Under the lock: all known waits, of the heartbeats and of the coordinator's parts."""
        now = time.monotonic()
        told = {
            name: [Wait(w.who, w.step, w.for_whom, w.seconds + (now - at), w.what) for w in heartbeat.waits]
            for name, (heartbeat, at) in self._job.heartbeats.items()
            if heartbeat.waits
        }
        found = causes(told)
        for source in self._wait_sources:
            found += source.waits(now)
        for who, since in self._registration.waiting():
            chief = self._job.membership.chief
            found.append(Wait(who, 0, [chief], now - since, f"the registration of {who}"))
        return found

    def known(self) -> dict[str, Known]:
        """Under the lock: what to say of each member that others may wait for."""
        now = time.monotonic()
        found = {}
        state = self._job.membership.state
        for name, member in state.members.items():
            heard = self._job.liveness.last_heard(name)
            found[name] = Known(
                host=member.host,
                heard_seconds=now - heard if heard is not None else 0.0,
                left_seconds=self._job.liveness.deadline(name) - now if heard is not None else 0.0,
                state=self._pace.describe(name) or self._in_pipeline(name)
                if now - (heard or now) < FRESH_SECONDS
                else "",
            )
        for name, (_, reason) in state.fencing.items():
            found[name] = Known(host="-", heard_seconds=0.0, left_seconds=0.0, state=f"it {reason}; is being fenced")
        for name in self._job.membership.awaited:
            reason = self._job.evicted.get(name, "is gone")
            found[name] = Known(host="-", heard_seconds=0.0, left_seconds=0.0, state=f"it {reason}; starts again")
        return found

    def _in_pipeline(self, name: str) -> str:
        """Under the lock: which of its processes a pipeline waits for; empty if for none."""
        heartbeat = self._job.heartbeats.get(name)
        if heartbeat is None:
            return ""
        found = (wait for wait in heartbeat[0].waits if wait.what.startswith(PIPELINE_OF))
        return "; ".join(f"its pipeline waits for {', '.join(wait.for_whom)}" for wait in found)

    def ask_why(self, request: Request, message: AskWhy) -> None:
        with self._job.lock:
            waits = self.waits()
            known = self.known()
            gone = [name for name in message.servers if name not in self._job.membership.state.members]
            if gone:
                waits = [Wait(request.peer.name, message.step, gone, 0.0, "server")]
            text = why(
                waits,
                known,
                who=request.peer.name if request.peer.role == "worker" else "",
                step=message.step,
                stuck_seconds=self._job.config.stuck_seconds,
            )
            text = self._pace.add_to(text)
            found = list(self._job.verdicts)
        request.reply(GivenWhy(text, verdicts=found))

    def ask_look(self, request: Request, message: AskLook) -> None:
        """Replies with what the recorder has seen last."""
        request.reply(GivenLook(self._job.latest_look))

    def ask_page(self, request: Request, message: AskPage) -> None:
        """Replies with a link that opens the page once."""
        request.reply(GivenPage(self._new_page_link()))

    # -- status -------------------------------------------------------------------------------------------

    def ask_status(self, request: Request, message: AskStatus) -> None:
        with self._job.lock:
            request.reply(GivenStatus(self._status()))

    def _status(self) -> JobStatus:
        membership, config = self._job.membership, self._job.config
        waits = self.waits()
        outcome = membership.outcome
        return JobStatus(
            job=self._job.job_id,
            name=config.name,
            term=self._job.term,
            generation=membership.generation,
            policy=config.policy,
            exchange=config.exchange,
            replicas=max(1, config.replicas),
            ack=config.ack or ("replicated" if config.replicas > 1 else "memory"),
            protection=self._protection(),
            seconds=self._job.seconds(),
            members=self._members(),
            waits=waits,
            why=self._why(waits),
            events=list(self._job.events),
            num_revoked=membership.state.num_revoked,
            epochs=progress(membership.state.leases),
            saves=self.save_counts(),
            verdict=outcome.reason if outcome else "",
            readings=self._metrics.values(),
            stop=membership.state.steering.steer.stop,
            lr_factor=membership.state.steering.factor,
            step=self._job.step(),
            verdicts=list(self._job.verdicts),
            missing=[] if membership.formed or outcome else membership.missing(),
        )

    def _members(self) -> list[MemberStatus]:
        """All members, servers first."""
        membership, state = self._job.membership, self._job.membership.state
        shares = self.worker_shares()
        steps = (known.step for name, (known, _) in self._job.heartbeats.items() if name in state.entered)
        furthest = max(steps, default=0)
        names = [*membership.servers(), *membership.workers()]
        replica_sets = state.replica_sets.values()
        primaries = collections.Counter(replica_set.primary for replica_set in replica_sets)
        backups = collections.Counter(name for replica_set in replica_sets for name in replica_set.backups)
        return [self._member_status(name, shares, furthest, primaries[name], backups[name]) for name in names]

    def _why(self, waits: Sequence[Wait]) -> str:
        return self._pace.add_to(why(waits, self.known(), stuck_seconds=self._job.config.stuck_seconds))

    def totals(self) -> JobTotals:
        """Under the lock: all that members have told, for the recorder."""
        membership, waits = self._job.membership, self.waits()
        outcome = membership.outcome
        return JobTotals(
            at=time.time(),
            step=self._job.step(),
            seconds=self._job.seconds(),
            members=[self._totals_of(status) for status in self._members()],
            gone=list(membership.awaited),
            waits=waits,
            why=self._why(waits) if waits else "",
            epochs=progress(membership.state.leases),
            readings=self._metrics.values(),
            verdict=outcome.reason if outcome else "",
            stop=membership.state.steering.steer.stop,
            generation=membership.generation,
            term=self._job.term,
        )

    def _totals_of(self, status: MemberStatus) -> MemberTotals:
        report = self._job.reports.get(status.name, _NO_REPORT)
        stats = self._job.member_stats.get(status.name, _NO_STATS)
        return MemberTotals(
            status=status,
            stats=stats,
            times=report.times,
            samples=report.samples,
            shared_bytes=report.pushed.shared,
        )

    def slices(self, most: int = 3) -> dict[int, str]:
        """Under the lock: what is in each slice, in words."""
        found = {}
        for segment in self._job.registry.layout.segments:
            for part in segment.slices:
                names = [segment.parameters[piece.parameter].name for piece in segment.pieces(part)[: most + 1]]
                more = ", …" if len(names) > most else ""
                found[part.id] = f"slice {part.id} ({', '.join(names[:most])}{more})"
        return found

    def _protection(self) -> str:
        """What the death of a server would cost now."""
        state = self._job.membership.state
        hosts = [state.members[name].host for name in self._job.membership.servers()]
        return protection_of(self._job.config, hosts, state.replica_sets.values())

    def _member_status(
        self, name: str, shares: Mapping[str, float], furthest: int, num_primary: int, num_backup: int
    ) -> MemberStatus:
        state, now = self._job.membership.state, time.monotonic()
        member, heartbeat = state.members[name], self._job.heartbeats.get(name)
        heard = self._job.liveness.last_heard(name)
        step = heartbeat[0].step if heartbeat else 0
        report = self._job.reports.get(name)
        return MemberStatus(
            name=name,
            role=member.role,
            incarnation=member.incarnation,
            host=member.host,
            since=member.since,
            heard_seconds=now - heard if heard is not None else 0.0,
            deadline_seconds=self._job.liveness.deadline(name) - heard if heard is not None else 0.0,
            rtt_seconds=heartbeat[0].rtt_seconds if heartbeat else 0.0,
            state=self._state_of(name),
            step=step,
            lag=furthest - step if member.role == "worker" and name in state.entered else 0,
            num_primary=num_primary,
            num_backup=num_backup,
            cores=member.cores,
            pid=member.pid,
            stages=report.stages if report is not None else [],
            samples_per_second=report.samples / report.seconds if report is not None and report.seconds else 0.0,
            steps_per_push=report.times.steps_per_push if report is not None else 1,
            share=shares.get(name, 0.0),
        )

    def _state_of(self, name: str) -> str:
        state, heartbeat = self._job.membership.state, self._job.heartbeats.get(name)
        if name in self._job.retiring:
            return "retiring"
        if name not in self._job.endpoints:
            return "suspected"
        if heartbeat is not None and heartbeat[0].is_quarantined:
            return "quarantined"
        if state.members[name].role == "worker" and name not in state.entered:
            return "joining"
        return self._pace.state_of(name) or "working"


#: A phase with a smaller share of the step is not worth advice.
WORTH = 0.15
#: The others wait for a worker whose compute time is this much above the median.
MUCH_LONGER = 1.25
DEFAULTS = JobConfig()


def profile_lines(
    times: Mapping[str, StepTimes],
    servers: Sequence[ServerStats],
    config: JobConfig = DEFAULTS,
    stages: Mapping[str, Sequence[StageStats]] | None = None,
) -> list[str]:
    """The profile of a job, as lines to read: a table with a line per worker, and advice."""
    known = {name: times[name] for name in sorted(times, key=by_name) if times[name].num_steps}
    if not known:
        return ["profile: no step was made"]
    width = max(len("worker"), *map(len, known))
    columns = ("steps", "step", "compute", "stage", "wait", "(apply)", "pull")
    head = f"{'worker':{width}} " + " ".join(f"{column:>9}" for column in columns)
    title = "profile: milliseconds per step, in the mean; apply: the servers' rules, within the wait or beside it"
    lines = [title, head]
    applied = apply_seconds(servers)
    for name, own in known.items():
        cells = (own.total, own.compute, own.stage, own.wait, applied * own.num_steps, own.pull)
        row = " ".join(f"{seconds / own.num_steps * 1e3:9.2f}" for seconds in cells)
        lines.append(f"{name:{width}} {own.num_steps:9,} {row}")
    if config.sync_every == "auto":
        for name, own in known.items():
            steps = f"{own.steps_per_push} local step{'s' if own.steps_per_push > 1 else ''}"
            lines.append(f"profile: {name} makes {steps} for a push now (--sync-every auto)")
    lines += [f"profile: {sentence}" for sentence in _advice(known, applied, config)]
    for name in sorted(stages or {}, key=by_name):
        lines += [f"profile: {line}" for line in pipeline_lines(name, (stages or {})[name])]
    return lines


def _advice(known: Mapping[str, StepTimes], applied: float, config: JobConfig) -> Iterator[str]:
    total = sum(own.total for own in known.values()) or 1.0
    shares = {
        phase: sum(getattr(own, phase) for own in known.values()) / total for phase in ("stage", "wait", "pull")
    }
    if max(shares.values()) < WORTH:
        compute = sum(own.compute for own in known.values()) / total
        yield f"{compute:.0%} of the step is the script's own work"
        return
    compute_by = {name: own.compute / own.num_steps for name, own in known.items()}
    slowest = max(compute_by, key=lambda name: compute_by[name])
    median = sorted(compute_by.values())[len(compute_by) // 2 if len(compute_by) % 2 else len(compute_by) // 2 - 1]
    if shares["wait"] >= WORTH and compute_by[slowest] > MUCH_LONGER * median:
        yield f"{slowest} computes longest ({compute_by[slowest] * 1e3:.1f} ms a step): the others wait for it"
    elif shares["wait"] >= WORTH:
        steps = sum(own.num_steps for own in known.values())
        part = applied * steps / max(sum(own.wait for own in known.values()), 1e-9)
        what = "mostly for the servers' rules" if part >= 0.5 else "for answers"
        yield f"{shares['wait']:.0%} of the step is spent waiting, {what}{_try(_instead_of_waiting(part, config))}"
    for phase, what in (
        ("stage", "gradients into the arena and on their way"),
        ("pull", "new parameters into their place"),
    ):
        if shares[phase] >= WORTH:
            remedies = ["larger batches"]
            if not config.steps_locally and not config.window and len(known) > 1:
                remedies.append("--sync-every H, or auto (fewer bytes)")
            yield f"{shares[phase]:.0%} of the step is spent on {what}{_try(remedies)}"


def _instead_of_waiting(part: float, config: JobConfig) -> list[str]:
    """`part`: the share of the wait that is for the servers' rules."""
    if config.exchange == "ring":  # every process applies the rule to everything
        return ["--exchange servers"] if part >= 0.5 else []
    remedies = ["more servers (-s)"] if part >= 0.5 else []
    if not config.window:
        remedies.append("--policy async --window 1 (older parameters, no waiting)")
    return remedies


def _try(remedies: Sequence[str]) -> str:
    return f"; try {', or '.join(remedies)}" if remedies else ""
