"""Whatever bytes come, what comes out is an error of the protocol: never another exception, never much memory.

Inputs are made from a number: batch n is always the same thousand inputs. A failure names batch and bytes;
`run_batch(n)` repeats it.
"""

from __future__ import annotations

import contextlib
import random
import tracemalloc
import types
import typing
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import pytest

from syncline.config import JobConfig
from syncline.core.layout import Parameter, Ranges, Segment, arrange
from syncline.core.leasing.ranges import Span
from syncline.core.rounds import RoundMembership
from syncline.core.rule import Option, Rule
from syncline.core.wire.control import Leave
from syncline.core.wire.message import Message
from syncline.core.wire.tables import MESSAGES
from syncline.core.wire.traffic import Upload
from syncline.errors import ConnectionLost, ProtocolError
from syncline.net import frame, handshake
from syncline.net.connection import SocketConnection
from syncline.net.frame import Header
from syncline.net.handshake import Connecting, Listening, Proof, Welcome, pack
from syncline.net.rpc import Endpoint, Request, Stamp
from syncline.net.transport import Peer

NUM_INPUTS, NUM_SOAK_INPUTS, BATCH = 100_000, 10_000_000, 1000
TOKEN, JOB = bytes(range(32)), "job-1"
WORKER, SERVER = Peer("worker", "worker-0", 0), Peer("server", "server-0", 7)
SEGMENT = arrange([Parameter("fc.weight", "float32", (10, 84)), Parameter("n", "int64", (), 1)],
                  [Rule("Adam", lr=1e-3, betas=(0.9, 0.99)), Rule("Add")], "mean")  # fmt: skip


SPECIAL: dict[object, object] = {
    Segment: SEGMENT,
    JobConfig: JobConfig(),
    Span: Span(5, 11, 4, 2),
    Ranges: ((0, 3), (5, 6)),
    RoundMembership: RoundMembership(
        1,
        2,
        [("worker-0", 5, 5)],
        [("worker-1", 6, 5)],
        [("worker-0", 1)],
        RoundMembership(1, 1, [("worker-2", 7, 4)]),
    ),
    int: 5,
    float: 0.5,
    bool: True,
    str: "worker-0",
    bytes: b"1234",
    Any: [1, {"a": None}],
    Option: 0.1,
}


def value(kind: Any) -> Any:
    """Something of this type, with something in every list."""
    if kind in SPECIAL:
        return SPECIAL[kind]
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return [value(inside[0]), value(inside[0])]
    if origin is dict:
        return {value(inside[0]): value(inside[1])}
    if origin is tuple:
        return tuple(value(one) for one in inside if one is not ...)
    if origin in (typing.Union, types.UnionType):
        return value(next(one for one in inside if one is not type(None)))
    return kind(**{field.name: value(field.type) for field in msgspec.structs.fields(kind)})


def sample(kind: type[Message]) -> Message:
    """One message of each kind."""
    made: Message = value(kind)
    return made


class Bytes:
    """A stream that holds some bytes and then ends."""

    carries_fds = False
    fds = ()
    is_drained = True

    def take(self, count: int) -> memoryview:
        view = memoryview(bytearray(count))
        self.read(view)
        return view

    def take_fd(self) -> None:
        return None

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def write(self, buffers: list[memoryview], fd: int | None = None) -> None:
        pass

    def read(self, view: memoryview) -> None:
        if len(view) > len(self._data):
            raise ConnectionLost("the end of the input")
        view[:] = self._data[: len(view)]
        self._data = self._data[len(view) :]

    def shut(self) -> None:
        pass

    def close(self) -> None:
        pass


class Service:
    """Answers nothing, and has room for a small payload only."""

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> list[memoryview]:
        if payload_bytes > 4096:
            raise ProtocolError("too much")
        return [memoryview(bytearray(payload_bytes))]

    def handle(self, request: Request) -> None:
        pass

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        pass


class Unread(SocketConnection):
    """A connection whose frames are read by the test, in its own thread."""

    def start(self, receiver: object, *, waiter_reads: bool = False) -> bool:
        self._receiver = receiver  # type: ignore[assignment]
        return True

    def read_all(self) -> None:
        while self._closed is None:
            self._read_frame()


def read_frames(data: bytes) -> None:
    """As a server reads what an authenticated worker sends."""
    connection = Unread(Bytes(data), WORKER, "worker-0")
    Endpoint(connection, Stamp(JOB), Service())
    connection.read_all()


def listen(data: bytes) -> None:
    """As a listener reads a stranger: prefix, hello, prefix, proof."""
    side, stream = Listening(TOKEN, JOB, SERVER, ""), Bytes(data)
    side.challenge(read_part(stream))
    side.welcome(read_part(stream))


def connect(data: bytes) -> None:
    side, stream = Connecting(TOKEN, JOB, WORKER, ""), Bytes(data)
    side.answer(read_part(stream))


def finish(data: bytes) -> None:
    Connecting(TOKEN, JOB, WORKER, "").finish(read_part(Bytes(data)))


def read_part(stream: Bytes) -> bytes:
    prefix = bytearray(handshake.PREFIX_BYTES)
    stream.read(memoryview(prefix))
    body = bytearray(handshake.body_bytes(bytes(prefix)))
    assert len(body) <= handshake.MAX_BYTES
    stream.read(memoryview(body))
    return bytes(body)


def decode_any(data: bytes) -> None:
    frame.decode(data[0] % len(MESSAGES) if data else 0, data[1:])


def whole_frame(message: Message, payload: bytes = b"") -> bytes:
    body, kind = frame.encode(message), frame.kind_of(message)
    return Header(kind, 0, 0, frame.job_key(JOB), 0, 1, 0, len(body), len(payload)).pack() + body + payload


def corpus() -> list[tuple[Callable[[bytes], None], bytes]]:
    """What each reader takes for good, to begin with."""
    found: list[tuple[Callable[[bytes], None], bytes]] = []
    for kind in MESSAGES:
        message = sample(kind)
        found.append((decode_any, bytes([frame.kind_of(message)]) + frame.encode(message)))
        found.append((read_frames, whole_frame(message) + whole_frame(Leave())))
    found.append((read_frames, whole_frame(sample(Upload), b"payload" * 9)))
    nonces = [bytes(range(32)), bytes(range(32, 64))]  # the same in every run
    with mock.patch.object(handshake.secrets, "token_bytes", lambda size: nonces.pop(0)):
        one, two = Connecting(TOKEN, JOB, WORKER, ""), Listening(TOKEN, JOB, SERVER, "")
    challenge = two.challenge(one.hello()[handshake.PREFIX_BYTES :])
    proof, _ = one.answer(challenge[handshake.PREFIX_BYTES :])
    shakes = [(listen, one.hello() + proof), (listen, one.hello() + pack(Proof(bytes(32)))), (connect, challenge),
              (finish, pack(Welcome())), (finish, pack(Welcome("TokenError: no")))]  # fmt: skip
    return found + shakes * 8


CORPUS = corpus()
#: Where parsers break: sizes at their limits, the marks of MessagePack, text that is none.
TOKENS = [
    b"\x00", b"\xff", b"\x7f", b"\x80", b"\xc0", b"\xc1", b"\xc4\xff", b"\xc6\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8, b"\xcb\x7f\xf0" + bytes(6), b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff",
    b"\xdf\x7f\xff\xff\xff", b"\xff" * 8, b"\xd9\xff", b"\xa3\xed\xa0\x80", b"\x91" * 40, b"\x81\xa1a" * 20,
    b"SYNC\x01", b"SYNH\x01", b"\xc7\xff\x05",
]  # fmt: skip


def mutate(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at, how = chance.randrange(len(changed) + 1), chance.randrange(7)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif how == 1 and at < len(changed):
            changed[at] = chance.randrange(256)
        elif how == 2:
            del changed[at:]
        elif how == 3:
            changed[at:at] = chance.randbytes(chance.randrange(1, 9))
        elif how == 4:
            token = chance.choice(TOKENS)
            changed[at : at + (len(token) if chance.random() < 0.7 else 0)] = token
        elif how == 5:
            del changed[at : at + chance.randrange(1, 9)]
        else:
            other = chance.choice(CORPUS)[1]
            start = chance.randrange(len(other))
            changed[at:] = other[start : start + 200]
    return bytes(changed)


def run_batch(number: int) -> int:
    """A thousand inputs; how many of them were refused."""
    chance, refused = random.Random(number), 0
    for _ in range(BATCH):
        reader, good = chance.choice(CORPUS)
        data = mutate(chance, good) if chance.random() < 0.97 else chance.randbytes(chance.randrange(200))
        try:
            reader(data)
        except (ProtocolError, ConnectionLost):
            refused += 1
        except BaseException as error:
            pytest.fail(f"batch {number}: {reader.__name__}({data.hex()!r}) raised {type(error).__name__}: {error}")
    return refused


def test_the_inputs_are_good_before_they_are_changed() -> None:
    """A fuzz test whose inputs fail at the first byte finds nothing: each must get through, as far as it can."""
    assert {sample_reader.__name__ for sample_reader, _ in CORPUS} == {
        "decode_any", "read_frames", "listen", "connect", "finish",
    }  # fmt: skip
    for kind in MESSAGES:
        message = sample(kind)
        assert frame.decode(frame.kind_of(message), frame.encode(message)) == message
    for reader, good in CORPUS:
        if reader is read_frames:
            try:
                reader(good)
            except ConnectionLost as error:
                assert "the end of the input" in str(error)


@pytest.mark.parametrize("count", [NUM_INPUTS // 10, pytest.param(NUM_INPUTS, marks=pytest.mark.proof)])
def test_changed_inputs(count: int) -> None:
    """A stranger, or a broken member, sends anything: the connection ends with a reason, and nothing else does."""
    refused = sum(run_batch(number) for number in range(count // BATCH))
    assert refused > count // 2, "most changes must be noticed, or they change nothing"


def test_no_input_makes_room_for_what_it_only_claims() -> None:
    """`dd ff ff ff ff` claims a list of four thousand million: five bytes must not cost gigabytes."""
    chance = random.Random(-1)
    tracemalloc.start()
    try:
        for _ in range(3000):
            reader, good = chance.choice(CORPUS)
            data = mutate(chance, good)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with contextlib.suppress(ProtocolError, ConnectionLost):
                reader(data)
            # A frame's body is read into one buffer, of the size that its header claims and that is bounded.
            most = (frame.MAX_BODY_BYTES if reader is read_frames else 0) + 1_000_000
            assert tracemalloc.get_traced_memory()[1] - before < most, data.hex()
    finally:
        tracemalloc.stop()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_million_changed_inputs() -> None:
    """The same for some minutes, on other inputs than the default run has."""
    first = NUM_INPUTS // BATCH
    refused = sum(run_batch(number) for number in range(first, first + NUM_SOAK_INPUTS // BATCH))
    assert refused > NUM_SOAK_INPUTS // 2
