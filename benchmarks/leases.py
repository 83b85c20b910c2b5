"""Rows about leases: what handing out samples costs a step, and what a billion of them costs the coordinator."""

from __future__ import annotations

from benchmarks.footprint import beyond
from benchmarks.match import play
from benchmarks.memory import check_memory_is_told, pss_bytes
from benchmarks.row import Effort, Reach, Row, Samples
from benchmarks.sides import JobSide
from benchmarks.task import Task

#: torch's own loader makes a list of all numbers at the beginning of an epoch: more would measure that.
_NUM_SAMPLES = 1_000_000
_STEP_SECONDS = 0.005
_FEW_SAMPLES = 1000


def lease_share(name: str, *, policy: str, reach: Reach) -> Row:
    """What a step takes longer with our loader than with torch's own, beside the time of a step.

    A step here is a batch of 64 and a push of 4 KiB, and nothing in between that would hide what leases cost, or make
    the figure as rough as a sleep is. Both sides shuffle.
    """

    def measure(effort: Effort) -> Samples:
        ours, plain = (
            JobSide(Task(kind=kind, num_samples=_NUM_SAMPLES), side=side, transport="shm", policy=policy)
            for kind, side in (("leased_steps", "ours"), ("unleased_steps", "reference"))
        )
        return beyond(play(ours, plain, effort), _STEP_SECONDS)

    return Row(
        name=name,
        what=f"what a batch and a small push take longer with leases than with torch's own DataLoader, {policy}",
        reference=f"a step of {_STEP_SECONDS * 1e3:g} ms",
        reach=reach,
        measure=measure,
    )


def coordinator_memory(name: str, num_samples: int, most_bytes: int, *, reach: Reach) -> Row:
    """The coordinator while samples are leased, beyond that of a job without a loader."""

    def measure(effort: Effort) -> Samples:
        check_memory_is_told()
        ours = JobSide(Task(kind="leased_steps", num_samples=num_samples), transport="shm", policy="async")
        idle = JobSide(Task(kind="push_pull", num_bytes=4096), side="reference", transport="shm", policy="async")
        gauges = {
            "ours": lambda _: pss_bytes(ours.pids["coordinator"]),
            "reference": lambda _: pss_bytes(idle.pids["coordinator"]),
        }
        return beyond(play(ours, idle, effort, gauges=gauges), most_bytes)

    return Row(
        name=name,
        what=f"coordinator memory beyond an idle one (PSS), {num_samples:,} samples leased to 1 worker",
        reference=f"{most_bytes / 1e6:g} MB",
        reach=reach,
        measure=measure,
        unit="bytes",
    )


def epoch_start(name: str, num_samples: int, *, reach: Reach) -> Row:
    """From `iter()` to the first batch of an epoch of that many samples, shuffled."""

    def measure(effort: Effort) -> Samples:
        ours, few = (
            JobSide(Task(kind="epoch_start", num_samples=count), side=side, transport="shm", policy="async")
            for side, count in (("ours", num_samples), ("reference", _FEW_SAMPLES))
        )
        return play(ours, few, effort)

    return Row(
        name=name,
        what=f"from iter() to the first batch of an epoch, {num_samples:,} samples, shuffled",
        reference=f"the same with {_FEW_SAMPLES:,} samples",
        reach=reach,
        measure=measure,
    )
