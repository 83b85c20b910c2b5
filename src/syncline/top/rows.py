"""What a look says, as words and numbers: the line on top, the table of members, one member. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from syncline.core.leasing.progress import epoch_told
from syncline.core.members import by_name
from syncline.core.pipelining.telling import pipeline_lines, split_told
from syncline.core.units import bytes_told, number_told, seconds_told
from syncline.stats import JobLook, MemberFigures, bubble

#: Bars of a step, as wide as this.
BAR_COLUMNS = 48
PHASES = ("compute", "data", "stage", "wait", "pull", "apply")


class Column(NamedTuple):
    """A column of the table, and what it is sorted by."""

    name: str
    key: Callable[[MemberFigures], float | tuple[object, ...]]
    text: Callable[[MemberFigures], str]
    is_text: bool = False


def _step(member: MemberFigures) -> float:
    return member.compute + member.stage + member.wait + member.pull


def _of_worker(member: MemberFigures, text: str) -> str:
    return text if member.role == "worker" else ""


def _seconds(name: str) -> Column:
    return Column(
        name,
        lambda member: float(getattr(member, name)),
        lambda member: seconds_told(getattr(member, name)) if getattr(member, name) else "",
    )


COLUMNS = (
    Column("member", lambda m: (m.role != "worker", by_name(m.name)), lambda m: m.name, True),
    Column("state", lambda m: (m.state,), lambda m: m.state, True),
    Column("step", lambda m: m.step, lambda m: _of_worker(m, f"{m.step:,}")),
    Column("lag", lambda m: m.lag, lambda m: _of_worker(m, str(m.lag))),
    Column(
        "samples/s",
        lambda m: m.samples_per_second,
        lambda m: _of_worker(m, number_told(m.samples_per_second)) if m.samples_per_second else "",
    ),
    Column("a step", _step, lambda m: seconds_told(_step(m)) if _step(m) else ""),
    *(_seconds(phase) for phase in PHASES),
    Column("cores", lambda m: m.cores, lambda m: f"{m.cores:.2f}"),
    Column("memory", lambda m: m.memory_bytes, lambda m: bytes_told(m.memory_bytes)),
    Column("sent/s", lambda m: m.sent_per_second, lambda m: bytes_told(m.sent_per_second)),
    Column("heard", lambda m: m.heard_seconds, lambda m: f"{m.heard_seconds:.1f} s"),
    Column("host", lambda m: (m.host,), lambda m: m.host, True),
    Column("stages busy", lambda m: bubble(m.stages), lambda m: split_told(m.stages)),
)
#: The state of members that have died and are waited for.
DEAD = "dead"


def members_of(look: JobLook) -> list[MemberFigures]:
    """Those that live, and those that have died and are waited for."""
    known = {member.name for member in look.figures.members}
    gone = [
        MemberFigures(name=name, role=name.rpartition("-")[0] or "worker", state=DEAD)
        for name in look.figures.gone
        if name not in known
    ]
    return [*look.figures.members, *gone]


def arranged(members: Sequence[MemberFigures], column: int, *, is_reversed: bool) -> list[MemberFigures]:
    """Sorted by a column: names and words from A on, numbers from the largest on. Equal ones by name."""
    chosen = COLUMNS[column]
    found = sorted(members, key=COLUMNS[0].key)
    return sorted(found, key=chosen.key, reverse=is_reversed == chosen.is_text)


def headline(look: JobLook) -> str:
    """Where the job is, in one line."""
    figures = look.figures
    workers = sum(member.role == "worker" for member in figures.members)
    servers = sum(member.role == "server" for member in figures.members)
    parts = [f"step {figures.step:,}", *(epoch_told(epoch) for epoch in figures.epochs[:2])]
    parts += [seconds_told(round(figures.seconds)), f"{number_told(figures.steps_per_second)} steps/s"]
    if figures.samples_per_second:
        parts.append(f"{number_told(figures.samples_per_second)} samples/s")
    parts.append(f"{workers} workers, {servers} servers" + (f", {len(figures.gone)} dead" if figures.gone else ""))
    return " · ".join(parts)


def notices(look: JobLook) -> list[str]:
    """What is wrong now: the end, waits, verdicts."""
    figures = look.figures
    found = [f"the job is over: {figures.verdict}"] if figures.verdict else []
    found += [f"training has stopped by {figures.stop}"] if figures.stop and not figures.verdict else []
    found += [figures.why] if figures.why else []
    for verdict in look.verdicts[:3]:
        found.append(f"{verdict.text}: {verdict.advice}" if verdict.advice else verdict.text)
    return found


def phase_lines(member: MemberFigures) -> list[str]:
    """The time of one step as bars."""
    parts = {phase: getattr(member, phase) for phase in PHASES}
    parts["compute"] = max(0.0, parts["compute"] - parts["data"])  # waiting for data is part of it
    longest = max(parts.values())
    if not longest > 0:
        return ["no step in the last second"]
    width = max(map(len, PHASES))
    return [
        f"{phase:{width}}  {'█' * max(1, round(BAR_COLUMNS * value / longest)):{BAR_COLUMNS}}  {seconds_told(value)}"
        for phase, value in parts.items()
        if value > 0
    ]


def facts(member: MemberFigures) -> list[str]:
    """Everything else about one member."""
    where = f"host {member.host or '-'}, pid {member.pid or '-'}, incarnation {member.incarnation}"
    lines = [f"{member.role}, {member.state or 'unknown'}; {where}"]
    if member.role == "worker":
        lines.append(
            f"step {member.step:,}, {member.lag} behind the fastest; {number_told(member.samples_per_second)} "
            f"samples/s, {member.share:.0%} of all samples"
        )
    else:
        lines.append(
            f"{bytes_told(member.parameter_bytes)} of parameters; {member.num_rounds} rounds in the last second"
        )
    lines.append(
        f"{member.cores:.2f} cores, {bytes_told(member.memory_bytes)} of memory"
        + (f", {bytes_told(member.gpu_bytes)} on GPUs" if member.gpu_bytes else "")
        + (f", which are busy {member.gpu_busy:.0%} of the time" if member.gpu_busy is not None else "")
        + f"; heard of {member.heard_seconds:.1f} s ago, round trip {seconds_told(member.rtt_seconds)}"
    )
    lines.append(f"sends {bytes_told(member.sent_per_second)}/s, receives {bytes_told(member.received_per_second)}/s")
    lines += pipeline_lines(member.name, member.stages)
    most = sorted(member.peers.items(), key=lambda peer: -peer[1])[:8]
    lines += [f"  to {name}: {bytes_told(rate)}/s" for name, rate in most]
    return lines
