"""Aggregates the gradients of a round's workers otherwise than by a mean: see `core/aggregate.py`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from syncline import extensions
from syncline.core.aggregate import Aggregate, OwnAggregate, aggregated, own_of
from syncline.errors import RuleError

#: NumPy has no bfloat16, and integers become fractions.
_AS = {torch.float32: torch.float32, torch.float16: torch.float32, torch.bfloat16: torch.float32}


@functools.cache
def _own(how: Aggregate) -> OwnAggregate | None:
    return own_of(how, extensions.load)


def aggregate_tensors(
    how: Aggregate, tensors: Sequence[torch.Tensor], weights: Sequence[float], into: torch.Tensor
) -> None:
    """Writes the aggregate of these tensors, one of each worker, into `into`."""
    kind = _AS.get(tensors[0].dtype, torch.float64)
    rows = [tensor.detach().to("cpu", kind).numpy() for tensor in tensors]
    found = torch.from_numpy(aggregated(how, rows, weights, _own(how)))
    into.copy_(found if into.is_floating_point() else found.round())
    if how.kind == "own" and not bool(torch.isfinite(into).all()):
        raise RuleError(
            f"--aggregate {how.name}: it returned numbers beyond {str(into.dtype).removeprefix('torch.')}"
        )
