"""Workers whose steps are sleeps, one of them slower than the others: how long an epoch takes, and who does how much.

Started by test_shares.py; each worker writes one line of JSON per epoch.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

import syncline
from syncline.torch import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--cost", type=float, default=0.005, help="seconds for a sample of a fast worker")
    parser.add_argument("--slower", type=float, default=4.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--auto", action="store_true")
    parser.add_argument(
        "--turns", action="store_true", help="from the middle of the last epoch on another one is slow"
    )
    args = parser.parse_args()

    job = syncline.init()
    job.kv.register({"ledger": np.zeros(args.epochs * args.samples)}, syncline.Rule("Add"), reduce="sum")
    dataset = torch.utils.data.TensorDataset(torch.arange(args.samples))
    loader = DataLoader(dataset, args.batch, shuffle=True, batch="auto" if args.auto else "")
    sizes: list[int] = []
    for epoch in range(args.epochs):
        job.barrier("epoch")
        began, mine = time.monotonic(), 0
        for (x,) in loader:
            has_turned = args.turns and epoch == args.epochs - 1 and len(sizes) > 40
            slow = "worker-0" if has_turned else "worker-3"
            time.sleep(args.cost * len(x) * (args.slower if job.name == slow else 1.0))
            grads = job.kv.gradients()
            grads["ledger"][:] = 0
            grads["ledger"][epoch * args.samples + x.numpy()] = 1
            job.kv.push_pull(grads).wait()
            mine += len(x)
            if epoch == args.epochs - 1:
                sizes.append(len(x))
        seconds = time.monotonic() - began
        print(json.dumps({"worker": job.name, "epoch": epoch, "seconds": seconds, "samples": mine}), flush=True)
    job.barrier("end")
    ledger = job.kv.pull()["ledger"]
    once = bool((ledger == 1).all())
    print(json.dumps({"worker": job.name, "once": once, "sizes": sizes}), flush=True)


if __name__ == "__main__":
    main()
