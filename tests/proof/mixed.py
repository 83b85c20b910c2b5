"""One model on a GPU and on processors at once: who has read what in which round, and how many samples a second.

Started by test_mixed.py; each worker writes one line of JSON per epoch, and what it has read into a file.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time

import numpy as np
import torch

import syncline
from syncline.torch import DataLoader, DistributedOptimizer

CLASSES, LR = 10, 0.05


def model_of(width: int) -> torch.nn.Module:
    """Much to compute and little to send: convolutions over images."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, width, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(width, width, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(width, width, 3, padding=1), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, CLASSES),
    )  # fmt: skip


def data_of(samples: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 3, side, side, generator=generator)
    return x, torch.randint(0, CLASSES, (samples,), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", required=True, help="of worker-0, worker-1, …: cuda,cpu,cpu")
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()

    job = syncline.init()
    device = args.devices.split(",")[int(job.name.rpartition("-")[2])]
    dtype = getattr(torch, args.dtype)
    x, y = data_of(args.samples, args.side)
    x, model = x.to(dtype), model_of(args.width).to(device, dtype)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR))
    dataset = torch.utils.data.TensorDataset(torch.arange(args.samples))
    loader = DataLoader(dataset, args.batch, shuffle=True, batch="auto", collate_fn=_numbers)
    read: dict[str, np.ndarray] = {}
    for epoch in range(args.epochs):
        job.barrier("epoch")
        began, mine = time.monotonic(), 0
        for rows in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[rows].to(device)), y[rows].to(device))
            loss.backward()
            optimizer.step()
            read[str(job.step)] = rows.numpy()
            mine += len(rows)
        seconds = time.monotonic() - began
        print(json.dumps({"worker": job.name, "epoch": epoch, "seconds": seconds, "samples": mine}), flush=True)
    job.barrier("end")
    parameters = torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu().numpy()
    np.savez(args.out / f"{job.name}.npz", parameters=parameters, **read)


def _numbers(rows: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([row for (row,) in rows])


if __name__ == "__main__":
    main()
