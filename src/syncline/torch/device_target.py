"""Copies new parameters to a device, slice by slice on a side stream, each with its own event."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from syncline.core.layout import Slice
from syncline.net.device_channel import WorkerChannel
from syncline.torch.streams import Side, StreamMark
from syncline.worker.arrays import Bytes, address_of
from syncline.worker.exchange.targets import FlatTarget, Landed, WantedSlices


class DeviceTarget:
    """Segments in flat device memory, besides some on the host."""

    def __init__(
        self,
        side: Side,
        flats: Mapping[int, torch.Tensor],
        on_host: Mapping[int, Bytes],
        mapped: Callable[[], list[Bytes]],
        device_channel: WorkerChannel | None = None,
    ) -> None:
        """`device_channel`: to servers with these slices on the same device."""
        self._side, self._flats, self._mapped, self._device_channel = side, flats, mapped, device_channel
        # Through the device channel everything arrives at once, after all servers have answered.
        self.in_parts = device_channel is None
        self._on_host = FlatTarget(on_host)
        self._host_copies: dict[int, torch.Tensor] = {}  # by segment: pinned host memory for received bytes
        self._sources: dict[int, tuple[int, torch.Tensor]] = {}  # by slice: its last known source
        self._marks: dict[int, tuple[int, StreamMark]] = {}  # by slice, numbered in queue order
        self._count = 0
        self._taking: StreamMark | None = None  # the last read from the servers' memory
        self._follows = False
        self._lock = threading.RLock()  # the exchange may call from its receiving threads
        self.wanted: dict[str, WantedSlices] = {}  # owned by the exchange
        self.kept: dict[int, Landed | None] = {}

    def begin(self) -> None:
        """The next copies overwrite parameters: they wait for the caller's stream as of the first copy."""
        self._follows = False

    def follow(self) -> None:
        """The next copies overwrite parameters: they wait for the caller's stream as of now."""
        self._side.follow()
        self._follows = True

    # -- what the exchange calls --------------------------------------------------------------------------

    def wants(self, part: Slice) -> bool:
        return part.segment in self._flats or self._on_host.wants(part)

    def views(self, part: Slice) -> list[Bytes]:
        if part.segment not in self._flats:
            return self._on_host.views(part)
        with self._lock:  # several servers may deliver their first slices at once
            if part.segment not in self._host_copies:
                self._host_copies[part.segment] = self._side.new_host_memory(self._flats[part.segment].numel())
        self._wait_for(part)  # its last bytes may still be read from here
        view: Bytes = self._of(self._host_copies[part.segment], part).numpy()
        return [view]

    def filled(self, parts: Sequence[Slice]) -> None:
        for part in parts:
            if part.segment in self._flats:
                self._bring(part, self._of(self._host_copies[part.segment], part))

    def take(self, parts: Sequence[tuple[Slice, Bytes]]) -> None:
        for part, source in parts:
            if self.fetches(part):
                self._fetch(part)
            elif part.segment in self._flats:
                self._bring(part, self._source(part, source))
            else:
                self._on_host.take([(part, source)])
        self._taking = self._side.mark()

    def start_over(self) -> None:
        """Received parameters may be in use: overwrites wait for the caller's stream."""
        self.follow()

    def holds(self, part: Slice) -> bool:
        return part.segment in self._flats or self._on_host.holds(part)

    def copy_of(self, part: Slice) -> Bytes | None:
        if part.segment not in self._flats:
            return self._on_host.copy_of(part)
        self._wait_for(part)
        copy: Bytes = self._of(self._flats[part.segment], part).detach().to("cpu", copy=True).numpy()
        return copy

    def fetches(self, part: Slice) -> bool:
        return (
            self._device_channel is not None
            and part.segment in self._flats
            and part.segment in self._device_channel.segments
        )

    # -- towards the device -------------------------------------------------------------------------------

    def _bring(self, part: Slice, source: torch.Tensor) -> None:
        with self._lock:
            if not self._follows:
                self.follow()
            self._side.copy(self._of(self._flats[part.segment], part), source)
            self._count += 1
            self._marks[part.id] = (self._count, self._side.mark())

    def _fetch(self, part: Slice) -> None:
        """Copies on the device what its server has left there."""
        assert self._device_channel is not None
        handed = self._device_channel.parameters(part.id)
        assert handed is not None, "applied, and not handed over"
        with self._lock:
            if handed.event is not None:
                self._side.follow_event(handed.event)
            self._bring(part, handed.data)

    @staticmethod
    def _of(flat: torch.Tensor, part: Slice) -> torch.Tensor:
        return flat[part.offset : part.offset + part.num_bytes]

    def _source(self, part: Slice, source: Bytes) -> torch.Tensor:
        """The source as a tensor over registered memory."""
        address = address_of(source)
        known = self._sources.get(part.id)
        if known is None or known[0] != address:
            known = self._sources[part.id] = (address, self._find(source, address))
        return known[1]

    def _find(self, source: Bytes, address: int) -> torch.Tensor:
        for array in self._mapped():
            start = address - address_of(array)
            if 0 <= start <= array.nbytes - source.nbytes:
                return self._side.host_memory(array)[start : start + source.nbytes]
        return self._side.host_memory(source)

    # -- what readers of the parameters call --------------------------------------------------------------

    def order(self, slices: Iterable[int]) -> bool:
        """Orders the caller's stream after these slices. Returns whether they are already there."""
        marks = [self._marks[number] for number in slices if number in self._marks]
        if not marks:
            return True
        _, last = max(marks, key=lambda pair: pair[0])
        if last.done():
            return True
        last.order()
        return False

    def _wait_for(self, part: Slice) -> None:
        if part.id in self._marks:
            self._marks[part.id][1].wait()

    def finish(self) -> None:
        """Waits until nothing is read from the servers' memory."""
        if self._taking is not None:
            self._taking.wait()
