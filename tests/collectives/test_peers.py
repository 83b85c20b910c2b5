"""Ways between workers: one for each pair, of members only; and what a lying peer gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.collectives.together import messages, together
from tests.patience import PATIENCE

from syncline import collectives
from syncline.core.members import Member
from syncline.core.wire.collectives import Chunk, Describe, Offer, Share, TensorPiece
from syncline.core.wire.control import Leave, Roster
from syncline.net import memory
from syncline.net.memory import HeapMemory
from syncline.net.rpc import Stamp
from syncline.net.transport import Peer
from syncline.testing import local_job
from syncline.testing.local import LocalJob
from syncline.worker.collectives import peers as peers_module
from syncline.worker.collectives.incoming import PeerMessages
from syncline.worker.collectives.peers import PeerLink, Peers
from syncline.worker.session import Rosters


@pytest.fixture
def two(tmp_path: Any) -> Iterator[LocalJob]:
    with local_job(workers=2, transport="tcp", folder=str(tmp_path), wait_seconds=PATIENCE) as job:
        assert together(job, lambda me: collectives.all_reduce(1)) == [2, 2]
        yield job


def links(job: LocalJob, rank: int) -> list[PeerLink]:
    return list(job[rank].collectives.calls.peers.links.values())


def test_one_connection_for_each_pair(tmp_path: Any) -> None:
    """Whoever begins: the earlier one knocks, and the later one dials."""
    with local_job(workers=3, folder=str(tmp_path)) as job:
        assert together(
            job, lambda me: collectives.send(1, to=1) if me.rank == 0 else collectives.recv(0), ranks=[0, 1]
        )
        assert together(
            job, lambda me: collectives.send(1, to=0) if me.rank == 2 else collectives.recv(2), ranks=[0, 2]
        )
        before = [link for rank in range(3) for link in links(job, rank)]
        assert [len(links(job, rank)) for rank in range(3)] == [2, 1, 1]
        assert together(job, lambda me: collectives.all_reduce(1)) == [3, 3, 3]
        assert [len(links(job, rank)) for rank in range(3)] == [2, 2, 2]
        assert set(before) <= {link for rank in range(3) for link in links(job, rank)}


def test_an_incarnation_that_the_roster_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was evicted may still have the token."""
    monkeypatch.setattr(peers_module, "ROSTER_SECONDS", 0.05)
    said: list[str] = []
    rosters, stamp = Rosters(), Stamp("job")
    members = [Member("worker-0", "worker", 1, "local"), Member("worker-1", "worker", 4, "local")]
    rosters.hear(Roster(1, members, []))
    stamp.incarnation = 1
    peers = Peers(rosters, stamp, _Nowhere(), said.append)
    for stranger in (Peer("worker", "worker-1", 2), Peer("worker", "worker-2", 4), Peer("server", "worker-1", 4)):
        left, right = memory.pair(stranger, Peer("worker", "worker-0", 1))
        peers.accept(right)
        assert right.other is None and not peers.links
    assert len(said) == 3 and "incarnation 2 is no worker of this job" in said[0]
    left, right = memory.pair(Peer("worker", "worker-1", 4), Peer("worker", "worker-0", 1))
    peers.accept(right)
    assert list(peers.links) == [4] and left.other is right
    peers.close()


class _Nowhere:
    def connect(self, member: Member) -> Any:
        raise AssertionError

    def knock(self, member: Member) -> None:
        raise AssertionError

    def create_memory(self, num_bytes: int) -> HeapMemory:
        return HeapMemory(num_bytes)


def lie(link: PeerLink, group: tuple[int, ...], which: str) -> None:
    """Says something that nobody says who keeps to the protocol."""
    bytes8 = memoryview(bytearray(8))
    if which == "other bytes than described":
        link.send(Describe(group, 1, "all_reduce", "float32", (4,), op="sum"), [bytes8], 8)
    elif which == "no bytes":
        link.send(Describe(group, 1, "all_reduce", "float32", (4,), op="sum"))
    elif which == "a group without us":
        link.send(Describe((77, 78), 0, "barrier"))
    elif which == "a chunk of nothing":
        link.send(Chunk(5), [bytes8], 8)
        link.send(Chunk(0), [memoryview(bytearray(1 << 20))], 1 << 20)
    elif which == "memory that did not come":
        link.send(Share(1, 4096))
    elif which == "an offer of other bytes":
        link.send(Offer(0, "float64", (3,)), [bytes8], 8)
    elif which == "less than nothing":
        link.send(Offer(0, "float64", (-3,)))
    elif which == "too much at once":
        link.send(TensorPiece(0, 0), [memoryview(bytearray(1 << 20))], 1 << 20)
    elif which == "what is said to the coordinator":
        link.send(Leave(False))


LIES = [
    "other bytes than described", "no bytes", "a group without us", "a chunk of nothing", "memory that did not come",
    "an offer of other bytes", "less than nothing", "too much at once", "what is said to the coordinator",
]  # fmt: skip


def test_a_lie_ends_the_connection(two: LocalJob) -> None:
    """With a reason; whoever waits is told whose connection it was; the next call makes a new one."""
    for which in LIES:
        (mine,), (theirs,) = links(two, 0), links(two, 1)
        lie(theirs, (mine.incarnation, theirs.incarnation), which)
        assert mine.lost.startswith("refused what worker-1 sent: "), (which, mine.lost)
        assert together(two, lambda me: collectives.all_reduce(1)) == [2, 2], which


def test_a_chunk_that_is_not_the_next_one(two: LocalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a call: a description as it should be, and then bytes that nobody has asked for."""
    calls, (theirs,) = two[1].collectives.calls, links(two, 1)
    group = tuple(member.incarnation for member in calls.world.members(None)[0])
    said = Describe(
        group,
        1,
        "all_reduce",
        "float32",
        (50_000,),
        op="sum",
        host=group[1],
        generation=calls.world.roster.generation,
    )
    theirs.send(said)
    under_way, ours = threading.Event(), PeerMessages.buffers_for

    # What worker-0 sends waits there for a call of worker-1, which makes none.
    def buffers_for(self: PeerMessages, link: Any, message: Any, payload_bytes: int) -> Any:
        if isinstance(message, Chunk):
            under_way.set()
        return ours(self, link, message, payload_bytes)

    monkeypatch.setattr(PeerMessages, "buffers_for", buffers_for)

    def work(me: Any) -> Any:
        lying = threading.Thread(target=lie_when_it_waits)
        lying.start()
        try:
            return collectives.all_reduce(np.ones(50_000, np.float32))
        finally:
            lying.join()

    def lie_when_it_waits() -> None:
        under_way.wait(PATIENCE)
        theirs.send(Chunk(7), [memoryview(bytearray(64))], 64)

    (told,) = messages(together(two, work, ranks=[0]))
    assert told.startswith(
        "CollectiveError: worker-1 is gone while all_reduce of float32[50000] was under way: refused"
    )
