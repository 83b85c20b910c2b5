"""The table at the end of a job. Pure: facts in, lines out. Unknown facts have no row."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence

from syncline.core.members import by_name
from syncline.core.metrics import told
from syncline.core.units import counted

COLUMNS = 100
_LABEL_COLUMNS = 13
#: Deaths listed one by one. More of them are counted by member.
MOST_DEATHS = 3


@dataclasses.dataclass(frozen=True)
class Death:
    """One death that the job survived."""

    name: str
    reason: str  # "was killed by SIGKILL"
    step: int  # of the job, when the launcher noticed
    comes_back: bool  # the launcher restarts it
    back_seconds: float | None = None  # until it had rejoined; None: it never did
    died_again: bool = False  # before it had rejoined

    def told(self) -> str:
        """In words."""
        if not self.comes_back:
            after = "not restarted"
        elif self.died_again:
            after = "died again before it was back"
        elif self.back_seconds is None:
            after = "not back before the end"
        else:
            after = f"back after {duration(self.back_seconds)}"
        where = f" at step {self.step:,}" if self.step else ""
        return f"{self.name} {self.reason}{where}, {after}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What the launcher knows of an ended job."""

    verdict: str
    seconds: float  # from the launcher's start to the end of all members
    logs: str
    is_known: bool = False  # the coordinator answered at least once
    is_final: bool = False  # its last answer was after the end: the numbers are final
    start_seconds: float | None = None  # until all members had joined; None: they never did
    missing: Sequence[str] = ()  # members that the start waited for
    policy: str = ""
    num_steps: int = 0
    num_samples: int = 0  # handed to the scripts
    sample_seconds: float = 0.0  # from the first sample to the last
    readings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    best: str = ""
    stop: str = ""  # the rule and value that ended training
    deaths: Sequence[Death] = ()
    num_revoked: int = 0
    saves: str = ""
    pushed: str = ""  # bytes per step


def lines(facts: Facts) -> list[str]:
    """The outcome, then one row for each known fact."""
    rows = [
        ("time", _time(facts)),
        ("steps", _steps(facts)),
        ("stopped by", facts.stop),
        ("metrics", told(facts.readings)),
        ("best", facts.best),
        ("deaths", _deaths(facts)),
        ("checkpoints", facts.saves),
        ("pushed", f"{facts.pushed} per step, by all workers" if facts.pushed else ""),
        ("logs", facts.logs),
    ]
    return [facts.verdict, *(line for label, text in rows if text for line in _row(label, text))]


def finished(num_well: int, num_workers: int) -> str:
    """The outcome of a job that has not failed."""
    if num_well == num_workers:
        who = f"all {num_workers} workers" if num_workers > 1 else "its worker"
    else:
        who = f"{num_well} of {counted(num_workers, 'worker')}"
    return f"the job has finished: {who} ended well"


def duration(seconds: float) -> str:
    """`2.1 s`, `41 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _row(label: str, text: str) -> list[str]:
    """A long path or rule is not wrapped, so that it can be copied."""
    head = f"  {label:<{_LABEL_COLUMNS}}"
    return textwrap.wrap(
        text, COLUMNS, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _time(facts: Facts) -> str:
    whole = duration(facts.seconds)
    if facts.start_seconds is not None:
        return f"{whole}, {duration(facts.start_seconds)} of it to start"
    if not facts.is_known:
        return whole
    missing = [name for name in facts.missing if name not in facts.verdict]
    return f"{whole}; the job did not start" + (f": waited for {', '.join(missing)}" if missing else "")


def _steps(facts: Facts) -> str:
    if not facts.is_known or facts.start_seconds is None:
        return ""
    words = [f"{facts.num_steps:,} ({facts.policy})" if facts.policy else f"{facts.num_steps:,}"]
    if facts.num_samples:
        # A dead worker's last samples are unknown; uncommitted ones were read twice.
        about = "about " if any(death.name.startswith("worker-") for death in facts.deaths) else ""
        words.append(f"{about}{facts.num_samples:,} samples read")
        if facts.sample_seconds:
            words.append(f"{about}{facts.num_samples / facts.sample_seconds:,.0f} samples/s")
    return ", ".join(words) + ("" if facts.is_final else "; as last reported")


def _deaths(facts: Facts) -> str:
    deaths = facts.deaths
    if len(deaths) <= MOST_DEATHS:
        words = [death.told() for death in deaths]
    else:
        names = sorted({death.name for death in deaths}, key=by_name)
        numbers = ", ".join(f"{name} {sum(death.name == name for death in deaths)}" for name in names)
        words = [f"{len(deaths)} ({numbers})"]
        if back := [death.back_seconds for death in deaths if death.back_seconds is not None]:
            words.append(f"{len(back)} back after {duration(max(back))} at most")
        if again := sum(death.died_again for death in deaths):
            words.append(f"{again} died again before that")
        if lost := len(deaths) - len(back) - again:
            words.append(f"{lost} not back")
    if facts.num_revoked:
        words.append(f"{counted(facts.num_revoked, 'acknowledged update')} revoked")
    return "; ".join(words)
