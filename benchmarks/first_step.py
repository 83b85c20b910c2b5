"""The script of the row `start`: one step of a tiny model; says when it was done."""

from __future__ import annotations

import sys
import time

DONE = "the first step was done at "


def main() -> None:
    import torch

    import syncline
    from syncline.torch import DistributedOptimizer

    syncline.init()
    model = torch.nn.Linear(4, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    sys.stdout.write(f"{DONE}{time.monotonic()}\n")


if __name__ == "__main__":
    main()
