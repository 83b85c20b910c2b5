"""LeNet on Fashion-MNIST, in one process or in many: `syncline run -w 2 -s 1 examples/fashion_mnist.py`."""

import argparse
import contextlib
import math
import os
import pathlib
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import syncline
from syncline.data import fashion_mnist
from syncline.torch import DataLoader, DistributedOptimizer


def lenet() -> nn.Sequential:
    """44,426 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def load(train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = fashion_mnist(train)
    return torch.tensor(images).unsqueeze(1).float() / 255, torch.tensor(labels)


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    answers = torch.cat([model(part).argmax(1) for part in images.split(1000)])
    return (answers == labels).float().mean().item()


def deadline(folder: pathlib.Path, seconds: float) -> float:
    """So long after the first worker of this run came here."""
    mark = folder / f"began-{os.getppid()}"  # the launcher's own: one per run
    with contextlib.suppress(FileExistsError):
        mark.open("x").close()
    return mark.stat().st_mtime + seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="ends the training after so long, for all lives of all workers")
    parser.add_argument("--out", type=pathlib.Path, help="model file; default: model.pt in the job's folder")
    args = parser.parse_args()

    job = syncline.init()
    torch.manual_seed(args.seed)
    model = lenet().to(job.device)
    opt = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=args.lr), model=model)
    loader = DataLoader(TensorDataset(*load(train=True)), args.batch_size, shuffle=True, seed=args.seed)
    until = deadline(job.folder, args.seconds) if args.seconds else math.inf
    for _ in range(args.epochs):
        for x, y in loader:
            if time.time() > until:
                break
            loss = F.cross_entropy(model(x.to(job.device)), y.to(job.device))
            loss.backward()
            opt.step()
            opt.zero_grad()

    job.barrier("trained")  # from here on nobody pushes
    opt.pull()  # the final model, also for who had finished before the last round
    if job.is_chief:
        model.cpu()
        out = args.out or job.folder / "model.pt"
        out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), out)
        stats = job.stats()
        print(f"policy         {job.config.policy}")
        print(f"workers        {job.config.workers}")
        print(f"seconds        {stats.seconds:.1f}")
        print(f"samples/s      {stats.samples_per_second:,.0f}")
        print(f"test accuracy  {accuracy(model, *load(train=False)):.2%}")
        sent = stats.bytes_per_step
        print(f"bytes/step     {sent:,.0f} over sockets, by all workers" + ("" if sent else "; all in shared memory"))
        print(f"staleness      {stats.staleness_mean:.2f} steps mean, {stats.staleness_max} at most")
        print(f"model          {out}")
    job.close()


if __name__ == "__main__":
    main()
