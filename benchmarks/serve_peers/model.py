"""The models that are served by all sides. Only torch is imported: other environments have no syncline."""

from __future__ import annotations

import torch
from torch import nn


class Mlp(nn.Sequential):
    """5.8 M parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
        )


class LeNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip


class Large(nn.Sequential):
    """512 MiB of parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 1 << 17), nn.ReLU(), nn.Linear(1 << 17, 240))


MODELS = {"Mlp": Mlp, "LeNet": LeNet}

example = {"image": torch.zeros(1, 1, 28, 28)}
