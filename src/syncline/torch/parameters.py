"""Names of a model's parameters and buffers, and their places in flat memory."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from syncline.core.layout import ITEM_BYTES, Layout
from syncline.errors import LayoutError
from syncline.net.memory import aligned_zeros
from syncline.worker.arrays import Bytes

#: Bytes sampled per segment to detect writes.
_SAMPLES = 1024


@dataclasses.dataclass(slots=True)
class Tracked:
    """One parameter or buffer of the model that lives on the servers."""

    name: str
    tensor: torch.Tensor
    group: int  # of the optimizer; -1 for parameters without one
    is_view: bool = False  # the tensor shares the flat memory


def name_parameters(
    groups: Sequence[dict[str, Any]], model: torch.nn.Module | None, prefix: str = ""
) -> Iterator[Tracked]:
    """The optimizer's parameters under the model's names; tied weights are one parameter."""
    known = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
    names: dict[str, int] = {}
    for index, group in enumerate(groups):
        given = group.get("param_names") or [f"group{index}.{k}" for k in range(len(group["params"]))]
        for name, parameter in zip(given, group["params"], strict=True):
            name = known.get(id(parameter), name)
            if names.setdefault(name, id(parameter)) != id(parameter):
                raise LayoutError(f"two parameters are named {name!r}; names must differ")
            yield Tracked(prefix + name, parameter, index)


def free_prefix(taken: dict[str, Any], items: Sequence[Tracked], *, shares: bool = True) -> str:
    """A prefix that keeps these names apart from another model of this job with the same names.

    `taken` has a weak reference to the tensor of every name; these items are added. Names are never reused, even if
    their model is gone: its values stay on the servers. `shares`: two optimizers of the same tensors use the same
    names, with one rule and one state.
    """
    count = 0
    while any(_is_anothers(taken, _prefix(count) + i.name, i.tensor if shares else None) for i in items):
        count += 1
    taken.update({_prefix(count) + item.name: weakref.ref(item.tensor) for item in items})
    return _prefix(count)


def _is_anothers(taken: dict[str, Any], name: str, tensor: torch.Tensor | None) -> bool:
    return name in taken and (tensor is None or taken[name]() is not tensor)


def _prefix(count: int) -> str:
    return f"model{count + 1}." if count else ""


def others(model: torch.nn.Module, tracked: Sequence[Tracked], prefix: str) -> list[Tracked]:
    """Parameters of the model without this optimizer: the chief's values count, once.

    They have separate names, since another optimizer may register them.
    """
    have = {id(item.tensor) for item in tracked}
    found = [(name, p) for name, p in model.named_parameters() if id(p) not in have]
    return [Tracked(f"fixed.{prefix}{name}", p, -1) for name, p in found]


def buffers_of(model: torch.nn.Module, prefix: str) -> list[Tracked]:
    """The non-empty buffers that a server can host."""
    return [
        Tracked(prefix + name, buffer, -1)
        for name, buffer in model.named_buffers()
        if buffer.numel() and str(buffer.dtype).removeprefix("torch.") in ITEM_BYTES
    ]


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()


class FlatMemory:
    """The parameters of each segment as one run of bytes, shared with the model's tensors where possible."""

    def __init__(
        self,
        layout: Layout,
        tracked: Sequence[Tracked],
        *,
        in_place: bool,
        create: Callable[[int], Bytes] = aligned_zeros,
    ) -> None:
        """`create` makes the memory: zeros."""
        self._layout = layout
        self.flats: dict[int, Bytes] = {}
        self._tracked = list(tracked)
        self._views: list[tuple[Tracked, torch.Tensor]] = []
        for item in tracked:
            segment, index = layout.where[item.name]
            if segment.index not in self.flats:
                self.flats[segment.index] = create(segment.num_bytes)
            view = as_tensor(self.flats[segment.index], segment.offsets[index], item.tensor.shape, item.tensor.dtype)
            view.copy_(item.tensor.detach())
            self._views.append((item, view))
            if in_place and item.tensor.device.type == "cpu" and item.tensor.is_contiguous():
                item.tensor.data = view
                item.is_view = True
        self._places = [(i.tensor, view.data_ptr()) for i, view in self._views if i.is_view and i.tensor.numel()]
        self._samples = [
            (flat, np.arange(n := min(flat.size, _SAMPLES)) * flat.size // n) for flat in self.flats.values()
        ]
        self.note()

    def note(self) -> None:
        """Records the current content as received."""
        self._noted = self._sampled()

    @property
    def is_written(self) -> bool:
        """Whether the memory was written since; checks samples, which takes microseconds."""
        return self._sampled() != self._noted

    def _sampled(self) -> list[bytes]:
        return [flat.take(places).tobytes() for flat, places in self._samples]

    def view(self, position: int) -> torch.Tensor:
        """The flat memory's view of the parameter at this position."""
        return self._views[position][1]

    @property
    def is_left(self) -> bool:
        """Whether a tensor has left the flat memory: for another optimizer's, or the script's."""
        return any(tensor.data_ptr() != place for tensor, place in self._places)

    @torch.no_grad()
    def gather(self) -> None:
        """Copies the tensors into the flat memory."""
        for item, view in self._views:
            if _lies_elsewhere(item.tensor, view):
                view.copy_(item.tensor)

    @torch.no_grad()
    def spread(self) -> None:
        """Copies the flat memory into the tensors that do not share it."""
        for item, view in self._views:
            # Other memory may have been put in its place: model.to(), swapped weights.
            if not item.is_view or item.tensor.data_ptr() != view.data_ptr():
                item.tensor.copy_(view)


def _lies_elsewhere(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    return bool(tensor.numel()) and tensor.data_ptr() != view.data_ptr()


def as_tensor(flat: Bytes, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape and type over some bytes."""
    return shaped(torch.from_numpy(flat), offset, shape, dtype)


def shaped(flat: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape and type over some of the bytes of another."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(tuple(shape), dtype=dtype, device=flat.device)
    return flat[offset : offset + num_bytes].view(dtype).view(tuple(shape))
