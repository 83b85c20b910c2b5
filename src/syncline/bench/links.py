"""The floors between two processes: plain sockets, or plain TLS 1.3 sockets, with an echo at the far end.

A link has one connection for each direction, each used by one thread only: threads must not share an OpenSSL
connection, and with a single one a thread could not send while another receives.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Iterator

import numpy as np

from syncline.errors import ConnectionLost
from syncline.net.certificate import Certificate, client_context
from syncline.net.transport import buffer_of

PIECE_BYTES = 1 << 20
CONNECT_SECONDS = 60.0
_TOKEN_BYTES = 16


class BenchListener:
    """The far end, before the near end has connected. It turns away peers without the token."""

    def __init__(self, address: str, *, is_tls: bool) -> None:
        self._listener = socket.create_server((address, 0), family=family_of(address))
        self._listener.settimeout(CONNECT_SECONDS)
        self._is_tls = is_tls
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)

    @contextlib.contextmanager
    def accept(self) -> Iterator[Far]:
        context = Certificate.create().server_context() if self._is_tls else None
        found: list[socket.socket] = []
        with contextlib.ExitStack() as stack:
            while len(found) < 2:
                sock, _ = self._listener.accept()
                sock.settimeout(CONNECT_SECONDS)
                tune(sock)
                said = bytearray(_TOKEN_BYTES)
                with contextlib.suppress(OSError, ConnectionLost):
                    sock = context.wrap_socket(sock, server_side=True) if context is not None else sock
                    receive(sock, memoryview(said))
                stack.enter_context(sock)
                if hmac.compare_digest(bytes(said), self.token.encode()):
                    found.append(sock)
            self._listener.close()
            yield Far(found[0], found[1])


class Far:
    """Sends back what comes."""

    def __init__(self, there: socket.socket, back: socket.socket) -> None:
        self._there, self._back = there, back
        self._piece = buffer_of(np.zeros(PIECE_BYTES, np.uint8))

    def echo(self, num_bytes: int) -> None:
        for start in range(0, num_bytes, PIECE_BYTES):
            piece = self._piece[: min(PIECE_BYTES, num_bytes - start)]
            receive(self._there, piece)
            self._back.sendall(piece)


class Near:
    """Sends bytes to the far end and receives as many; long messages in both directions at once."""

    def __init__(self, there: socket.socket, back: socket.socket, num_bytes: int) -> None:
        self._there, self._back = there, back
        self._out, self._in = (buffer_of(np.ones(num_bytes, np.uint8)) for _ in range(2))

    def exchange(self) -> None:
        if len(self._out) <= PIECE_BYTES:
            self._there.sendall(self._out)
            receive(self._back, self._in)
            return
        sender = threading.Thread(target=self._there.sendall, args=(self._out,))
        sender.start()
        receive(self._back, self._in)
        sender.join()


@contextlib.contextmanager
def connect(address: str, port: int, token: str, num_bytes: int, *, is_tls: bool) -> Iterator[Near]:
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(2):
            sock = stack.enter_context(socket.create_connection((address, port), CONNECT_SECONDS))
            tune(sock)
            if is_tls:
                sock = stack.enter_context(client_context().wrap_socket(sock))
            sock.sendall(token.encode())
            found.append(sock)
        yield Near(found[0], found[1], num_bytes)


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def receive(sock: socket.socket, view: memoryview) -> None:
    """Fills the view. Raises ConnectionLost at the end of the stream."""
    while len(view):
        count = sock.recv_into(view)
        if not count:
            raise ConnectionLost("the other process of the floor has closed the connection")
        view = view[count:]


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def address_towards(host: str) -> str:
    """This machine's address on the way to a host, by the routing table; nothing is sent. "" if there is none."""
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])
