"""Rows about training: whole steps of a model, beside the same loop without us or with a peer."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.match import play
from benchmarks.row import Effort, NotMeasured, Reach, Row, Samples, Scale, check_gpu
from benchmarks.sides import JobSide, ProcessSide
from benchmarks.task import Task
from syncline import config as configuration
from syncline.core.units import counted

#: In a turn with a window, the first steps have nothing to wait for.
UNCOUNTED = 3
#: Turns on a GPU last so much longer: a step alone takes about half a turn.
LONGER = 5


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


def beside_ddp(
    name: str,
    model: str,
    what: str,
    *,
    workers: int,
    reach: Reach,
    batch_size: int = 0,
    exchange: str = "servers",
    num_cores: int = 0,
) -> Row:
    """Training with several workers in rounds, beside DistributedDataParallel; with a batch size, one of a series."""

    how = "in a ring" if exchange == "ring" else "sync"

    def measure(effort: Effort) -> Samples:
        task = Task(kind="train", model=model, num_threads=1)
        ddp = ProcessSide("peers", Task(kind="train_ddp", model=model, num_threads=1), processes=workers)
        return play(JobSide(task, workers=workers, transport="shm", exchange=exchange), ddp, effort)

    return Row(
        name=name,
        what=f"{what}, {counted(workers, 'worker')} {how}, one torch thread each: samples/s",
        reference=f"DistributedDataParallel on gloo, {counted(workers, 'rank')}",
        reach=reach,
        measure=measure,
        num_cores=num_cores,
        scale=Scale(workers, workers * batch_size) if batch_size else None,
    )


def early_beside_late(name: str, model: str, what: str, *, workers: int) -> Row:
    """A ring on one host: sums that begin while backward goes on, beside sums that begin at the step."""

    def measure(effort: Effort) -> Samples:
        settings: dict[str, Any] = {"workers": workers, "transport": "shm", "exchange": "ring"}
        task = Task(kind="train", model=model, num_threads=1)
        late = Task(kind="train", model=model, num_threads=1, overlap=False)
        return play(JobSide(task, **settings), JobSide(late, side="reference", **settings), effort)

    return Row(
        name=name,
        what=f"{what}, {counted(workers, 'worker')} in a ring, one torch thread each",
        reference="the same with overlap=False",
        reach=Reach("printed"),
        measure=measure,
        num_cores=2 * workers,  # with fewer both begin at the step
    )


def beside_nccl(name: str, model: str, what: str, *, workers: int, reach: Reach) -> Row:
    """A ring on GPUs, beside DistributedDataParallel on nccl; 0 workers: as many as there are GPUs."""

    def measure(effort: Effort) -> Samples:
        check_gpu()
        count = workers or configuration.num_gpus()
        if count < max(workers, 1 if workers else 2):
            raise NotMeasured("needs several GPUs")
        task = Task(kind="train", model=model, device="cuda")
        longer = dataclasses.replace(effort, turn_seconds=effort.turn_seconds * LONGER)
        ddp = ProcessSide("peers", Task(kind="train_ddp_nccl", model=model, device="cuda"), processes=count)
        return play(JobSide(task, workers=count, exchange="ring", sums="nccl"), ddp, longer)

    ranks = counted(workers, "rank") if workers else "a rank per GPU"
    return Row(
        name=name,
        what=f"{what}, a ring with --sums nccl, {ranks}: samples/s",
        reference=f"DistributedDataParallel on nccl, {ranks}, fused Adam",
        reach=reach,
        measure=measure,
    )


def beside_strangers(name: str, model: str, what: str, *, workers: int, reach: Reach) -> Row:
    """Training with several workers in `async`, beside as many processes that do not communicate."""

    def measure(effort: Effort) -> Samples:
        task = Task(kind="train", model=model, num_threads=1, num_uncounted=UNCOUNTED)
        ours = JobSide(task, workers=workers, transport="shm", policy="async", window=1)
        return play(ours, ProcessSide("peers", task, processes=workers), effort)

    return Row(
        name=name,
        what=f"{what}, {workers} workers async --window 1, one torch thread each: samples/s",
        reference=f"{workers} plain processes that do not communicate at all",
        reach=reach,
        measure=measure,
    )


def on_device(
    name: str,
    model: str,
    what: str,
    *,
    reach: Reach,
    policy: str = "sync",
    window: int = 0,
    device: str = "cuda",
    server_device: str = "",
    sums: str = "",
) -> Row:
    """One worker that trains on a GPU, beside the same step without us. `sums`: in a ring of itself."""
    settings: dict[str, Any] = {"policy": policy, "window": window, "transport": "shm"}
    how = f"1 server, {policy} --window {window}" if window else f"1 server, {policy}"
    if sums:
        settings, how = {"exchange": "ring", "sums": sums}, f"a ring with --sums {sums}"
    if server_device:
        settings["server_device"] = server_device
        how += f", --server-device {server_device}"

    def measure(effort: Effort) -> Samples:
        if device != "cpu":
            check_gpu()
        task = Task(kind="train", model=model, device=device, num_uncounted=UNCOUNTED if window else 1)
        longer = dataclasses.replace(effort, turn_seconds=effort.turn_seconds * LONGER)
        return play(JobSide(task, **settings), ProcessSide("peers", task), longer)

    return Row(
        name=name,
        what=f"{what}, on a GPU, 1 worker, {how}",
        reference="the local step in one process",
        reach=reach,
        measure=measure,
    )
