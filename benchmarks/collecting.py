"""Rows about collectives: all-reduce among workers of one host or of two."""

from __future__ import annotations

from benchmarks.match import play
from benchmarks.moving import FLOORS
from benchmarks.mpi import MpiSide
from benchmarks.namespaces import SpannedJobSide, SpannedProcessSide, wire
from benchmarks.row import Effort, Reach, Row, Samples
from benchmarks.sides import JobSide, ProcessSide
from benchmarks.task import Task
from benchmarks.words import size_in_words


def all_reduce(name: str, num_bytes: int, *, workers: int, reach: Reach, own_arrays: bool = False) -> Row:
    """In shared memory, beside gloo."""

    def measure(effort: Effort) -> Samples:
        ours = JobSide(Task(kind="all_reduce", num_bytes=num_bytes, own_arrays=own_arrays), workers=workers)
        gloo = ProcessSide("peers", Task(kind="all_reduce_only", num_bytes=num_bytes), processes=workers)
        return play(ours, gloo, effort)

    source = "the caller's own arrays" if own_arrays else "collectives.empty()"
    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} all_reduce_ of float32, {workers} ranks, in {source}",
        reference=f"gloo all-reduce in place, {workers} ranks",
        reach=reach,
        measure=measure,
    )


def all_reduce_mpi(name: str, num_bytes: int, *, workers: int, reach: Reach) -> Row:
    """The same beside Open MPI, where that is installed."""

    def measure(effort: Effort) -> Samples:
        task = Task(kind="all_reduce", num_bytes=num_bytes)
        return play(JobSide(task, workers=workers), MpiSide(task, ranks=workers), effort)

    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} all_reduce_ of float32, {workers} ranks, in collectives.empty()",
        reference=f"Open MPI's Allreduce in place, {workers} ranks",
        reach=reach,
        measure=measure,
    )


def all_reduce_small(name: str, num_bytes: int, *, reach: Reach) -> Row:
    """So small that only the way counts."""

    def measure(effort: Effort) -> Samples:
        ours = JobSide(Task(kind="all_reduce", num_bytes=num_bytes, own_arrays=True), workers=2)
        return play(ours, ProcessSide("floors", Task(kind="round trip", num_bytes=num_bytes)), effort)

    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} all_reduce_ of float32, 2 ranks, in the caller's own arrays",
        reference=FLOORS["round trip"],
        reach=reach,
        measure=measure,
    )


def all_reduce_net(name: str, num_bytes: int, *, rate: str, reach: Reach) -> Row:
    """Between two hosts, which are network namespaces, beside gloo over the same wire."""

    def measure(effort: Effort) -> Samples:
        with wire(rate) as hosts:
            ours = SpannedJobSide(Task(kind="all_reduce", num_bytes=num_bytes), hosts)
            gloo = SpannedProcessSide("peers", Task(kind="all_reduce_only", num_bytes=num_bytes), hosts)
            return play(ours, gloo, effort)

    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} all_reduce_ of float32, 2 ranks, TLS between two namespaces at {rate}",
        reference="gloo all-reduce in place between the same two, in the clear",
        reach=reach,
        measure=measure,
    )
