"""Rows about memory: what a server and a worker have beyond a process that does without."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks.match import play
from benchmarks.memory import check_memory_is_told, pss_bytes
from benchmarks.row import Effort, Reach, Row, Samples
from benchmarks.sides import JobSide, ProcessSide
from benchmarks.task import Task
from benchmarks.words import size_in_words

_TINY_BYTES = 4096


def beyond(samples: Samples, expected: float) -> Samples:
    """What ours has more than the other, beside what it may have."""
    more = [ours - other for ours, other in zip(samples.ours, samples.reference, strict=True)]
    return Samples(more, [float(expected)] * len(more))


def server_memory(name: str, num_bytes: int, *, transport: str, num_staged: int, reach: Reach) -> Row:
    """A server that hosts a model with Adam, beyond one that hosts next to nothing; both are new interpreters.

    The reference is arithmetic: parameters, Adam's two moments, and a model for each worker that stages. On shm the
    server shares the parameters and the worker's arena with the worker, and each counts half of both.
    """

    def measure(effort: Effort) -> Samples:
        check_memory_is_told()
        ours, idle = (
            JobSide(
                Task(kind="push_pull", num_bytes=size, rule="Adam"), transport=transport, side=side, preload=False
            )
            for side, size in (("ours", num_bytes), ("reference", _TINY_BYTES))
        )
        gauges = {
            "ours": lambda _: pss_bytes(ours.pids["server-0"]),
            "reference": lambda _: pss_bytes(idle.pids["server-0"]),
        }
        return beyond(play(ours, idle, effort, gauges=gauges), num_bytes * (3 + num_staged))

    size, staged = size_in_words(num_bytes), ", plus one model that is staged" * bool(num_staged)
    return Row(
        name=name,
        what=f"server memory beyond an idle server (PSS), {size} model, Adam, 1 worker, {transport}",
        reference=f"parameters and optimizer state{staged}: {size_in_words(num_bytes * (3 + num_staged))}",
        reach=reach,
        measure=measure,
        unit="bytes",
    )


def mlp_bytes(widths: Sequence[int]) -> int:
    """Of the float32 weights and biases of an MLP."""
    return sum(4 * (width + 1) * following for width, following in itertools.pairwise(widths))


def worker_memory(name: str, widths: Sequence[int], *, reach: Reach) -> Row:
    """A worker that trains, beyond a plain script with the same model; both are new interpreters.

    Both have parameters, gradients and activations. The plain script makes no optimizer step: neither its state nor
    what a step takes meanwhile is in our favour. A page that worker and server share counts half here.
    """
    num_bytes = mlp_bytes(widths)

    def measure(effort: Effort) -> Samples:
        check_memory_is_told()
        ours = JobSide(Task(kind="train_keeping", widths=list(widths), num_threads=1), transport="shm", preload=False)
        plain = ProcessSide("peers", Task(kind="backward", widths=list(widths), num_threads=1))
        gauges = {"ours": lambda _: pss_bytes(ours.pids["worker-0"]), "reference": lambda _: pss_bytes(plain.pids[0])}
        return beyond(play(ours, plain, effort, gauges=gauges), num_bytes)

    shape = "-".join(map(str, widths))
    return Row(
        name=name,
        what=f"worker memory beyond a plain torch script without an optimizer (PSS), MLP {shape}, Adam, shm",
        reference=f"parameters: {size_in_words(num_bytes)}",
        reach=reach,
        measure=measure,
        unit="bytes",
    )
