"""References without a framework: the least that two processes must do to get the same bytes across.

The process that has the turns starts its partner and talks to it over a socket that they inherit; when one is gone,
the socket closes and so does the other.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from benchmarks.task import Task, read_arguments
from benchmarks.turns import Operation, Player, take_turns
from syncline.net import shm
from syncline.net.transport import buffer_of

PIECE_BYTES = 4 << 20
PARTNER_SECONDS = 10.0


def _receive(sock: socket.socket, view: memoryview) -> bool:
    """Fills the view; False at the end of the stream."""
    while len(view):
        count = sock.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True


# -- shared memory: signal, one in-place add over there, one copy out here ----------------------------------


def shared_memory(task: Task, sock: socket.socket) -> Operation:
    gradients = shm.create(task.num_bytes)
    socket.send_fds(sock, [b"g"], [gradients.fd])
    fds = socket.recv_fds(sock, 1, 1)[1]
    parameters = _floats(shm.accept(fds[0], task.num_bytes).array, task)
    _floats(gradients.array, task)[...] = 1.0
    out = np.zeros_like(parameters)
    answer = memoryview(bytearray(1))

    def operation() -> None:
        sock.sendall(b"s")
        _receive(sock, answer)
        np.copyto(out, parameters)

    return operation


def _add_in_place(task: Task, sock: socket.socket) -> None:
    memory = shm.create(task.num_bytes)
    fds = socket.recv_fds(sock, 1, 1)[1]
    gradients = _floats(shm.accept(fds[0], task.num_bytes).array, task)
    socket.send_fds(sock, [b"p"], [memory.fd])
    parameters = _floats(memory.array, task)
    signal = memoryview(bytearray(1))
    while _receive(sock, signal):
        np.add(parameters, gradients, out=parameters)
        sock.sendall(b"d")


def _floats(array: npt.NDArray[np.uint8], task: Task) -> npt.NDArray[np.float32]:
    return array[: task.num_bytes].view(np.float32)


# -- sockets: all bytes there and back ----------------------------------------------------------------------


def round_trip(task: Task, sock: socket.socket) -> Operation:
    there, back = bytes(task.num_bytes), memoryview(bytearray(task.num_bytes))

    def operation() -> None:
        sock.sendall(there)
        _receive(sock, back)

    return operation


def stream(task: Task, sock: socket.socket) -> Operation:
    """Both directions at once: a thread sends while this one receives."""
    there = buffer_of(np.ones(task.num_bytes, np.uint8))
    back = buffer_of(np.zeros(task.num_bytes, np.uint8))

    def send() -> None:
        for start in range(0, task.num_bytes, PIECE_BYTES):
            sock.sendall(there[start : start + PIECE_BYTES])

    def operation() -> None:
        sender = threading.Thread(target=send)
        sender.start()
        _receive(sock, back)
        sender.join()

    return operation


def _echo(task: Task, sock: socket.socket) -> None:
    piece_bytes = min(PIECE_BYTES, task.num_bytes)
    piece = buffer_of(np.zeros(piece_bytes, np.uint8))
    left = task.num_bytes
    while _receive(sock, piece[: min(left, piece_bytes)]):
        sock.sendall(piece[: min(left, piece_bytes)])
        left = left - min(left, piece_bytes) or task.num_bytes


# -- the two processes --------------------------------------------------------------------------------------

FLOORS = {"shared memory": shared_memory, "round trip": round_trip, "stream": stream}
PARTNERS = {"shared memory": _add_in_place, "round trip": _echo, "stream": _echo}


def _pair(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind != "stream":
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        two, _ = listener.accept()
    for sock in (one, two):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, two


@contextlib.contextmanager
def _partner(task: Task, arguments: list[str]) -> Iterator[socket.socket]:
    mine, theirs = _pair(task.kind)
    with mine:
        with theirs:
            command = [sys.executable, "-m", "benchmarks.floors", *arguments, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        try:
            yield mine
        finally:
            mine.close()
            try:
                process.wait(PARTNER_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(arguments: list[str]) -> None:
    task, path = read_arguments(arguments)
    if len(arguments) > 2:
        with socket.socket(fileno=int(arguments[2])) as sock, contextlib.suppress(ConnectionError):
            PARTNERS[task.kind](task, sock)
        return
    with _partner(task, arguments) as sock:
        take_turns(path, Player(task.side, task.number), FLOORS[task.kind](task, sock))


if __name__ == "__main__":
    main(sys.argv[1:])
