"""Verdicts: who makes a job slow, or what is wrong with it, with the figures that say so.

Pure functions of the figures of the last minute (`core/observing.py`) and of the points of metrics. A verdict needs a
difference that is large and lasts: noise on a busy machine is no straggler. Of a healthy job there are none.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from syncline.config import JobConfig
from syncline.core.conditions import is_less_better
from syncline.core.members import by_name
from syncline.core.series import Point
from syncline.core.units import counted
from syncline.stats import JobFigures, JobVerdict, MemberFigures

#: Figures that a verdict looks at.
WINDOW_SECONDS = 20.0
#: Before so much is known there is no verdict on speed.
LEAST_SECONDS = 8.0
#: A member that takes so many times as long as the others in the mean, and in both halves of the window.
MUCH_LONGER = 1.5
#: What is a smaller share of a step is not worth a sentence.
WORTH = 0.2
STARVED = 0.3
MOSTLY_EXCHANGE = 0.5
#: Without a step for so long, and for so many usual steps, a job hangs.
HANG_SECONDS, HANG_STEPS = 30.0, 20.0
IDLE_CORES = 0.1
#: Readings of a metric before it is judged.
LEAST_READINGS, LEAST_FLAT = 20, 60
#: Of a mean, by how much it may be off, relative to its size, and still be called flat.
MOST_NOISE = 0.02
MOST_NAMED = 3


class WorkerMeans(msgspec.Struct, frozen=True, kw_only=True):
    """A worker over some looks, per step."""

    name: str
    num_steps: int
    compute: float
    data: float
    stage: float
    wait: float
    pull: float
    looks: int

    @property
    def total(self) -> float:
        return self.compute + self.stage + self.wait + self.pull

    @property
    def transfer(self) -> float:
        return self.stage + self.pull


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
    slow = stragglers(history) if not hangs else []
    hot = hot_servers(history, slices) if not hangs else []
    starved = data_starvation(history) if not hangs else []
    exchange = [] if hangs or slow or hot or starved else communication_bound(history, config)
    losses = [
        verdict for name, points in curves.items() for verdict in (*diverging(name, points), *flat(name, points))
    ]
    return [*hangs, *slow, *hot, *starved, *exchange, *losses]


# -- members ----------------------------------------------------------------------------------------------


def recent(history: Sequence[JobFigures], seconds: float = WINDOW_SECONDS) -> list[JobFigures]:
    """The looks of the last seconds."""
    return [look for look in history if history[-1].at - look.at < seconds]


def worker_means(looks: Iterable[JobFigures]) -> dict[str, WorkerMeans]:
    """Each worker's means over these looks, weighted by steps; of workers that made any."""
    sums: dict[str, list[MemberFigures]] = {}
    for look in looks:
        for member in look.members:
            if member.role == "worker" and member.num_steps:
                sums.setdefault(member.name, []).append(member)
    found = {}
    for name, members in sums.items():
        steps = sum(member.num_steps for member in members)

        def mean(phase: str, members: list[MemberFigures] = members, steps: int = steps) -> float:
            return sum(float(getattr(member, phase)) * member.num_steps for member in members) / steps

        found[name] = WorkerMeans(
            name=name,
            num_steps=steps,
            compute=mean("compute"),
            data=mean("data"),
            stage=mean("stage"),
            wait=mean("wait"),
            pull=mean("pull"),
            looks=len(members),
        )
    return found


def _is_enough(looks: Sequence[JobFigures]) -> bool:
    return len(looks) >= 4 and looks[-1].at - looks[0].at >= LEAST_SECONDS


def _halves(looks: Sequence[JobFigures]) -> list[dict[str, WorkerMeans]]:
    return [worker_means(looks[: len(looks) // 2]), worker_means(looks[len(looks) // 2 :])]


def stragglers(history: Sequence[JobFigures]) -> list[JobVerdict]:
    """Workers that take much longer than the others: by their computing, or by what they send and receive."""
    looks = recent(history)
    if not _is_enough(looks):
        return []
    means, halves = worker_means(looks), _halves(looks)
    if len(means) < 2:
        return []
    found = []
    for name in sorted(means, key=by_name):
        own, others = means[name], [one for one in means.values() if one.name != name]
        usual = statistics.median(one.compute for one in others)
        if _is_longer(name, [means, *halves], "compute"):
            cause = "its data" if own.data - usual > 0.5 * (own.compute - usual) else "compute"
            text = (
                f"{name} is the straggler: {_seconds(own.compute)} of its own work a step, "
                f"{_times(own.compute, usual)} ({_seconds(usual)}); the cause is {cause}"
            )
            advice = (
                "see what else runs on its host; --cores auto, --policy sync:spare=1 or bounded:2 go on without it"
            )
            if cause == "its data":
                advice = "see the storage of its host, and give its loader more workers"
        elif _is_longer(name, [means, *halves], "transfer") or _is_blamed(name, looks, means):
            usual = statistics.median(one.transfer for one in others)
            compared = (
                f"; sending and receiving takes {_seconds(own.transfer)} a step, of the others {_seconds(usual)}"
            )
            text = (
                f"{name} is the straggler: the others wait for what it sends, and it computes as fast as they do; "
                f"the cause is the network{compared if own.transfer > 2 * usual else ''}"
            )
            advice = "see the link of its host; --codec bf16 or --sync-every auto send less"
        else:
            continue
        is_slow = functools.partial(_is_slow, name)
        since = _since(history, is_slow) if is_slow(history[-5:]) else looks[0].at
        found.append(JobVerdict(kind="straggler", subject=name, text=text, advice=advice, since=since))
    return found if 2 * len(found) <= len(means) else []  # if most are slow, there is no usual


def _is_longer(
    name: str, halves: Sequence[Mapping[str, WorkerMeans]], phase: str, times: float = MUCH_LONGER
) -> bool:
    for means in halves:
        own, others = means.get(name), [one for one in means.values() if one.name != name]
        if own is None or not others:
            return False
        value = float(getattr(own, phase))
        usual = statistics.median(float(getattr(one, phase)) for one in others)
        if value < times * usual or value - usual < WORTH * own.total:
            return False
    return True


def _is_slow(name: str, part: Sequence[JobFigures]) -> bool:
    means = [worker_means(part)]
    return _is_longer(name, means, "compute", 1.3) or _is_longer(name, means, "transfer", 1.3)


def _is_blamed(name: str, looks: Sequence[JobFigures], means: Mapping[str, WorkerMeans]) -> bool:
    """Whether rounds wait for this worker alone in most looks, though it computes as fast as the others."""
    num_blamed = 0
    for look in looks:
        waits = [wait for wait in look.waits if wait.what in ("round", "lag")]
        num_blamed += any(wait.for_whom == [name] for wait in waits)
    shortest = min(means.values(), key=lambda one: one.wait)
    waited = sum(one.wait for one in means.values()) / sum(one.total for one in means.values())
    return num_blamed >= 0.6 * len(looks) and waited >= WORTH and shortest.name == name


def _since(history: Sequence[JobFigures], holds: Callable[[Sequence[JobFigures]], bool]) -> float:
    """The begin of the newest stretch of looks in which it holds, five at a time."""
    since = history[-1].at
    for end in range(len(history), 4, -5):
        part = history[end - 5 : end]
        if not holds(part):
            break
        since = part[0].at
    return since


def hot_servers(history: Sequence[JobFigures], slices: Mapping[int, str] = {}) -> list[JobVerdict]:
    """A server that works much longer on each round than the others, while workers wait for it."""
    looks = recent(history)
    if not _is_enough(looks):
        return []
    means = worker_means(looks)
    total = statistics.mean(one.total for one in means.values()) if means else 0.0
    if not total:
        return []
    halves = [_apply_means(part) for part in (looks[: len(looks) // 2], looks[len(looks) // 2 :])]
    whole = _apply_means(looks)
    if len(whole) < 2:
        return []
    hottest = max(whole, key=lambda name: whole[name])
    usual = statistics.median(value for name, value in whole.items() if name != hottest)
    for means_of in (whole, *halves):
        others = [value for name, value in means_of.items() if name != hottest]
        own = means_of.get(hottest, 0.0)
        if not others or own < 2 * statistics.median(others) or own - statistics.median(others) < WORTH * total:
            return []
    last = next((member for member in history[-1].members if member.name == hottest), None)
    parts = [number for number, share in (last.busiest if last is not None else ()) if share > 0]
    told = "; its busiest slices: " + ", ".join(slices.get(n, f"slice {n}") for n in parts) if parts else ""
    times = f", {_times(whole[hottest], usual)}" if usual > 0 else ""
    text = f"{hottest} is the hot server: {_seconds(whole[hottest])} of a round's step in its rules{times}{told}"
    advice = "give its host more cores, or the job more servers (syncline scale JOB -s N), or smaller slices"
    return [JobVerdict(kind="hot-server", subject=hottest, text=text, advice=advice, since=looks[0].at)]


def _apply_means(looks: Iterable[JobFigures]) -> dict[str, float]:
    """Seconds of a round in the rules of each server."""
    rounds: dict[str, tuple[float, int]] = {}
    for look in looks:
        for member in look.members:
            if member.role == "server":
                seconds, count = rounds.get(member.name, (0.0, 0))
                rounds[member.name] = (seconds + member.apply * member.num_rounds, count + member.num_rounds)
    return {name: seconds / count for name, (seconds, count) in rounds.items() if count}


def data_starvation(history: Sequence[JobFigures]) -> list[JobVerdict]:
    """Workers that wait for their loaders."""
    looks = recent(history)
    if not _is_enough(looks):
        return []
    means, halves = worker_means(looks), _halves(looks)
    starved = sorted(
        (
            name
            for name, own in means.items()
            if all(part.get(name) is not None and _data_share(part[name]) >= STARVED for part in (means, *halves))
            and own.total > 0
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
    return [JobVerdict(kind="data-starvation", subject=subject, text=text, advice=advice, since=looks[0].at)]


def _data_share(own: WorkerMeans) -> float:
    return own.data / own.total if own.total else 0.0


def communication_bound(history: Sequence[JobFigures], config: JobConfig) -> list[JobVerdict]:
    """All workers spend most of their steps on sending, waiting for answers and receiving."""
    looks = recent(history)
    means = worker_means(looks) if _is_enough(looks) else {}
    total = sum(one.total for one in means.values())
    if not total:
        return []
    share = {phase: sum(getattr(one, phase) for one in means.values()) / total for phase in ("stage", "wait", "pull")}
    if sum(share.values()) < MOSTLY_EXCHANGE:
        return []
    applied = max(_apply_means(looks).values(), default=0.0)
    waited = statistics.mean(one.wait for one in means.values())
    in_rules = waited > 0 and applied >= 0.5 * waited and share["wait"] >= 0.5 * sum(share.values())
    parts = ", ".join(f"{phase} {part:.0%}" for phase, part in share.items())
    what = "most of the wait is for the servers' rules" if in_rules else "the job is bound by communication"
    text = f"{sum(share.values()):.0%} of the workers' steps is exchange ({parts}): {what}"
    return [
        JobVerdict(
            kind="communication", subject="", text=text, advice=_less_exchange(in_rules, config), since=looks[0].at
        )
    ]


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
