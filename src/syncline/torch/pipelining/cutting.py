"""Where a model is cut into parts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from syncline.errors import ConfigError
from syncline.torch.pipelining.engine import empty
from syncline.torch.pipelining.orders import TensorMeta

if TYPE_CHECKING:
    from syncline.torch.pipelining.layers import LayeredModel

#: Traces that are kept: of full and short micro-batches, in training and in evaluation.
_MOST_TRACES = 4


class Chain(torch.nn.Sequential):
    """Stages one behind the other; one that returns a tuple gives the next several inputs."""

    def forward(self, *given: Any) -> Any:
        output: Any = given
        for stage in self:
            output = stage(*output) if isinstance(output, tuple) else stage(output)
        return output


class Layers:
    """A model as layers that can be cut apart: the stages that a script gave, or what was found in its model.

    With an example the model is traced. What its `forward` reads of shapes becomes a constant of the trace, so it is
    traced for every size of micro-batches, and without computing anything: no process has all of its numbers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        given: Sequence[torch.nn.Module] | None = None,
        example: Sequence[torch.Tensor] = (),
        cut_before: Sequence[str] = (),
    ) -> None:
        from syncline.torch.pipelining.layers import find_layers  # loads torch's tracing

        self.model, self.cut_before, self._find = model, tuple(cut_before), find_layers
        self.is_traced = not given and bool(example)
        if not given and not self.is_traced:
            if not isinstance(model, torch.nn.Sequential):
                raise ConfigError(
                    f"Pipeline: {type(model).__name__} is no torch.nn.Sequential: give an example of its inputs with "
                    "Pipeline(model, loss_fn, example=(x,)), or its parts with Pipeline(stages=[front, back], "
                    "loss_fn=…)"
                )
            given = tuple(model)
        self.given = tuple(given or ())
        if self.is_traced:
            self._layered = self._find(model, example, cut_before=self.cut_before, computes=False)
        else:
            self._layered = self._find(None, (), stages=self.given)
        self.names = [layer.name for layer in self._layered.layers]
        self._traces: dict[Any, LayeredModel] = {}

    def firsts(self, num_parts: int) -> list[int]:
        """The first layer of every part: as `cut_before` says, or parts with about as many parameters each."""
        if num_parts > len(self.names):
            raise ConfigError(
                f"Pipeline: {num_parts} parts need as many layers, and the model has {len(self.names)}; use fewer "
                "--stages"
            )
        if self.cut_before:
            if len(self.cut_before) + 1 != num_parts:
                raise ConfigError(
                    f"Pipeline: cut_before names {len(self.cut_before)} of the {num_parts - 1} cuts that make "
                    f"{num_parts} parts; name {num_parts - 1}, or use other --stages"
                )
            places = map(self._layered.place_of, self.cut_before)
            return [0, *sorted(place for place in places if place is not None)]
        return _even([1 + sum(p.numel() for p in held) for held, _ in self.held(range(len(self.names)))], num_parts)

    def parts(self, firsts: Sequence[int], batch: Sequence[TensorMeta]) -> list[torch.nn.Module]:
        """The parts that begin at these layers, for micro-batches like this one."""
        ends = [*firsts[1:], len(self.names)]
        if self.is_traced:
            traced = self._trace(batch)
            return [traced.stage(first, end) for first, end in zip(firsts, ends, strict=True)]
        return [
            self.given[first] if end == first + 1 else Chain(*self.given[first:end])
            for first, end in zip(firsts, ends, strict=True)
        ]

    def held(self, firsts: Sequence[int]) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """The parameters and buffers of each part."""
        whole, layers = self._layered.model, self._layered.layers
        parameters, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
        return [
            (
                [parameters[name] for layer in layers[first:end] for name in layer.parameters],
                [buffers[name] for layer in layers[first:end] for name in layer.buffers],
            )
            for first, end in zip(firsts, [*firsts[1:], len(layers)], strict=True)
        ]

    def _trace(self, batch: Sequence[TensorMeta]) -> LayeredModel:
        shapes = tuple((tuple(meta.shape), meta.dtype) for meta in batch)
        key = (shapes, tuple(module.training for module in self.model.modules()))
        if (known := self._traces.pop(key, None)) is None:
            example = [empty(meta).zero_() for meta in batch]
            known = self._find(self.model, example, cut_before=self.cut_before, computes=False)
            if [layer.name for layer in known.layers] != self.names:
                raise ConfigError(
                    f"Pipeline: with inputs of {', '.join(str(shape) for shape, _ in shapes)} the model has other "
                    "layers than with the example; give its parts with stages=[front, back]"
                )
        self._traces[key] = known  # the latest
        for _ in range(len(self._traces) - _MOST_TRACES):
            self._traces.pop(next(iter(self._traces)))
        return known


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
