"""Data sets for examples and proofs, as NumPy arrays; no framework is imported here."""

from __future__ import annotations

from syncline.data.datasets import fashion_mnist
from syncline.data.idx import read_idx

__all__ = ["fashion_mnist", "read_idx"]
