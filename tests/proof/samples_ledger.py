"""Every sample counts exactly once in every epoch, whoever dies: each step adds 1 to the cells of its samples.

Started by tests under `syncline chaos`; the workers say at the end what they find.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

import syncline
from syncline.torch import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--think", type=float, default=0.005, help="seconds of work for a step")
    args = parser.parse_args()

    job = syncline.init()
    job.kv.register({"ledger": np.zeros(args.epochs * args.samples)}, syncline.Rule("Add"), reduce="sum")
    dataset = torch.utils.data.TensorDataset(torch.arange(args.samples))
    loader = DataLoader(dataset, args.batch, shuffle=True)
    for epoch in range(args.epochs):
        for (x,) in loader:
            grads = job.kv.gradients()
            grads["ledger"][:] = 0
            grads["ledger"][epoch * args.samples + x.numpy()] = 1
            job.kv.push_pull(grads).wait()
            time.sleep(args.think)
        print(f"{job.name}: epoch {epoch} is over", flush=True)
    job.barrier("end")
    ledger = job.kv.pull()["ledger"]
    lost, doubled = int((ledger < 1).sum()), int((ledger > 1).sum())
    print(f"samples: {ledger.size} in all, {lost} lost, {doubled} doubled", flush=True)
    raise SystemExit(1 if lost or doubled else 0)


if __name__ == "__main__":
    main()
