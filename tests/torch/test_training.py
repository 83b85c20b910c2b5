"""DataLoader and DistributedOptimizer together: weights by samples, uneven ends, the final model."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from syncline.testing import local_job
from syncline.torch import DataLoader, DistributedOptimizer
from syncline.worker.job import Job

DATA = torch.utils.data.TensorDataset(torch.arange(1.0, 12.0).reshape(11, 1))


def train(job: Job, batch_size: int, epochs: int = 2) -> float:
    """Gradient of the mean of w·x is the mean of x: the path tells exactly which samples each round had."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
    loader = DataLoader(DATA, batch_size=batch_size, shuffle=True, seed=5)
    for _ in range(epochs):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x.double()).mean().backward()
            optimizer.step()
    job.barrier("trained")
    optimizer.pull()
    return model.weight.item()


def test_uneven_ends_are_weighed_by_samples_and_nobody_waits_for_who_has_finished() -> None:
    """Four workers with batches of 2: rounds of 8 and of 3 samples, one worker has none in the last."""
    with local_job(workers=1) as jobs:
        alone = jobs.run(lambda job: train(job, 8))
    with local_job(workers=4) as jobs:
        together = jobs.run(lambda job: train(job, 2))
        assert [job.own_step for job in jobs] == [2, 4, 4, 4]
        assert [job.step for job in jobs] == [4, 4, 4, 4], "rounds of the job"
        assert jobs[0].stats().samples == 22
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone * 4))
    assert len(set(together)) == 1


def test_more_workers_than_samples() -> None:
    """A worker without any sample takes part in no round, in no epoch."""
    tiny = torch.utils.data.TensorDataset(torch.ones(2, 1))

    def work(job: Job) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        for _ in range(3):
            for (x,) in DataLoader(tiny, batch_size=1):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
        job.barrier("trained")
        optimizer.pull()
        return model.weight.item()

    with local_job(workers=3) as jobs:
        assert jobs.run(work) == [-3.0] * 3


def test_an_evaluation_in_between_is_in_no_weight_and_rests_nobody() -> None:
    """The chief evaluates through a loader of ours, with gradients off: nothing about the rounds changes by it."""

    def work(job: Job) -> float:
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        for number, (x,) in enumerate(DataLoader(DATA, batch_size=2)):
            if job.is_chief and number == 1:
                with torch.no_grad():
                    list(DataLoader(DATA, batch_size=3))
            optimizer.zero_grad()
            model(x.double()).mean().backward()
            optimizer.step()
        job.barrier("trained")
        optimizer.pull()
        return model.weight.item()

    with local_job(workers=2) as jobs:
        results = jobs.run(work)
    means = [torch.arange(1.0, 5.0).mean(), torch.arange(5.0, 9.0).mean(), torch.arange(9.0, 12.0).mean()]
    expected = -sum(mean.item() for mean in means)
    torch.testing.assert_close(torch.tensor(results), torch.tensor([expected, expected]))


def test_a_loader_made_anew_for_every_epoch_is_told_of_once() -> None:
    """Its order would be that of epoch 0 every time."""
    with local_job(workers=1) as jobs:
        job = jobs[0]
        once = DataLoader(DATA, batch_size=2, shuffle=True, job=job)
        orders = [[x.tolist() for (x,) in once] for _ in range(2)]
        assert orders[0] != orders[1] and not job.debug_state().notices
        again = [x.tolist() for (x,) in DataLoader(DATA, batch_size=2, shuffle=True, job=job)]
        assert again == orders[0]
        assert [text for text in job.debug_state().notices if "create it once" in text]


@pytest.mark.parametrize("differs", [False, True])
def test_a_learning_rate_that_does_not_count_is_named_once(differs: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """In sync the chief's counts. A script that scales its rate by the rank, say, heard nothing of it."""

    def work(job: Job) -> float:
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        lr = 0.5 / (job.rank + 1) if differs else 0.5
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model=model)
        for number in range(8):
            if not differs:
                optimizer.param_groups[0]["lr"] = 0.5 if number % 2 else 0.25
            optimizer.zero_grad()
            model(torch.ones(1, 1).double()).mean().backward()
            optimizer.step()
        optimizer.pull()
        return float(model.weight.detach())

    with local_job(workers=3, servers=2) as jobs:
        assert jobs.run(work) == ([-4.0] * 3 if differs else [-3.0] * 3)
    said = [line for line in capfd.readouterr().err.splitlines() if "has no effect" in line]
    rest = "a round uses the hyperparameters of worker-0"
    assert len(said) == (2 if differs else 0), said
    for name, lr in (("worker-1", 0.25), ("worker-2", 0.16666666666666666)) if differs else ():
        assert any(f"{name} has lr = {lr} (0.5 in worker-0), which has no effect: {rest}" in line for line in said)


@pytest.mark.parametrize("factor", [lambda step: math.cos(step / 20) ** 2, lambda step: 0.1 if step > 9 else 1.0])
def test_a_schedule_that_is_some_steps_behind_is_not_named(
    factor: Callable[[int], float], capfd: pytest.CaptureFixture[str]
) -> None:
    """As after a restart: worker-1 goes on with a schedule that is five steps behind the chief's."""

    def work(job: Job) -> None:
        model = torch.nn.Linear(1, 1, bias=False).double()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model)
        for step in range(30):
            optimizer.param_groups[0]["lr"] = 0.5 * factor(step - 5 * job.rank if step > 3 else step)
            optimizer.zero_grad()
            model(torch.ones(1, 1).double()).mean().backward()
            optimizer.step()

    with local_job(workers=2, servers=1) as jobs:
        jobs.run(work)
    assert "has no effect" not in capfd.readouterr().err
