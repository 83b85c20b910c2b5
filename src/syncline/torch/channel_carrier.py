"""Gradients that stay on their GPU: the server of this process takes them from their mirror, through the device
channel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from syncline.core.layout import Segment, Slice
from syncline.net.device_channel import DeviceChannel, Handed
from syncline.torch.carriers import BUCKET_BYTES
from syncline.torch.comparing import Comparison, MirrorCheck, place_of
from syncline.worker.exchange.servers import ServersExchange


class ChannelCarrier:
    """Gradients are copied into their mirror: as they become ready, where several ranks add up; else at `step()`."""

    def __init__(
        self, exchange: ServersExchange, segment: Segment, device: torch.device, device_channel: DeviceChannel
    ) -> None:
        self._exchange, self._segment, self._device_channel, self._device = exchange, segment, device_channel, device
        self._mirror = torch.zeros(segment.num_bytes, dtype=torch.uint8, device=device)
        self._views = [place_of(self._mirror, segment, index) for index in range(len(segment.parameters))]
        self._comparison = Comparison(segment, self._mirror)
        self._bucket: list[Slice] = []  # copied, and not told
        self._streams: list[Any] = []  # that write the mirror for the next commit; it is free to be written by them
        self._clock = exchange.clock  # of the commit before that
        self._check = MirrorCheck(segment, self._mirror)
        device_channel.open_for(segment.index)

    @property
    def helps_early(self) -> bool:
        return self._segment.num_bytes >= self._exchange.early_bytes

    def targets(self, indices: Iterable[int]) -> list[torch.Tensor]:
        self._make_free()
        return [self._views[index] for index in indices]

    def _make_free(self) -> None:
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        if self._clock != self._exchange.clock:
            self._clock = self._exchange.clock
            self._streams.clear()
        if stream in self._streams:
            return
        self._exchange.make_room()
        for part in self._segment.slices:  # its server may still be at work on what was there before
            handed = self._device_channel.parameters(part.id)
            if handed is not None and handed.event is not None:
                handed.event.wait()  # the caller's stream does
        self._streams.append(stream)

    def fill(self, gradients: Mapping[int, torch.Tensor]) -> bool:
        torch._foreach_copy_(self.targets(gradients), list(gradients.values()))
        return False

    def copy_early(self, index: int, gradient: torch.Tensor) -> bool:
        self.targets((index,))[0].copy_(gradient)
        return False

    def carry(self, numbers: Sequence[int]) -> None:
        self._bucket += [self._segment.slices[number] for number in numbers]
        if sum(part.num_bytes for part in self._bucket) >= BUCKET_BYTES:
            self._tell()

    def _tell(self) -> None:
        bucket, self._bucket = self._bucket, []
        if bucket:
            self._give()
            self._exchange.stage(bucket)

    def _give(self) -> None:
        event = torch.cuda.Event() if self._device.type == "cuda" else None
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            for stream in self._streams:
                if stream != current:
                    current.wait_stream(stream)
            event.record(current)
        self._device_channel.give(self._segment.index, Handed(self._mirror, event))

    def same(self, gradients: Mapping[int, torch.Tensor]) -> set[int]:
        self._tell()
        return self._comparison.same(gradients)

    def finish(self, late: set[int]) -> None:
        self._bucket = []

    def hand_over(self) -> bool:
        """The GPU tells whether all are finite. Where some are not, host memory gets them too: there it is found out
        which, and what of them counts."""
        self._give()
        if not self._exchange.checks_finite:
            return False
        self._check.begin()
        if self._check.is_finite():
            return True
        torch.from_numpy(self._exchange.arena(self._segment.index)).copy_(self._mirror)
        return False
