"""What a codec is: a name, a bound on the size of an encoding, and the two ways."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Codec(Protocol):
    """A stateless value, used by several threads. Equal numbers have equal encodings on every machine.

    It encodes each parameter separately; with `is_joint = True`, all of a slice together.
    """

    @property
    def name(self) -> str:
        """The name used at launch and on the wire."""

    @property
    def is_lossy(self) -> bool:
        """Whether decoding may change numbers; the difference is then added to the next push."""

    def bound(self, num_items: int) -> int:
        """The maximal size of an encoding of this many numbers. Receivers allocate no more."""

    def encode(self, values: Floats) -> Bytes:
        """Encodes into new memory."""

    def decode(self, data: Bytes, out: Floats) -> None:
        """Writes all of `out`. Raises FrameError (or ValueError) for an invalid encoding."""
