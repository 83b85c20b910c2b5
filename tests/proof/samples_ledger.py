"""Every sample counts exactly once in every epoch, whoever dies: each step adds 1 to the cells of its samples.

Started by tests under `syncline chaos`; the workers say at the end what they find.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

import syncline
from syncline.torch import DataLoader, DistributedOptimizer
from syncline.worker.job import Job


def by_kv(job: Job, size: int) -> Callable[[np.ndarray], None]:
    job.kv.register({"ledger": np.zeros(size)}, syncline.Rule("Add"), reduce="sum")

    def push(cells: np.ndarray) -> None:
        grads = job.kv.gradients()
        grads["ledger"][:] = 0
        grads["ledger"][cells] = 1
        job.kv.push_pull(grads).wait()

    return push


def by_optimizer(job: Job, size: int) -> Callable[[np.ndarray], None]:
    """Every step adds exactly 1: 0.5 times 2. With --sync-every these are local steps."""
    model = torch.nn.Module()
    model.ledger = torch.nn.Parameter(torch.zeros(size))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model, job=job)

    def push(cells: np.ndarray) -> None:
        model.ledger.grad = torch.zeros(size)
        model.ledger.grad[cells] = -2.0
        optimizer.step()

    return push


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--think", type=float, default=0.005, help="seconds of work for a step")
    parser.add_argument("--optimizer", action="store_true", help="with SGD of torch, for bounded and async")
    args = parser.parse_args()

    job = syncline.init()
    push = by_optimizer(job, args.epochs * args.samples) if args.optimizer else by_kv(job, args.epochs * args.samples)
    dataset = torch.utils.data.TensorDataset(torch.arange(args.samples))
    loader = DataLoader(dataset, args.batch, shuffle=True)
    for epoch in range(args.epochs):
        for (x,) in loader:
            push(epoch * args.samples + x.numpy())
            time.sleep(args.think)
        print(f"{job.name}: epoch {epoch} is over", flush=True)
    job.barrier("end")
    ledger = np.asarray(job.kv.pull()["ledger"])
    lost, doubled = int((ledger < 1).sum()), int((ledger > 1).sum())
    print(f"samples: {ledger.size} in all, {lost} lost, {doubled} doubled", flush=True)
    raise SystemExit(1 if lost or doubled else 0)


if __name__ == "__main__":
    main()
