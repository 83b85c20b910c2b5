"""A model's buffers, such as BatchNorm's statistics: the chief's, or the workers' mean, after every step."""

from __future__ import annotations

import torch

from syncline.core.layout import Ranges, to_ranges
from syncline.core.rule import Rule
from syncline.torch.parameters import FlatMemory, as_tensor, buffers_of, on_cpu
from syncline.worker.arrays import Bytes
from syncline.worker.job import Job


class Buffers:
    """Buffers live on the servers under the rule `Assign`."""

    def __init__(self, job: Job, model: torch.nn.Module, mode: str, prefix: str = "") -> None:
        self._job, self._model, self._prefix = job, model, prefix
        self._tracked = buffers_of(model, prefix)
        left_out = sum(bool(buffer.numel()) for _, buffer in model.named_buffers()) - len(self._tracked)
        if left_out:
            job.notice(f"{left_out} buffers of a type that servers cannot host are not synchronised")
        self._mode = mode
        self.flats: dict[int, Bytes] = {}
        self._flat: FlatMemory | None = None
        if not self._tracked:
            return
        values = job.kv.register([(i.name, on_cpu(i.tensor)) for i in self._tracked], Rule("Assign"))
        with torch.no_grad():
            for item in self._tracked:
                item.tensor.copy_(values[item.name])
        layout = job.exchange.layout
        self._segment = layout.where[self._tracked[0].name][0]
        self._flat = FlatMemory(layout, self._tracked, in_place=False)
        self._pushed = to_ranges(layout.parameter_id(item.name) for item in self._tracked)
        if self._takes:  # a chief stays chief; a later one only stops receiving them
            self.flats = self._flat.flats

    @property
    def _pushes(self) -> bool:
        return self._mode == "mean" or self._job.is_chief

    @property
    def _takes(self) -> bool:
        """Whether this worker receives buffers; the chief's own copy is current."""
        return self._mode == "mean" or not self._job.is_chief

    def collect(self) -> Ranges:
        """Copies this worker's buffers into the arena, if they count; returns their ids."""
        if not self._tracked or not self._pushes:
            return ()
        arena = self._job.exchange.arena(self._segment.index)
        where = self._job.exchange.layout.where
        self._look_again()
        for item in self._tracked:
            offset = self._segment.offsets[where[item.name][1]]
            as_tensor(arena, offset, item.tensor.shape, item.tensor.dtype).copy_(item.tensor.detach())
        return self._pushed

    def spread(self) -> None:
        """Copies received buffers into the model."""
        if self._flat is not None and self._takes:
            self._look_again()
            self._flat.spread()

    def _look_again(self) -> None:
        """A module may have replaced a buffer's tensor."""
        current = dict(self._model.named_buffers())
        for item in self._tracked:
            item.tensor = current.get(item.name.removeprefix(self._prefix), item.tensor)
