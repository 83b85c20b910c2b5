"""A model of NumPy, for servers in this process: no test of theirs needs torch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from tests.patience import PATIENCE

INPUTS = ("x:FP32:4",)
ROW = [1.0, 1.0, 1.0, 1.0]


class Held:
    """What all models of a test see: calls wait while it is held."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.sizes: list[int] = []  # of each call

    def make(self) -> Linear:
        return Linear(self)


class Linear:
    """y = weight x + bias, 4 to 3: the model of `saved.arrays`."""

    def __init__(self, held: Held | None = None) -> None:
        self._held = held
        self.weight, self.bias = np.ones((3, 4), np.float32), np.ones(3, np.float32)

    def load(self, weights: dict[str, Any]) -> None:
        self.weight, self.bias = weights["weight"], weights["bias"]

    def __call__(self, x: Any) -> Any:
        if self._held is not None:
            self._held.sizes.append(len(x))
            assert self._held.free.wait(PATIENCE)
        return x @ self.weight.T + self.bias
