"""The models that both sides train, and one step of training."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for width, following in itertools.pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


#: Model, batch size, and the optimizer as a plain script has it.
MODELS: dict[str, tuple[Callable[[], nn.Module], int, Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "lenet": (lenet, 64, lambda model: torch.optim.Adam(model.parameters(), lr=1e-3)),
    "mlp-small": (lambda: mlp(784, 128, 10), 64, lambda model: torch.optim.Adam(model.parameters(), lr=1e-3)),
    "mlp-wide": (
        lambda: mlp(784, 2048, 2048, 10),
        32,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    ),
    "mlp-tiny": (lambda: mlp(784, 4, 10), 4, lambda model: torch.optim.SGD(model.parameters(), lr=0.01)),
}


def make(name: str, num_threads: int) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """A model, its optimizer and its batch size; the same numbers in every process."""
    if num_threads:
        torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    build, batch_size, optimizer = MODELS[name]
    model = build()
    return model, optimizer(model), batch_size


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int, seed: int
) -> Callable[[], None]:
    """One step on a batch that stays the same: nothing but the step is measured."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch_size, 1, 28, 28, generator=generator)
    y = torch.randint(10, (batch_size,), generator=generator)

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
