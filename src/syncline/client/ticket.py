"""A push to the servers, under way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from syncline.client.commit import CommitFlow
from syncline.client.lane import ServerLane

if TYPE_CHECKING:
    from syncline.client.servers import ServersExchange


class ServersTicket:
    """A push to the servers. `wait` may be called again after a WaitTimeout."""

    def __init__(self, exchange: ServersExchange, flow: CommitFlow, lanes: Sequence[ServerLane]) -> None:
        self._exchange, self._flow, self._lanes = exchange, flow, lanes
        self._landed = False

    def done(self) -> bool:
        return self._flow.done()

    def wait(self, timeout_seconds: float | None = None) -> None:
        if not self._landed:
            self._exchange.finish(self._flow, self._lanes, timeout_seconds)
            self._landed = True
            self._exchange.forget(self)

    def wait_for(self, slices: Collection[int]) -> None:
        """Returns when these slices are in the sink; others may still be under way."""
        if not self._landed and not self._exchange.wait_for(self._flow, self._lanes, slices):
            self.wait()
