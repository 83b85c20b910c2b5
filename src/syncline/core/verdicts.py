"""Verdicts: who makes a job slow, or what is wrong with it, with the figures that say so.

Pure functions of the figures of the last minute (`core/observing.py`) and of the points of metrics. A verdict needs a
difference that is large and lasts: noise on a busy machine is no straggler. Of a healthy job there are none.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from syncline.config import JobConfig
from syncline.core.conditions import is_less_better
from syncline.core.members import by_name
from syncline.core.series import Point
from syncline.core.units import counted
from syncline.core.windows import LookSums, Window, WorkerMeans, recent
from syncline.stats import JobFigures, JobVerdict

#: A member that takes so many times as long as the others in the mean, and in both halves of the window.
MUCH_LONGER = 1.5
#: What is a smaller share of a step is not worth a sentence.
WORTH = 0.2
STARVED = 0.3
MOSTLY_EXCHANGE = 0.5
#: Without a step for so long, and for so many usual steps, a job hangs.
HANG_SECONDS, HANG_STEPS = 30.0, 20.0
#: Of the time, in which rounds wait for a worker alone.
MOSTLY_AWAITED = 0.6
IDLE_CORES = 0.1
#: Readings of a metric before it is judged.
LEAST_READINGS, LEAST_FLAT = 20, 60
#: Of a mean, by how much it may be off, relative to its size, and still be called flat.
MOST_NOISE = 0.02
MOST_NAMED = 3


class StandStill(msgspec.Struct, frozen=True, kw_only=True):
    """When the job made its last step, and how long a step usually takes."""

    still_seconds: float = 0.0
    step_seconds: float = 0.0
    is_held: bool = False  #: a worker is paused by hand, or a validation or save goes on


_MOVES = StandStill()


def verdicts(
    history: Sequence[JobFigures],
    curves: Mapping[str, Sequence[Point]],
    config: JobConfig,
    progress: StandStill = _MOVES,
    slices: Mapping[int, str] = {},
) -> list[JobVerdict]:
    """All verdicts on a job, the worst first. `slices`: what is in them, in words."""
    if not history or history[-1].verdict:
        return []
    hangs = likely_hang(history, progress)
    losses = [
        verdict for name, points in curves.items() for verdict in (*diverging(name, points), *flat(name, points))
    ]
    window = Window(history)
    if hangs or not window.is_enough:
        return [*hangs, *losses]
    slow, hot, starved = stragglers(window), hot_servers(window, slices), data_starvation(window)
    exchange = [] if slow or hot or starved else communication_bound(window, config)
    return [*slow, *hot, *starved, *exchange, *losses]


class TellsVerdicts:
    """Makes a line of each verdict, with its advice, the first time that it is reached."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()  # kind and subject

    def new(self, reached: Sequence[JobVerdict]) -> list[str]:
        found = []
        for verdict in reached:
            key = (verdict.kind, verdict.subject)
            if key not in self._told:
                self._told.add(key)
                found.append(f"{verdict.text}: {verdict.advice}" if verdict.advice else verdict.text)
        return found


# -- members ----------------------------------------------------------------------------------------------


def stragglers(window: Window) -> list[JobVerdict]:
    """Workers that take much longer than the others: by their computing, or by what they send and receive."""
    means = window.whole.workers
    if len(means) < 2:
        return []
    names = [name for name in sorted(means, key=by_name) if _cause(name, window)]
    if 2 * len(names) > len(means):
        return []  # if most are slow, there is no usual
    return [_straggler(name, _cause(name, window), window) for name in names]


def _cause(name: str, window: Window) -> str:
    """What makes a worker slow; "" if it is not."""
    own = window.whole.workers[name]
    if _is_longer(name, window.parts, "compute"):
        usual = window.whole.usual("compute", name)
        return "its data" if own.data - usual > 0.5 * (own.compute - usual) else "compute"
    return "the network" if _is_longer(name, window.parts, "transfer") or _is_late(name, window) else ""


def _straggler(name: str, cause: str, window: Window) -> JobVerdict:
    own = window.whole.workers[name]
    if cause == "the network":
        usual = window.whole.usual("transfer", name)
        if _is_longer(name, window.parts, "transfer"):
            figures = f"sending and receiving takes {_seconds(own.transfer)} a step, of the others {_seconds(usual)}"
        else:
            figures = f"rounds wait for it alone {window.awaited[0].get(name, 0.0):.0%} of the time"
        text = (
            f"{name} is the straggler: the others wait for what it sends, and it computes as fast as they do; "
            f"the cause is the network; {figures}"
        )
        advice = "see the link of its host; --codec bf16 or --sync-every auto send less"
    else:
        usual = window.whole.usual("compute", name)
        text = (
            f"{name} is the straggler: {_seconds(own.compute)} of its own work a step, "
            f"{_times(own.compute, usual)} ({_seconds(usual)}); the cause is {cause}"
        )
        advice = "see what else runs on its host; --cores auto, --policy sync:spare=1 or bounded:2 go on without it"
        if cause == "its data":
            advice = "see the storage of its host, and give its loader more workers"
    return JobVerdict(kind="straggler", subject=name, text=text, advice=advice, since=_since(name, window))


def _is_longer(name: str, parts: Sequence[LookSums], phase: str, times: float = MUCH_LONGER) -> bool:
    for part in parts:
        own = part.workers.get(name)
        if own is None or len(part.workers) < 2:
            return False
        value, usual = float(getattr(own, phase)), part.usual(phase, name)
        if value < times * usual or value - usual < WORTH * own.total:
            return False
    return True


def _is_late(name: str, window: Window) -> bool:
    """Whether rounds wait for this worker alone most of the time, in both halves, though it computes no longer than
    the others in either: then what it sends comes late. Its own times do not tell: the answer comes late to it, too.
    """
    for part, awaited in zip(window.parts, window.awaited, strict=True):
        if awaited.get(name, 0.0) < MOSTLY_AWAITED or name not in part.workers:
            return False
        if _is_longer(name, [part], "compute"):
            return False
    waits = [one.wait for one in window.whole.workers.values() if one.name != name]
    return statistics.fmean(waits) >= WORTH * window.mean_total > 0


def _since(name: str, window: Window) -> float:
    """The begin of the newest run of looks in which a worker is slow, five at a time."""
    since = 0.0
    for began, part in window.fives:
        if not any(_is_longer(name, [part], phase, 1.3) for phase in ("compute", "transfer")):
            break
        since = began
    return since or window.since


def hot_servers(window: Window, slices: Mapping[int, str] = {}) -> list[JobVerdict]:
    """A server that works much longer on each round than the others, while workers wait for it."""
    total, whole = window.mean_total, window.whole.apply_seconds
    if not total or len(whole) < 2:
        return []
    hottest = max(whole, key=lambda name: whole[name])
    usual = statistics.median(value for name, value in whole.items() if name != hottest)
    for part in window.parts:
        others = [value for name, value in part.apply_seconds.items() if name != hottest]
        own = part.apply_seconds.get(hottest, 0.0)
        if not others or own < 2 * statistics.median(others) or own - statistics.median(others) < WORTH * total:
            return []
    last = next((member for member in window.history[-1].members if member.name == hottest), None)
    numbers = [number for number, share in (last.busiest if last is not None else ()) if share > 0]
    told = "; its busiest slices: " + ", ".join(slices.get(n, f"slice {n}") for n in numbers) if numbers else ""
    times = f", {_times(whole[hottest], usual)}" if usual > 0 else ""
    text = f"{hottest} is the hot server: {_seconds(whole[hottest])} of a round's step in its rules{times}{told}"
    advice = "give its host more cores, or the job more servers (syncline scale JOB -s N), or smaller slices"
    return [JobVerdict(kind="hot-server", subject=hottest, text=text, advice=advice, since=window.since)]


def data_starvation(window: Window) -> list[JobVerdict]:
    """Workers that wait for their loaders."""
    means = window.whole.workers
    starved = sorted(
        (
            name
            for name in means
            if all(name in part.workers and _data_share(part.workers[name]) >= STARVED for part in window.parts)
        ),
        key=by_name,
    )
    if not starved:
        return []
    worst = max((means[name] for name in starved), key=_data_share)
    part = f"{_data_share(worst):.0%} of a step ({_seconds(worst.data)} of {_seconds(worst.total)})"
    text = (
        f"{_named(starved)} {'waits' if len(starved) == 1 else 'wait'} for data: {worst.name} spends {part} "
        "waiting for its loader"
    )
    advice = "DataLoader(num_workers=N), faster storage, or less work per sample in the data set"
    subject = starved[0] if len(starved) == 1 else ""
    return [JobVerdict(kind="data-starvation", subject=subject, text=text, advice=advice, since=window.since)]


def _data_share(own: WorkerMeans) -> float:
    return own.data / own.total if own.total else 0.0


def communication_bound(window: Window, config: JobConfig) -> list[JobVerdict]:
    """All workers spend most of their steps on sending, waiting for answers and receiving."""
    means = window.whole.workers
    total = sum(one.total for one in means.values())
    if not total:
        return []
    share = {phase: sum(getattr(one, phase) for one in means.values()) / total for phase in ("stage", "wait", "pull")}
    if sum(share.values()) < MOSTLY_EXCHANGE:
        return []
    applied = max(window.whole.apply_seconds.values(), default=0.0)
    waited = statistics.mean(one.wait for one in means.values())
    in_rules = waited > 0 and applied >= 0.5 * waited and share["wait"] >= 0.5 * sum(share.values())
    parts = ", ".join(f"{phase} {part:.0%}" for phase, part in share.items())
    what = "most of the wait is for the servers' rules" if in_rules else "the job is bound by communication"
    text = f"{sum(share.values()):.0%} of the workers' steps is exchange ({parts}): {what}"
    advice = _less_exchange(in_rules, config)
    return [JobVerdict(kind="communication", subject="", text=text, advice=advice, since=window.since)]


def _less_exchange(in_rules: bool, config: JobConfig) -> str:
    remedies = []
    if not config.is_ring:
        remedies.append(f"more servers (-s {max(2, 2 * config.servers)})")
    if not in_rules and not config.codec and config.transport != "shm":
        remedies.append("--codec bf16 where workers push over sockets")
    if not config.steps_locally:
        remedies.append("--sync-every auto")
    remedies.append("larger batches")
    return "try " + ", or ".join(remedies)


def likely_hang(history: Sequence[JobFigures], progress: StandStill) -> list[JobVerdict]:
    """The job has made no step for much longer than a step takes."""
    still = progress.still_seconds
    if progress.is_held or still < max(HANG_SECONDS, HANG_STEPS * progress.step_seconds):
        return []
    last = history[-1]
    workers = [member for look in recent(history) for member in look.members if member.role == "worker"]
    are_idle = bool(workers) and max(member.cores for member in workers) < IDLE_CORES
    if not are_idle and not any(wait.seconds >= HANG_SECONDS for wait in last.waits):
        return []  # they work on something that is no step: an evaluation, or a very long one
    usual = f"; a step usually takes {_seconds(progress.step_seconds)}" if progress.step_seconds else ""
    cause = f"; {last.why}" if last.why else "; no member waits for another: the scripts themselves may stand still"
    text = f"the job probably hangs: no step for {still:.0f} s, at step {last.step:,}{usual}{cause}"
    advice = "syncline why JOB names who is waited for; py-spy dump --pid PID shows where its script stands"
    return [JobVerdict(kind="hang", subject="", text=text, advice=advice, since=last.at - still)]


# -- metrics ----------------------------------------------------------------------------------------------


def diverging(name: str, points: Sequence[Point]) -> list[JobVerdict]:
    """A loss that is no number any more, or rises far above where it has been."""
    if is_less_better(name) is not True or len(points) < 3:
        return []
    advice = "a lower learning rate, --clip-norm or warm-up; resume from a checkpoint of before"
    if not any(math.isfinite(one.value) for one in points[-3:]):
        began = next((one for one in reversed(points) if math.isfinite(one.value)), points[0])
        text = f"{name} diverges: it is not finite since step {began.step:,.0f}"
        return [JobVerdict(kind="diverging", subject=name, text=text, advice=advice, since=began.at)]
    known = [one for one in points if math.isfinite(one.value)]
    if len(known) < LEAST_READINGS:
        return []
    windows, size = _windows(known)
    best = min(range(len(windows)), key=lambda k: windows[k])
    noise = _noise(known) / math.sqrt(size)
    last, first = windows[-1], windows[0]
    is_rising = best <= len(windows) - 4 and windows[-1] >= windows[-2] >= windows[-3]
    if is_rising and last > max(first, 2 * windows[best] if windows[best] > 0 else first) + 4 * noise:
        place = known[min(len(known) - 1, (best + 1) * size - 1)]
        text = (
            f"{name} diverges: {last:.4g} in the mean of the last {counted(size, 'reading')}, after "
            f"{windows[best]:.4g} at step {place.step:,.0f}"
        )
        return [JobVerdict(kind="diverging", subject=name, text=text, advice=advice, since=place.at)]
    return []


def flat(name: str, points: Sequence[Point]) -> list[JobVerdict]:
    """A loss that has not got better for half of all its readings."""
    known = [one for one in points if math.isfinite(one.value)]
    if is_less_better(name) is not True or len(known) < LEAST_FLAT:
        return []
    quarter = len(known) // 4
    before = statistics.fmean(one.value for one in known[-2 * quarter : -quarter])
    last = statistics.fmean(one.value for one in known[-quarter:])
    noise = _noise(known[-2 * quarter :]) * math.sqrt(2 / quarter)
    least = max(0.002 * abs(before), 2 * noise)
    if 2 * noise > MOST_NOISE * abs(before):
        return []  # too noisy to tell
    if abs(before - last) > least or diverging(name, points):
        return []
    since = known[-2 * quarter]
    text = f"{name} is flat: {last:.4g} since step {since.step:,.0f} ({counted(2 * quarter, 'reading')})"
    advice = "it has converged, or the learning rate is too low or too high; --on-plateau lr*0.1, --stop for the end"
    return [JobVerdict(kind="flat", subject=name, text=text, advice=advice, since=since.at)]


def _windows(points: Sequence[Point]) -> tuple[list[float], int]:
    """The means of ten parts or so, in order."""
    size = max(2, len(points) // 10)
    tail = len(points) % size
    parts = [points[k : k + size] for k in range(tail, len(points), size)]
    return [statistics.fmean(one.value for one in part) for part in parts], size


def _noise(points: Sequence[Point]) -> float:
    """How far readings are from their neighbours, as a standard deviation."""
    steps = [abs(b.value - a.value) for a, b in itertools.pairwise(points)]
    return statistics.median(steps) / 0.954 if steps else 0.0


def _times(seconds: float, usual: float) -> str:
    return f"{seconds / usual:.1f} times as long as the others" if usual > 0 else "and the others next to none"


def _named(names: Sequence[str]) -> str:
    if len(names) > MOST_NAMED:
        return f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
