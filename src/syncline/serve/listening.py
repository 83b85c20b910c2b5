"""The HTTP server around the application: uvicorn in a thread, on a socket that is already bound."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import pathlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from syncline.config import num_given_sockets
from syncline.errors import ConfigError, WaitTimeout
from syncline.serve.limits import Connections
from syncline.serve.tls import TlsAcceptor, server_context

try:
    import uvicorn
except ImportError as error:
    raise ConfigError(f"serving needs uvicorn: pip install 'syncline[serve]' ({error})") from error

_SWEEP_SECONDS = 0.5
_BACKLOG = 1024
FIRST_GIVEN = 3  # by the protocol of systemd
START_SECONDS = 60.0

#: Started and ended in the event loop, beside HTTP.
Beside = Callable[[], Awaitable[Callable[[], Awaitable[None]]]]


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError: the address is taken or not of this machine."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {error}; choose another port") from None
    return sock


def given() -> socket.socket | None:
    """The listening socket that a supervisor such as systemd has opened for us (socket activation); None: there is
    none. ConfigError: there are several, or it is none for HTTP.
    """
    num_sockets = num_given_sockets()
    if not num_sockets:
        return None
    words = "the supervisor ($LISTEN_FDS) gives"
    if num_sockets > 1:
        raise ConfigError(f"{words} {num_sockets} sockets; give one, for HTTP")
    try:
        sock = socket.socket(fileno=FIRST_GIVEN)
    except OSError as error:
        raise ConfigError(f"{words} a descriptor that cannot be used: {error}") from None
    is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    if not is_tcp or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        raise ConfigError(f"{words} a socket that does not listen for TCP; use ListenStream=HOST:PORT")
    sock.set_inheritable(False)
    return sock


@contextlib.contextmanager
def reserved(host: str, port: int) -> Iterator[int]:
    """A port at which several processes can listen, each with a socket of its own. ConfigError: it is taken."""
    if port:
        bind(host, port).close()  # fails beside another program, even one that shares the port with others
    with contextlib.ExitStack() as stack:
        try:
            family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = stack.enter_context(socket.socket(family, kind, proto))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(address)
        except OSError as error:
            raise ConfigError(f"--grpc-port {port}: cannot listen there: {error}; choose another port") from None
        yield sock.getsockname()[1]


def is_loopback(sock: socket.socket) -> bool:
    """Whether only processes of this host can connect."""
    host = str(sock.getsockname()[0])
    return host.startswith("127.") or host == "::1"


class HttpListener:
    """Serves the application in a thread of its own. `drain` ends it."""

    def __init__(
        self,
        application: Any,
        sock: socket.socket,
        connections: Connections,
        *,
        certificate: pathlib.Path | None,
        key: pathlib.Path | None,
        drain_seconds: float,
        beside: Beside | None = None,
        handshake_seconds: float = START_SECONDS,
        sweep: Callable[[], None] = lambda: None,
    ) -> None:
        """`handshake_seconds`: for that of TLS. `sweep` is called again and again in the event loop."""
        if (certificate is None) != (key is None):
            raise ConfigError("--cert and --key go together; give both")
        has_fast_parser = importlib.util.find_spec("httptools") is not None
        config = uvicorn.Config(
            application,
            http=_watched(connections, fast=has_fast_parser),
            loop="uvloop" if importlib.util.find_spec("uvloop") is not None else "asyncio",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=3600,  # `Connections` closes idle ones
            timeout_graceful_shutdown=max(1, round(drain_seconds)),
        )
        config.load()
        self._sockets = [sock]  # of uvicorn
        if certificate is not None and key is not None:
            try:
                context = server_context(certificate, key)
            except (OSError, ValueError) as error:
                raise ConfigError(f"--cert {certificate} --key {key}: cannot be used: {error}") from None
            acceptor = TlsAcceptor(sock, context, connections, handshake_seconds=handshake_seconds)
            self._sockets, beside = [], self._over_tls(acceptor, beside)
        self._server = _Server(config, connections, beside, sweep)
        self._sock = sock
        self._thread = threading.Thread(target=self._run, name="syncline serve http", daemon=True)
        self._trouble: BaseException | None = None
        self._drain_seconds = drain_seconds

    def start(self) -> None:
        """Returns when requests are answered."""
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._server.is_up.wait(0.1):
            if not self._thread.is_alive():
                if isinstance(self._trouble, ConfigError):
                    raise self._trouble
                raise ConfigError(f"the HTTP server did not start: {self._trouble}")
            if time.monotonic() > deadline:
                raise WaitTimeout(f"the HTTP server did not start within {START_SECONDS:g} s")

    def drain(self) -> None:
        """Accepts no more connections, answers open requests, and ends."""
        self._server.should_exit = True
        self._thread.join(self._drain_seconds + START_SECONDS)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Calls it in the event loop; after `start`. Any thread may ask."""
        assert self._server.loop is not None
        with contextlib.suppress(RuntimeError):  # it was closed
            self._server.loop.call_soon_threadsafe(function)

    def _over_tls(self, acceptor: TlsAcceptor, beside: Beside | None) -> Beside:
        async def start() -> Callable[[], Awaitable[None]]:
            ends = [await beside()] if beside is not None else []
            ends.append(await acceptor.start(self._server.make_protocol))

            async def end() -> None:
                await asyncio.gather(*(one() for one in ends))

            return end

        return start

    def _run(self) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        try:
            self._server.run(sockets=self._sockets)
        except BaseException as error:  # told to the thread that waits
            self._trouble = error
        finally:
            self._sock.close()


class _Server(uvicorn.Server):
    """uvicorn with a sweep of idle connections, and what runs beside it in the same loop."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, beside: Beside | None, sweep: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.is_up = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._watched, self._beside, self._also_sweep = connections, beside, sweep
        self._sweeper: asyncio.Task[None] | None = None
        self._end_beside: Callable[[], Awaitable[None]] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._sweeper = asyncio.create_task(self._sweep())
        if self._beside is not None:
            self._end_beside = await self._beside()
        self.is_up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ends: list[Awaitable[None]] = [super().shutdown(sockets)]
        if self._end_beside is not None:
            ends.append(self._end_beside())  # at once: both drain within the same seconds
        await asyncio.gather(*ends)
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper

    def make_protocol(self) -> asyncio.Protocol:
        """For a connection that was accepted beside uvicorn's own sockets."""
        make: Any = self.config.http_protocol_class
        made: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._watched.sweep(time.monotonic())
            self._also_sweep()


def _watched(connections: Connections, *, fast: bool) -> type[asyncio.Protocol]:
    """uvicorn's protocol, whose connections are counted. Only the calls of asyncio.Protocol are extended."""
    base: Any
    if fast:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as base
    else:
        from uvicorn.protocols.http.h11_impl import H11Protocol as base

    class WatchedProtocol(base):  # type: ignore[misc]
        _peer: object = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            name = transport.get_extra_info("peername")
            self._peer = tuple(name[:2]) if isinstance(name, tuple) else None
            super().connection_made(transport)
            connections.made(self._peer, transport)

        def data_received(self, data: bytes) -> None:
            connections.received(self._peer, len(data))
            super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.lost(self._peer)
            super().connection_lost(exc)

    return WatchedProtocol
