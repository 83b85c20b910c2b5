"""The bare TLS 1.3 echo of two processes between two namespaces, both directions streaming.

One thread is in the socket, and it never waits in there: it sends and receives as it can, and polls when it can do
neither. The process that has the turns starts its partner in the other namespace; when one is gone, the connection
closes and so does the other.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from benchmarks.task import Task, read_arguments
from benchmarks.turns import Operation, Player, take_turns
from syncline.errors import ConnectionLost
from syncline.net.certificate import Certificate, client_context
from syncline.net.transport import buffer_of

PIECE_BYTES = 4 << 20
BITE_BYTES = 1 << 18  #: what OpenSSL is given at once; larger and smaller ones were slower
PARTNER_SECONDS = 120.0  #: on a busy machine it makes its certificate for long


class Duplex:
    """A TLS socket that never blocks."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setblocking(False)
        self._sock, self._poll = sock, select.poll()
        self._poll.register(sock)

    def send(self, view: memoryview) -> int:
        """As much as goes now; how much that was."""
        sent = 0
        with contextlib.suppress(ssl.SSLWantWriteError, ssl.SSLWantReadError):
            while sent < len(view):
                sent += self._sock.send(view[sent : sent + BITE_BYTES])
        return sent

    def receive(self, view: memoryview) -> int:
        """As much as is here; how much that was. Raises ConnectionLost at the end of the stream."""
        received = 0
        with contextlib.suppress(ssl.SSLWantWriteError, ssl.SSLWantReadError):
            while received < len(view):
                count = self._sock.recv_into(view[received:])
                if not count:
                    raise ConnectionLost("the other side closed the connection")
                received += count
        return received

    def wait(self, *, to_receive: bool, to_send: bool) -> None:
        """Until something can be done of what is wanted."""
        self._poll.modify(self._sock, select.POLLIN * to_receive | select.POLLOUT * to_send)
        self._poll.poll()


def stream(task: Task, duplex: Duplex) -> Operation:
    """All bytes there and back, at once."""
    there = buffer_of(np.ones(task.num_bytes, np.uint8))
    back = buffer_of(np.zeros(task.num_bytes, np.uint8))

    def operation() -> None:
        sent = received = 0
        while True:
            received += duplex.receive(back[received:])
            if received == task.num_bytes:
                return
            sent += duplex.send(there[sent:])
            duplex.wait(to_receive=True, to_send=sent < task.num_bytes)

    return operation


def echo(duplex: Duplex) -> None:
    """Sends back whatever comes, until the other side is gone."""
    piece = buffer_of(np.zeros(PIECE_BYTES, np.uint8))
    sent = received = 0
    while True:
        received += duplex.receive(piece[received:])
        sent += duplex.send(piece[sent:received])
        was_full = received == PIECE_BYTES
        if sent == received:
            sent = received = 0
            if was_full:
                continue  # the rest of a record may be here already, where a poll does not see it
        duplex.wait(to_receive=not was_full, to_send=sent < received)


# -- the two processes --------------------------------------------------------------------------------------


def _serve(task: Task) -> None:
    """The partner: says on which port it listens, then echoes to the first who comes."""
    with socket.create_server((task.address, 0)) as listener:
        listener.settimeout(PARTNER_SECONDS)
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    context = Certificate.create().server_context()
    with context.wrap_socket(sock, server_side=True) as wrapped, contextlib.suppress(ConnectionError):
        echo(Duplex(wrapped))


@contextlib.contextmanager
def _partner(task: Task, arguments: list[str]) -> Iterator[ssl.SSLSocket]:
    command = [*task.prefix, sys.executable, "-m", "benchmarks.tls", *arguments, "partner"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline()
            if not port:
                raise ConnectionLost("the partner has ended before it listened")
            with socket.create_connection((task.address, int(port)), PARTNER_SECONDS) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with client_context().wrap_socket(sock) as wrapped:
                    yield wrapped
        finally:
            try:
                process.wait(PARTNER_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def main(arguments: list[str]) -> None:
    task, path = read_arguments(arguments)
    if len(arguments) > 2:
        _serve(task)
        return
    with _partner(task, arguments) as sock:
        take_turns(path, Player(task.side, task.number), stream(task, Duplex(sock)))


if __name__ == "__main__":
    main(sys.argv[1:])
