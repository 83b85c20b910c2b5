"""One server's lane in a commit: what it is told, and where what it answers lands."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.core.rounds import RoundMembership
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import CommitStaged, Committed, GiveClip, Stage
from syncline.net.rpc import Call, Endpoint
from syncline.net.transport import Buffer
from syncline.worker.commit import CommitFlow
from syncline.worker.landing import Landing

_LOOK_SECONDS = 0.05


class ServerLane:
    """How to ask one server in the course of a commit, and what it answered."""

    __slots__ = ("_buffers", "_endpoint", "_message", "_parts", "answer", "call", "earlier", "landing", "server")

    def __init__(
        self,
        server: str,
        endpoint: Endpoint,
        message: Stage,
        buffers: Sequence[Buffer],
        landing: Landing | None,
        earlier: Sequence[Call],
    ) -> None:
        self.server, self._endpoint, self._message, self._buffers = server, endpoint, message, buffers
        self.landing, self.earlier = landing, earlier
        self._parts = landing is not None and landing.in_parts
        self.call: Call | None = None
        self.answer: Committed | None = None

    def stage(self) -> Call:
        return self._ask(self._message, self._buffers)

    def commit(self, clock: int, roll: RoundMembership | None = None) -> Call:
        return self._ask(CommitStaged(clock, self._pull, self._parts, roll))

    def clip(self, clock: int, squared_norm: float) -> Call:
        return self._ask(GiveClip(clock, squared_norm, self._pull, self._parts))

    @property
    def is_read_by_waiter(self) -> bool:
        return self._endpoint.waiter_reads

    @property
    def _pull(self) -> list[int]:
        return self.landing.pull if self.landing is not None else []

    def _ask(self, message: Message, buffers: Sequence[Buffer] = ()) -> Call:
        size = sum(map(len, buffers)) if buffers else 0
        if self.landing is None:
            return self._endpoint.call(message, buffers=buffers, payload_bytes=size)
        landing = self.landing
        return self._endpoint.call(
            message, buffers=buffers, payload_bytes=size, into=landing.buffers, on_part=landing.arrived
        )

    def await_more(self, flow: CommitFlow, numbers: set[int], seconds: float) -> None:
        """Something more of this lane, or of the flow that it belongs to."""
        if self.is_read_by_waiter:
            if self.call is not None and not self.call.is_done:
                self.call.read(seconds)
            else:
                flow.go_on(seconds)
        elif not flow.done():  # looks at the lanes that nobody else reads
            assert self.landing is not None
            self.landing.wait_for(numbers, min(seconds, _LOOK_SECONDS))

    def finish(self) -> None:
        """The commit is answered everywhere: new parameters land."""
        if self.landing is not None:
            assert self.answer is not None
            self.landing.finish(self.answer)

    def give_up(self) -> None:
        """The commit is made again, with other servers: nothing lands by this lane any more."""
        if self.landing is not None:
            self.landing.give_up()
