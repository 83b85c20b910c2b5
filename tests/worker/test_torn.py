"""Answers that are still coming in over a socket when servers change: nothing older lands over what is newer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline import Rule
from syncline.core.members import Member
from syncline.core.wire.traffic import CommitStaged
from syncline.errors import ConnectionLost, Refresh
from syncline.net.connection import SocketConnection
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.streams import PlainStream
from syncline.net.transport import Buffer, Peer, buffer_of

SGD = Rule("SGD", lr=1.0)
NUM = 1 << 16
SLICE = 1 << 17  # bytes: large enough to be sent piece by piece


def over_sockets(twin: Any) -> Callable[[Member], Endpoint]:
    """The house's dial, over sockets that are read by threads of their own."""

    def dial(member: Member) -> Endpoint:
        server = twin.servers.get(member.name)
        if server is None:
            raise ConnectionLost(f"{member.name} cannot be reached")
        ends = socket.socketpair()
        peers = Peer("server", member.name, 0), Peer("worker", "worker-0", 3)
        left, right = (
            SocketConnection(PlainStream(end, p.name), p, p.name) for end, p in zip(ends, peers, strict=True)
        )
        left.shares_memory = right.shares_memory = False
        server.endpoints.append(Endpoint(right, Stamp("twin"), server))
        return Endpoint(left, twin.stamp)

    return dial


class Halted:
    """Server-0's first answer to a commit stops, and one of its slices moves to server-1 and changes there."""

    def __init__(self, twin: Any, where: str) -> None:
        self.twin, self._where = twin, where
        self._stopped = threading.Event()
        self.threads: list[threading.Thread] = []
        self.commits = 0  # that server-1 has heard of
        self.commits_at_the_end = 0  # when all of the old answer had been sent
        self._is_first = True
        twin.servers["server-1"].fail = self._refuse_once
        self._answer = twin.servers["server-0"].answer
        twin.servers["server-0"].answer = self.answer

    def answer(self, request: Any, message: Any) -> Any:
        answer = self._answer(request, message)
        if not isinstance(message, CommitStaged) or not self._is_first:
            return answer
        self._is_first = False
        told, arrays = answer
        size = sum(array.nbytes for array in arrays)
        if self._where == "within a slice":
            request.reply(told, self._in_halves(arrays), size)
            return None

        def reply_late() -> None:
            self._stopped.set()
            _eventually(lambda: self.commits > 1)
            time.sleep(0.3)  # the newer answer has landed
            request.reply(told, [buffer_of(array) for array in arrays], size)

        self.threads.append(threading.Thread(target=reply_late))
        self.threads[0].start()
        return None

    def _in_halves(self, arrays: list[Any]) -> Iterator[Buffer]:
        first, half = arrays[0], arrays[0].nbytes // 2
        yield buffer_of(first[:half])
        self._stopped.set()
        _eventually(lambda: self.commits)
        time.sleep(0.3)  # the worker is about to make its commit again
        yield buffer_of(first[half:])
        for array in arrays[1:]:
            yield buffer_of(array)
        self.commits_at_the_end = self.commits

    def _refuse_once(self, message: Any) -> None:
        if not isinstance(message, CommitStaged):
            return
        if not self.commits:
            assert self._stopped.wait(PATIENCE)
            moved = next(
                number for number, replica_set in self.twin.replica_sets.items() if replica_set.primary == "server-0"
            )
            self.twin.change({moved: "server-1"})
            self.twin.values[moved] -= 10.0  # another worker's push
            self.twin.versions[moved] += 1
            self.commits = 1
            raise Refresh("primaries have changed")
        self.commits += 1


def _eventually(what: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("where", ["within a slice", "before it"])
@pytest.mark.parametrize("window", [0, 1])
def test_an_answer_that_is_still_coming_in_does_not_land_over_a_newer_one(
    house: Callable[..., Any], where: str, window: int
) -> None:
    """The slice has moved: the bytes of its old primary and those of the new one come by two connections, for the
    same memory of the model. What comes in already is through before the commit is told again to anybody: every
    server acknowledges what is staged first, by the connection that the old answer came by. What comes later goes
    nowhere."""
    twin = house(2, shares_memory=False, policy="async", window=window, slice_bytes=SLICE, wait_seconds=PATIENCE)
    twin.dial = over_sockets(twin)
    twin.job.kv.register({"a": np.zeros(NUM)}, SGD)
    out = {"a": np.zeros(NUM)}
    halted = Halted(twin, where)
    twin.job.kv.push_pull({"a": np.ones(NUM)}, out=out).wait()
    expected = twin.everything()["a"]
    np.testing.assert_array_equal(out["a"], expected)
    assert set(out["a"]) == {-1.0, -11.0} and halted.commits > 1
    assert where == "before it" or halted.commits_at_the_end == 1
    for thread in halted.threads:
        thread.join()
    twin.job.kv.pull()  # by the same connections, after all that came before
    np.testing.assert_array_equal(out["a"], expected)
