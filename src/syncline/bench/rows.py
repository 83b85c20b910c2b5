"""The rows there are. A row is a value; its sizes are arguments, so that tests can make small ones."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from functools import partial
from typing import Any

from syncline.bench.match import play
from syncline.bench.row import Effort, Reach, Row, Samples
from syncline.bench.sides import JobSide, ProcessSide, Task
from syncline.errors import ConfigError

MIB = 1 << 20
LARGE, SMALL = 64 * MIB, 4 << 10


def size_in_words(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:g} KiB"


def _against_floor(ours: Task, floor: str, settings: dict[str, Any], effort: Effort) -> Samples:
    reference = ProcessSide("floors", Task(kind=floor, num_bytes=ours.num_bytes))
    return play(JobSide(ours, **settings), reference, effort)


def push_pull(
    name: str, num_bytes: int, *, own_arrays: bool, floor: str, reach: Reach, transport: str = "shm"
) -> Row:
    """push_pull with one worker and one server on this host, SGD on the server, beside a bare loop."""
    references = {
        "shared memory": "bare two-process shared-memory loop: signal, one in-place add, one copy out",
        "round trip": "bare Unix-socket round trip of two processes",
        "stream": "bare TCP echo of two processes, both directions streaming in 4 MiB pieces",
    }
    source = "the caller's own arrays" if own_arrays else "gradients()"
    task = Task(kind="push_pull", num_bytes=num_bytes, own_arrays=own_arrays)
    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} push_pull, SGD, 1 worker 1 server, {transport}, from {source}",
        reference=references[floor],
        reach=reach,
        measure=partial(_against_floor, task, floor, {"transport": transport}),
    )


def sync(name: str, num_bytes: int, *, workers: int, reach: Reach) -> Row:
    """A round of several workers on one host, beside gloo."""

    def measure(effort: Effort) -> Samples:
        ours = JobSide(Task(kind="push_pull", num_bytes=num_bytes), workers=workers, transport="shm")
        gloo = ProcessSide("peers", Task(kind="all_reduce", num_bytes=num_bytes), processes=workers)
        return play(ours, gloo, effort)

    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} sync, {workers} workers 1 server, from gradients()",
        reference=f"gloo all-reduce plus local fused SGD step, {workers} ranks",
        reach=reach,
        measure=measure,
    )


def adam(name: str, num_bytes: int, *, reach: Reach) -> Row:
    """Adam on the server, beside Adam here."""

    def measure(effort: Effort) -> Samples:
        ours = JobSide(Task(kind="push_pull", num_bytes=num_bytes, own_arrays=True, rule="Adam"), transport="shm")
        return play(ours, ProcessSide("peers", Task(kind="fused_adam", num_bytes=num_bytes)), effort)

    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} Adam on the server, 1 worker, from the caller's own arrays",
        reference="one fused Adam step in the same process plus two copies",
        reach=reach,
        measure=measure,
    )


def embedded(name: str, model: str, what: str, *, reach: Reach) -> Row:
    """One process with an embedded job, beside the same loop without us."""

    def measure(effort: Effort) -> Samples:
        task = Task(kind="train", model=model)
        return play(ProcessSide("worker", task, side="ours"), ProcessSide("peers", task), effort)

    return Row(
        name=name,
        what=f"{what}, one process, embedded",
        reference="the plain torch loop",
        reach=reach,
        measure=measure,
    )


def beside_ddp(name: str, model: str, what: str, *, workers: int, reach: Reach) -> Row:
    """Training with several workers in rounds, beside DistributedDataParallel."""

    def measure(effort: Effort) -> Samples:
        task = Task(kind="train", model=model, num_threads=1)
        ddp = ProcessSide("peers", Task(kind="train_ddp", model=model, num_threads=1), processes=workers)
        return play(JobSide(task, workers=workers, transport="shm"), ddp, effort)

    return Row(
        name=name,
        what=f"{what}, {workers} workers sync, one torch thread each: samples/s",
        reference=f"DistributedDataParallel on gloo, {workers} ranks",
        reach=reach,
        measure=measure,
    )


def all_rows() -> list[Row]:
    wide, small = "MLP 784-2048-2048-10 batch 32, SGD with momentum", "MLP 784-128-10 batch 64, Adam"
    memory = "shared memory"
    return [
        push_pull("shm-large", LARGE, own_arrays=False, floor=memory, reach=Reach("at most", 1.3)),
        push_pull("shm-large-arrays", LARGE, own_arrays=True, floor=memory, reach=Reach("at most", 1.7)),
        push_pull("shm-small", SMALL, own_arrays=False, floor="round trip", reach=Reach("at most", 8)),
        push_pull("tcp-large", LARGE, own_arrays=False, floor="stream", reach=Reach("at most", 1.5), transport="tcp"),
        sync("sync-2", LARGE, workers=2, reach=Reach("at most", 0.5)),
        sync("sync-4", LARGE, workers=4, reach=Reach("at most", 0.4)),
        adam("adam", LARGE, reach=Reach("at most", 1.3)),
        embedded("lenet", "lenet", "LeNet batch 64, Adam", reach=Reach("at most", 1.03)),
        embedded("mlp", "mlp-small", small, reach=Reach("at most", 1.15)),
        beside_ddp("mlp-ddp", "mlp-wide", wide, workers=2, reach=Reach("at least", 1.2)),
    ]


def choose(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """The rows with one of these names, where * stands for anything; all without names."""
    for pattern in patterns:
        if not fnmatch.filter([row.name for row in rows], pattern):
            raise ConfigError(f"--only {pattern}: there are {', '.join(row.name for row in rows)}")
    return [row for row in rows if not patterns or any(fnmatch.fnmatch(row.name, p) for p in patterns)]
