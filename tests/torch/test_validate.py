"""`job.validate`: every sample once, on one set of parameters, in every policy; rules see what comes out."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.data
from tests.patience import PATIENCE

from syncline.errors import ConfigError
from syncline.testing import local_job
from syncline.torch import DataLoader, DistributedOptimizer
from syncline.worker.job import Job

POLICIES = ["sync", "bounded:2", "async"]


class Numbers(torch.utils.data.Dataset[int]):
    """Sample i is i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


class Counting(torch.nn.Module):
    """Every step adds 1 to its only parameter, by SGD with learning rate 1."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.nn.Parameter(torch.zeros(1))


class Seen:
    """What all workers' validations have looked at: worker, sample, the parameter at that time."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, float]] = []
        self.lock = threading.Lock()

    def add(self, job: Job, batch: torch.Tensor, model: Counting) -> None:
        assert not torch.is_grad_enabled()
        assert not model.training
        with self.lock:
            self.rows += [(job.name, int(number), float(model.count)) for number in batch]

    def by_parameter(self) -> dict[float, list[int]]:
        found: dict[float, list[int]] = {}
        for _, number, value in self.rows:
            found.setdefault(value, []).append(number)
        return found


def train(job: Job, seen: Seen, *, num_epochs: int = 2, num_samples: int = 48, **options: Any) -> Any:
    model = Counting()
    opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, job=job)
    loader = DataLoader(Numbers(num_samples), 4, job=job)

    def measure(batch: torch.Tensor) -> dict[str, Any]:
        seen.add(job, batch, model)
        return {"mean": batch.double().mean(), "count": model.count.mean()}

    handle = job.validate(measure, Numbers(50), batch_size=3, **options)
    for _ in range(num_epochs):
        for _ in loader:
            assert model.training
            model.count.grad = -torch.ones(1)
            opt.step()
    return handle


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_sample_once_on_one_set_of_parameters(policy: str, tmp_path: pathlib.Path) -> None:
    seen = Seen()
    with local_job(3, 2, policy, folder=str(tmp_path)) as job:
        handles = job.run(lambda one: train(one, seen))
        job.run(lambda one: one.close())
        readings = job.coordinator.metrics.newest
    validations = seen.by_parameter()
    assert len(validations) == 2
    assert all(sorted(numbers) == list(range(50)) for numbers in validations.values())
    assert readings["mean"].value == pytest.approx(24.5)
    assert readings["count"].value == max(validations)
    assert readings["count"].number == 2
    if policy == "sync":
        assert sorted(validations) == [4.0, 8.0]
        assert handles[0].latest == {"mean": pytest.approx(24.5), "count": 8.0}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_so_many_steps_and_at_the_end(policy: str, tmp_path: pathlib.Path) -> None:
    seen = Seen()
    with local_job(2, 1, policy, folder=str(tmp_path)) as job:
        job.run(lambda one: train(one, seen, num_epochs=1, num_samples=56, every=3))
        job.run(lambda one: one.close())
    validations = seen.by_parameter()
    assert all(sorted(numbers) == list(range(50)) for numbers in validations.values())
    if policy == "sync":
        assert sorted(validations) == [3.0, 6.0, 7.0]
    else:
        assert len(validations) >= 3
        assert max(validations) == 14.0


def test_rules_hear_of_it_before_anybody_goes_on(tmp_path: pathlib.Path) -> None:
    seen, stop = Seen(), ["count>=6"]
    with local_job(3, 1, folder=str(tmp_path), stop=stop) as job:
        job.run(lambda one: train(one, seen, num_epochs=5, every="2steps"))
        steps = [one.step for one in job]
        assert all(one.should_stop for one in job)
    assert steps == [6, 6, 6]
    assert sorted(seen.by_parameter()) == [2.0, 4.0, 6.0]


def test_a_validated_metric_is_taken_from_validations_only(tmp_path: pathlib.Path) -> None:
    with local_job(1, 1, folder=str(tmp_path)) as job:
        job.run(lambda one: train(one, Seen(), num_epochs=1))
        job[0].report(count=1000.0, other=1.0)
        job[0].measures.flush()
        job[0].barrier("reported")
        assert job.coordinator.metrics.values() == {
            "count": 12.0,
            "mean": pytest.approx(24.5),
            "other": 1.0,
        }


def test_named_sets_have_metrics_of_their_own(tmp_path: pathlib.Path) -> None:
    def work(one: Job) -> None:
        first = one.validate(lambda batch: {"size": len(batch)}, Numbers(10), name="easy", batch_size=10)
        one.validate(lambda batch: {"size": len(batch)}, Numbers(20), name="hard", batch_size=20)
        train(one, Seen(), num_epochs=1)
        assert first.latest == {"size": 10.0}

    with local_job(2, 1, folder=str(tmp_path)) as job:
        job.run(work)
        values = job.coordinator.metrics.values()
    assert (values["easy/size"], values["hard/size"]) == (10.0, 20.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_dies_in_it_gives_back(policy: str, tmp_path: pathlib.Path) -> None:
    """Its part is read by another one, and counts once."""
    seen, dead, first = Seen(), [], threading.Lock()
    with local_job(3, 1, policy, folder=str(tmp_path)) as job:

        def work(one: Job) -> None:
            model = Counting()
            opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, job=one)
            loader = DataLoader(Numbers(48), 4, job=one)

            def measure(batch: torch.Tensor) -> dict[str, Any]:
                with first:
                    if not dead:
                        dead.append(one.name)
                        job.kill(one.name)
                        raise SystemExit
                seen.add(one, batch, model)
                return {"mean": batch.double().mean()}

            one.validate(measure, Numbers(50), batch_size=2)
            try:
                for _ in loader:
                    model.count.grad = -torch.ones(1)
                    opt.step()
                one.close()  # where it waits, it reads what the dead one has held
            except SystemExit:
                return

        job.run(work)
        assert job.coordinator.metrics.values() == {"mean": pytest.approx(24.5)}
    for numbers in seen.by_parameter().values():
        assert sorted(numbers) == list(range(50))


def test_when_all_who_have_its_parameters_are_gone_it_is_made_anew(tmp_path: pathlib.Path) -> None:
    """In async the last one that reads dies when the others have gone on: nobody has these parameters any more."""
    seen, dead = Seen(), threading.Event()
    with local_job(2, 1, "async", folder=str(tmp_path)) as job:
        state = job.coordinator.membership.state.validations

        def work(one: Job) -> None:
            model = Counting()
            opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, job=one)
            loader = DataLoader(Numbers(80), 4, job=one)

            def measure(batch: torch.Tensor) -> dict[str, Any]:
                if one.name == "worker-1" and not dead.is_set():
                    until(lambda: (now := state.now) is not None and list(now.inside) == ["worker-1"])
                    dead.set()
                    job.kill("worker-1")
                    raise SystemExit
                seen.add(one, batch, model)
                return {"mean": batch.double().mean()}

            one.validate(measure, Numbers(50), batch_size=2, every=6)
            try:
                for _ in loader:
                    model.count.grad = -torch.ones(1)
                    opt.step()
            except SystemExit:
                return

        job.run(work)
        job.run(lambda one: one.close() if one.name != "worker-1" else None)
        assert job.coordinator.membership.state.validations.num_given_up == 1
        assert job.coordinator.metrics.values() == {"mean": pytest.approx(24.5)}


def test_random_states_are_as_before(tmp_path: pathlib.Path) -> None:
    def work(one: Job) -> torch.Tensor:
        torch.manual_seed(7)
        one.validate(lambda batch: {"noise": torch.rand(())}, Numbers(10), batch_size=3, every=1, name="noisy")
        train(one, Seen(), num_epochs=1)
        return torch.rand(3)

    with local_job(1, 1, folder=str(tmp_path)) as job:
        found = job.run(work)[0]
    torch.manual_seed(7)
    assert torch.equal(found, torch.rand(3))


def test_what_cannot_be_validated(tmp_path: pathlib.Path) -> None:
    def good(batch: Any) -> dict[str, float]:
        return {"x": 1.0}

    with local_job(1, 1, folder=str(tmp_path)) as job:
        one = job[0]
        with pytest.raises(ConfigError, match="nothing to validate on"):
            one.validate(good, Numbers(0))
        with pytest.raises(ConfigError, match="no samples by number"):
            one.validate(good, iter(()))
        with pytest.raises(ConfigError, match="every = 'weekly'"):
            one.validate(good, Numbers(3), every="weekly")
        one.validate(good, Numbers(3))
        with pytest.raises(ConfigError, match="there is one already"):
            one.validate(good, Numbers(3))
        one.validate(lambda batch: 0.5, Numbers(3), name="bad")
        with pytest.raises(ConfigError, match="must return a dict"):
            train(one, Seen(), name="mine")
