"""The weighted sum of gradients: every way of adding up a round uses these functions, so all give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.core.layout import INTEGERS

HALF = (torch.float16, torch.bfloat16)


def sum_dtype(dtype: str, *, averages: bool) -> torch.dtype:
    """The dtype in which numbers are added up: halves in single precision, means of integers as fractions."""
    kind: torch.dtype = getattr(torch, dtype)
    if dtype in INTEGERS:
        return torch.float64 if averages else torch.int64
    return torch.float32 if kind in HALF else kind


def add_up(sources: Sequence[tuple[torch.Tensor, float]], total: torch.Tensor, *, weighted: bool) -> None:
    """Writes Σ gᵢ, or Σ wᵢgᵢ, into `total`, in the order given."""
    (first, weight), *rest = sources
    if rest and not weighted and first.dtype == total.dtype:
        torch.add(first, rest.pop(0)[0], out=total)
    else:
        total.copy_(first)  # `out=` would still compute in the dtype of the sources
        if weighted:
            total.mul_(weight)
    for tensor, weight in rest:
        total.add_(tensor, alpha=weight if weighted else 1)


def narrow(total: torch.Tensor, into: torch.Tensor) -> None:
    """Copies a sum into memory of its own dtype; means of integers are rounded."""
    if into is not total:
        is_mean = not into.is_floating_point() and total.is_floating_point()
        into.copy_(total.round_() if is_mean else total)
