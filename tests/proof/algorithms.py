"""The example's LeNet with one worker that may be slow or wrong. Started by test_algorithms.py, or by hand:

syncline run -w 4 --policy async tests/proof/algorithms.py --slow worker-3 --epochs 3
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import syncline
from syncline.torch import DataLoader, DistributedOptimizer

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
from fashion_mnist import accuracy, lenet, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=60_000, help="of the training set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--rule", choices=["Adam", "SGD"], default="Adam")
    parser.add_argument("--slow", default="", help="the worker that takes four times as long for a step")
    parser.add_argument("--wrong", default="", help="the worker whose gradients are a million times too large")
    parser.add_argument("--validate", action="store_true", help="validate every 250 steps, for --stop")
    args = parser.parse_args()

    job = syncline.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    model = lenet()
    opt = DistributedOptimizer(getattr(torch.optim, args.rule)(model.parameters(), lr=args.lr), model=model)
    images, labels = load(train=True)
    train = TensorDataset(images[: args.samples], labels[: args.samples])
    loader = DataLoader(train, 32, shuffle=True, seed=args.seed)
    if args.validate:
        test_images, test_labels = load(train=False)

        def measure(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double().mean()}

        job.validate(measure, TensorDataset(test_images[:2000], test_labels[:2000]), every="250steps")
    for _ in loader.epochs(args.epochs):
        for x, y in loader:
            began = time.perf_counter()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if job.name == args.wrong:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad *= 1e6
            if job.name == args.slow:
                time.sleep(3 * (time.perf_counter() - began))
            opt.step()
            opt.zero_grad()
    job.barrier("trained")
    opt.pull()
    if job.is_chief:
        print(f"seconds        {job.stats().seconds:.1f}")
        print(f"test accuracy  {accuracy(model, *load(train=False)):.2%}", flush=True)
    job.close()


if __name__ == "__main__":
    main()
