"""Where the time of a job's steps went, as lines to read: the end of `syncline run --profile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from syncline.config import JobConfig
from syncline.core.members import by_name
from syncline.stats import ServerStats, StepTimes, apply_seconds

#: A phase of less than this share of the step is nothing to act upon.
WORTH = 0.15
#: A worker that computes this much longer than the median of all is what the others wait for.
MUCH_LONGER = 1.25
DEFAULTS = JobConfig()


def profile_lines(
    times: Mapping[str, StepTimes], servers: Sequence[ServerStats], config: JobConfig = DEFAULTS
) -> list[str]:
    """A table, a line per worker, and a sentence on what to do next."""
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
    lines += [f"profile: {sentence}" for sentence in _advice(known, applied, config)]
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
            if config.policy == "sync" and config.sync_every == 1 and len(known) > 1:
                remedies.append("--sync-every H (fewer bytes)")
            yield f"{shares[phase]:.0%} of the step is spent on {what}{_try(remedies)}"


def _instead_of_waiting(part: float, config: JobConfig) -> list[str]:
    """`part`: how much of the wait is for rules."""
    if config.exchange == "ring":  # every process applies the rule to everything
        return ["--exchange servers"] if part >= 0.5 else []
    remedies = ["more servers (-s)"] if part >= 0.5 else []
    if not config.window:
        remedies.append("--policy async --window 1 (older parameters, no waiting)")
    return remedies


def _try(remedies: Sequence[str]) -> str:
    return f"; try {', or '.join(remedies)}" if remedies else ""
