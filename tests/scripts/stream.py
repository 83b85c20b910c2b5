"""A stream: an IterableDataset over shards, whose length shows when they are read."""

import argparse

import probe
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import IterableDataset

import syncline
from syncline.torch import DataLoader, DistributedOptimizer


class Events(IterableDataset):
    """Each shard is a file in other scripts; here its name says what is in it."""

    def __init__(self, shards):
        self.shards = shards

    def __iter__(self):
        for name in self.shards:
            number, count = (int(part) for part in name.split("-")[1:])
            generator = torch.Generator().manual_seed(number)
            for _ in range(count):
                x = torch.randn(10, generator=generator)
                yield x, torch.sin(x[:3]).sum() + 0.5 * x[3] * x[4]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    job = syncline.init()
    syncline.seed_everything(0)
    loader = DataLoader(Events([f"events-{k}-{64 + 32 * (k % 3)}" for k in range(9)]), batch_size=args.batch_size)
    model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model=model)

    for epoch in loader.epochs(args.epochs):
        total, count = 0.0, 0
        for x, y in loader:
            loss = F.mse_loss(model(x).squeeze(1), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total, count = total + loss.item() * len(x), count + len(x)
            probe.stepped(job, x)
        if count:
            print(f"epoch {epoch}: {count} events, loss {total / count:.4f}")

    job.barrier("trained")
    optimizer.pull()
    with torch.no_grad():
        x, y = (torch.stack(part) for part in zip(*Events(["events-100-300"]), strict=True))
        loss = F.mse_loss(model(x).squeeze(1), y).item()
    probe.result(job, loss, model)


if __name__ == "__main__":
    main()
