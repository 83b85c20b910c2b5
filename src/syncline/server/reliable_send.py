"""A word from one server to another, said again until it is acknowledged; and a thread that says large ones."""

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
    """A message on its way to one other server; its answer says nothing."""

    def __init__(
        self,
        partner: Partner,
        message: Message,
        buffers: Sequence[Buffer] = (),
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """`then`: what to do when it is acknowledged."""
        self.partner, self._message, self._buffers, self._then = partner, message, buffers, then
        self.is_acknowledged = False

    def take_back(self) -> None:
        """It need not be said any more."""
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
            pass  # one of us is out: the coordinator's word will come
        self.is_acknowledged = True
        self._then()


class Outbox:
    """What goes to one other server, in a thread of its own: whoever makes it does not wait for the wire, and one who
    does not read holds up nothing else."""

    def __init__(self, name: str) -> None:
        self._sayings: queue.SimpleQueue[ReliableSend | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"sums to {name}", daemon=True).start()

    def put(self, saying: ReliableSend) -> None:
        self._sayings.put(saying)

    def close(self) -> None:
        """What is left is not said; nobody waits for what is being said."""
        self._sayings.put(None)

    def _run(self) -> None:
        while (saying := self._sayings.get()) is not None:
            saying.send()
