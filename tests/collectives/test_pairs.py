"""From one worker to one other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tests.collectives.together import messages, together
from tests.patience import PATIENCE

from syncline import collectives
from syncline.errors import CollectiveError
from syncline.testing.local import LocalJob


def test_send_and_recv(three: LocalJob) -> None:
    """In order, of any size and dtype, also none; a tensor comes as a tensor; into a place of one's own too."""
    sizes = [0, 3, 300_001, 5]

    def work(me: Any) -> None:
        if me.rank == 0:
            for size in sizes:
                collectives.send(np.arange(size), to=2)
            collectives.send(torch.full((40_000, 2), 3, dtype=torch.bfloat16).t(), to=2)
            shared = collectives.empty(50_000)
            shared[:] = 7
            collectives.send(shared, to=2)
        elif me.rank == 2:
            for size in sizes:
                assert np.array_equal(collectives.recv(0), np.arange(size))
            tensor = collectives.recv(0)
            assert tensor.shape == (2, 40_000) and tensor.dtype is torch.bfloat16 and (tensor == 3).all()
            out = np.zeros((50_000, 2), np.float32)
            assert collectives.recv(0, out=out[:, 1]) is not None and (out == [0, 7]).all()

    assert together(three, work) == [None] * 3


def test_both_at_once(three: LocalJob) -> None:
    """Each sends to both others, not waited for, and takes what they send, in another order; beside a collective."""

    def work(me: Any) -> None:
        others = [rank for rank in range(3) if rank != me.rank]
        total = collectives.all_reduce(np.ones(20_000), wait=False)
        sent = [collectives.send(np.full(100_000, me.rank), to=rank, wait=False) for rank in others]
        for rank in reversed(others):
            assert (collectives.recv(rank) == rank).all()
        for ticket in sent:
            assert ticket.wait(PATIENCE) is None
        assert (total.wait(PATIENCE) == 3).all()

    assert together(three, work) == [None] * 3


def test_a_place_that_does_not_fit(three: LocalJob) -> None:
    """Both get the same error, and the next one goes well."""

    def work(me: Any) -> Any:
        if me.rank == 0:
            return collectives.send(np.ones(30_000), to=1)
        return collectives.recv(0, out=np.ones(3))

    told = "CollectiveError: worker-0 sends float64[30000], worker-1 receives it into float64[3]"
    assert messages(together(three, work, ranks=[0, 1])) == [told] * 2
    results = together(
        three, lambda me: collectives.send(1, to=1) if me.rank == 0 else collectives.recv(0), ranks=[0, 1]
    )
    assert results == [None, 1]


def test_in_a_group(three: LocalJob) -> None:
    """Ranks are those of the job, and must be in it; who is in none of it says so before anything is sent."""

    def work(me: Any) -> Any:
        outer = collectives.group([0, 2])
        if me.rank == 0:
            try:
                collectives.send(np.ones(3), to=1, group=outer)
            except CollectiveError as error:
                return collectives.send(np.arange(4), to=2, group=outer), str(error)
        if me.rank == 2:
            return collectives.recv(0, group=outer).tolist()
        return collectives.recv(0, group=outer)

    here, middle, there = together(three, work)
    assert here == (None, "send: rank 1, worker-1, is not in this group") and there == [0, 1, 2, 3]
    assert messages([middle]) == ["CollectiveError: worker-1 is not in this group: worker-0 and worker-2"]
