"""Receives parameters on a GPU: `step()` returns when its commit is sent; each parameter is awaited where it is
read.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Sequence

import torch

from syncline.net.device_channel import WorkerChannel
from syncline.torch.buffers import Buffers
from syncline.torch.device_target import DeviceTarget
from syncline.torch.guard import Guard
from syncline.torch.parameters import Tracked, shaped
from syncline.torch.receiver import pull_all
from syncline.torch.streams import Side, StreamMark
from syncline.worker.exchange.commit import ServersTicket
from syncline.worker.exchange.servers import ServersExchange


class DeviceReceiver:
    """Receives parameters into flat device memory, which the model's tensors share where possible.

    Without a window, the last push is *due*: reading a parameter waits for its slices, as does the stream that reads
    it. With a window, an earlier push is received at the beginning of a step, while the device is busy: only streams
    wait. `lazy` is False if everything must be received when `step()` returns.
    """

    def __init__(
        self,
        exchange: ServersExchange,
        tracked: Sequence[Tracked],
        buffers: Buffers | None,
        window: int,
        *,
        side: Side,
        model: torch.nn.Module | None,
        lazy: bool,
        device_channel: WorkerChannel | None = None,
    ) -> None:
        self._exchange, self._tracked, self._buffers, self._window = exchange, list(tracked), buffers, window
        self._side, self._lazy = side, lazy
        self._views: list[torch.Tensor] = []
        self._slices: list[tuple[int, ...]] = []  # by tracked parameter
        flats = self._lay_out(model)
        self.target = DeviceTarget(
            side, flats, buffers.flats if buffers is not None else {}, exchange.mapped, device_channel
        )
        # Before any commit (of another optimizer, or job.kv), pending reads of the servers' memory must be finished.
        self._stop_finishing = exchange.before_commit(self.target.finish)
        self._buffer_slices = [p.id for p in exchange.layout.slices() if buffers and p.segment in buffers.flats]
        self._tickets: collections.deque[ServersTicket] = collections.deque()
        self._due: ServersTicket | None = None
        self._landed = False  # received, not awaited yet
        self._astray: set[int] = set()  # parameters in other memory that must still be copied there
        self._storage: dict[int, StreamMark] = {}
        self._first_reads: dict[int, None] | None = {}  # in order, until known
        self._lock = threading.RLock()
        waits = {id(item.tensor): functools.partial(self._read, k) for k, item in enumerate(self._tracked)}
        self._guard = Guard(model.modules() if model is not None and lazy else (), waits)
        self._unguarded = [k for k, item in enumerate(self._tracked) if id(item.tensor) not in self._guard.guarded]
        self._guard.arm()  # to learn the order of the first reads

    def _lay_out(self, model: torch.nn.Module | None) -> dict[int, torch.Tensor]:
        where, flats = self._exchange.layout.where, {}
        stays = _laid_out_by_cudnn(model)
        for item in self._tracked:
            segment, index = where[item.name]
            if segment.index not in flats:
                flats[segment.index] = torch.zeros(segment.num_bytes, dtype=torch.uint8, device=item.tensor.device)
            begin = segment.offsets[index]
            end = begin + segment.parameters[index].num_bytes
            self._slices.append(
                tuple(p.id for p in segment.slices if p.offset < end and p.offset + p.num_bytes > begin)
            )
            view = shaped(flats[segment.index], begin, item.tensor.shape, item.tensor.dtype)
            view.copy_(item.tensor.detach())
            self._views.append(view)
            if item.tensor.is_contiguous() and id(item.tensor) not in stays:
                item.tensor.data = view
        return flats

    # -- a step -------------------------------------------------------------------------------------------

    def before_push(self) -> None:
        with self._lock:
            self._learn()
            self.target.begin()
            self._land(max(self._window - 1, 0))

    def _learn(self) -> None:
        """Learns the order in which a forward reads its parameters, and prefers it."""
        if self._first_reads:
            order = [*self._first_reads, *(k for k in range(len(self._tracked)) if k not in self._first_reads)]
            slices = dict.fromkeys(number for k in order for number in self._slices[k])
            self._exchange.prefer([*self._buffer_slices, *slices])
            self._first_reads = None

    def before_commit(self) -> None:
        self.target.begin()
        if not self._window:  # the first slices may arrive before the commit returns
            self.target.follow()

    def opened(self, ticket: ServersTicket) -> None:
        with self._lock:
            self._tickets.append(ticket)
            if ticket.target is None and not self._landed:
                return
            if ticket.target is not None and not self._window:
                self._due = ticket
            self._await()

    def _land(self, window: int) -> None:
        while len(self._tickets) > window:
            ticket = self._tickets[0]
            ticket.wait()
            self._tickets.popleft()
            if ticket is self._due:
                self._due = None  # its parameters are awaited already
            elif ticket.target is not None:
                self._landed = True

    def _await(self) -> None:
        """Lets reads wait for parameters, or waits here."""
        if self._due is not None or self._landed:
            self._astray = {k for k, item in enumerate(self._tracked) if _is_elsewhere(item.tensor, self._views[k])}
            self._storage.clear()
            self._spread_buffers()
            self._landed = False
        if not self._lazy or self._guard.compiled:
            self.wait()
            return
        self._guard.arm()
        for k in self._unguarded:
            self._need(k)

    def _spread_buffers(self) -> None:
        if self._buffers is not None and self._buffer_slices:
            if self._due is not None:
                self._due.wait_for(self._buffer_slices)
            with torch.no_grad():
                self._buffers.spread()

    # -- reading ------------------------------------------------------------------------------------------

    def _read(self, k: int, alone: bool) -> bool:
        """A parameter is read. Returns whether nothing of it is pending."""
        with self._lock:
            if self._first_reads is not None and alone:
                self._first_reads[k] = None
            # With a window, the next push may be received at any time.
            return self._need(k) and not (self._window and self._tickets)

    def _need(self, k: int) -> bool:
        """Orders the caller's stream after this parameter. Returns whether it has arrived."""
        if self._due is not None:
            self._due.wait_for(self._slices[k])
        is_there = self.target.order(self._slices[k])
        if k in self._astray:
            self._astray.discard(k)
            with torch.no_grad():
                self._side.copy(self._tracked[k].tensor.detach(), self._views[k])
            self._storage[k] = self._side.mark()
        if k in self._storage and not self._storage[k].done():
            self._storage[k].order()
            return False
        return is_there

    def wait(self) -> None:
        with self._lock:
            if self._due is not None:
                self._due.wait()
            for k in range(len(self._tracked)):
                self._need(k)

    def settle(self) -> None:
        with self._lock:
            self.target.begin()
            self._land(0)
            self._await()
            self.wait()
            self.target.finish()

    def pull(self) -> None:
        with self._lock:
            self.target.begin()
            pull_all(self._exchange, self.target)
            self._landed = True
            self._await()
            self.wait()

    @property
    def is_left(self) -> bool:
        return False  # each tensor's memory is checked when parameters are received

    @property
    def is_written(self) -> bool:
        return False

    def close(self) -> None:
        self._guard.remove()
        self._stop_finishing()


def _is_elsewhere(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether other memory was put in its place: model.to(), swapped weights."""
    return bool(tensor.numel()) and tensor.data_ptr() != view.data_ptr()


def _laid_out_by_cudnn(model: torch.nn.Module | None) -> set[int]:
    """The weights of recurrent modules: cuDNN needs each module's weights in one piece of memory."""
    found = [m for m in model.modules() if isinstance(m, torch.nn.RNNBase)] if model is not None else []
    return {id(parameter) for module in found for parameter in module.parameters()}
