"""The in-process twin: it must refuse and end as a socket does, or tests over it would prove nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline.core.wire.control import Leave
from syncline.core.wire.traffic import Attach, Pull, Upload
from syncline.errors import ConnectionLost, FencedError, FrameError
from syncline.net import frame, memory
from syncline.net.frame import Header
from syncline.net.transport import Peer, buffer_of
from syncline.stats import WireStats

Make = Callable[..., Any]
ONE, TWO = Peer("worker", "worker-0", 3), Peer("server", "server-0", 7)


@pytest.fixture
def linked(inbox: Make) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    left, right = memory.pair(ONE, TWO)
    ends = (left, inbox()), (right, inbox())
    for connection, receiver in ends:
        connection.start(receiver)
    return ends


def send(connection: Any, message: Any, *buffers: memoryview, num_bytes: int | None = None, **fields: Any) -> None:
    body = frame.encode(message)
    size = sum(map(len, buffers)) if num_bytes is None else num_bytes
    connection.send(
        Header(frame.kind_of(message), 1, body_bytes=len(body), payload_bytes=size, **fields), body, buffers
    )


def test_frames_go_both_ways_and_are_copies(linked: Any) -> None:
    """Messages are encoded and decoded: a list that the sender changes later is not the receiver's."""
    (one, at_one), (two, at_two) = linked
    assert (one.peer, two.peer) == (TWO, ONE)
    slices = [1, 2]
    send(one, Pull(slices, None, True), generation=4)
    slices.append(3)
    header, message, _, _ = at_two.next()
    assert message == Pull([1, 2], None, True) and header.generation == 4
    send(two, Leave())
    assert at_one.next()[1] == Leave()


@pytest.mark.parametrize("cuts", [[], [1], [3, 3, 9], [7, 8]])
def test_a_payload_is_the_same_however_it_is_cut(linked: Any, cuts: list[int]) -> None:
    (one, _), (_, at_two) = linked
    at_two.piece_bytes = 4
    data = np.arange(13, dtype=np.uint8)
    send(one, Upload(0, [1]), *[buffer_of(part) for part in np.split(data, cuts)])
    data[:] = 0  # the sender may use its buffers again at once
    assert at_two.next()[2] == bytes(range(13))


def test_stats_count_on_both_sides(linked: Any) -> None:
    (one, _), (two, at_two) = linked
    send(one, Upload(0, [1]), memoryview(b"12345"))
    at_two.next()
    size = frame.HEADER.size + len(frame.encode(Upload(0, [1]))) + 5
    assert one.stats() == WireStats(frames_sent=1, bytes_sent=size)
    assert two.stats() == WireStats(frames_received=1, bytes_received=size)


def test_stats_are_exact_beside_other_threads(linked: Any) -> None:
    """A worker's step and its report go over one connection at once: no count is lost between them."""
    (one, _), (two, _) = linked

    def push() -> None:
        for _ in range(500):
            send(one, Leave())

    threads = [threading.Thread(target=push, name=f"push {k}", daemon=True) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert one.stats().frames_sent == two.stats().frames_received == 2000


def test_the_end_is_told_once_on_each_side(linked: Any) -> None:
    (one, at_one), (two, at_two) = linked
    one.close()
    one.close()
    two.close()
    assert at_one.end() == "closed" and at_two.end() == "the other side closed the connection"
    assert at_one.ends.empty() and at_two.ends.empty()
    for connection in (one, two):
        with pytest.raises(ConnectionLost, match="the other side closed the connection"):
            send(connection, Leave())


def test_a_reason_is_known_on_both_sides(linked: Any) -> None:
    (one, at_one), (_, at_two) = linked
    one.close("the job has ended")
    assert at_one.end() == at_two.end() == "the job has ended"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FrameError("no such slice"), "refused what worker-0 sent: FrameError: no such slice"),
        (FencedError("replaced"), "refused what worker-0 sent: FencedError: replaced"),
    ],
)
def test_a_refused_frame_closes_the_connection_and_not_the_senders_thread(
    linked: Any, error: Exception, reason: str
) -> None:
    """Over a socket the sender of a bad frame sees its connection end; here it must see the same, no exception."""
    (one, at_one), (_, at_two) = linked

    def refuse(header: Header, message: object) -> None:
        raise error

    at_two.on_buffers_for = refuse
    send(one, Upload(0, [1]), memoryview(b"12345"))
    assert at_two.end() == at_one.end() == reason
    assert at_two.frames.empty()


def test_headers_are_bounded_here_too(linked: Any) -> None:
    (one, _), (_, at_two) = linked
    send(one, Leave(), num_bytes=frame.MAX_PAYLOAD_BYTES + 1)
    assert "FrameError: a payload of" in at_two.end()


def test_a_payload_that_does_not_fit_is_refused(linked: Any) -> None:
    (one, _), (_, at_two) = linked
    at_two.most_bytes = 4
    send(one, Upload(0, [1]), memoryview(b"12345"))
    assert "a payload of 5 bytes does not fit its message" in at_two.end()


def test_in_one_process_everything_is_shared(linked: Any) -> None:
    (one, _), (_, at_two) = linked
    arena = one.create_memory(100)
    assert one.shares_memory and one.can_carry(arena)
    body = frame.encode(Attach(0, 0, 100))
    one.send(Header(frame.kind_of(Attach(0, 0, 100)), 1, frame.ATTACHED, body_bytes=len(body)), body, (), arena)
    assert at_two.next()[3] is arena
    arena.close()
    assert at_two.frames.empty() and arena.array.nbytes == 100, "closed by one side, the other still reads it"
