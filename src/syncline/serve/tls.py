"""HTTP over TLS: a connection counts from the moment that it is accepted.

If uvicorn's socket spoke TLS, asyncio would show connections after the handshake only, for which it allows a minute:
those that never shake hands would be bounded by nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pathlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, cast

from syncline.serve.limits import Connections

log = logging.getLogger("syncline.serve")

_PAUSE_SECONDS = 0.5  # after a connection that could not be accepted


def server_context(certificate: pathlib.Path, key: pathlib.Path) -> ssl.SSLContext:
    """OSError or ValueError: these files are no certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


class TlsAcceptor:
    """Accepts connections in the event loop, and gives them to a protocol when they are encrypted."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, connections: Connections, *, handshake_seconds: float
    ) -> None:
        """`sock`: listens; this object's from `start` on. `connections`: counts those that shake hands."""
        self._sock, self._context, self._connections = sock, context, connections
        self._seconds = handshake_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], Awaitable[None]]:
        """`make`: a protocol for each connection. Returns what ends this."""
        self._sock.setblocking(False)
        self._begin(self._accept(make))
        return self._close

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()

    async def _accept(self, make: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._sock)
            except OSError as error:  # too many open files, as a rule
                log.warning("a connection cannot be accepted: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                self._begin(self._shake_hands(accepted, make))

    async def _shake_hands(self, accepted: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        peer: object = None
        try:
            peer = tuple(accepted.getpeername()[:2])
            self._connections.made(peer, cast(asyncio.Transport, _Unencrypted(accepted)))
            await asyncio.get_running_loop().connect_accepted_socket(
                make, accepted, ssl=self._context, ssl_handshake_timeout=self._seconds
            )
        except BaseException as error:
            self._connections.lost(peer)
            accepted.close()
            if not isinstance(error, OSError):
                raise
            log.debug("no TLS with %s: %s", peer, error)  # by the client's fault, as a rule


class _Unencrypted:
    """A connection that shakes hands: all that `Connections` does with it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._sock.shutdown(socket.SHUT_RDWR)
