"""Where a model is cut into parts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from syncline.errors import ConfigError


class Chain(torch.nn.Sequential):
    """Stages one behind the other; one that returns a tuple gives the next several inputs."""

    def forward(self, *given: Any) -> Any:
        output: Any = given
        for stage in self:
            output = stage(*output) if isinstance(output, tuple) else stage(output)
        return output


class Layers:
    """A model as layers that can be cut apart: the stages that a script gave, or what was found in its model."""

    def __init__(self, model: torch.nn.Module, stages: Sequence[torch.nn.Module] | None) -> None:
        self.model = model
        if stages is not None:
            self.layers = list(stages)
            return
        if not isinstance(model, torch.nn.Sequential):
            raise ConfigError(
                f"Pipeline: {type(model).__name__} is no torch.nn.Sequential: give its parts with "
                "Pipeline(stages=[front, back], loss_fn=…)"
            )
        self.layers = list(model)

    def firsts(self, num_parts: int) -> list[int]:
        """The first layer of every part: parts with about as many parameters each."""
        if num_parts > len(self.layers):
            raise ConfigError(
                f"Pipeline: {num_parts} parts need as many layers, and the model has {len(self.layers)}; use fewer "
                "--stages"
            )
        weights = [1 + sum(p.numel() for p in layer.parameters()) for layer in self.layers]
        return _even(weights, num_parts)

    def parts(self, firsts: Sequence[int]) -> list[torch.nn.Module]:
        ends = [*firsts[1:], len(self.layers)]
        return [
            self.layers[first] if end == first + 1 else Chain(*self.layers[first:end])
            for first, end in zip(firsts, ends, strict=True)
        ]


def _even(weights: Sequence[int], num_parts: int) -> list[int]:
    """Contiguous parts whose heaviest one is as light as can be: the first layer of each."""
    count = len(weights)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best: list[list[tuple[int, list[int]]]] = [[(sums[end], [0]) for end in range(count + 1)]]
    for part in range(1, num_parts):
        row: list[tuple[int, list[int]]] = []
        for end in range(count + 1):
            found = (sums[-1] + 1, [0])
            for first in range(part, end):
                heaviest, firsts = best[-1][first]
                found = min(found, (max(heaviest, sums[end] - sums[first]), [*firsts, first]))
            row.append(found)
        best.append(row)
    return best[-1][count][1]


def digest(model: torch.nn.Module) -> str:
    """Equal in processes whose scripts have made the same model."""
    text = "\n".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    )
    return hashlib.sha256(text.encode()).hexdigest()
