"""Steps that XLA compiles: they cannot call out, so they leave their gradients for the callback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from syncline.keras import backends
from syncline.keras.backends import to_host


class LeftGradients:
    """Variables in which a compiled step leaves its gradients and its learning rate."""

    def __init__(self) -> None:
        self._left: tuple[list[str], list[Any], Any] | None = None

    def leave(self, names: list[str], gradients: Sequence[Any], rate: Any) -> None:
        """In the code that is being compiled."""
        if self._left is None:
            with backends.current().outside():
                places = [
                    keras.Variable(np.zeros(g.shape, g.dtype.as_numpy_dtype), trainable=False) for g in gradients
                ]
                self._left = (names, places, keras.Variable(0.0, dtype="float32", trainable=False))
        for place, gradient in zip(self._left[1], gradients, strict=True):
            place.assign(gradient)
        self._left[2].assign(rate)

    def found(self) -> tuple[list[str], list[Any]] | None:
        """Behind the step: the names, and the gradients with the learning rate behind; None: it left none."""
        if self._left is None:
            return None
        names, places, rate = self._left
        return names, [*(to_host(place) for place in places), to_host(rate)]
