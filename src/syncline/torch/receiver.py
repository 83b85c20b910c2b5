"""Receives new parameters into the model in `step()` itself, as on a CPU and with local steps."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from syncline.net.memory import aligned_zeros
from syncline.torch.buffers import Buffers
from syncline.torch.parameters import FlatMemory, Tracked
from syncline.worker.arrays import Bytes
from syncline.worker.exchange.commit import ServersTicket
from syncline.worker.exchange.servers import ServersExchange
from syncline.worker.exchange.targets import FlatTarget, Target


class ParameterReceiver(Protocol):
    """What `DistributedOptimizer` needs of a receiver."""

    @property
    def is_left(self) -> bool:
        """Whether received parameters have moved to other memory."""

    @property
    def is_written(self) -> bool:
        """Whether the script was seen to write to them since, through `.data` too."""

    @property
    def target(self) -> Target:
        """Where the exchange delivers them."""

    def before_push(self) -> None:
        """A step begins: an earlier push may be received now."""

    def before_commit(self) -> None:
        """The servers' memory will be written again: ends all reads of it."""

    def opened(self, ticket: ServersTicket) -> None:
        """A commit is in flight. Without a target it brings no parameters (`--pull-every`)."""

    def wait(self) -> None:
        """All pushes outside the window are received into the model."""

    def settle(self) -> None:
        """All pushes are received; nothing is in flight after this."""

    def pull(self) -> None:
        """Pulls the newest parameters."""

    def close(self) -> None:
        """Another receiver takes over; everything is settled."""


class HostReceiver:
    """Receives parameters into flat host memory, which the model's tensors share where possible."""

    def __init__(
        self,
        exchange: ServersExchange,
        tracked: Sequence[Tracked],
        buffers: Buffers | None,
        window: int,
        also: dict[int, Bytes],
        *,
        in_place: bool,
        create: Callable[[int], Bytes] = aligned_zeros,
    ) -> None:
        """`also`: memory for other segments that the answers bring. `create` makes the memory of parameters."""
        self._exchange, self._buffers, self._window = exchange, buffers, window
        self.flat = FlatMemory(exchange.layout, tracked, in_place=in_place, create=create)
        self.target = FlatTarget({**self.flat.flats, **(buffers.flats if buffers is not None else {}), **also})
        self._tickets: collections.deque[ServersTicket] = collections.deque()

    def before_push(self) -> None:
        """Open commits are received after the next commit."""

    def before_commit(self) -> None:
        """Received parameters are copies."""

    def opened(self, ticket: ServersTicket) -> None:
        self._tickets.append(ticket)
        self.wait()

    def wait(self) -> None:
        self._land(self._window)

    def settle(self) -> None:
        self._land(0)

    @torch.no_grad()
    def _land(self, window: int) -> None:
        landed = False
        while len(self._tickets) > window:
            self._tickets[0].wait()
            landed = self._tickets.popleft().target is not None or landed
        if landed:
            self.spread()

    def pull(self) -> None:
        pull_all(self._exchange, self.target)
        self.spread()

    def close(self) -> None:
        """The model's tensors stay where they are."""

    @property
    def is_left(self) -> bool:
        return self.flat.is_left

    @property
    def is_written(self) -> bool:
        return not self._tickets and self.flat.is_written

    def spread(self) -> None:
        """Copies received parameters into the tensors that do not share the flat memory."""
        self.flat.spread()
        self.flat.note()
        if self._buffers is not None:
            self._buffers.spread()


def pull_all(exchange: ServersExchange, target: Target) -> None:
    """Pulls everything that a target wants."""
    exchange.pull([part for part in exchange.layout.slices() if target.wants(part)], target, None)
