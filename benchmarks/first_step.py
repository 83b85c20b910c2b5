"""The script of the rows about starting: one step of a tiny model, or of the LeNet of the examples folder that is its
argument. It says when the step was done.
"""

from __future__ import annotations

import sys
import time
from typing import Any

DONE = "the first step was done at "


def main() -> None:
    import torch

    import syncline
    from syncline.torch import DistributedOptimizer

    syncline.init()
    model, (x, y), loss = _lenet(sys.argv[1]) if len(sys.argv) > 1 else _tiny()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    loss(model(x), y).backward()
    optimizer.step()
    sys.stdout.write(f"{DONE}{time.monotonic()}\n")


def _tiny() -> tuple[Any, Any, Any]:
    import torch

    return torch.nn.Linear(4, 1), (torch.ones(2, 4), torch.ones(2, 1)), torch.nn.functional.mse_loss


def _lenet(examples: str) -> tuple[Any, Any, Any]:
    """With all of the training data read, as the example reads it, and its loader's first batch."""
    import importlib

    import torch

    from syncline.torch import DataLoader

    sys.path.insert(0, examples)
    example = importlib.import_module("fashion_mnist")
    loader = DataLoader(torch.utils.data.TensorDataset(*example.load(train=True)), 32, shuffle=True)
    return example.lenet(), next(iter(loader)), torch.nn.functional.cross_entropy


if __name__ == "__main__":
    main()
