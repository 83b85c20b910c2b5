"""What a codec is: a name, a bound on the size of an encoding, and the two ways."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Codec(Protocol):
    """A value without state: several threads use it at once. Equal numbers have equal encodings, on every machine.

    It gets each parameter's numbers by themselves; one with `is_joint = True` gets all of a slice at once.
    """

    @property
    def name(self) -> str:
        """As it is said at launch and on the wire."""

    @property
    def is_lossy(self) -> bool:
        """Whether decoding may give other numbers; what is left out is then added to the next push."""

    def bound(self, num_items: int) -> int:
        """The most bytes that an encoding of so many numbers has. Receivers allocate no more."""

    def encode(self, values: Floats) -> Bytes:
        """The encoding of these numbers, in memory of its own."""

    def decode(self, data: Bytes, out: Floats) -> None:
        """Writes all of `out`. Raises FrameError (or ValueError) for what is no encoding of so many numbers."""
