"""The tensors of a model by number, and which of them a process of a pipeline computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from syncline.torch.pipelining.deferred import materialise, replace


class Tensors:
    """Parameters and buffers of the whole model, numbered alike in all processes; tied ones have one number."""

    def __init__(self, model: torch.nn.Module) -> None:
        named = dict(model.named_parameters())
        self.names, self.parameters = list(named), list(named.values())
        buffers = dict(model.named_buffers())
        self.buffer_names, self.buffers = list(buffers), list(buffers.values())
        self.number_of = {id(p): index for index, p in enumerate(self.parameters)}
        self.number_of_buffer = {id(b): index for index, b in enumerate(self.buffers)}

    def move(self, places: Mapping[int, torch.Tensor], *, fill: bool) -> None:
        """Parameters lie there from now on; `fill`: with the values that they have."""
        _move(self.parameters, places, fill)

    def move_buffers(self, places: Mapping[int, torch.Tensor], *, fill: bool) -> None:
        _move(self.buffers, places, fill)


def _move(tensors: Sequence[torch.Tensor], places: Mapping[int, torch.Tensor], fill: bool) -> None:
    with torch.no_grad():
        for index, place in places.items():
            if fill:
                place.copy_(tensors[index])
            replace(tensors[index], place)


class Holdings:
    """What the parts of one process consist of, by number."""

    def __init__(self, tensors: Tensors, parts: Sequence[torch.nn.Module]) -> None:
        self._tensors = tensors
        self.parameters = sorted({tensors.number_of[id(p)] for part in parts for p in part.parameters()})
        self.buffers = sorted({tensors.number_of_buffer[id(b)] for part in parts for b in part.buffers()})

    def materialise(self) -> None:
        """Makes those that were built without memory."""
        parameters = [self._tensors.parameters[index] for index in self.parameters]
        materialise([*parameters, *(self._tensors.buffers[index] for index in self.buffers)])
