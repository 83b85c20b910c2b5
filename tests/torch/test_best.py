"""`--best`: validations are saved as they stood, the best of them is kept, and said."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch.test_validate import Counting, Numbers

import syncline
from syncline.errors import ConfigError
from syncline.store import checkpoints
from syncline.store.folders import open_folder
from syncline.testing import local_job
from syncline.testing.local import LocalJob
from syncline.torch import DataLoader, DistributedOptimizer
from syncline.worker.job import Job

POLICIES = ["sync", "bounded:2", "async"]
#: The score is best when the parameter is here.
AIM = 9.0


def train(job: Job, *, num_epochs: int = 1, num_samples: int = 64, every: Any = 3) -> None:
    model = Counting()
    opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, job=job)
    loader = DataLoader(Numbers(num_samples), 2, job=job)

    def measure(batch: torch.Tensor) -> dict[str, Any]:
        return {"score": -abs(float(model.count) - AIM), "count": float(model.count)}

    job.validate(measure, Numbers(20), every, batch_size=3)
    for _ in range(num_epochs):
        for _ in loader:
            model.count.grad = -torch.ones(1)
            opt.step()


def run_to_the_end(job: LocalJob, **options: Any) -> list[str]:
    job.run(lambda one: train(one, **options))
    job.run(lambda one: one.close())
    return list(job.coordinator.job.events)


@pytest.mark.parametrize("policy", POLICIES)
def test_best_has_what_was_validated(policy: str, tmp_path: pathlib.Path) -> None:
    """Re-measured from disk: the parameter that is saved is the one that had this score."""
    where = tmp_path / "saves"
    with local_job(2, 2, policy, folder=str(tmp_path), checkpoint=str(where), best="score", keep=2) as job:
        events = run_to_the_end(job)
    found = {name: (m.metrics, m.step) for name, m in manifests(where).items()}
    fact = checkpoints.pointed(open_folder(str(where)), "best")
    assert fact is not None
    best = float(syncline.load_state_dict(where / "best")["count"])
    assert fact["value"] == -abs(best - AIM) == found[fact["checkpoint"]][0]["score"]
    assert found[fact["checkpoint"]][0]["count"] == best
    told = [float(line.split("score ")[1]) for line in events if line.startswith("validation at step")]
    assert fact["value"] == max(told)
    assert len(told) >= 5
    if policy == "sync":
        assert (best, len(found)) == (AIM, 3)  # the two newest, and the best
        assert max(told) == 0.0
    assert any(line.startswith(f"best score {fact['value']:.6g} at step") for line in events)


def manifests(where: pathlib.Path) -> dict[str, Any]:
    return {found.name: found.manifest for found in checkpoints.find(open_folder(str(where))) if found.manifest}


def test_the_best_is_known_to_the_job_that_goes_on(tmp_path: pathlib.Path) -> None:
    where = tmp_path / "saves"
    settings = {"folder": str(tmp_path), "checkpoint": str(where), "best": "score"}
    with local_job(2, 1, stop=["count>=12"], **settings) as job:
        run_to_the_end(job)
    before = checkpoints.pointed(open_folder(str(where)), "best")
    with local_job(1, 2, **settings) as job:
        events = run_to_the_end(job)
    assert before is not None
    assert before["value"] == 0.0
    assert checkpoints.pointed(open_folder(str(where)), "best") == before
    assert any(line.startswith("validation at step 15") for line in events)
    assert not any(line.startswith("validation at step 12") for line in events)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_average_is_a_candidate(policy: str, tmp_path: pathlib.Path) -> None:
    """Of the parameters 0, 1, 2, …: it is behind them, so in `sync` it comes to the aim when they are past it."""
    where, aim = tmp_path / "saves", 7.5
    settings = {"checkpoint": str(where), "best": "min:miss", "average": "ema:0.75", "keep": 100}

    def work(job: Job) -> None:
        model = Counting()
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, job=job)
        measure = lambda batch: {"miss": abs(float(model.count) - aim), "count": float(model.count)}  # noqa: E731
        job.validate(measure, Numbers(20), 1, batch_size=3)
        for _ in DataLoader(Numbers(40), 2, job=job):
            before = model.count.item()
            model.count.grad = -torch.ones(1)
            opt.step()
            assert policy != "sync" or model.count.item() == before + 1  # what is pushed is added to the parameters
        assert "syncline.average" not in str(opt.state_dict())

    with local_job(2, 2, policy, folder=str(tmp_path), **settings) as job:
        job.run(work)
        job.run(lambda one: one.close())
        events = list(job.coordinator.job.events)
    found = manifests(where)
    for name, manifest in found.items():
        if "count" not in manifest.metrics:
            continue
        plain = float(syncline.load_state_dict(where / name)["count"])
        average = float(syncline.load_state_dict(where / name, weights="average")["count"])
        assert (manifest.metrics["count"], manifest.metrics["average:count"]) == (plain, pytest.approx(average))
    fact = checkpoints.pointed(open_folder(str(where)), "best")
    assert fact is not None
    best = float(syncline.load_state_dict(where / "best")["count"])
    values = [m.metrics[key] for m in found.values() for key in ("miss", "average:miss") if key in m.metrics]
    assert fact["value"] == pytest.approx(abs(best - aim)) == min(values)
    if policy == "sync":
        average, expected = 0.0, {}
        for step in range(1, 11):
            average += 0.25 * (step - average)
            expected[step] = average
        known = {int(m.metrics["count"]): m.metrics["average:count"] for m in found.values() if "count" in m.metrics}
        assert known == pytest.approx(expected)
        assert (fact["weights"], fact["step"]) == ("average", 10)
        assert any("(average) at step 10" in line for line in events)


def test_the_mean_of_the_last_is_a_candidate(tmp_path: pathlib.Path) -> None:
    """The mean of 3, 6 and 9 is validated at 12, that of 6, 9 and 12 at 15."""
    where, aim = tmp_path / "saves", 4.2
    settings = {"checkpoint": str(where), "best": "min:miss", "average": "last:3", "keep": 2}

    def work(job: Job) -> None:
        model = Counting()
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, job=job)
        measure = lambda batch: {"miss": abs(float(model.count) - aim), "count": float(model.count)}  # noqa: E731
        job.validate(measure, Numbers(20), 3, batch_size=3)
        for _ in DataLoader(Numbers(60), 2, job=job):
            model.count.grad = -torch.ones(1)
            opt.step()
        assert model.count.item() == 15.0

    with local_job(2, 2, folder=str(tmp_path), **settings) as job:
        job.run(work)
        job.run(lambda one: one.close())
    found = manifests(where)
    values = {m.metrics["count"]: m.metrics.get("mean:count") for m in found.values() if m.kind == "whole"}
    assert values == {15.0: 9.0, 12.0: 6.0, 9.0: None, 3.0: None}  # the last three, and the best
    fact = checkpoints.pointed(open_folder(str(where)), "best")
    assert fact is not None
    assert found[fact["checkpoint"]].kind == "whole"
    assert len([m for m in found.values() if m.kind == "weights"]) == 1


def test_the_mean_of_the_last_may_be_the_best(tmp_path: pathlib.Path) -> None:
    where = tmp_path / "saves"
    settings = {"checkpoint": str(where), "best": "min:miss", "average": "last:2", "keep": 2}

    def work(job: Job) -> None:
        model = Counting()
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, job=job)
        measure = lambda batch: {"miss": abs(float(model.count) - 4.4)}  # noqa: E731
        job.validate(measure, Numbers(20), 3, batch_size=3)
        for _ in DataLoader(Numbers(60), 2, job=job):
            model.count.grad = -torch.ones(1)
            opt.step()

    with local_job(2, 2, folder=str(tmp_path), **settings) as job:
        job.run(work)
        job.run(lambda one: one.close())
        events = list(job.coordinator.job.events)
    assert float(syncline.load_state_dict(where / "best")["count"]) == 4.5
    fact = checkpoints.pointed(open_folder(str(where)), "best")
    assert fact is not None
    assert fact["value"] == pytest.approx(0.1)
    best = manifests(where)[fact["checkpoint"]]
    assert (best.kind, best.metrics["miss"]) == ("weights", fact["value"])
    assert any(line.startswith("best miss 0.1 (mean) at step 6") for line in events)


class LocalCandidate(torch.nn.Module):
    """Every worker adds a number of its own with each local step."""

    def __init__(self) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(torch.zeros(3))


def test_with_local_steps_own_models_are_candidates(tmp_path: pathlib.Path) -> None:
    """Three steps of +1 in one worker, of +3 in the other: 3 and 9 by themselves, 6 on the average."""
    where = tmp_path / "saves"

    def work(job: Job) -> None:
        model = LocalCandidate()
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, job=job)
        measure = lambda batch: {"miss": abs(float(model.values.mean()) - 8.5)}  # noqa: E731
        job.validate(measure, Numbers(20), every=3, batch_size=7)
        for _ in DataLoader(Numbers(12), 2, job=job):
            model.values.grad = torch.full((3,), -1.0 if job.rank == 0 else -3.0)
            opt.step()
        assert model.values.mean().item() == 6.0  # training goes on with the average

    settings = {"checkpoint": str(where), "best": "min:miss", "sync_every": 3}
    with local_job(2, 2, folder=str(tmp_path), **settings) as job:
        job.run(work)
        job.run(lambda one: one.close())
        events = list(job.coordinator.job.events)
    assert torch.equal(syncline.load_state_dict(where / "best")["values"], torch.full((3,), 9.0))
    fact = checkpoints.pointed(open_folder(str(where)), "best")
    assert fact is not None
    assert (fact["value"], manifests(where)[fact["checkpoint"]].kind) == (0.5, "weights")
    assert "validation at step 3: miss 2.5; worker-0: miss 5.5; worker-1: miss 0.5" in events
    assert any(line.startswith("best miss 0.5 (worker-1) at step 3") for line in events)


def averages(num_steps: int, decay: float = 0.75) -> list[float]:
    """Of the parameters 0, 1, 2, … after every step."""
    found = [0.0]
    for step in range(1, num_steps + 1):
        found.append(found[-1] + (1.0 - decay) * (step - found[-1]))
    return found


@pytest.mark.parametrize("dies", ["server-0", "job"])
def test_an_average_goes_on(dies: str, tmp_path: pathlib.Path) -> None:
    """From its backup when a server dies; from the checkpoint in a job that is taken up with other servers."""
    where = tmp_path / "saves"
    settings = {"folder": str(tmp_path), "checkpoint": str(where), "best": "max:count", "average": "ema:0.75"}
    with local_job(2, 2, replicas=2, stop=["count>=6"] if dies == "job" else [], **settings) as job:

        def work(one: Job) -> None:
            train(one, num_samples=40, every=2)

        if dies == "server-0":
            killed = threading.Timer(0.0, lambda: job.kill("server-0"))
            watch_for(job, 4, killed.start)
        job.run(work)
        job.run(lambda one: one.close())
    if dies == "job":
        with local_job(1, 1, **settings) as job:
            job.run(lambda one: train(one, num_samples=40, every=2))
            job.run(lambda one: one.close())
    expected = averages(20)
    for manifest in manifests(where).values():
        if "count" in manifest.metrics:
            step = int(manifest.metrics["count"])
            assert manifest.metrics["average:count"] == pytest.approx(expected[step])
    newest = max(int(m.metrics.get("count", 0)) for m in manifests(where).values())
    assert newest == (14 if dies == "job" else 10)


def watch_for(job: LocalJob, step: int, act: Callable[[], None]) -> None:
    """Acts when the job has validated at this step."""
    best = job.coordinator.best_checkpoint
    add_validation = best.add_validation

    def watched(over: Any) -> None:
        add_validation(over)
        if over.step == step:
            act()

    best.add_validation = watched  # type: ignore[method-assign]


def test_a_save_that_fails_costs_no_validation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = tmp_path / "saves"

    def full(*args: object) -> str:
        raise syncline.StoreError("no space left")

    monkeypatch.setattr(checkpoints, "write_manifest", full)
    with local_job(2, 1, folder=str(tmp_path), checkpoint=str(where), best="score") as job:
        events = run_to_the_end(job, num_samples=24)
    assert sum(line.startswith("validation at step") for line in events) == 2
    assert any("a save was given up (validation 1)" in line for line in events)
    assert any("no checkpoint has a value of this metric" in line for line in events)


def test_what_best_needs(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="--best needs to know where to save"), local_job(best="score"):
        pass
    saves = str(tmp_path / "saves")
    with pytest.raises(ConfigError, match="use --best METRIC too"), local_job(checkpoint=saves, average="ema:0.9"):
        pass
