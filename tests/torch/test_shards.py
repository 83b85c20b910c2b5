"""Shards and sources in the DataLoader: read in sequence, or a batch at a time, and each sample once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from tests.leased import FakeJob, LeaseQueue, alone

from syncline.core.leasing.order import ChunkedOrder
from syncline.data import ArraySource, IterableSource
from syncline.data.source import Batch
from syncline.errors import ConfigError, DataError
from syncline.torch.data import DataLoader

LENGTHS = [10, 0, 23, 1, 8, 4]


class Files(torch.utils.data.IterableDataset[int]):
    """Shard k has its first sample at 100 · k; `opened` is written down by all copies."""

    def __init__(self, lengths: list[int]) -> None:
        self.shards = list(enumerate(lengths))
        self.opened: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for number, length in self.shards:
            self.opened.append(number)
            yield from range(100 * number, 100 * number + length)


def source(lengths: list[int]) -> IterableSource:
    """The same as a shard source."""

    def shard(number: int, length: int) -> Callable[[], Iterator[dict[str, Any]]]:
        return lambda: ({"number": 100 * number + k} for k in range(length))

    return IterableSource({f"part-{number}": shard(number, length) for number, length in enumerate(lengths)})


ALL = [100 * number + k for number, length in enumerate(LENGTHS) for k in range(length)]


def numbers(batch: Any) -> list[int]:
    found: list[int] = (batch["number"] if isinstance(batch, dict) else batch).tolist()
    return found


def train(loader: DataLoader[Any], job: FakeJob) -> list[list[int]]:
    found = []
    for batch in loader:
        found.append(numbers(batch))
        job.step()
    return found


@pytest.mark.parametrize("in_rounds", [True, False])
@pytest.mark.parametrize("make", [Files, source])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_every_sample_of_every_shard_is_read_once(make: Any, num_workers: int, in_rounds: bool) -> None:
    lease_queue = LeaseQueue(num_workers, in_rounds=in_rounds)
    world = lease_queue.run(lambda job: train(DataLoader(make(LENGTHS), 4, True, job=job), job))
    batches = list(itertools.chain(*world))
    assert sorted(itertools.chain(*batches)) == ALL
    assert all(len({number // 100 for number in batch}) == 1 for batch in batches), "no batch crosses shards"
    assert lease_queue.left == 0 and lease_queue.passed_over == 0


def test_shards_are_mixed_by_seed_and_epoch() -> None:
    job = alone()
    loader = DataLoader(Files([4] * 8), 4, True, job=job, seed=3)
    first, second = train(loader, job), train(loader, job)
    assert first != second and sorted(first) == sorted(second) == [[100 * k + i for i in range(4)] for k in range(8)]
    assert train(DataLoader(Files([4] * 8), 4, True, job=alone(), seed=3), job) == first


def test_whoever_goes_on_with_a_shard_skips_what_is_done() -> None:
    lease_queue = LeaseQueue(2, in_rounds=False)
    for number, _ in enumerate(DataLoader(Files([20, 5]), 4, job=lease_queue[0])):
        lease_queue[0].step()
        if number == 1:
            break
    rest = train(DataLoader(Files([20, 5]), 4, job=lease_queue[1]), lease_queue[1])
    assert sorted(itertools.chain(*rest)) == [*range(8, 20), *range(100, 105)] and lease_queue.left == 0


def test_a_shard_that_is_begun_stays_with_its_reader() -> None:
    """The other would have to read it from its first sample: it takes shards that are not begun, or waits."""
    lease_queue = LeaseQueue(2, in_rounds=False)
    dataset = Files([12, 12, 12])
    mine = iter(DataLoader(dataset, 4, job=lease_queue[0]))
    next(mine)
    lease_queue[0].step()
    lease_queue.recall(lease_queue[0].owner, "loader-0", 0)

    def work(job: FakeJob) -> list[int]:
        batches = mine if job.rank == 0 else DataLoader(dataset, 4, job=job)
        found: list[int] = []
        for batch in batches:
            found += numbers(batch)
            job.step()
        return found

    one, two = lease_queue.run(work)
    assert set(range(4, 12)) <= set(one)
    assert sorted([*one, *two]) == sorted({*range(4, 12), *range(100, 112), *range(200, 212)})
    assert sorted(dataset.opened) == [0, 1, 2]


def test_a_lease_behind_the_end_of_a_shard_is_nothing() -> None:
    """A worker died at the last samples of a shard: what follows them is leased apart, and there is nothing."""
    lease_queue = LeaseQueue(2, in_rounds=False)
    with pytest.raises(KeyError):
        for _ in DataLoader(Broken([6]), 4, job=lease_queue[0]):
            lease_queue[0].step()
    lease_queue.leasing.out(lease_queue[0].owner, failed=True)
    epoch = lease_queue.leasing.epoch("loader-0", 0)
    assert epoch is not None and [one.span.stop - one.span.start for one in epoch.suspect_batches] == [4]
    lease_queue.jobs.pop(0)
    assert train(DataLoader(Files([6]), 4, job=lease_queue[0]), lease_queue[0]) == [[4, 5]] and lease_queue.left == 0


class Broken(Files):
    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            if number == 5:
                raise KeyError("sample 5")
            yield number


def test_what_shards_cannot_do_is_said() -> None:
    class Fixed(torch.utils.data.IterableDataset[int]):
        @property
        def shards(self) -> list[str]:
            return ["a"]

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ConfigError, match="num_workers must be 0 for shards"):
        DataLoader(Files([3]), num_workers=1, job=alone())
    with pytest.raises(ConfigError, match=r"drop_last cannot be given for shards: .*leave it out"):
        DataLoader(Files([3]), drop_last=True, job=alone())
    with pytest.raises(ConfigError, match="no shards; check the path"):
        DataLoader(Files([]), job=alone())
    with pytest.raises(ConfigError, match=r"Fixed\.shards cannot be set.*plain attribute"):
        next(iter(DataLoader(Fixed(), job=alone())))
    for ask in (len, lambda loader: loader.total_steps):
        with pytest.raises(TypeError, match=r"is known only after they are read; use schedules by"):
            ask(DataLoader(Files([3]), job=alone()))


def test_a_column_without_tensors_is_named_with_a_remedy() -> None:
    days = np.arange(4).astype("datetime64[D]")
    for arrays, name in (({"day": days, "y": np.arange(4)}, "day"), ((np.arange(4), days), "array 1")):
        loader = DataLoader(ArraySource(arrays), 2, job=alone())  # type: ignore[arg-type]
        with pytest.raises(DataError, match=rf"'{name}' is datetime64\[D\], .*leave it out with columns="):
            next(iter(loader))
    texts = ArraySource({"s": np.array(["a", "b"], dtype=object)})
    assert next(iter(DataLoader(texts, 2, job=alone())))["s"].tolist() == ["a", "b"]  # type: ignore[arg-type, call-overload]


class Chunks:
    """A source of three chunks, which writes down what is read at once."""

    chunk_sizes = (8, 8, 8)

    def __init__(self) -> None:
        self.reads: list[int] = []

    def describe(self) -> str:
        return "24 numbers"

    def __len__(self) -> int:
        return 24

    def read(self, samples: Any) -> Batch:
        self.reads.append(len(samples))
        return {"number": np.asarray(samples), "name": np.array([str(s) for s in samples], dtype=object)}

    def where(self, sample: int) -> str:
        return str(sample)


def test_a_source_is_read_in_whole_batches_in_its_own_order() -> None:
    job, chunks = alone(), Chunks()
    loader: DataLoader[Any] = DataLoader(chunks, 6, True, job=job, seed=2)  # type: ignore[arg-type]
    batches = list(loader)
    assert chunks.reads == [6, 6, 6, 6]
    assert isinstance(batches[0]["number"], torch.Tensor) and isinstance(batches[0]["name"], np.ndarray)
    expected = ChunkedOrder((8, 8, 8), 2, 0).at(np.arange(24)).tolist()
    assert list(itertools.chain(*(numbers(batch) for batch in batches))) == expected
    assert len(loader) == 4 and len(loader.dataset) == 24  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_arrays_come_as_tensors(num_workers: int) -> None:
    lease_queue = LeaseQueue(2, in_rounds=False)
    arrays = ArraySource((np.arange(30.0).reshape(15, 2), np.arange(15)))

    def work(job: FakeJob) -> list[int]:
        found: list[int] = []
        for x, y in DataLoader(arrays, 4, True, job=job, num_workers=num_workers):  # type: ignore[arg-type]
            assert torch.equal(x[:, 0], 2.0 * y)
            found += y.tolist()
            job.step()
        return found

    assert sorted(itertools.chain(*lease_queue.run(work))) == list(range(15)) and lease_queue.left == 0
