"""The status of a job as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from syncline.core.leasing.progress import epoch_told
from syncline.core.metrics import told
from syncline.core.pipelining.telling import pipeline_lines
from syncline.core.units import counted, listed
from syncline.stats import EpochProgress, JobStatus, JobVerdict, MemberStatus, Wait

COLUMNS = 100
MOST_EVENTS = 10
#: Members that are named, of those that the job waits for before it starts.
MOST_MISSING = 6
_HEAD = (
    "member",
    "incarnation",
    "host",
    "pid",
    "state",
    "step",
    "lag",
    "heard",
    "rtt",
    "slices",
    "samples/s",
    "share",
)
_LEFT = (0, 2, 4)  # text columns; the others are numbers


def show_status(status: JobStatus) -> str:
    """Members, waits and recent events."""
    is_ring = status.exchange == "ring"
    copies = "ring" if is_ring else f"{counted(status.replicas, 'replica')}, ack {status.ack}"
    head = (
        f"{status.name or status.job}: {status.policy} · {copies} · term {status.term} · "
        f"generation {status.generation} · {duration(status.seconds)}"
    )
    lines = [head, f"a {'process' if is_ring else 'server'}'s death: {status.protection}", ""]
    lines += _table(status.members) if status.members else []
    if status.missing:
        named = status.missing[:MOST_MISSING]
        rest = [f"{len(status.missing) - MOST_MISSING} more"] if len(status.missing) > MOST_MISSING else []
        lines.append(f"the job has not started yet: it waits for {listed([*named, *rest])} to join")
    if any(member.steps_per_push > 1 for member in status.members):
        made = (f"{member.name} {member.steps_per_push:,}" for member in status.members if member.role == "worker")
        lines += ["", f"local steps for a push: {', '.join(made)}"]
    for member in status.members:
        if told_of_stages := pipeline_lines(member.name, member.stages):
            lines += ["", *told_of_stages]
    if status.epochs:
        lines += ["", *(_whole_epoch(epoch) for epoch in status.epochs)]
    if status.readings:
        lines += ["", f"readings: {told(status.readings)}"]
    if status.lr_factor != 1.0:
        lines.append(f"learning rates are multiplied by {status.lr_factor:.4g}")
    if status.stop:
        lines.append(f"training has stopped by {status.stop}")
    if saves := status.saves.told():
        lines += ["", f"checkpoints: {saves}"]
    lines += ["", "waits: none" if not status.waits else "waits:"]
    lines += [f"  {_wait(wait)}" for wait in sorted(status.waits, key=lambda wait: -wait.seconds)]
    if status.waits and status.why:
        lines.append(f"  {status.why}")
    if status.verdicts:
        lines += ["", *verdict_lines(status.verdicts)]
    if status.events:
        lines += ["lately:", *(f"  {event}" for event in status.events[-MOST_EVENTS:])]
    if status.verdict:
        lines.append(f"the job is over: {status.verdict}")
    return "\n".join(part for line in lines for part in _wrap(line))


def verdict_lines(verdicts: Sequence[JobVerdict]) -> list[str]:
    """Each verdict with its advice."""
    return [f"{verdict.text}: {verdict.advice}" if verdict.advice else verdict.text for verdict in verdicts]


def _wrap(line: str) -> list[str]:
    return textwrap.wrap(line, COLUMNS, subsequent_indent="    ", drop_whitespace=False) or [""]


def _table(members: Sequence[MemberStatus]) -> list[str]:
    rows = [_HEAD, *(_row(member) for member in members)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(_HEAD))]
    shown = [k for k in range(len(_HEAD)) if k < _HEAD.index("samples/s") or any(row[k] for row in rows[1:])]
    return ["  ".join(_cell(row[k], k, widths[k]) for k in shown).rstrip() for row in rows]


def _cell(text: str, column: int, width: int) -> str:
    return text.ljust(width) if column in _LEFT else text.rjust(width)


def _row(member: MemberStatus) -> tuple[str, ...]:
    is_server = member.role == "server"
    state = member.state + (f" ({counted(member.num_restarts, 'restart')})" if member.num_restarts else "")
    return (
        _short(member.name, 16),
        str(member.incarnation),
        _short(f"{member.host} [{member.cores}]" if member.cores else member.host, 20),
        str(member.pid) if member.pid else "",
        _short(state, 24),
        "" if is_server else f"{member.step:,}",
        "" if is_server else str(member.lag),
        f"{member.heard_seconds:.1f} s",
        f"{1e3 * member.rtt_seconds:.1f} ms",
        f"{member.num_primary}+{member.num_backup}" if is_server else "",
        f"{member.samples_per_second:,.0f}" if member.samples_per_second else "",
        f"{100 * member.share:.0f} %" if member.share else "",
    )


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _wait(wait: Wait) -> str:
    who = wait.who or "the round"
    step = f" at step {wait.step}" if wait.step else ""
    return f"{who}{step} waits for {', '.join(wait.for_whom) or 'an answer'}: {wait.seconds:.1f} s ({wait.what})"


def _whole_epoch(epoch: EpochProgress) -> str:
    name, unit = ("job.steps", "steps") if epoch.is_steps else (epoch.loader, "samples")
    parts = [f"{name}: {epoch_told(epoch)}: {epoch.num_done:,} {unit} done"]
    parts += [f"{epoch.num_passed_over:,} passed over"] if epoch.num_passed_over else []
    parts += [f"{epoch.num_quarantined:,} quarantined"] if epoch.num_quarantined else []
    leased = [f"{name} {number:,}" for name, number in sorted(epoch.leased.items())]
    parts += [f"leased: {', '.join(leased)}"] if leased else []
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """In seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
