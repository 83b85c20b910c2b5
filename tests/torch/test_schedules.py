"""`syncline.torch.schedule`: learning rates by the progress of the run."""

from __future__ import annotations

import copy
import itertools
import math
import pathlib
import re
import sys
from typing import Any

import pytest
import torch
from tests import forked
from tests.patience import JOB_PATIENCE

from syncline.errors import ConfigError
from syncline.testing import local_job
from syncline.torch import DataLoader, DistributedOptimizer, Schedule, schedule
from syncline.worker.job import Job

torch.manual_seed(0)
LINEAR = torch.nn.Linear(4, 3)
INPUTS = torch.randn(48, 4, generator=torch.Generator().manual_seed(3))
DATA = torch.utils.data.TensorDataset(INPUTS)


def cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def train(job: Job, factors: Any = cosine, **options: Any) -> tuple[torch.nn.Module, Schedule, list[float]]:
    model = copy.deepcopy(LINEAR)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.05}]
    optimizer = DistributedOptimizer(torch.optim.SGD(groups, lr=0.5), model=model, job=job)
    made, rates = schedule(optimizer, factors), []
    loader = DataLoader(DATA, job=job, global_batch_size=12, **options)
    for _ in loader.epochs(2):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
    job.barrier("trained")
    optimizer.pull()
    return model, made, rates


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_trains_as_one_process_does(workers: int, tmp_path: pathlib.Path) -> None:
    expected = copy.deepcopy(LINEAR)
    plain = torch.optim.SGD([{"params": [expected.weight]}, {"params": [expected.bias], "lr": 0.05}], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: cosine(step / 8))
    for step in range(8):
        plain.zero_grad()
        expected(INPUTS[step % 4 * 12 :][:12]).square().mean().backward()
        plain.step()
        scheduler.step()
    with local_job(workers=workers, folder=str(tmp_path)) as jobs:
        found = jobs.run(train)
    for model, made, rates in found:
        assert rates == pytest.approx([0.5 * cosine(step / 8) for step in range(8)])
        torch.testing.assert_close(model.state_dict(), expected.state_dict())
        assert made.last_progress == 7 / 8 and made.last_factor == pytest.approx(cosine(7 / 8))
        assert repr(made).startswith("Schedule(progress=0.8750, factors=[0.03806")


def test_a_function_for_each_group(tmp_path: pathlib.Path) -> None:
    with local_job(workers=1, folder=str(tmp_path)) as jobs:
        _, made, rates = jobs.run(lambda job: train(job, [cosine, lambda progress: 1.0]))[0]
    assert made.last_factors == [pytest.approx(cosine(7 / 8)), 1.0] and rates[0] == 0.5


@pytest.mark.parametrize("policy", ["async", "bounded:2"])
def test_outside_of_rounds_too(policy: str, tmp_path: pathlib.Path) -> None:
    with local_job(workers=2, policy=policy, folder=str(tmp_path)) as jobs:
        for _, made, rates in jobs.run(train):
            assert all(before >= after for before, after in itertools.pairwise(rates)), rates
            assert made.last_progress is not None and 0 < made.last_progress <= 1


def test_local_steps_have_it_too(tmp_path: pathlib.Path) -> None:
    with local_job(workers=2, sync_every=2, folder=str(tmp_path)) as jobs:
        for _, made, rates in jobs.run(train):
            assert rates[0] == 0.5 and rates[-1] < 0.3 and made.last_factor == rates[-1] / 0.5


def test_a_grad_scaler_steps_it(tmp_path: pathlib.Path) -> None:
    def work(job: Job) -> list[float]:
        model = copy.deepcopy(LINEAR)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model, job=job)
        schedule(optimizer, cosine)
        scaler, rates = torch.amp.GradScaler("cpu"), []
        loader = DataLoader(DATA, 12, job=job)
        for _ in loader.epochs(1):
            for (x,) in loader:
                scaler.scale(model(x).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                rates.append(optimizer.param_groups[0]["lr"])
        return rates

    with local_job(workers=1, folder=str(tmp_path)) as jobs:
        assert jobs.run(work)[0] == pytest.approx([0.5 * cosine(k / 4) for k in range(4)])


def test_what_makes_no_sense_is_refused_with_the_remedy(tmp_path: pathlib.Path) -> None:
    with local_job(workers=1, folder=str(tmp_path)) as jobs:
        model = copy.deepcopy(LINEAR)
        plain = torch.optim.SGD(model.parameters(), lr=0.5)
        with pytest.raises(ConfigError, match=r"takes a syncline.torch.DistributedOptimizer, not SGD"):
            schedule(plain, cosine)  # type: ignore[arg-type]
        optimizer = DistributedOptimizer(plain, model=model, job=jobs[0])
        for wrong in (1.0, [], [0.5], "cosine"):
            with pytest.raises(ConfigError, match=r"must be a function of the progress, or a list of one"):
                schedule(optimizer, wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"2 functions for 1 parameter groups: give one for each group"):
            schedule(optimizer, [cosine, cosine])
        made = schedule(optimizer, cosine)
        assert repr(made) == "Schedule(no step yet, factors=[])" and made.last_factor is None
        model(INPUTS).sum().backward()
        with pytest.raises(ConfigError, match=r"nothing says how long the run is"):
            optimizer.step()
        jobs[0].samples.note_progress(0.25, by="steps")
        schedule(optimizer, lambda progress: math.nan)
        with pytest.raises(ConfigError, match=r"group 0 returned nan at progress 0.2500: it must be a number"):
            optimizer.step()
        schedule(optimizer, lambda progress: progress)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.125, "by the learning rate that it was made with"


GUIDE = re.findall(
    r"```python\n(.*?)```", (pathlib.Path(__file__).parents[2] / "docs/guides/schedules.md").read_text(), re.DOTALL
)


@pytest.mark.proof  # `make test` runs it with the other pages' scripts
def test_the_guides_script_runs_alone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(GUIDE[0])
    command = [sys.executable, "script.py"]
    done = forked.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=JOB_PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "progress 1.0, 0.0004" in done.stdout, done.stdout


@pytest.mark.parametrize("three_phase", [False, True])
def test_the_guides_one_cycle_is_torchs(three_phase: bool) -> None:
    found: dict[str, Any] = {}
    for block in GUIDE[1:]:
        exec(block, found)
    function = found["three_phases" if three_phase else "one_cycle"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=2000, three_phase=three_phase)
    for step in range(1999):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(function(step / 1999), abs=5e-3), step
        optimizer.step()
        scheduler.step()
    assert [found["warm_up"](at) for at in (0.0, 0.025, 0.5)] == [pytest.approx(0.02), 0.5, 1.0]
    assert [found["warm_up_cosine"](at) for at in (0.05, 1.0)] == [1.0, pytest.approx(0.01)]
    assert [found["milestones"](at / 90) for at in (0, 30, 89)] == [1.0, pytest.approx(0.1), pytest.approx(0.01)]
