"""How many connections the page holds, and for how long: a stranger cannot take those that readers need.

A connection belongs to a stranger until a request on it was allowed. Strangers have a few connections together, and
some seconds for a request; a further one takes the place of the oldest. Every user of the machine can be one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

#: Connections at a time; of more, requests are answered 503.
MOST_CONNECTIONS = 160
#: Of these, connections of strangers.
MOST_STRANGERS = 32
#: Connections that wait in the kernel; the loop takes them all at once.
BACKLOG = 32
#: For a request, from the connection, or from the first byte after the last answer.
REQUEST_SECONDS = 10.0
#: In the scope of a request: a function that says that it is allowed.
LET_IN = "syncline.let_in"


class BoundedProtocol(H11Protocol):
    """One connection. uvicorn alone has no deadline before the first request."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self._deadline: asyncio.TimerHandle | None = None
        self._is_stranger, self._made_at = True, 0.0
        inner = self.app

        async def with_door(scope: Any, receive: Any, send: Any) -> None:
            scope[LET_IN] = self._let_in
            await inner(scope, receive, send)

        self.app = with_door

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._made_at = self.loop.time()
        self._expect_request()
        strangers = [one for one in self.connections if isinstance(one, BoundedProtocol) and one._is_stranger]
        if len(strangers) > MOST_STRANGERS:
            min(strangers, key=lambda one: one._made_at)._end()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_request()
        else:
            self._expect_nothing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def _let_in(self) -> None:
        self._is_stranger = False

    def _expect_request(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self._end)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self) -> None:
        self._is_stranger = False  # its place is free
        self._expect_nothing()
        self.transport.abort()
