"""How new parameters come into the model: landed by `step()` itself, as on a CPU and with local steps."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Protocol

import torch

from syncline.torch.buffers import Buffers
from syncline.torch.parameters import FlatMemory, Tracked
from syncline.worker.exchange.commit import ServersTicket
from syncline.worker.exchange.servers import ServersExchange
from syncline.worker.exchange.targets import FlatTarget, Target


class ParameterReceiver(Protocol):
    """What `DistributedOptimizer` asks of either way to land parameters."""

    @property
    def is_left(self) -> bool:
        """Whether parameters that landed here lie in other memory now."""

    @property
    def is_written(self) -> bool:
        """Whether the script was seen to write to them since they landed, through `.data` too."""

    @property
    def target(self) -> Target:
        """Where the exchange brings them."""

    def before_push(self) -> None:
        """A step begins: an earlier push may land now."""

    def before_commit(self) -> None:
        """The servers' memory will be written again: nothing reads it after this."""

    def opened(self, ticket: ServersTicket) -> None:
        """A commit is under way."""

    def wait(self) -> None:
        """The parameters of every push that is not in the window are in the model, for whatever reads them next."""

    def settle(self) -> None:
        """The same of every push; nothing is under way after this."""

    def pull(self) -> None:
        """Brings the newest parameters."""

    def close(self) -> None:
        """Another one takes over; everything is settled."""


class HostReceiver:
    """Parameters land in flat memory on the host, in which the model's tensors lie where they can."""

    def __init__(
        self,
        exchange: ServersExchange,
        tracked: Sequence[Tracked],
        buffers: Buffers | None,
        window: int,
        *,
        in_place: bool,
    ) -> None:
        self._exchange, self._buffers, self._window = exchange, buffers, window
        self.flat = FlatMemory(exchange.layout, tracked, in_place=in_place)
        self.target = FlatTarget({**self.flat.flats, **(buffers.flats if buffers is not None else {})})
        self._tickets: collections.deque[ServersTicket] = collections.deque()

    def before_push(self) -> None:
        """What is open lands after the commit."""

    def before_commit(self) -> None:
        """What has landed is a copy."""

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
            self._tickets.popleft()
            landed = True
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
        """What has landed goes into the tensors that do not lie in the flat memory."""
        self.flat.spread()
        self.flat.note()
        if self._buffers is not None:
            self._buffers.spread()


def pull_all(exchange: ServersExchange, target: Target) -> None:
    """The newest of everything that a sink wants."""
    exchange.pull([part for part in exchange.layout.slices() if target.wants(part)], target, None)
