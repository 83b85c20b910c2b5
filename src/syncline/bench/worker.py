"""Our side of every row: the script that the workers of a job run, or one process alone (an embedded job)."""

from __future__ import annotations

import sys

import numpy as np

import syncline
from syncline.bench.sides import Task, read_arguments
from syncline.bench.turns import Operation, Seat, take_turns


def push_pull(task: Task) -> Operation:
    """Gradients up and parameters down, in one round trip."""
    kv = syncline.init().kv
    size = task.num_bytes // 4
    values = {"w": np.zeros(size, np.float32)}
    kv.register(values, syncline.Rule(task.rule, lr=1e-3))
    gradients = {"w": np.ones(size, np.float32)} if task.own_arrays else kv.gradients()
    gradients["w"][...] = 1.0
    return lambda: kv.push_pull(gradients, out=values).wait()


def train(task: Task) -> Operation:
    """A step of training with our optimizer around torch's."""
    from syncline.bench.models import make, training_step
    from syncline.torch import DistributedOptimizer

    job = syncline.init()
    model, optimizer, batch_size = make(task.model, task.num_threads)
    return training_step(model, DistributedOptimizer(optimizer, model=model), batch_size, seed=job.rank)


OPERATIONS = {"push_pull": push_pull, "train": train}


def main(arguments: list[str]) -> None:
    task, path = read_arguments(arguments)
    operation = OPERATIONS[task.kind](task)
    take_turns(path, Seat(task.side, syncline.current_job().rank), operation)


if __name__ == "__main__":
    main(sys.argv[1:])
