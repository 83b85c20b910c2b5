"""Small calls that are made again and again on one host: descriptions are compared as bytes, and mean the same."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.collectives.conftest import over_unix_sockets
from tests.collectives.together import messages, together
from tests.patience import PATIENCE

from syncline import collectives
from syncline.core.wire.collectives import Broken, Describe
from syncline.errors import ConnectionLost
from syncline.net import frame
from syncline.net.connection import SocketConnection
from syncline.net.streams import PlainStream
from syncline.net.transport import Peer
from syncline.testing.local import LocalJob
from syncline.worker.collectives import calls, rendezvous

F3, F4 = np.ones(3, np.float32), np.ones(4, np.float32)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalJob]:
    with over_unix_sockets(3, str(tmp_path_factory.mktemp("runs")), wait_seconds=PATIENCE) as made:
        yield made


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every call that was repeated: whether all had said the same at once. On a busy machine some have not, or
    were heard before: those calls go the long way, and come to the same."""
    found: list[bool] = []

    def repeat(*arguments: Any) -> Any:
        started = rendezvous.repeat(*arguments)
        if started is not None:
            found.append(started.is_whole)
        return started

    monkeypatch.setattr(calls, "repeat", repeat)
    monkeypatch.setattr(rendezvous, "MOMENT_SECONDS", PATIENCE)  # on a busy machine too
    return found


@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "product"])
@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_every_time_the_same_as_the_first(job: LocalJob, repeated: list[bool], op: str, make: Any) -> None:
    """The first call of its kind describes it; those after it are compared, and come to the same bits."""

    def work(me: Any) -> tuple[list[Any], list[Any]]:
        mine = make([[1.5 + me.rank, -2.0], [0.1 * me.rank, 1e30]])
        results = [collectives.all_reduce(mine, op) for _ in range(4)]
        places = []
        for _ in range(3):
            place = mine.clone() if make is torch.tensor else mine.copy()
            assert collectives.all_reduce_(place, op) is place
            places.append(place)
        return results, places

    first: Any = None
    for results, places in together(job, work):
        for found in [*results, *places]:
            assert type(found) is type(results[0]) and found.shape == (2, 2) and found.dtype == results[0].dtype
            first = found if first is None else first
            assert np.asarray(found).tobytes() == np.asarray(first).tobytes()
    assert len(repeated) == 3 * 6 and any(repeated)


def test_what_is_no_plain_array_goes_the_long_way(job: LocalJob, repeated: list[bool]) -> None:
    def work(me: Any) -> list[Any]:
        strided, read_only, other = np.ones((4, 4))[:, ::2], np.ones(3), np.ones(3, ">f8")
        read_only.flags.writeable = False
        halves = [np.ones(3, np.float16), torch.ones(3, dtype=torch.bfloat16)]
        return [
            collectives.all_reduce(x)
            for x in (strided, read_only, other, *halves, np.ones(0), 1, [1, 1], torch.nn.Parameter(torch.ones(2)))
            for _ in range(2)
        ]

    for results in together(job, work):
        assert all(bool((found == 3).all()) for found in results)
    assert not repeated


@pytest.mark.parametrize("odd", [
    lambda: collectives.all_reduce(F3), lambda: collectives.all_reduce(F4, "max"), collectives.barrier,
    lambda: collectives.all_reduce(F4.astype(np.int32)), lambda: collectives.all_reduce(np.ones(50_000)),
])  # fmt: skip
def test_a_rank_that_calls_something_else_in_between(job: LocalJob, odd: Any) -> None:
    """All have a habit, of this and of the other: all get the same error, and go on with it."""

    def work(me: Any) -> list[str]:
        told = []
        for turn in range(6):
            try:
                (odd if turn == 3 and me.rank == 1 else lambda: collectives.all_reduce(F4))()
                if turn % 2:
                    odd()
            except Exception as error:
                told.append(f"{turn} {error}")
                odd()
        return told

    first, *others = together(job, work)
    assert others == [first, first] and len(first) == 1 and first[0].startswith("3 worker-1 called "), first


def test_one_that_comes_late_is_waited_for(job: LocalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the moment: the call goes on where it was, with those who have said the same."""
    monkeypatch.setattr(rendezvous, "MOMENT_SECONDS", 0.01)
    ahead = threading.Semaphore(0)

    def work(me: Any) -> list[float]:
        found = []
        for turn in range(5):
            if me.rank == turn % 3:
                for _ in range(2):
                    ahead.acquire(timeout=PATIENCE)
                threading.Event().wait(0.03)
            else:
                ahead.release()
            found.append(float(collectives.all_reduce(np.full(2, float(turn + me.rank)))[0]))
            collectives.barrier()
        return found

    assert together(job, work) == [[3.0 * turn + 3 for turn in range(5)]] * 3


def test_tickets_and_groups_between(job: LocalJob, repeated: list[bool]) -> None:
    def work(me: Any) -> list[Any]:
        pair, found = collectives.group([0, 2]), []
        for _ in range(3):
            ticket = collectives.all_reduce(F3, wait=False)
            found.append(collectives.all_reduce(F3))
            found.append(ticket.wait(PATIENCE))
            me.collectives.calls.queue.settle()  # what is called next is a call of the script itself
            if me.rank != 1:
                found.append(collectives.all_reduce(F3, group=pair) * 1.5)
        return found

    for results in together(job, work):
        assert all((found == 3).all() for found in results)
    assert any(repeated) and len(repeated) >= 4


def test_what_interrupts_one_is_told_to_all(job: LocalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(me: Any) -> Any:
        for _ in range(3):
            collectives.all_reduce(F3)
        if me.rank == 2:
            endpoint = me.collectives.calls.links_of(None).local_peers[0][1]
            monkeypatch.setattr(endpoint, "post", _interrupted)
        return collectives.all_reduce(F3)

    results = messages(together(job, work))
    monkeypatch.undo()
    assert results == [*["CollectiveError: worker-2 has given up: RuntimeError: stop"] * 2, "RuntimeError: stop"]
    assert [found.tolist() for found in together(job, lambda me: collectives.all_reduce(F3))] == [[3, 3, 3]] * 3


def _interrupted(*arguments: Any) -> None:
    raise RuntimeError("stop")


def test_one_that_is_gone_is_named(tmp_path: Any) -> None:
    """While the others wait for it in a call that all have made before."""
    with over_unix_sockets(3, str(tmp_path), wait_seconds=PATIENCE) as job:

        def work(me: Any) -> Any:
            for _ in range(3):
                collectives.all_reduce(F3)
            if me.rank == 2:
                me.collectives.calls.peers.close("it was killed")
                return None
            return collectives.all_reduce(F3)

        *others, _ = together(job, work)
        told = "CollectiveError: worker-2 is gone while all_reduce of float32[3] was under way"
        assert all(one.startswith(told) for one in messages(others)), others


def test_a_failure_of_another_group_does_not_matter(job: LocalJob, repeated: list[bool]) -> None:
    """What was said of a call that this worker never makes stays there."""

    def work(me: Any) -> Any:
        collectives.all_reduce(F3)
        heard = me.collectives.calls.rendezvous.heard
        heard.broken[(1, 2, 3), 4] = Broken((1, 2, 3), 4, "of another group")
        try:
            return [collectives.all_reduce(F3) for _ in range(2)]
        finally:
            heard.broken.clear()

    assert all((found == 3).all() for results in together(job, work) for found in results)
    assert len(repeated) >= 6 and any(repeated)


def test_bytes_between_workers_are_counted(job: LocalJob) -> None:
    """Those of repeated calls too, and they are among all that goes over the wire."""
    before = [one.stats() for one in job.jobs]
    together(job, lambda me: [collectives.all_reduce(np.ones(1000)) for _ in range(10)])
    for one, was in zip(job.jobs, before, strict=True):
        stats = one.stats()
        now, then = stats.wire_to_workers, was.wire_to_workers
        assert 2 * 10 * 8000 < now.bytes_sent - then.bytes_sent < 2 * 10 * 8300
        assert 2 * 10 * 8000 < now.bytes_received - then.bytes_received < 2 * 10 * 8300
        assert stats.wire.bytes_sent - was.wire.bytes_sent > 2 * 10 * 8000


# -- frames ----------------------------------------------------------------------------------------------------


class _Receiver:
    def __init__(self) -> None:
        self.delivered: list[Any] = []
        self.reason = ""

    def buffers_for(self, header: Any, message: Any) -> Any:
        return [memoryview(bytearray(header.payload_bytes))]

    def deliver(self, header: Any, message: Any, payload: Any, attachment: Any) -> None:
        self.delivered.append(message)

    def lost(self, reason: str) -> None:
        self.reason = reason


@pytest.fixture
def ends() -> Iterator[tuple[SocketConnection, SocketConnection, _Receiver]]:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    left, right = (SocketConnection(PlainStream(sock), Peer("worker", "w", 7), "test") for sock in (one, two))
    receiver = _Receiver()
    left.start(_Receiver(), waiter_reads=True)  # type: ignore[arg-type]
    right.start(receiver, waiter_reads=True)  # type: ignore[arg-type]
    yield left, right, receiver
    left.close()
    right.close()


def _head(number: int, *, sender: int = 7, generation: int = 1, job: int = 5, payload_bytes: int = 4) -> bytes:
    body = frame.encode(Describe((7, 8), number, "all_reduce"))
    return frame.head(Describe, (job, sender, generation, 0), body, payload_bytes)


def test_a_frame_that_is_like_mine_is_taken(ends: Any) -> None:
    left, right, receiver = ends
    for number in range(3):
        left.post(_head(number, generation=number) + b"data")
        assert right.take_like(_head(number, sender=8), 4, 2.0) == b"data"
    assert right.take_like(_head(3), 4, 0.0) is None
    assert left.stats().bytes_sent == right.stats().bytes_received and not receiver.delivered


@pytest.mark.parametrize("theirs", [{"number": 2}, {"number": 1, "sender": 9}, {"number": 1, "job": 6}])
def test_any_other_frame_stays_where_it_is(ends: Any, theirs: dict[str, int]) -> None:
    left, right, receiver = ends
    left.post(_head(**theirs) + b"data")
    assert right.take_like(_head(1), 4, 2.0) is None
    assert right.take_like(_head(1, payload_bytes=5), 5, 2.0) is None
    assert right.read(2.0) and len(receiver.delivered) == 1


def test_half_a_frame_and_the_end(ends: Any) -> None:
    """What is there of it is left to whoever reads on; the end is seen."""
    left, right, receiver = ends
    left.post((_head(1) + b"data")[:60])
    assert right.take_like(_head(1), 4, 2.0) is None
    left.post((_head(1) + b"data")[60:])
    assert right.read(2.0) and len(receiver.delivered) == 1
    left.close()
    assert right.take_like(_head(2), 4, 2.0) is None and "closed" in receiver.reason
    with pytest.raises(ConnectionLost):
        left.post(b"x")
