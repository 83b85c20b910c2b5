"""Messages between servers that are resent until acknowledged, and a thread that sends large ones."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence

from syncline.core.wire.message import Message
from syncline.errors import ConnectionLost, SynclineError
from syncline.net.rpc import Call
from syncline.net.transport import Buffer
from syncline.server.replicate import Partner


class ReliableSend:
    """A message in flight to another server. Its acknowledgement has no content."""

    def __init__(
        self,
        partner: Partner,
        message: Message,
        buffers: Sequence[Buffer] = (),
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """`then`: called on acknowledgement."""
        self.partner, self._message, self._buffers, self._then = partner, message, buffers, then
        self.is_acknowledged = False

    def take_back(self) -> None:
        """Stops resending."""
        self.is_acknowledged, self._buffers = True, ()

    def send(self) -> None:
        endpoint, buffers = self.partner.current(), self._buffers
        if self.is_acknowledged:
            return
        if endpoint is None:
            self.partner.repeat_later(self)
            return
        try:
            call = endpoint.call(self._message, buffers=buffers, payload_bytes=sum(map(len, buffers)))
        except ConnectionLost:
            self.partner.repeat_later(self)
            return
        call.when_done(functools.partial(self._answered, call))

    def _answered(self, call: Call) -> None:
        try:
            call.wait(0)
        except ConnectionLost:
            self.partner.repeat_later(self)
            return
        except SynclineError:
            pass  # one of the servers is removed: the coordinator will say so
        self.is_acknowledged = True
        self._then()


class Outbox:
    """Sends to one other server from its own thread, so that a slow receiver blocks nothing else."""

    def __init__(self, name: str) -> None:
        self._sayings: queue.SimpleQueue[ReliableSend | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"sums to {name}", daemon=True).start()

    def put(self, saying: ReliableSend) -> None:
        self._sayings.put(saying)

    def close(self) -> None:
        """Drops unsent messages. Does not wait for the one being sent."""
        self._sayings.put(None)

    def _run(self) -> None:
        while (saying := self._sayings.get()) is not None:
            saying.send()
