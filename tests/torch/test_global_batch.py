"""DataLoader(global_batch_size=N): the global batch is N, however many workers there are."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from tests.leased import LeaseQueue, alone
from tests.torch.test_data import Numbers, flat, train

import syncline
from syncline.errors import ConfigError
from syncline.testing import local_job
from syncline.torch import DataLoader
from syncline.worker.job import Job


def sizes_of_rounds(job: Job, num_samples: int, **options: Any) -> list[float]:
    """How many samples all workers had read after each step of this one; what `loader.batch_size` was in it."""
    job.kv.register({"read": np.zeros(1)}, syncline.Rule("Add"), reduce="sum")
    loader = DataLoader(Numbers(num_samples), job=job, **options)
    found = []
    for batch in loader:
        assert len(batch) <= (loader.batch_size or 0)
        found.append(float(job.kv.push_pull({"read": np.full(1, float(len(batch)))}).wait()["read"][0]))
    return found


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_in_sync_every_round_has_the_global_batch(workers: int, tmp_path: pathlib.Path) -> None:
    with local_job(workers=workers, folder=str(tmp_path)) as jobs:
        found = jobs.run(lambda job: sizes_of_rounds(job, 100, global_batch_size=10))
    assert found == [[10.0 * (k + 1) for k in range(10)]] * workers


def test_with_parts_by_speed_every_sample_counts_once(tmp_path: pathlib.Path) -> None:
    """Where parts are cut again a round may have less, or a little more."""
    with local_job(workers=3, folder=str(tmp_path)) as jobs:
        found = jobs.run(lambda job: sizes_of_rounds(job, 400, global_batch_size=20, batch="auto"))
    known = sorted({0.0, *found[0], *found[1], *found[2]})
    assert known[-1] == 400 and max(np.diff(known)) < 40


@pytest.mark.parametrize("policy", ["async", "bounded:2"])
def test_outside_of_rounds_a_batch_is_a_part(policy: str) -> None:
    lease_queue = LeaseQueue(3, in_rounds=False)
    found = lease_queue.run(lambda job: train(DataLoader(Numbers(120), job=job, global_batch_size=10), job))
    assert {len(batch) for batches in found for batch in batches} == {4}
    assert sorted(flat(flat(found))) == list(range(120))


def test_length_steps_and_batch_size_are_those_of_the_parts() -> None:
    lease_queue, free = LeaseQueue(3), LeaseQueue(3, in_rounds=False)
    loaders = [DataLoader(Numbers(105), job=job, global_batch_size=10) for job in lease_queue]
    assert [loader.batch_size for loader in loaders] == [4, 3, 3]
    assert [loader.total_steps for loader in loaders] == [11] * 3
    lengths, found = (
        [len(loader) for loader in loaders],
        lease_queue.run(lambda job: [len(batch) for batch in train(loaders[job.rank], job)]),
    )
    assert [sum(sizes) for sizes in zip(*found, strict=True)] == [10] * 10 + [5]
    assert lengths == [len(sizes) for sizes in found]
    loader = DataLoader(Numbers(105), job=free[1], global_batch_size=10)
    assert (loader.batch_size, loader.total_steps, len(loader)) == (4, 27, 9)
    dropping = DataLoader(Numbers(105), job=lease_queue[2], global_batch_size=10, drop_last=True)
    assert (dropping.total_steps, len(dropping)) == (10, 10)


def test_a_rest_that_is_less_than_the_workers_is_in_the_length_of_those_who_read_it() -> None:
    lease_queue = LeaseQueue(3)
    loaders = [DataLoader(Numbers(22), job=job, global_batch_size=10) for job in lease_queue]
    lengths = [len(loader) for loader in loaders]
    assert lengths == [len(batches) for batches in lease_queue.run(lambda job: train(loaders[job.rank], job))]


def test_shards_are_read_in_parts_too() -> None:
    lease_queue = LeaseQueue(2)
    source = syncline.data.IterableSource({f"s{k}": lambda: iter([{"x": n} for n in range(20)]) for k in range(2)})
    found = lease_queue.run(
        lambda job: [len(batch["x"]) for batch in _read(DataLoader(source, job=job, global_batch_size=9), job)]
    )
    assert all(not sizes or sizes[0] == part for sizes, part in zip(found, (5, 4), strict=True)), found
    assert sum(map(sum, found)) == 40  # by one of them, where the other came late


def _read(loader: DataLoader[Any], job: Any) -> Any:
    for batch in loader:
        job.step()
        yield batch


def test_what_makes_no_sense_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"batch_size=8 and global_batch_size=64 cannot both be given.*leave one"):
        DataLoader(Numbers(8), 8, job=alone(), global_batch_size=64)
    for size in (0, True, 2.0):
        with pytest.raises(ConfigError, match=r"global_batch_size = .* must be an int of at least 1"):
            DataLoader(Numbers(8), job=alone(), global_batch_size=size)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"less than the 3 workers .*: give global_batch_size=3 or more, or start few"
    ):
        iter(DataLoader(Numbers(8), job=LeaseQueue(3)[0], global_batch_size=2))
    assert DataLoader(Numbers(8), None, job=LeaseQueue(3, in_rounds=False)[0], global_batch_size=2).batch_size == 1


def test_without_it_batch_size_is_each_workers() -> None:
    assert DataLoader(Numbers(8), 2, job=LeaseQueue(2)[0]).batch_size == 2
