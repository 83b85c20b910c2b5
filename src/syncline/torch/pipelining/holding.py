"""The tensors of a model by number, and which of them a process of a pipeline computes with."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch

from syncline.errors import ConfigError
from syncline.torch.pipelining.cutting import Layers
from syncline.torch.pipelining.deferred import materialise, replace

#: torch's count of the writes to a tensor.
_WRITES = "_version"


class Tensors:
    """Parameters and buffers of the whole model, numbered alike in all processes; tied ones have one number."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        named = dict(model.named_parameters())
        self.names, self.parameters = list(named), list(named.values())
        self.buffer_names = list(dict(model.named_buffers()))
        self.number_of = {id(p): index for index, p in enumerate(self.parameters)}

    @property
    def buffers(self) -> list[torch.Tensor]:
        """As they are now: a module may have put another tensor in the place of one."""
        named = dict(self._model.named_buffers())
        return [named[name] for name in self.buffer_names]

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


def hollow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape without memory of its own, for what another process computes with."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


class Holdings:
    """The parameters and buffers that one process computes with, by number."""

    def __init__(self, parameters: Iterable[int], buffers: Iterable[int]) -> None:
        self._held = frozenset(parameters)
        self.parameters, self.buffers = sorted(self._held), sorted(set(buffers))

    def has_parameter(self, index: int) -> bool:
        return index in self._held

    def materialise(self, tensors: Tensors) -> None:
        """Makes those that were built without memory."""
        buffers = tensors.buffers
        materialise([*(tensors.parameters[i] for i in self.parameters), *(buffers[i] for i in self.buffers)])


def share_out(tensors: Tensors, layers: Layers, firsts: Sequence[int], num_processes: int) -> list[Holdings]:
    """What each process of a pipeline holds; the first one also what no layer uses."""
    buffer_numbers = {id(buffer): index for index, buffer in enumerate(tensors.buffers)}
    held = [
        ({tensors.number_of[id(p)] for p in parameters}, {buffer_numbers[id(b)] for b in buffers})
        for parameters, buffers in layers.held(firsts)
    ]
    unused = set(range(len(tensors.parameters))).difference(*(parameters for parameters, _ in held))
    unused_buffers = set(range(len(tensors.buffer_names))).difference(*(buffers for _, buffers in held))
    held[0] = (held[0][0] | unused, held[0][1] | unused_buffers)
    return [
        Holdings(
            itertools.chain.from_iterable(parameters for parameters, _ in held[number::num_processes]),
            itertools.chain.from_iterable(buffers for _, buffers in held[number::num_processes]),
        )
        for number in range(num_processes)
    ]


def in_several(holdings: Sequence[Holdings]) -> list[int]:
    """Buffers that several processes see: none of them may write there."""
    counts = collections.Counter(index for each in holdings for index in each.buffers)
    return sorted(index for index, count in counts.items() if count > 1)


class UnwrittenBuffers:
    """Looks whether buffers that lie in several stages are written, which would depend on timing."""

    def __init__(self, tensors: Tensors, indices: Sequence[int]) -> None:
        self._tensors, self._indices = tensors, indices
        self.note()

    def note(self) -> None:
        self._versions = self._seen()

    def check(self) -> None:
        for index, before, now in zip(self._indices, self._versions, self._seen(), strict=True):
            if before != now:
                raise ConfigError(
                    f"Pipeline: the buffer {self._tensors.buffer_names[index]!r} is in two stages, and a step writes "
                    "to it; use it in one stage only, or cut the model elsewhere"
                )

    def _seen(self) -> list[tuple[int, int]]:
        if not self._indices:
            return []
        buffers = self._tensors.buffers
        return [(buffers[index].data_ptr(), getattr(buffers[index], _WRITES)) for index in self._indices]
