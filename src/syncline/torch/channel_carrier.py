"""Gradients that stay on their GPU: servers take them from their mirror, through the device channel."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from syncline.core.layout import Segment, Slice
from syncline.net.device_channel import Handed, WorkerChannel
from syncline.torch.carriers import BUCKET_BYTES
from syncline.torch.comparing import Comparison, MirrorCheck, place_of
from syncline.worker.exchange.servers import ServersExchange


class _Mirror:
    """Where the gradients of one slot are copied."""

    def __init__(self, segment: Segment, data: torch.Tensor, event: Any) -> None:
        self.data, self.event = data, event  # the event, if it is always the same
        self.views = [place_of(data, segment, index) for index in range(len(segment.parameters))]
        self.comparison, self.check = Comparison(segment, data), MirrorCheck(segment, data)


class ChannelCarrier:
    """Gradients are copied into their mirror: as they become ready, where several ranks add up; else at `step()`."""

    def __init__(
        self, exchange: ServersExchange, segment: Segment, device: torch.device, device_channel: WorkerChannel
    ) -> None:
        """The channel is open for this segment."""
        self._exchange, self._segment, self._device_channel, self._device = exchange, segment, device_channel, device
        self._mirrors: dict[int, _Mirror] = {}  # by slot: with a window there are several
        self._bucket: list[Slice] = []  # copied, and not told
        self._streams: list[Any] = []  # that write the mirror for the next commit; it is free to be written by them
        self._clock = exchange.clock  # of the commit before that

    @property
    def helps_early(self) -> bool:
        return self._segment.num_bytes >= self._exchange.early_bytes

    @property
    def _mirror(self) -> _Mirror:
        """That of the next commit."""
        slot = self._exchange.slot
        if slot not in self._mirrors:
            given = self._device_channel.memory(self._segment.index, slot)
            if given is None:
                given = Handed(torch.zeros(self._segment.num_bytes, dtype=torch.uint8, device=self._device))
            self._mirrors[slot] = _Mirror(self._segment, *given)
        return self._mirrors[slot]

    def targets(self, indices: Iterable[int]) -> list[torch.Tensor]:
        self._make_free()
        views = self._mirror.views
        return [views[index] for index in indices]

    def _make_free(self) -> None:
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        if self._clock != self._exchange.clock:
            self._clock = self._exchange.clock
            self._streams.clear()
        if stream in self._streams:
            return
        self._exchange.make_room()
        self._device_channel.wait_until_read(self._segment, self._exchange.slot)
        self._streams.append(stream)

    def fill(self, gradients: Mapping[int, torch.Tensor]) -> Collection[int]:
        torch._foreach_copy_(self.targets(gradients), list(gradients.values()))
        return ()

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
        mirror = self._mirror
        event = mirror.event or (torch.cuda.Event() if self._device.type == "cuda" else None)
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            for stream in self._streams:
                if stream != current:
                    current.wait_stream(stream)
            event.record(current)
        self._device_channel.give(self._segment.index, Handed(mirror.data, event))

    def same(self, gradients: Mapping[int, torch.Tensor]) -> set[int]:
        self._tell()
        return self._mirror.comparison.same(gradients)

    def finish(self, late: set[int]) -> None:
        self._bucket = []

    def hand_over(self) -> bool:
        """The GPU tells whether all are finite. Where some are not, host memory gets them too: there it is found out
        which, and what of them counts. It also gets them where the channel has been given up.
        """
        mirror = self._mirror
        self._give()
        is_finite = False
        if self._exchange.checks_finite:
            mirror.check.begin()
            is_finite = mirror.check.is_finite()
        is_read = self._segment.index in self._device_channel.segments
        if (self._exchange.checks_finite and not is_finite) or not is_read:
            torch.from_numpy(self._exchange.arena(self._segment.index)).copy_(mirror.data)
        return is_finite
