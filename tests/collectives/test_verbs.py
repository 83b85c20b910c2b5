"""Every verb against NumPy, small and large, on one host, over sockets and on two hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.collectives.together import together
from tests.patience import PATIENCE

from syncline import collectives
from syncline.core.collectives import ITEM_BYTES
from syncline.testing.local import LocalJob

#: With the description; in a few blocks of shared memory, or several chunks of a ring, with an odd end.
SIZES = [0, 5, 5_000, 700_003]


def numbers(rank: int, size: int, dtype: str = "float32") -> Any:
    rng = np.random.default_rng(100 * rank + size)
    if dtype == "bool":
        return rng.random(size) < 0.5
    if dtype.startswith("complex"):
        return (rng.standard_normal(size) + 1j * rng.standard_normal(size)).astype(dtype)
    if dtype.startswith("float"):
        return rng.standard_normal(size).astype(dtype)
    return rng.integers(0, 4, size).astype(dtype)


def given(job: LocalJob, size: int, dtype: str = "float32") -> list[Any]:
    return [numbers(rank, size, dtype) for rank in range(len(job))]


def same(results: list[Any]) -> None:
    """Bit by bit."""
    assert all(result.tobytes() == results[0].tobytes() for result in results)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "product"])
def test_all_reduce(job: LocalJob, op: str, size: int) -> None:
    """The result is that of NumPy, and every rank has the same bits; what was given is as it was."""
    before = given(job, size)
    results = together(job, lambda me: collectives.all_reduce(before[me.rank], op))
    table = {"sum": np.sum, "average": np.mean, "min": np.min, "max": np.max, "product": np.prod}
    np.testing.assert_allclose(results[0], table[op](before, axis=0), rtol=1e-4, atol=1e-5)
    same(results)
    for rank, array in enumerate(before):
        assert np.array_equal(array, numbers(rank, size))


def test_sums_are_in_the_order_of_ranks(three: LocalJob) -> None:
    """1 + 1e8 - 1e8 is 0 in float32, and 1 the other way round. On one host large ones too, not on a ring."""
    is_shared = three[0].config.transport != "tcp"
    for size in (4, 50_000) if is_shared else (4,):
        values = [np.full(size, x, np.float32) for x in (1.0, 1e8, -1e8)]
        for result in together(three, lambda me, v=values: collectives.all_reduce(v[me.rank])):
            assert (result == 0).all()


@pytest.mark.parametrize("dtype", sorted(set(ITEM_BYTES) - {"bfloat16"}))
def test_every_dtype(job: LocalJob, dtype: str) -> None:
    op = "max" if dtype == "bool" else "sum"
    for size in (7, 9_001):
        before = given(job, size, dtype)
        results = together(job, lambda me, b=before: collectives.all_reduce(b[me.rank], op))
        wanted = np.max(before, axis=0) if op == "max" else np.sum(before, axis=0, dtype=dtype)
        assert results[0].dtype == before[0].dtype
        np.testing.assert_allclose(results[0], wanted, rtol=2e-2 if dtype == "float16" else 1e-5, atol=1e-2)
        same(results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.bool, torch.int64])
def test_tensors(job: LocalJob, dtype: torch.dtype) -> None:
    """Of any dtype, of no dimensions, with strides; a tensor comes back."""
    op = "max" if dtype is torch.bool else "sum"
    for shape in ((), (3, 4), (150, 100)):
        before = [(torch.arange(15_000)[: max(1, int(np.prod(shape)))] % 2 + k).to(dtype) for k in range(len(job))]
        before = [one.reshape(shape).t() if shape else one.reshape(()) for one in before]
        results = together(job, lambda me, b=before: collectives.all_reduce(b[me.rank], op))
        wanted = (
            torch.stack(before).amax(0) if op == "max" else torch.stack(before).to(torch.float64).sum(0).to(dtype)
        )
        for result in results:
            assert result.dtype is dtype and torch.equal(result, wanted)


def test_in_place(job: LocalJob) -> None:
    """In arrays of the script's own, with strides too, and in shared memory, which is used where it lies."""
    for size in (5, 90_000):

        def work(me: Any, size: int = size) -> None:
            plain, wide = np.full(size, me.rank, np.float64), np.full((size, 2), me.rank, np.int32)
            shared, tensor = collectives.empty(size), torch.full((size,), float(me.rank), dtype=torch.bfloat16)
            shared[:] = me.rank
            for array in (plain, wide[:, 1], shared, tensor):
                assert collectives.all_reduce_(array) is array
                assert (array == sum(range(len(job)))).all()
            assert (wide[:, 0] == me.rank).all()
            root = collectives.reduce_(np.full(size, me.rank), root=0)
            assert (root == (sum(range(len(job))) if me.rank == 0 else me.rank)).all()
            assert (collectives.broadcast_(np.full(size, me.rank + 7), root=0) == 7).all()

        assert together(job, work) == [None] * len(job)


def test_a_result_leaves_what_was_given_in_shared_memory(job: LocalJob) -> None:
    def work(me: Any) -> None:
        shared = collectives.empty(50_000)
        shared[:] = me.rank + 1
        total = collectives.all_reduce(shared)
        assert (total == sum(range(1, len(job) + 1))).all() and (shared == me.rank + 1).all()
        assert (collectives.reduce(shared, op="max") is None) == (me.rank > 0) and (shared == me.rank + 1).all()

    assert together(job, work) == [None] * len(job)


@pytest.mark.parametrize("size", [3, 40_000])
def test_gathering(job: LocalJob, size: int) -> None:
    """The first dimension may differ, and may be 0; single numbers become a row."""
    count = len(job)
    arrays = [np.full((rank, size), rank, np.int16) for rank in range(count)]
    wanted = np.concatenate(arrays)

    def work(me: Any) -> None:
        assert np.array_equal(collectives.all_gather(arrays[me.rank]), wanted)
        out = np.empty_like(wanted)
        assert collectives.all_gather(arrays[me.rank], out=out) is out and np.array_equal(out, wanted)
        found = collectives.gather(arrays[me.rank], root=count - 1)
        assert found is None if me.rank < count - 1 else np.array_equal(found, wanted)
        assert collectives.all_gather(float(me.rank)).tolist() == list(range(count))

    assert together(job, work) == [None] * count


@pytest.mark.parametrize("size", [3, 40_000])
def test_from_one_to_all(job: LocalJob, size: int) -> None:
    """broadcast and scatter: the others need give nothing; pieces are as even as possible, or as said."""
    count = len(job)
    root = count - 1
    whole = np.arange((2 * count + 1) * size, dtype=np.float64).reshape(-1, size)
    ends = np.cumsum([3] + [2] * (count - 1))

    def work(me: Any) -> None:
        x = whole if me.rank == root else None
        assert np.array_equal(collectives.broadcast(x, root), whole)
        tensor = collectives.broadcast(torch.ones(size) if me.rank == root else None, root)
        assert torch.equal(tensor, torch.ones(size))
        piece = collectives.scatter(x, root)
        assert np.array_equal(piece, np.split(whole, ends[:-1])[me.rank])
        splits = [2 * count + 1] + [0] * (count - 1)
        assert len(collectives.scatter(x, root, splits=splits)) == (2 * count + 1 if me.rank == 0 else 0)
        pieces = [np.full((k, size), k) for k in range(count)] if me.rank == root else None
        out = np.empty((me.rank, size), np.int64)
        assert collectives.scatter(pieces, root, out=out) is out and (out == me.rank).all()

    assert together(job, work) == [None] * count


@pytest.mark.parametrize("size", [3, 40_000])
def test_from_all_to_all(job: LocalJob, size: int) -> None:
    count = len(job)

    def work(me: Any) -> None:
        given = [np.full((me.rank + k, size), 10 * me.rank + k) for k in range(count)]
        for k, piece in enumerate(collectives.all_to_all(given)):
            assert piece.shape == (k + me.rank, size) and (piece == 10 * k + me.rank).all()
        rows = np.arange(count * size).reshape(count, size)
        summed = collectives.reduce_scatter(rows + me.rank)
        assert np.array_equal(summed[0], count * rows[me.rank] + sum(range(count)))
        splits = [0] * (count - 1) + [count]
        out = np.empty((count if me.rank == count - 1 else 0, size), rows.dtype)
        assert collectives.reduce_scatter(rows, "max", splits=splits, out=out) is out
        assert np.array_equal(out, rows if me.rank == count - 1 else rows[:0])
        collectives.barrier()

    assert together(job, work) == [None] * count


def test_tickets_are_done_in_order(job: LocalJob) -> None:
    """What is not waited for is done behind one another, and before what is called next."""

    def work(me: Any) -> None:
        x = np.ones(30_000, np.float32)
        tickets = [collectives.all_reduce_(x, wait=False) for _ in range(3)]
        assert collectives.barrier() is None and all(ticket.done() for ticket in tickets)
        assert (x == len(job) ** 3).all() and tickets[0].wait(PATIENCE) is x

    assert together(job, work) == [None] * len(job)


def test_groups_of_ranks(three: LocalJob) -> None:
    """A group has its own calls; ranks are those of the job, also for its root."""

    def work(me: Any) -> list[Any]:
        if me.rank == 1:
            pair = collectives.group([1, 0])
            return [collectives.all_reduce(10, group=pair), collectives.barrier()]
        pair, ends = collectives.group([0, 1]), collectives.group([0, 2])
        first = [collectives.all_reduce(20, group=pair)] if me.rank == 0 else []
        both = collectives.broadcast(me.rank, root=2, group=ends)
        return [*first, int(both), len(ends), collectives.barrier()]

    assert together(three, work) == [[30, 2, 2, None], [30, None], [2, 2, None]]


def test_beside_servers(tmp_path: Any) -> None:
    """Before, between and after pushes, in a job with servers, of a policy in which nobody waits."""
    import syncline
    from syncline.testing import local_job

    def work(me: Any) -> float:
        collectives.barrier()
        me.kv.register({"w": np.zeros(1000, np.float32)}, syncline.Rule("SGD", lr=1.0), reduce="sum")
        for _ in range(3):
            total = collectives.all_reduce(np.ones(1000, np.float32))
            me.kv.push_pull({"w": total}).wait()
        collectives.barrier()
        return float(me.kv.pull()["w"][0])

    with local_job(workers=2, policy="async", folder=str(tmp_path)) as job:
        assert together(job, work) == [-12.0, -12.0]
