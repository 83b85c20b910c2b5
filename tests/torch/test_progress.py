"""`job.progress`: 0 to 1 of the whole run, whoever makes the steps."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import numpy as np
import pytest
from tests.leased import FakeJob, LeaseQueue, alone
from tests.torch.test_data import Numbers, train

import syncline
import syncline.data
from syncline.errors import ConfigError
from syncline.testing import local_job
from syncline.torch import DataLoader
from syncline.worker.job import Job


def places(job: FakeJob, loader: DataLoader[Any], num_epochs: int) -> list[float]:
    found = []
    for _ in loader.epochs(num_epochs):
        for _ in loader:
            job.step()
            found.append(round(job.samples.run_done, 6))
    return found


def steps(job: Job, loader: DataLoader[Any], num_epochs: int) -> list[float]:
    """The progress at each step, and at the end."""
    job.kv.register({"w": np.zeros(1)}, syncline.Rule("Add"))
    found = []
    for _ in loader.epochs(num_epochs):
        for _ in loader:
            found.append(job.progress)
            job.kv.push_pull({"w": np.ones(1)}).wait()
    return [*found, job.progress]


def test_alone_it_is_epochs_and_samples() -> None:
    job = alone()
    assert places(job, DataLoader(Numbers(8), 2, True, job=job), 2) == [k / 8 for k in range(8)]
    assert job.samples.run_done == 1.0


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"global_batch_size": 10}])
def test_in_rounds_it_is_the_same_for_all_workers(options: dict[str, Any], tmp_path: pathlib.Path) -> None:
    with local_job(workers=3, folder=str(tmp_path)) as jobs:
        found = jobs.run(lambda job: steps(job, DataLoader(Numbers(120), job=job, **options), 2))
    num_rounds = 240 // (12 if "batch_size" in options else 10)
    assert found == [pytest.approx([k / num_rounds for k in range(num_rounds + 1)])] * 3


def test_outside_of_rounds_it_is_about_what_all_have_read() -> None:
    """Each worker has leases of its own, which lie apart; their places alone would be apart by as much."""
    lease_queue = LeaseQueue(2, in_rounds=False)
    loaders = [DataLoader(Numbers(400), 4, job=job) for job in lease_queue]
    runs = [loader.epochs(1) for loader in loaders]
    assert [next(run) for run in runs] == [0, 0]
    batches, read = [iter(loader) for loader in loaders], 0
    for _ in range(40):
        for job, mine in zip(lease_queue, batches, strict=True):
            next(mine)
            assert job.samples.run_done == pytest.approx(read / 400, abs=0.1)
            read += 4
            job.step()
    for run in (*batches, *runs):
        run.close()  # type: ignore[attr-defined]


def test_a_worker_that_starts_again_and_one_that_takes_up_go_on_where_the_job_is() -> None:
    lease_queue = LeaseQueue(2, in_rounds=False)
    first = DataLoader(Numbers(40), 4, job=lease_queue[0])
    for _ in range(2):
        train(first, lease_queue[0])
    again, run = DataLoader(Numbers(40), 4, job=lease_queue[1]), []
    for _ in again.epochs(4):
        run.append(lease_queue[1].samples.run_done)
        train(again, lease_queue[1])
    assert run == [0.5, 0.75]


def test_shards_count_as_they_are_handed_out() -> None:
    job = alone()
    source = syncline.data.IterableSource({f"s{k}": lambda: iter([{"x": n} for n in range(4)]) for k in range(5)})
    found = places(job, DataLoader(source, 2, job=job), 1)
    assert [place for place, _ in itertools.groupby(found)] == [0.0, 0.2, 0.4, 0.6, 0.8]


def test_another_run_counts_from_its_own_beginning() -> None:
    job = alone()
    loader = DataLoader(Numbers(8), 2, job=job)
    assert places(job, loader, 1)[-1] == 0.75
    assert places(job, DataLoader(Numbers(8), 2, job=job), 1)[0] == 0.0


def test_where_nothing_says_how_long_the_run_is_the_error_names_what_does(tmp_path: pathlib.Path) -> None:
    with (
        local_job(workers=1, folder=str(tmp_path)) as jobs,
        pytest.raises(ConfigError, match=r"loader.epochs\(n\).*job.steps\(n\).*--max-steps or --max-time"),
    ):
        _ = jobs[0].progress


def test_the_end_that_comes_first_counts(tmp_path: pathlib.Path) -> None:
    with local_job(workers=1, folder=str(tmp_path), max_steps=10, max_time="1000h") as jobs:
        found = jobs.run(lambda job: steps(job, DataLoader(Numbers(16), 2, job=job), 100))
    assert found[0] == pytest.approx([k / 10 for k in range(11)], abs=1e-6)
