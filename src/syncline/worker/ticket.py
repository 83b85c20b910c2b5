"""A push to the servers, under way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from syncline.core.codecs.pieces import Encoded
from syncline.core.wire.leases import Use
from syncline.errors import SynclineError
from syncline.worker.commit import CommitFlow
from syncline.worker.exchange import Push
from syncline.worker.lane import ServerLane
from syncline.worker.sinks import Sink

if TYPE_CHECKING:
    from syncline.worker.servers import ServersExchange

_NOT_YET = CommitFlow(0, ())


class ServersTicket:
    """A push to the servers: all that is needed to make it again. `wait` may be called again after a WaitTimeout."""

    __slots__ = (
        "_exchange",
        "back_at",
        "changed",
        "clock",
        "encoded",
        "flow",
        "generation",
        "is_early",
        "landed",
        "lanes",
        "phase",
        "push",
        "sink",
        "slot",
        "uses",
    )  # fmt: skip

    def __init__(
        self,
        exchange: ServersExchange,
        push: Push,
        sink: Sink | None,
        clock: int,
        phase: int,
        back_at: int | None,
        slot: int,
    ) -> None:
        self._exchange, self.push, self.sink = exchange, push, sink
        self.clock, self.phase, self.back_at, self.slot = clock, phase, back_at, slot
        self.lanes: Sequence[ServerLane] = ()
        self.flow = _NOT_YET  # on its way
        self.generation = 0  # under which it is on its way
        self.landed = False
        self.uses: list[Use] = []  # of leases
        self.encoded: dict[int, Encoded] = {}  # by slice: as it goes out, again and again
        self.is_early, self.changed = False, list[int]()  # whether slices were staged early; those that changed since

    def done(self) -> bool:
        return self.landed or self.flow.done()

    def wait(self, timeout_seconds: float | None = None) -> None:
        if not self.landed:
            self._exchange.finish(self, timeout_seconds)

    def wait_for(self, slices: Collection[int]) -> None:
        """Returns when these slices are in the sink; others may still be under way."""
        if not self.landed and not self._exchange.wait_for(self, slices):
            self.wait()

    def unanswered(self) -> list[str]:
        """The servers whose answer is not here."""
        return [lane.server for lane in self.lanes if lane.call is None or not lane.call.is_done]

    def failed_by(self, error: SynclineError) -> SynclineError:
        """It cannot be sent, by a fault of the user's codec: whoever waits for it hears this."""
        self.flow = CommitFlow(self.clock, ())
        self.flow.end(error)
        return error

    def give_up(self) -> None:
        """Nothing more is said for it, and nothing of it lands, until it is made again."""
        self.flow.give_up()
        for lane in self.lanes:
            lane.give_up()
