"""Gradients that stay on their GPU: the server of this process takes them from their mirror, through the hatch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from syncline.client.exchange import Exchange
from syncline.core.layout import FLOATS, Segment
from syncline.net.hatch import Handed, Hatch
from syncline.torch.comparing import place_of


class HatchCarrier:
    """Gradients are copied into their mirror at `step()`: nothing travels, so nothing is won by doing so early."""

    helps_early = False

    def __init__(self, exchange: Exchange, segment: Segment, device: torch.device, hatch: Hatch) -> None:
        self._exchange, self._segment, self._hatch, self._device = exchange, segment, hatch, device
        self._mirror = torch.zeros(segment.num_bytes, dtype=torch.uint8, device=device)
        self._views = [place_of(self._mirror, segment, index) for index in range(len(segment.parameters))]
        floats = [part for part in segment.slices if part.dtype in FLOATS and part.num_bytes]
        self._numbers = [
            self._mirror[part.offset : part.offset + part.num_bytes].view(getattr(torch, part.dtype))
            for part in floats
        ]
        hatch.open_for(segment.index)

    def targets(self, indices: Iterable[int]) -> list[torch.Tensor]:
        return [self._views[index] for index in indices]

    def fill(self, gradients: Mapping[int, torch.Tensor]) -> bool:
        self._exchange.make_room()
        for part in self._segment.slices:  # its server may still be at work on what was there before
            handed = self._hatch.parameters(part.id)
            if handed is not None and handed.event is not None:
                handed.event.wait()  # the caller's stream does
        torch._foreach_copy_(self.targets(gradients), list(gradients.values()))
        return False

    def carry(self, numbers: Sequence[int]) -> None:
        """Nothing is carried early."""

    def same(self, gradients: Mapping[int, torch.Tensor]) -> set[int]:
        return set()

    def finish(self, again: set[int], late: set[int]) -> None:
        """Nothing was carried early."""

    def hand_over(self) -> bool:
        """On the GPU the largest number of each slice tells whether all are finite. Where some are not, host memory
        gets them too: there it is found out which, and what of them counts."""
        event = torch.cuda.Event() if self._device.type == "cuda" else None
        if event is not None:
            event.record(torch.cuda.current_stream(self._device))
        self._hatch.give(self._segment.index, Handed(self._mirror, event))
        if not self._exchange.checks_finite:
            return False
        largest = [torch.linalg.vector_norm(numbers, math.inf).float() for numbers in self._numbers]
        if not largest or math.isfinite(float(torch.stack(largest).amax())):
            return True
        torch.from_numpy(self._exchange.arena(self._segment.index)).copy_(self._mirror)
        return False
