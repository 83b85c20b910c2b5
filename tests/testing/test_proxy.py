"""The proxy does the harm that it is told to do, exactly that, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.patience import PATIENCE

from syncline.testing import Proxy

SECONDS = PATIENCE
#: Long enough for loopback to carry anything that is not held back; nothing fails when it was too short.
QUIET_SECONDS = 0.15


def read(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes and (more := sock.recv(num_bytes - len(data))):
        data += more
    return data


def is_silent(sock: socket.socket) -> bool:
    sock.settimeout(QUIET_SECONDS)
    try:
        sock.recv(1)
        return False
    except TimeoutError:
        return True
    finally:
        sock.settimeout(SECONDS)


class Wire:
    """A proxy before a listening socket, and both ends of connections through it."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(SECONDS)
        self.proxy = Proxy(*self.listening.getsockname())
        self._made = [self.listening]

    def connect(self) -> socket.socket:
        self._made.append(socket.create_connection((self.proxy.host, self.proxy.port), SECONDS))
        return self._made[-1]

    def accept(self) -> socket.socket:
        sock, _ = self.listening.accept()
        sock.settimeout(SECONDS)
        self._made.append(sock)
        return sock

    def pair(self) -> tuple[socket.socket, socket.socket]:
        return self.connect(), self.accept()

    def close(self) -> None:
        self.proxy.close()
        for sock in self._made:
            sock.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


def test_bytes_go_both_ways_as_they_are(wire: Wire) -> None:
    """More than any buffer holds, in both directions at once: neither may wait for the other."""
    near, far = wire.pair()
    data = os.urandom(8 << 20)
    got: list[bytes] = []
    ends = ((near.sendall, data), (far.sendall, data[::-1]))
    senders = [threading.Thread(target=send, args=(what,), name="send") for send, what in ends]
    senders.append(threading.Thread(target=lambda: got.append(read(far, len(data))), name="read"))
    for thread in senders:
        thread.start()
    assert read(near, len(data)) == data[::-1]
    for thread in senders:
        thread.join(SECONDS)
    assert got == [data]


def test_an_end_of_one_direction_is_passed_on_and_the_other_goes_on(wire: Wire) -> None:
    near, far = wire.pair()
    near.sendall(b"last words")
    near.shutdown(socket.SHUT_WR)
    assert read(far, 100) == b"last words"
    far.sendall(b"heard")
    assert read(near, 5) == b"heard"


def test_a_delay_holds_every_chunk_back(wire: Wire) -> None:
    near, far = wire.pair()
    wire.proxy.delay(0.2)
    began = time.monotonic()
    near.sendall(b"a")
    assert far.recv(1) == b"a"
    assert time.monotonic() - began >= 0.2
    wire.proxy.delay(SECONDS * 10)
    near.sendall(b"b")
    assert is_silent(far)
    wire.proxy.delay(0)  # who is delayed already need not wait to its end
    assert far.recv(1) == b"b"


def ends_with(sock: socket.socket) -> str:
    try:
        while data := sock.recv(100):
            assert data
        return "end"
    except ConnectionResetError:
        return "reset"


@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_ends_both_sides_and_new_connections_are_welcome(wire: Wire, reset: bool) -> None:
    """A reset must be one: an orderly end before it would be read as `closed` by whoever is quick."""
    pairs = [wire.pair(), wire.pair()]
    wire.proxy.cut(reset=reset)
    for sock in (sock for pair in pairs for sock in pair):
        assert ends_with(sock) == ("reset" if reset else "end")
    near, far = wire.pair()
    near.sendall(b"again")
    assert read(far, 5) == b"again"


def test_a_cut_also_meets_the_connection_that_is_just_being_made(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target has accepted it, the proxy does not count it yet: a test that waited for the target to accept
    would cut nothing, now and then."""
    dial = socket.create_connection

    def dial_and_cut(address: tuple[str, int], seconds: float) -> socket.socket:
        sock = dial(address, seconds)
        if address == wire.listening.getsockname():
            wire.proxy.cut()
        return sock

    monkeypatch.setattr(socket, "create_connection", dial_and_cut)
    near, far = wire.pair()
    assert ends_with(near) == ends_with(far) == "end"


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("num_bytes", [1, 999, 1000, 1001, 200_000])
def test_a_cut_comes_after_exactly_so_many_bytes(wire: Wire, direction: str, num_bytes: int) -> None:
    """At the end of a chunk, within one, and many chunks later."""
    near, far = wire.pair() if direction == "up" else reversed(wire.pair())
    wire.proxy.cut_after(num_bytes, direction)  # type: ignore[arg-type]
    data = os.urandom(300_000)

    def send() -> None:
        with contextlib.suppress(OSError):
            for start in range(0, len(data), 1000):
                near.sendall(data[start : start + 1000])

    sender = threading.Thread(target=send, name="send")
    sender.start()
    assert read(far, len(data)) == data[:num_bytes]
    sender.join(SECONDS)


@pytest.mark.parametrize("offset", [0, 999, 1000, 70_000])
def test_one_byte_is_changed_and_no_other(wire: Wire, offset: int) -> None:
    near, far = wire.pair()
    far.sendall(b"this direction is left alone")
    assert read(near, 28) == b"this direction is left alone"
    wire.proxy.corrupt(offset, "up", flip=0x10)
    data = os.urandom(100_000)
    for start in range(0, len(data), 1000):
        near.sendall(data[start : start + 1000])
    got = read(far, len(data))
    assert [(k, a ^ b) for k, (a, b) in enumerate(zip(data, got, strict=True)) if a != b] == [(offset, 0x10)]


def test_a_stopped_direction_carries_nothing_and_loses_nothing(wire: Wire) -> None:
    """Half-open: one side hears and is not heard. It sees no end either, which a cut would have told it."""
    near, far = wire.pair()
    wire.proxy.stop("down")
    near.sendall(b"hello?")
    assert read(far, 6) == b"hello?"
    far.sendall(b"yes")
    far.shutdown(socket.SHUT_WR)
    assert is_silent(near)
    wire.proxy.resume()
    assert read(near, 100) == b"yes"


def test_a_stopped_direction_does_not_carry_an_end_either(wire: Wire) -> None:
    """The process behind it dies: over a network that is gone, nobody hears of it."""
    near, far = wire.pair()
    far.sendall(b"a")
    assert read(near, 1) == b"a"
    time.sleep(QUIET_SECONDS)  # the thread of that direction waits for more by now
    wire.proxy.stop("down")
    far.close()
    assert is_silent(near)
    wire.proxy.resume()
    assert ends_with(near) == "end"


def test_both_directions_can_be_stopped_and_cut_then(wire: Wire) -> None:
    near, far = wire.pair()
    wire.proxy.stop()
    near.sendall(b"a")
    far.sendall(b"b")
    assert is_silent(near) and is_silent(far)
    wire.proxy.cut()
    assert ends_with(near) == ends_with(far) == "end"


def test_a_cut_within_a_frame_also_wakes_the_direction_that_is_stopped(wire: Wire) -> None:
    """Its thread waits to be resumed: nobody would close the sockets before that."""
    near, far = wire.pair()
    wire.proxy.stop("down")
    wire.proxy.cut_after(3, "up")
    near.sendall(b"12345")
    assert read(far, 5) == b"123"
    assert ends_with(near) in ("end", "reset")


def test_new_connections_can_be_held(wire: Wire) -> None:
    """As by a server that listens and is not awake yet: the connection is made, and nothing comes of it."""
    near, far = wire.pair()
    wire.proxy.hold()
    late = wire.connect()
    late.sendall(b"knock")
    assert is_silent(late)
    wire.listening.settimeout(QUIET_SECONDS)
    with pytest.raises(TimeoutError):
        wire.accept()
    near.sendall(b"old")
    assert read(far, 3) == b"old"
    wire.listening.settimeout(SECONDS)
    wire.proxy.let_in()
    assert read(wire.accept(), 5) == b"knock"


def test_a_recorded_connection_can_be_replayed(wire: Wire) -> None:
    wire.proxy.record()
    near, far = wire.pair()
    near.sendall(b"open the door")
    assert read(far, 13) == b"open the door"
    far.sendall(b"it is open")
    assert read(near, 10) == b"it is open"
    (recording,) = wire.proxy.recordings
    assert (bytes(recording.up), bytes(recording.down)) == (b"open the door", b"it is open")
    heard: list[bytes] = []

    def answer() -> None:
        sock = wire.accept()
        heard.append(read(sock, 13))
        sock.sendall(b"who is there?")
        sock.close()

    target = threading.Thread(target=answer, name="target")
    target.start()
    assert wire.proxy.replay(recording, SECONDS) == (b"who is there?", True)
    target.join(SECONDS)
    assert heard == [b"open the door"]


def test_new_connections_can_be_turned_to_another_target(wire: Wire) -> None:
    client, _ = wire.pair()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        wire.proxy.turn_to("127.0.0.1", listening.getsockname()[1])
        listening.settimeout(SECONDS)
        with socket.create_connection((wire.proxy.host, wire.proxy.port), SECONDS) as other:
            there, _ = listening.accept()
            with there:
                other.sendall(b"hello")
                assert read(there, 5) == b"hello"
    assert is_silent(client)


def test_a_target_that_is_not_there_is_an_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    with Proxy(*address) as proxy, socket.create_connection((proxy.host, proxy.port), SECONDS) as near:
        assert ends_with(near) in ("end", "reset")


@pytest.mark.parametrize(
    "trouble", [Proxy.stop, Proxy.hold, lambda proxy: proxy.delay(SECONDS * 10), lambda proxy: None]
)
def test_nothing_is_left_after_close_whatever_was_going_on(trouble: Callable[[Proxy], None]) -> None:
    """Threads that wait to be resumed, let in, for a delay to pass, or for room."""
    before = set(threading.enumerate())
    wire = Wire()
    near, _ = wire.pair()
    trouble(wire.proxy)
    wire.connect()
    near.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            near.send(bytes(1 << 20))
    wire.proxy.close()
    assert set(threading.enumerate()) == before
    wire.close()
