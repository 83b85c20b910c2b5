"""What a job does now: figures of a second or so, from the totals that its members tell.

Pure. Totals only rise within one life of a member; a new incarnation begins at zero, and so does what it told before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from syncline.stats import (
    EpochProgress,
    JobFigures,
    MemberCounts,
    MemberFigures,
    MemberStats,
    MemberStatus,
    StageStats,
    StepTimes,
    Wait,
)

#: Below this a rate of bytes is not worth a line in a picture.
LEAST_BYTES_PER_SECOND = 1.0
#: Members wait for each other in every step; longer waits are named.
LEAST_WAIT_SECONDS = 1.0
#: A member that has told nothing new for so long does nothing that is known of: its rates are zero.
SILENT_SECONDS = 10.0


class MemberTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one member at a moment: how it stands, and its totals."""

    status: MemberStatus
    stats: MemberStats = MemberStats()
    times: StepTimes = StepTimes()
    samples: int = 0
    shared_bytes: int = 0  #: pushed through shared memory


class JobTotals(msgspec.Struct, frozen=True, kw_only=True):
    """A job at a moment."""

    at: float
    step: int
    seconds: float
    members: Sequence[MemberTotals]
    gone: Sequence[str] = ()
    waits: Sequence[Wait] = ()
    why: str = ""
    epochs: Sequence[EpochProgress] = ()
    readings: Mapping[str, float] = {}
    verdict: str = ""
    stop: str = ""
    generation: int = 0
    term: int = 0


class _Told(msgspec.Struct, frozen=True):
    """The totals that a member told last, when they were first seen, and what they came to since those before."""

    at: float
    incarnation: int
    stats: MemberStats
    cores: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    peers: Mapping[str, float] = {}


class Observer:
    """Compares each look at a job with the one before.

    A member tells its totals about as often as it is looked at, so some looks see the same ones again. Its rates then
    stay as they were for some seconds; what follows is divided by the whole time.
    """

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}  # by member
        self._before: JobTotals | None = None
        self._members: dict[str, MemberTotals] = {}
        self._staleness: dict[str, tuple[int, tuple[int, ...]]] = {}  # server -> incarnation and its counts
        self._ended_staleness: tuple[int, ...] = ()  # of servers' earlier lives

    def look(self, totals: JobTotals) -> JobFigures:
        """The figures of the time since the last look."""
        before = self._before
        passed = totals.at - before.at if before is not None else 0.0
        hosted = _hosted(totals.members)
        members = tuple(self._member(member, totals.at, passed, hosted) for member in totals.members)
        self._note_staleness(totals.members)
        num_steps = max(0, totals.step - before.step) if before is not None else 0
        self._before = totals
        self._members = {member.status.name: member for member in totals.members}
        self._told = {name: told for name, told in self._told.items() if name in self._members}
        return JobFigures(
            at=totals.at,
            step=totals.step,
            seconds=totals.seconds,
            steps_per_second=num_steps / passed if passed > 0 else 0.0,
            samples_per_second=sum(member.samples_per_second for member in members),
            members=members,
            gone=tuple(totals.gone),
            waits=tuple(totals.waits),
            why=totals.why if any(wait.seconds >= LEAST_WAIT_SECONDS for wait in totals.waits) else "",
            staleness_counts=_added([self._ended_staleness, *(counts for _, counts in self._staleness.values())]),
            epochs=tuple(totals.epochs),
            readings=dict(totals.readings),
            verdict=totals.verdict,
            stop=totals.stop,
            generation=totals.generation,
            term=totals.term,
        )

    def _tell(self, now: MemberTotals, at: float) -> _Told:
        """The rates of what a member has told."""
        name, stats = now.status.name, now.stats
        before = self._told.get(name)
        if before is None or before.incarnation != now.status.incarnation:
            # Totals that are seen for the first time may be of hours: they are no rate.
            made = _Told(at, now.status.incarnation, stats)
        elif stats is before.stats or stats == before.stats:
            is_silent = at - before.at > SILENT_SECONDS
            return _Told(before.at, before.incarnation, stats) if is_silent else before
        else:
            seconds, known = at - before.at, before.stats
            made = _Told(
                at,
                now.status.incarnation,
                stats,
                _rate(stats.process.cpu_seconds, known.process.cpu_seconds, seconds),
                _rate(stats.wire.bytes_sent, known.wire.bytes_sent, seconds),
                _rate(stats.wire.bytes_received, known.wire.bytes_received, seconds),
                {
                    peer: _rate(sent, known.peers.get(peer, (0, 0))[0], seconds)
                    for peer, (sent, _) in stats.peers.items()
                },
            )
        self._told[name] = made
        return made

    def _member(self, now: MemberTotals, at: float, passed: float, hosted: Mapping[str, int]) -> MemberFigures:
        status = now.status
        known = self._members.get(status.name)
        # Totals that are seen for the first time may be of hours: they are no rate.
        before = known if known is not None and known.status.incarnation == status.incarnation else now
        seconds = passed if before is not now else 0.0
        steps = max(0, now.times.num_steps - before.times.num_steps)
        server, server_before = now.stats.server, before.stats.server
        rounds, apply, busiest = 0, 0.0, tuple[tuple[int, float], ...]()
        if server is not None:
            rounds = max(0, server.num_rounds - (server_before.num_rounds if server_before else 0))
            spent = server.round_seconds - (server_before.round_seconds if server_before else 0.0)
            apply = max(0.0, spent) / rounds if rounds else 0.0
            spent_before = dict(server_before.busiest) if server_before else {}
            busiest = tuple(
                (part, _rate(total, spent_before.get(part, 0.0), seconds)) for part, total in server.busiest
            )
        shared = _rate(now.shared_bytes, before.shared_bytes, seconds)
        told = self._tell(now, at)
        peers = dict(told.peers)
        if shared:  # read in place by the servers: in proportion to what each of them has
            whole = sum(hosted.values()) or 1
            for name, num_bytes in hosted.items():
                peers[name] = peers.get(name, 0.0) + shared * num_bytes / whole
        return MemberFigures(
            name=status.name,
            role=status.role,
            host=status.host,
            state=status.state,
            incarnation=status.incarnation,
            step=status.step,
            lag=status.lag,
            num_steps=steps,
            compute=_mean(now.times.compute, before.times.compute, steps),
            data=_mean(now.times.data, before.times.data, steps),
            stage=_mean(now.times.stage, before.times.stage, steps),
            wait=_mean(now.times.wait, before.times.wait, steps),
            pull=_mean(now.times.pull, before.times.pull, steps),
            samples_per_second=_rate(now.samples, before.samples, seconds),
            share=status.share,
            apply=apply,
            num_rounds=rounds,
            cores=told.cores,
            memory_bytes=now.stats.process.memory_bytes,
            gpu_bytes=now.stats.process.gpu_bytes,
            gpu_busy=now.stats.process.gpu_busy,
            sent_per_second=told.sent + shared,
            received_per_second=told.received,
            peers={name: rate for name, rate in peers.items() if rate >= LEAST_BYTES_PER_SECOND},
            parameter_bytes=server.parameter_bytes if server is not None else 0,
            busiest=busiest,
            heard_seconds=status.heard_seconds,
            rtt_seconds=status.rtt_seconds,
            pid=status.pid,
            stages=_stages_since(status.stages, before.status.stages),
            counts=MemberCounts(
                now.stats.wire.bytes_sent + now.shared_bytes,
                now.stats.wire.bytes_received,
                round(now.stats.process.cpu_seconds, 3),
                now.samples,
            ),
        )

    def _note_staleness(self, members: Sequence[MemberTotals]) -> None:
        for member in members:
            server, name = member.stats.server, member.status.name
            if server is None:
                continue
            incarnation, counts = self._staleness.get(name, (0, ()))
            if incarnation != member.status.incarnation:
                self._ended_staleness = _added([self._ended_staleness, counts])
            self._staleness[name] = (member.status.incarnation, server.staleness_counts)


def _stages_since(now: Sequence[StageStats], before: Sequence[StageStats]) -> tuple[StageStats, ...]:
    """What the processes of a pipeline did meanwhile. Without a step, or cut elsewhere since: all that is known."""
    if [one.layers for one in now] != [one.layers for one in before]:
        return tuple(now)
    if any(one.num_steps <= known.num_steps for one, known in zip(now, before, strict=True)):
        return tuple(now)
    return tuple(
        msgspec.structs.replace(
            one,
            num_steps=one.num_steps - known.num_steps,
            busy_seconds=one.busy_seconds - known.busy_seconds,
            step_seconds=one.step_seconds - known.step_seconds,
            sent_bytes=one.sent_bytes - known.sent_bytes,
        )
        for one, known in zip(now, before, strict=True)
    )


def _hosted(members: Sequence[MemberTotals]) -> dict[str, int]:
    """The bytes of parameters that each server has."""
    return {
        member.status.name: member.stats.server.parameter_bytes
        for member in members
        if member.stats.server is not None and member.stats.server.parameter_bytes
    }


def _rate(now: float, before: float, seconds: float) -> float:
    return max(0.0, now - before) / seconds if seconds > 0 else 0.0


def _mean(now: float, before: float, count: int) -> float:
    return max(0.0, now - before) / count if count else 0.0


def _added(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    longest = max(map(len, counts), default=0)
    return tuple(sum(one[k] for one in counts if k < len(one)) for k in range(longest))
