"""A word from one server to another, said again until it is acknowledged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from syncline.core.message import Message
from syncline.errors import ConnectionLost, SynclineError
from syncline.net.rpc import Call
from syncline.net.transport import Buffer
from syncline.roles.server.replication import Partner


class Saying:
    """A message on its way to one other server; its answer says nothing."""

    def __init__(
        self,
        partner: Partner,
        message: Message,
        buffers: Sequence[Buffer] = (),
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """`then`: what to do when it is acknowledged."""
        self._partner, self._message, self._buffers, self._then = partner, message, buffers, then
        self.is_acknowledged = False

    def take_back(self) -> None:
        """It need not be said any more."""
        self.is_acknowledged, self._buffers = True, ()

    def send(self) -> None:
        endpoint, buffers = self._partner.current(), self._buffers
        if self.is_acknowledged:
            return
        if endpoint is None:
            self._partner.repeat_later(self)
            return
        try:
            call = endpoint.call(self._message, buffers=buffers, payload_bytes=sum(map(len, buffers)))
        except ConnectionLost:
            self._partner.repeat_later(self)
            return
        call.when_done(functools.partial(self._answered, call))

    def _answered(self, call: Call) -> None:
        try:
            call.wait(0)
        except ConnectionLost:
            self._partner.repeat_later(self)
            return
        except SynclineError:
            pass  # one of us is out: the coordinator's word will come
        self.is_acknowledged = True
        self._then()
