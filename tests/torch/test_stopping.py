"""Whole jobs that end by a rule: in every policy, exact where that was promised, and nobody hangs."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.patience import PATIENCE
from torch.utils.data import TensorDataset

from syncline import Rule, Stopped
from syncline.config import resolve
from syncline.core.stopping import NEXT, Rules, Stopping, from_checkpoint, rules_of
from syncline.data import ArraySource, batches
from syncline.errors import ConfigError
from syncline.testing import local_job
from syncline.torch import DataLoader, DistributedOptimizer
from syncline.worker.job import Job

POLICIES = ("sync", "bounded:2", "async")
SAMPLES = 96


def rules(**settings: Any) -> Rules:
    return rules_of(resolve(settings))


def made(lr: float = 0.125) -> tuple[torch.nn.Module, DistributedOptimizer, DataLoader[Any]]:
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model=model)
    return model, optimizer, DataLoader(TensorDataset(torch.ones(SAMPLES, 4)), batch_size=4, shuffle=True)


def step(model: torch.nn.Module, optimizer: DistributedOptimizer, batch: Any) -> None:
    model(batch[0]).mean().backward()  # each weight's gradient is 1
    optimizer.step()
    optimizer.zero_grad()


class Counts:
    """What a worker has done: batches per epoch, and what it saw at the end."""

    def __init__(self, job: Job, epochs: list[int], weight: float, seen: int) -> None:
        self.epochs, self.weight, self.seen = epochs, weight, seen
        self.step, self.should_stop = job.step, job.should_stop


def train(epochs: int = 4, every: int = 1, metric: Any = None, lr: float = 0.125, **loader: Any) -> Any:
    def work(job: Job) -> Counts:
        model, optimizer, data = made(lr)
        if loader:
            data = DataLoader(TensorDataset(torch.ones(SAMPLES, 4)), batch_size=4, **loader)
        counts, number = [], 0
        for epoch in range(epochs):
            counts.append(0)
            for batch in data:
                counts[epoch] += 1
                model(batch[0]).mean().backward()
                if counts[epoch] % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    number += 1
                    if metric is not None:
                        job.report(**metric(job, number))
        with torch.no_grad():
            seen = sum(len(batch[0]) for batch in data)
        job.barrier("over")
        optimizer.pull()
        return Counts(job, counts, float(model.weight.detach()[0, 0]), seen)

    return work


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("most", [1, 7, 8, 20])
def test_max_steps_is_exact_in_sync(workers: int, most: int) -> None:
    """Also where it falls on the end of an epoch; the parameters have had exactly so many updates."""
    with local_job(workers=workers, max_steps=most) as local:
        found = local.run(train())
        assert {counts.step for counts in found} == {most}
        assert all(counts.should_stop for counts in found)
        assert {counts.weight for counts in found} == {-0.125 * most}
        assert all(counts.seen == SAMPLES for counts in found), "an evaluation goes on working"
        events = local.coordinator.job.events
    assert f"training stops by --max-steps {most}: step {most}; {NEXT}" in events
    assert f"stopped by --max-steps {most}: step {most}" in events


@pytest.mark.parametrize("policy", ["bounded:2", "async"])
def test_max_steps_is_passed_by_one_step_per_worker_at_most(policy: str) -> None:
    with local_job(workers=3, policy=policy, max_steps=10) as local:
        found = local.run(train())
    assert 10 <= max(counts.step for counts in found) <= 13
    assert {counts.weight for counts in found} == {-0.125 * max(counts.step for counts in found)}


def test_max_steps_counts_steps_not_batches_with_accumulation() -> None:
    with local_job(workers=2, max_steps=3) as local:
        found = local.run(train(every=2))
    assert [counts.step for counts in found] == [3, 3] and [counts.epochs[0] for counts in found] == [6, 6]


def test_max_steps_counts_each_workers_own_local_steps() -> None:
    """With --sync-every 4, seven steps: an average after four, and one of the rest."""
    with local_job(workers=2, max_steps=7, sync_every=4) as local:
        found = local.run(train())
    assert [counts.step for counts in found] == [7, 7]
    assert {counts.weight for counts in found} == {-0.125 * 7}


def test_what_data_processes_read_ahead_goes_back() -> None:
    with local_job(workers=2, max_steps=3) as local:
        found = local.run(train(num_workers=2))
        leases = local.coordinator.membership.state.leases
        (epoch,) = leases.epochs["loader-1"].values()
        used = epoch.num_done + sum(lease.num_left for lease in epoch.leases.values())
    assert [counts.epochs for counts in found] == [[3, 0, 0, 0]] * 2
    assert (epoch.num_todo, used) == (SAMPLES - 2 * 3 * 4, 2 * 3 * 4), "nobody holds what nobody reads"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rule_ends_all_loops_and_nobody_hangs(policy: str) -> None:
    """A worker that never reports, one that is slow, and one that hears of it while it waits."""

    def metric(job: Job, number: int) -> dict[str, float]:
        return {"score": float(number)}

    with local_job(workers=3, policy=policy, stop=("score>=5",)) as local:
        found = local.run(train(epochs=50, metric=metric))
        events = list(local.coordinator.job.events)
    assert all(counts.should_stop and sum(counts.epochs) < 50 * SAMPLES / 12 for counts in found)
    assert any(event.startswith("training stops by --stop 'score>=5': score = ") for event in events)
    assert all(counts.seen == SAMPLES for counts in found)


def test_one_that_waits_for_the_end_of_the_epoch_is_let_go() -> None:
    """In async worker-1 holds its batch while worker-0 waits for it; a stop from outside ends both loops."""
    held, let_go = threading.Event(), threading.Event()

    with local_job(workers=2, policy="async") as local:
        coordinator, alone = local.coordinator, []

        def work(job: Job) -> int:
            model, optimizer, loader = made()
            count = 0
            for batch in loader:
                count += 1
                if job.rank == 1:
                    held.wait(PATIENCE)
                step(model, optimizer, batch)
            if job.rank == 0:
                let_go.set()
            return count

        def fire() -> None:
            queue = coordinator.leases.queue
            for _ in range(60_000):
                if queue.somebody_waits:
                    break
                held.wait(0.005)
            state = coordinator.membership.state
            state.config = msgspec.structs.replace(state.config, stop=("x>0",))
            coordinator.metrics.add_merged({"x": 1.0}, 3)
            alone.append(let_go.wait(PATIENCE))  # while the other one still has its batch
            held.set()

        thread = threading.Thread(target=fire)
        thread.start()
        first, second = local.run(work)
        thread.join()
    assert first + second < SAMPLES / 4 + 1 and second >= 1 and alone == [True]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plateau_lowers_the_rate_first_and_the_script_sees_nothing_of_it(policy: str) -> None:
    """SGD on a constant gradient of 1: what the weight has moved tells the rate of each step."""
    seen: list[float] = []

    def work(job: Job) -> tuple[float, float]:
        model, optimizer, loader = made()
        moved = []
        for _ in range(20):
            for batch in loader:
                before = float(model.weight.detach()[0, 0])
                step(model, optimizer, batch)
                moved.append(before - float(model.weight.detach()[0, 0]))
                job.report(loss=1.0)
        seen.append(optimizer.param_groups[0]["lr"])
        return moved[0], moved[-1]

    settings = {"stop": ("loss.plateau(3)",), "on_plateau": "lr*0.5, at most 2 times"}
    with local_job(workers=1, policy=policy, **settings) as local:
        ((first, last),) = local.run(work)
        steering = local.coordinator.membership.state.steering
    assert (first, last) == (0.125, 0.125 * 0.25)
    assert steering.factor == 0.25 and steering.stop is not None and seen == [0.125]


def test_the_factor_is_on_a_schedulers_rate_and_on_kv_rules_and_on_local_steps() -> None:
    def work(job: Job) -> tuple[float, float, float]:
        model, optimizer, loader = made(lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        batch = next(iter(loader))
        local.coordinator.stop_rules.state.number += 1
        local.coordinator.stop_rules.state.factor = 0.25
        local.coordinator.stop_rules.announce()
        step(model, optimizer, batch)
        schedule.step()
        first = float(model.weight.detach()[0, 0])
        step(model, optimizer, batch)
        rate = schedule.get_last_lr()[0]
        return first, float(model.weight.detach()[0, 0]) - first, rate

    with local_job(workers=1) as local:
        assert local.run(work) == [(-0.25, -0.125, 0.5)]
    with local_job(workers=1, sync_every=2) as local:
        assert local.run(work) == [(-0.25, -0.125, 0.5)]

    def by_hand(job: Job) -> float:
        local.coordinator.stop_rules.state.number += 1
        local.coordinator.stop_rules.state.factor = 0.25
        local.coordinator.stop_rules.announce()
        job.kv.register({"x": np.zeros(4)}, Rule("SGD", lr=1.0))
        job.kv.push({"x": np.ones(4)}).wait()
        return float(job.kv.pull()["x"][0])

    with local_job(workers=1) as local:
        assert local.run(by_hand) == [-0.25]


def test_the_last_round_is_the_last_even_when_somebody_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers know the number, too: a round that one begins who does not know yet changes nothing."""

    def work(job: Job) -> tuple[float, int]:
        job.kv.register({"x": np.zeros(4)}, Rule("SGD", lr=1.0))
        for _ in range(5):
            job.kv.push({"x": np.ones(4)}).wait()
        return float(job.kv.pull()["x"][0]), job.step

    monkeypatch.setattr(Job, "commits", lambda job, committer: None)
    with local_job(workers=2, max_steps=3) as local:
        assert local.run(work) == [(-3.0, 3), (-3.0, 3)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("by_kv", [True, False])
def test_a_script_that_never_asks_is_ended(policy: str, by_kv: bool) -> None:
    """It ran on, and the model stood still. `except Exception` around a step does not keep it going."""
    made_steps = []

    def work(job: Job) -> None:
        job.kv.register({"x": np.zeros(4)}, Rule("SGD", lr=1.0))
        model, optimizer, _ = made()
        count = 0
        try:
            while True:
                try:
                    if by_kv:
                        job.kv.push({"x": np.ones(4)}).wait()
                    else:
                        step(model, optimizer, [torch.ones(2, 4)])
                    count += 1
                except Exception:
                    pytest.fail("Stopped is an Exception")
        except Stopped as stopped:
            assert stopped.code == 0 and str(stopped).startswith("--max-steps 4: step ")
            made_steps.append(count)
            raise

    with local_job(workers=2, policy=policy, max_steps=4) as local:
        assert local.run(work) == [None, None]  # type: ignore[comparison-overlap, func-returns-value]
        events = list(local.coordinator.job.events)
    if policy == "sync":
        assert made_steps == [4, 4]
    else:  # each worker makes one step more at most
        assert len(made_steps) == 2 and 4 <= sum(made_steps) <= 6
    assert sum(NEXT in event for event in events) == 1


@pytest.mark.parametrize("settings", [{"stop": ("score>=5",)}, {"max_time": "0.2s"}])
def test_every_rule_ends_a_script_that_never_asks(settings: dict[str, Any]) -> None:
    def work(job: Job) -> None:
        model, optimizer, _ = made()
        while True:
            step(model, optimizer, [torch.ones(2, 4)])
            job.report(score=job.own_step)

    with local_job(workers=2, **settings) as local:
        assert local.run(work) == [None, None]  # type: ignore[comparison-overlap, func-returns-value]


def test_of_two_optimizers_the_second_makes_the_last_step_too() -> None:
    """A GAN: the rule fires on the step of the first one. The other has not made its own yet."""

    def work(job: Job) -> None:
        models = [torch.nn.Linear(4, 1, bias=False) for _ in range(2)]
        optimizers = [DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=1.0), model=m) for m in models]
        count = [0, 0]
        try:
            while True:
                for number in (0, 1):
                    step(models[number], optimizers[number], [torch.ones(2, 4)])
                    count[number] += 1
        except Stopped:
            counts.append(count)
            raise

    counts: list[list[int]] = []
    with local_job(workers=2, max_steps=3) as local:
        local.run(work)
    assert counts == [[3, 3], [3, 3]]


def test_batches_that_were_read_before_the_stop_are_committed_behind_their_loop() -> None:
    """An accumulation that the end of the loop has cut: its last step is of leases of ours."""

    def work(job: Job) -> str:
        model, optimizer, data = made()
        for batch in data:
            model(batch[0]).mean().backward()
            if job.own_step < 2:
                optimizer.step()
                optimizer.zero_grad()
            else:
                job.report(score=1.0)
        assert job.should_stop
        optimizer.step()
        with pytest.raises(Stopped):
            optimizer.step()
        return "went on"

    with local_job(workers=1, stop=("score>=1",)) as local:
        assert local.run(work) == ["went on"]


def test_a_script_without_a_loader_asks() -> None:
    def work(job: Job) -> int:
        job.kv.register({"x": np.zeros(4)}, Rule("SGD", lr=1.0))
        count = 0
        while not job.should_stop:
            job.kv.push({"x": np.ones(4)}).wait()
            count += 1
        return count

    with local_job(workers=2, max_steps=5) as local:
        assert local.run(work) == [5, 5]


def test_batches_of_a_source_end_too() -> None:
    """Without torch's loader: the samples of a source of syncline.data."""

    def work(job: Job) -> list[int]:
        source = ArraySource({"x": np.ones((SAMPLES, 2))})
        job.kv.register({"x": np.zeros(4)}, Rule("SGD", lr=1.0))
        counts = []
        for _ in range(3):
            counts.append(0)
            for _batch in batches(source, 4):
                job.kv.push({"x": np.ones(4)}).wait()
                counts[-1] += 1
        return counts

    with local_job(workers=1, max_steps=5) as local:
        assert local.run(work) == [[5, 0, 0]]


def test_a_job_that_was_stopped_hears_of_it_when_it_is_taken_up() -> None:
    """The factor and the plateau's count go on, as a manifest brings them."""
    with local_job(workers=1, stop=("loss.plateau(3)",), on_plateau="lr*0.5") as local:
        for _ in range(3):
            local[0].report(loss=1.0)
        saved = local.coordinator.stop_rules.for_manifest()
    state = from_checkpoint(saved, 5.0)
    assert [count.num_worse for count in state.plateaus.values()] == [2]
    assert Stopping(rules(stop=("loss.plateau(3)",)), state).state.stop is None


def test_reports_can_be_numbers_and_scalars_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with local_job(workers=1) as local:
        job = local[0]
        weight = torch.ones((), requires_grad=True)
        job.report(a=1, b=2.5, c=np.float32(3), d=torch.tensor(4), e=torch.tensor([5.0]), f=weight * 6, g=np.ones(1))
        values = local.coordinator.metrics.values()
        assert values == {"a": 1, "b": 2.5, "c": 3, "d": 4, "e": 5, "f": 6, "g": 1}
        for value, words in (
            (torch.ones(2), r"loss is a Tensor of shape \(2,\): it must be one number"),
            (np.ones(3), r"loss is a ndarray of shape \(3,\)"),
            ("0.1", "loss = '0.1': it must be a number"),
            (None, "loss = None: it must be a number"),
            ([1.0], "loss is a list"),
            (1j, "loss is a complex"),
        ):
            with pytest.raises(ConfigError, match=words):
                job.report(loss=value)
        for name in ("a b", "1st", "", "x.y", "x" * 300):
            with pytest.raises(ConfigError, match="is not a name for a metric"):
                job.report(**{name: 1.0})
        job.report(loss=float("nan"))
        job.report(loss=float("nan"))
        assert "loss" not in local.coordinator.metrics.values()
    assert capsys.readouterr().err.count("worker-0 reports loss = nan at step 0: left out of the mean") == 1


def test_reports_are_weighted_by_the_samples_since_the_last() -> None:
    """worker-0 reads 4 samples between two reports, worker-1 reads 8."""

    def work(job: Job) -> None:
        model, optimizer, loader = made()
        for number, batch in enumerate(loader):
            step(model, optimizer, batch)
            if number == job.rank:
                job.report(loss=float(job.rank))
                break

    with local_job(workers=2, policy="async") as local:
        local.run(work)
        assert local.coordinator.metrics.values()["loss"] == pytest.approx(8 / 12)


@pytest.mark.parametrize("by_validation", [False, True])
def test_a_rule_fires_at_45_of_50_as_float32(by_validation: bool) -> None:
    """0.89999998 is what 0.9 is as float32; three workers, so that means of it are made too."""
    right = torch.arange(150) % 10 != 0

    def work(job: Job) -> tuple[bool, str]:
        model, optimizer, _ = made()
        step(model, optimizer, [torch.ones(4, 4)])
        if by_validation:
            data = TensorDataset(right)
            job.validate(lambda batch: {"accuracy": batch[0].float().mean()}, data, batch_size=50).now()
        else:
            for _ in range(2):
                job.report(accuracy=right.float().mean())
        job.barrier("reported")
        return job.should_stop, job.measures.stopped_by

    with local_job(workers=3, stop=("accuracy>=0.9",)) as job:
        for has_stopped, why in job.run(work):
            assert has_stopped and "accuracy = 0.9 at step" in why
