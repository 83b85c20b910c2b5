"""A word from one server to another, said again until it is acknowledged."""

from __future__ import annotations

import functools

from syncline.core.message import Message
from syncline.errors import ConnectionLost, SynclineError
from syncline.net.rpc import Call
from syncline.roles.server.replication import Partner


class Saying:
    """A message on its way to one other server; its answer says nothing."""

    def __init__(self, partner: Partner, message: Message) -> None:
        self._partner, self._message = partner, message
        self.is_acknowledged = False

    def send(self) -> None:
        endpoint = self._partner.current()
        if endpoint is None:
            self._partner.repeat_later(self)
            return
        try:
            call = endpoint.call(self._message)
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
