"""Our side of every row: the script that the workers of a job run, or one process alone (an embedded job).

It uses the public API only, since `benchmarks.check` runs it with other versions of syncline too.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

import syncline
from benchmarks.task import Task, read_arguments
from benchmarks.turns import Operation, Player, take_turns


def push_pull(task: Task) -> Operation:
    """Gradients up and parameters down, in one round trip; a bystander does neither."""
    job = syncline.init()
    kv, size = job.kv, task.num_bytes // 4
    values = {"w": np.zeros(size, np.float32)}
    kv.register(values, syncline.Rule(task.rule, lr=1e-3))
    if task.other_bytes:
        kv.register({"others": np.zeros(task.other_bytes // 4, np.float32)}, syncline.Rule(task.rule, lr=1e-3))
    if job.rank < task.num_bystanders:
        job.rest()
        return lambda: None
    gradients = {"w": np.ones(size, np.float32)} if task.own_arrays else {"w": kv.gradients()["w"]}
    gradients["w"][...] = np.random.default_rng(job.rank).standard_normal(size) if task.is_random else 1.0
    return lambda: kv.push_pull(gradients, out=values).wait()


def train(task: Task) -> Operation:
    """A step of training with our optimizer around torch's."""
    from benchmarks.models import make, training_step
    from syncline.torch import DistributedOptimizer

    job = syncline.init()
    own = msgspec.structs.replace(task, device=job.device) if task.device == "cuda" else task
    made = make(own, seed=job.rank)
    optimizer = DistributedOptimizer(made.optimizer, model=made.model, overlap=task.overlap)
    return training_step(dataclasses.replace(made, optimizer=optimizer))


def train_told(task: Task) -> Operation:
    """The same, and each step is reported."""
    step, job = train(task), syncline.current_job()
    losses = (2.0 / (1.0 + 0.001 * k) for k in itertools.count())

    def train_and_tell() -> None:
        step()
        job.report(loss=next(losses))

    return train_and_tell


def train_keeping(task: Task) -> Operation:
    """The same, with the gradients still there at the end of a step: what memory it takes."""
    from benchmarks.memory import return_what_is_freed
    from benchmarks.models import backward_step, make
    from syncline.torch import DistributedOptimizer

    return_what_is_freed()
    made = make(task, seed=syncline.init().rank)
    return backward_step(made, DistributedOptimizer(made.optimizer, model=made.model).step)


def all_reduce(task: Task) -> Operation:
    """All workers' numbers are added up, in place: in memory that they share, or in the caller's own arrays."""
    from syncline import collectives

    syncline.init()
    size = task.num_bytes // 4
    numbers = np.empty(size, np.float32) if task.own_arrays else collectives.empty(size)
    numbers[...] = 0.0
    return lambda: collectives.all_reduce_(numbers)


def pipeline_step(task: Task) -> Operation:
    """A step of a model in stages."""
    from benchmarks.stages import pipeline_step

    return pipeline_step()


class _Numbers:
    """A data set that costs next to nothing: sample i is i."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, number: int) -> int:
        return number


def _without_end(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _stepping(loader: Any) -> Operation:
    """A batch, and a small push."""
    push, batches = push_pull(Task(kind="push_pull", num_bytes=4096)), _without_end(loader)

    def step() -> None:
        next(batches)
        push()

    return step


def leased_steps(task: Task) -> Operation:
    """Steps on samples that are leased."""
    from syncline.torch import DataLoader

    syncline.init()
    return _stepping(DataLoader(_Numbers(task.num_samples), 64, shuffle=True))  # type: ignore[arg-type]


def unleased_steps(task: Task) -> Operation:
    """The same with torch's own loader."""
    import torch.utils.data

    syncline.init()
    return _stepping(torch.utils.data.DataLoader(_Numbers(task.num_samples), 64, shuffle=True))  # type: ignore[arg-type]


def epoch_start(task: Task) -> Operation:
    """The first batch of an epoch, which is then left."""
    from syncline.torch import DataLoader

    job = syncline.init()
    job.kv.register({"w": np.zeros(1024, np.float32)}, syncline.Rule("SGD", lr=1e-3))
    loader: Any = DataLoader(_Numbers(task.num_samples), 64, shuffle=True)  # type: ignore[arg-type]

    def begin() -> None:
        batches = iter(loader)
        next(batches)
        batches.close()

    return begin


OPERATIONS = {
    "push_pull": push_pull,
    "all_reduce": all_reduce,
    "train": train,
    "pipeline_step": pipeline_step,
    "train_told": train_told,
    "train_keeping": train_keeping,
    "leased_steps": leased_steps,
    "unleased_steps": unleased_steps,
    "epoch_start": epoch_start,
}


def _settling(task: Task) -> Operation:
    if task.device == "cpu":
        return lambda: None
    from benchmarks.models import settling

    return settling(task.device)


def main(arguments: list[str]) -> None:
    task, path = read_arguments(arguments)
    operation = OPERATIONS[task.kind](task)
    player = Player(task.side, syncline.current_job().rank)
    take_turns(path, player, operation, settle=_settling(task), num_uncounted=task.num_uncounted)


if __name__ == "__main__":
    main(sys.argv[1:])
