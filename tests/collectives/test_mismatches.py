"""Ranks that do not call the same: every rank gets the same error, which names who differs, and all go on."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.collectives.together import messages, together
from tests.patience import PATIENCE

from syncline import collectives
from syncline.errors import CollectiveError
from syncline.reduce.kernels import Reducer
from syncline.testing.local import LocalJob
from syncline.worker.collectives import verbs

REMEDY = "; all ranks of a group make the same calls in the same order"
F3, F4, LARGE = np.ones(3, np.float32), np.ones(4, np.float32), np.ones(50_000, np.float32)


def usable(job: LocalJob) -> None:
    """Whatever happened before, the next calls work, large and small."""
    for x in (F3, LARGE):
        for result in together(job, lambda me, x=x: collectives.all_reduce(x)):
            assert isinstance(result, np.ndarray) and (result == len(job)).all(), result


@pytest.mark.parametrize(
    ("others", "odd", "told"),
    [
        (
            lambda: collectives.all_reduce(F4),
            lambda: collectives.all_reduce(F3),
            "worker-1 called all_reduce of float32[3], worker-0 and worker-2 of float32[4]",
        ),
        (
            lambda: collectives.all_reduce(LARGE),
            lambda: collectives.all_reduce(F3),
            "worker-1 called all_reduce of float32[3], worker-0 and worker-2 of float32[50000]",
        ),
        (
            lambda: collectives.all_reduce_(LARGE.copy()),
            lambda: collectives.all_reduce_(LARGE.astype(np.float64)),
            "worker-1 called all_reduce of float64[50000], worker-0 and worker-2 of float32[50000]",
        ),
        (
            lambda: collectives.all_reduce(F3, "max"),
            lambda: collectives.all_reduce(F3, "min"),
            "worker-1 called all_reduce of float32[3] (min), worker-0 and worker-2 of float32[3] (max)",
        ),
        (
            lambda: collectives.reduce(F3, root=0),
            lambda: collectives.reduce(F3, root=2),
            "worker-1 called reduce of float32[3] with root worker-2, worker-0 and worker-2 of float32[3] with root "
            "worker-0",
        ),
        (
            collectives.barrier,
            lambda: collectives.all_gather(LARGE),
            "worker-1 called all_gather of float32[50000], worker-0 and worker-2 called barrier",
        ),
        (
            lambda: collectives.all_gather(np.ones((2, 3), np.float32)),
            lambda: collectives.all_gather(np.ones((2, 4), np.float32)),
            "worker-1 called all_gather of float32[2, 4], worker-0 and worker-2 of float32[2, 3]",
        ),
        (
            lambda: collectives.reduce_scatter(F3),
            lambda: collectives.reduce_scatter(F3, splits=[3, 0, 0]),
            "worker-1 called reduce_scatter of float32[3] in pieces of 3, 0, 0, worker-0 and worker-2 of float32[3] "
            "in pieces of 1, 1, 1",
        ),
    ],
)  # fmt: skip
def test_every_rank_gets_the_same_error(three: LocalJob, others: Any, odd: Any, told: str) -> None:
    results = together(three, lambda me: odd() if me.rank == 1 else others())
    assert messages(results) == [f"CollectiveError: {told}{REMEDY}"] * 3
    usable(three)


def test_a_place_that_does_not_fit_what_the_root_sends(three: LocalJob) -> None:
    results = together(three, lambda me: collectives.broadcast_(F3.copy() if me.rank == 2 else F4.copy(), root=0))
    assert (
        messages(results)
        == ["CollectiveError: worker-2 called broadcast into float32[3], and gets float32[4] from worker-0"] * 3
    )
    results = together(three, lambda me: collectives.all_gather(F3, out=F3.copy() if me.rank == 1 else None))
    assert (
        messages(results)
        == ["CollectiveError: worker-1 called all_gather into float32[3], and the result is float32[9]"] * 3
    )
    usable(three)


def test_calls_of_different_groups(three: LocalJob) -> None:
    """worker-2 is not in the group of worker-0, and would wait for it for ever: it is told too."""

    def work(me: Any) -> Any:
        group = collectives.group([0, 1]) if me.rank == 0 else None
        return collectives.all_reduce(F3, group=group)

    told = (
        "CollectiveError: worker-0 called all_reduce of float32[3] among worker-0 and worker-1, worker-1 called "
        f"all_reduce of float32[3] among worker-0, worker-1 and worker-2{REMEDY}"
    )
    assert messages(together(three, work)) == [told] * 3
    usable(three)
    results = together(three, lambda me: collectives.all_reduce(1, group=collectives.group([0, 1])), ranks=[0, 1])
    assert results == [2, 2]


def test_calls_in_another_order(three: LocalJob) -> None:
    """Both calls fail, at all ranks, and then all are level again."""

    def work(me: Any) -> list[str]:
        calls = [lambda: collectives.all_reduce(F3), collectives.barrier]
        found = []
        for call in reversed(calls) if me.rank == 2 else calls:
            with pytest.raises(CollectiveError) as caught:
                call()
            found.append(str(caught.value))
        return found

    first, *others = together(three, work)
    assert others == [first, first]
    usable(three)


def test_a_collective_against_send(three: LocalJob) -> None:
    """worker-0 would wait for worker-1 to take it, and that in a collective for worker-0."""

    def work(me: Any) -> Any:
        return collectives.send(F3, to=1) if me.rank == 0 else collectives.all_reduce(F3)

    told = f"CollectiveError: worker-0 called send to worker-1, worker-1 called all_reduce of float32[3]{REMEDY}"
    assert messages(together(three, work)) == [told] * 3
    usable(three)


def test_what_keeps_one_rank_from_it_is_told_to_all(three: LocalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without memory for the result: the others do not wait for it."""
    exchange = verbs.exchange

    def without_memory(rendezvous: Any, *given: Any) -> Any:
        if rendezvous is three[1].collectives.calls.rendezvous:
            raise MemoryError("7 bytes")
        return exchange(rendezvous, *given)

    with monkeypatch.context() as patch:
        patch.setattr(verbs, "exchange", without_memory)
        results = together(three, lambda me: collectives.all_gather(LARGE))
    assert isinstance(results[1], MemoryError)
    told = "CollectiveError: worker-1 has given up: MemoryError: 7 bytes"
    assert messages([results[0], results[2]]) == [told] * 2
    usable(three)


def test_nobody_writes_into_memory_after_an_error(three: LocalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """worker-2 fails at once, while worker-1 has not written its part yet: worker-0 gets its error only when that is
    through, and what its script writes then stays."""
    ours, started, written = Reducer.reduce, threading.Event(), threading.Event()
    mine = threading.local()

    def reduce(self: Any, sources: Any, targets: Any, **options: Any) -> None:
        if mine.rank == 2:
            started.wait(PATIENCE)
            raise MemoryError("7 bytes")
        if mine.rank == 1:
            started.set()
            time.sleep(0.3)
        ours(self, sources, targets, **options)
        if mine.rank == 1:
            written.set()

    def work(me: Any) -> Any:
        mine.rank, array = me.rank, collectives.empty(60_000)
        array[:] = 1
        try:
            collectives.all_reduce_(array)
        except (CollectiveError, MemoryError):
            if me.rank == 0:
                assert written.is_set()
        array[:] = 100 + me.rank
        time.sleep(0.4)
        return (array == 100 + me.rank).all()

    usable(three)
    if not any(link.shares_memory for link in three[0].collectives.calls.peers.links.values()):
        pytest.skip("no memory is shared over sockets")
    monkeypatch.setattr(Reducer, "reduce", reduce)
    assert together(three, work) == [True] * 3
    monkeypatch.undo()
    usable(three)


def test_what_cannot_be_is_said_before_anybody_waits(three: LocalJob) -> None:
    def refused(call: Any) -> str:
        with pytest.raises(CollectiveError) as caught:
            together_one(three, call)
        return str(caught.value)

    assert refused(lambda: collectives.all_reduce(np.ones(3, np.int32), "average")) == (
        "average of int32: use sum, and divide as you want it rounded"
    )
    assert "use max for any" in refused(lambda: collectives.all_reduce(np.ones(3, bool)))
    assert "no order" in refused(lambda: collectives.all_reduce(np.ones(3, complex), "min"))
    assert refused(lambda: collectives.all_reduce(F3, "mean")).startswith("op='mean': must be one of average, sum")
    assert "cannot be sent" in refused(lambda: collectives.all_reduce(np.array(["a"])))
    assert "there is no rank 3" in refused(lambda: collectives.reduce(F3, root=3))
    assert "there is no rank 9" in refused(lambda: collectives.group([0, 9]))
    assert "is not in this group" in refused(lambda: collectives.barrier(group=collectives.group([1, 2])))
    assert "worker-0 itself" in refused(lambda: collectives.send(F3, to=0))
    assert "2 arrays for 3 ranks" in refused(lambda: collectives.all_to_all([F3, F3]))
    assert "3 sizes are needed, 3 in all" in refused(lambda: collectives.reduce_scatter(F3, splits=[1, 1]))
    assert "a single number cannot be split" in refused(lambda: collectives.reduce_scatter(1.0))
    usable(three)


def together_one(job: LocalJob, call: Any) -> None:
    (result,) = together(job, lambda me: call(), ranks=[0])
    if isinstance(result, Exception):
        raise result
