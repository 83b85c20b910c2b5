"""DistributedOptimizer behaves as a user of torch.optim and DDP expects."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from syncline import Rule
from syncline.errors import ConfigError, LayoutError, RuleError
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.worker.job import Job

BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
torch.manual_seed(0)
LINEAR = torch.nn.Linear(4, 3)
WIDE = torch.nn.Linear(4, 50)  # several slices of 64 bytes
BATCH_NORM = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


def backward(model: torch.nn.Module, scale: float = 1.0) -> None:
    (model(BATCH).square().mean() * scale).backward()


def test_it_is_a_torch_optimizer_and_schedulers_drive_it() -> None:
    """The chief's learning rate travels with the commit."""
    expected = copy.deepcopy(LINEAR)
    plain = torch.optim.SGD(expected.parameters(), lr=1.0)
    plain_schedule = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    for _ in range(3):
        plain.zero_grad()
        backward(expected)
        plain.step()
        plain_schedule.step()

    def train(job: Job) -> torch.nn.Module:
        model = copy.deepcopy(LINEAR)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        assert isinstance(optimizer, torch.optim.Optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.125
        return model

    with local_job(workers=2) as jobs:
        for model in jobs.run(train):
            torch.testing.assert_close(model.weight, expected.weight)


def test_a_learning_rate_per_worker_in_async() -> None:
    """Two workers with learning rates 1 and 2: each push counts with its own, exactly once."""

    def train(job: Job) -> list[float]:
        model = torch.nn.Linear(1, 2, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0 + job.rank), model=model)
        for _ in range(20):
            optimizer.zero_grad()
            model.weight.grad = torch.zeros_like(model.weight)
            model.weight.grad[job.rank] = 1.0
            optimizer.step()
        job.barrier("end")
        return job.kv.pull(["weight"])["weight"].flatten().tolist()

    with local_job(workers=2, policy="async") as jobs:
        assert jobs.run(train) == [[-20.0, -40.0], [-20.0, -40.0]]


def test_a_round_without_the_chief_has_the_learning_rate_of_those_in_it() -> None:
    """Not the registered one, which a schedule has left long ago."""

    def train(job: Job) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        optimizer.param_groups[0]["lr"] = 0.25
        for _ in range(2 if job.is_chief else 4):
            optimizer.zero_grad()
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        job.rest()
        job.barrier("end")
        return float(job.kv.pull(["weight"])["weight"])

    with local_job(workers=2) as jobs:
        assert jobs.run(train) == [-1.0, -1.0]


def test_groups_keep_their_own_hyperparameters() -> None:
    def train(job: Job) -> torch.nn.Module:
        model = copy.deepcopy(LINEAR)
        groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}]
        optimizer = DistributedOptimizer(torch.optim.SGD(groups, lr=0.0), model=model)
        backward(model)
        optimizer.step()
        return model

    with local_job(workers=1) as jobs:
        (model,) = jobs.run(train)
    assert torch.equal(model.bias, LINEAR.bias)
    assert not torch.equal(model.weight, LINEAR.weight)


def test_buffers_are_the_chiefs_after_every_step() -> None:
    def train(job: Job) -> tuple[torch.Tensor, int]:
        model = copy.deepcopy(BATCH_NORM)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for _ in range(2 + job.rank * 0):
            optimizer.zero_grad()
            (model(BATCH + 5.0 * job.rank)).square().mean().backward()
            optimizer.step()
        return model[1].running_mean.clone(), int(model[1].num_batches_tracked)

    with local_job(workers=2) as jobs:
        (mean, count), (other_mean, other_count) = jobs.run(train)
    assert torch.equal(mean, other_mean) and count == other_count == 2
    assert not torch.equal(mean, torch.zeros(3))


def test_buffers_can_be_averaged() -> None:
    def train(job: Job) -> torch.Tensor:
        model = torch.nn.Linear(1, 1)
        model.register_buffer("seen", torch.zeros(2))
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, buffers="mean")
        model.seen.fill_(float(job.rank))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step(weight=1.0 + 2.0 * job.rank)
        return model.seen

    with local_job(workers=2) as jobs:
        for seen in jobs.run(train):
            assert seen.tolist() == [0.75, 0.75]


def test_tied_frozen_and_unused_parameters() -> None:
    """A tied weight is one parameter; a frozen or unused one stays as the chief has it."""

    class Net(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.one = torch.nn.Linear(4, 4, bias=False)
            self.two = torch.nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight
            self.frozen = torch.nn.Parameter(torch.full((2,), value), requires_grad=False)
            self.unused = torch.nn.Parameter(torch.full((2,), value))
            torch.nn.init.constant_(self.one.weight, value)

    def train(job: Job) -> tuple[Net, list[str]]:
        model = Net(1.0 + job.rank)
        opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=1.0)
        optimizer = DistributedOptimizer(opt, model=model)
        model.two(model.one(BATCH)).mean().backward()
        optimizer.step()
        return model, sorted(job.kv.layout.where)

    with local_job(workers=2) as jobs:
        (model, names), (other, _) = jobs.run(train)
    assert names == ["fixed.frozen", "one.weight", "unused"]
    for each in (model, other):
        assert each.frozen.tolist() == [1.0, 1.0] and each.unused.tolist() == [1.0, 1.0]
        assert each.one.weight is each.two.weight and not torch.equal(each.one.weight, torch.ones(4, 4))


def test_one_worker_without_a_gradient_counts_as_zero() -> None:
    """What some pushed is divided by the weight of the whole round."""

    def train(job: Job) -> float:
        parameter = torch.nn.Parameter(torch.zeros(1))
        other = torch.nn.Parameter(torch.zeros(1))
        optimizer = DistributedOptimizer(torch.optim.SGD([parameter, other], lr=1.0))
        other.grad = torch.ones(1)
        if job.is_chief:
            parameter.grad = torch.ones(1)
        optimizer.step()
        return parameter.item()

    with local_job(workers=2) as jobs:
        assert jobs.run(train) == [-0.5, -0.5]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    def train(job: Job) -> torch.nn.Module:
        model = copy.deepcopy(LINEAR)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=set_to_none)
            assert all(p.grad is None or not p.grad.any() for p in model.parameters())
            backward(model)
            optimizer.step()
        return model

    expected = copy.deepcopy(LINEAR)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        plain.zero_grad()
        backward(expected)
        plain.step()
    with local_job(workers=1) as jobs:
        torch.testing.assert_close(jobs.run(train)[0].weight, expected.weight)


def test_closure_and_step_hooks() -> None:
    seen = []

    def train(job: Job) -> float | None:
        model = copy.deepcopy(LINEAR)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        optimizer.register_step_post_hook(lambda *_: seen.append("post"))

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(BATCH).square().mean()
            loss.backward()
            return loss.item()

        return optimizer.step(closure)

    with local_job(workers=1) as jobs:
        assert jobs.run(train)[0] > 0  # type: ignore[operator]
    assert seen == ["post"]


@pytest.mark.parametrize("name", ["Adam", "Adafactor", "SGD"])
def test_state_dict_is_torchs_own_and_comes_back(name: str) -> None:
    """State saved from two servers resumes a plain torch optimizer, and a job, on the same path."""
    make = {
        "Adam": lambda p: torch.optim.Adam(p, lr=0.05),
        "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    }[name]

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()

    def first_half(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
        model = copy.deepcopy(WIDE)
        optimizer = DistributedOptimizer(make(model.parameters()), model=model)
        steps(model, optimizer, 3)
        saved = copy.deepcopy(optimizer.state_dict()) if job.rank == 1 else {}
        steps(model, optimizer, 2)
        return saved, copy.deepcopy(model.state_dict())

    expected = copy.deepcopy(WIDE)
    plain = make(expected.parameters())
    steps(expected, plain, 3)
    middle = copy.deepcopy(expected.state_dict())
    reference = copy.deepcopy(plain.state_dict())
    steps(expected, plain, 2)

    with local_job(workers=2, servers=2, slice_bytes=64) as jobs:
        saved, final = jobs.run(first_half)[1]
    for key, state in reference["state"].items():
        assert set(saved["state"][key]) == {k for k, v in state.items() if v is not None}
        for inner, value in state.items():
            if value is not None:
                torch.testing.assert_close(torch.as_tensor(saved["state"][key][inner]), torch.as_tensor(value))
    torch.testing.assert_close(final["weight"], expected.weight.detach())

    def second_half(job: Job) -> torch.nn.Module:
        model = copy.deepcopy(WIDE)
        model.load_state_dict(middle)
        optimizer = DistributedOptimizer(make(model.parameters()), model=model)
        optimizer.load_state_dict(saved)
        steps(model, optimizer, 2)
        return model

    with local_job(workers=2, servers=1) as jobs:
        for model in jobs.run(second_half):
            torch.testing.assert_close(model.weight, expected.weight)


def test_parameters_can_be_added_later() -> None:
    def train(job: Job) -> torch.nn.Module:
        model = copy.deepcopy(LINEAR)
        optimizer = DistributedOptimizer(torch.optim.SGD([model.weight], lr=0.1), model=None)
        backward(model)
        optimizer.step()
        optimizer.add_param_group({"params": [model.bias], "lr": 0.2})
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        return model

    with local_job(workers=2) as jobs:
        models = jobs.run(train)
    assert not torch.equal(models[0].bias, LINEAR.bias)
    assert torch.equal(models[0].bias, models[1].bias)


def test_an_overflow_skips_the_round_for_everyone_and_nobody_hangs() -> None:
    def train(job: Job) -> tuple[torch.Tensor, int]:
        model = copy.deepcopy(LINEAR)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(BATCH).square().mean()
            if step == 1 and job.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return model.weight.detach().clone(), job.kv.pull(["weight"]).versions["weight"]

    expected = copy.deepcopy(LINEAR)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        plain.zero_grad()
        backward(expected)
        plain.step()
    with local_job(workers=2) as jobs:
        for weight, version in jobs.run(train):
            torch.testing.assert_close(weight, expected.weight.detach())
            assert version == 2


def test_unscaled_and_clipped_by_hand_counts_as_edited() -> None:
    def train(job: Job) -> torch.Tensor:
        model = copy.deepcopy(LINEAR)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(BATCH).square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        return model.weight.detach()

    expected = copy.deepcopy(LINEAR)
    backward(expected)
    torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    with local_job(workers=1) as jobs:
        torch.testing.assert_close(jobs.run(train)[0], expected.weight.detach())


@pytest.mark.parametrize("policy", ["async", "bounded:1"])
def test_clip_norm_without_rounds_clips_what_is_pushed(policy: str) -> None:
    def train(job: Job) -> torch.Tensor:
        model = copy.deepcopy(LINEAR)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, clip_norm=0.01)
        backward(model)
        optimizer.step()
        return model.weight.detach()

    expected = copy.deepcopy(LINEAR)
    backward(expected)
    torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
    torch.optim.SGD(expected.parameters(), lr=1.0).step()
    with local_job(workers=1, policy=policy) as jobs:
        torch.testing.assert_close(jobs.run(train)[0], expected.weight.detach())


def test_optimizers_without_a_rule_are_refused_with_what_there_is() -> None:
    class Mine(torch.optim.SGD):
        pass

    with local_job(workers=1) as jobs:
        for kind in (torch.optim.LBFGS, Mine):
            with pytest.raises(RuleError, match=r"choose from: .*Adam.*--sync-every"):
                DistributedOptimizer(kind(copy.deepcopy(LINEAR).parameters(), lr=0.1), job=jobs[0])
        with pytest.raises(ConfigError, match="optimizer, not str"):
            DistributedOptimizer("SGD", job=jobs[0])  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="clip_norm"):
            DistributedOptimizer(torch.optim.SGD(LINEAR.parameters(), lr=0.1), job=jobs[0], clip_norm=-1.0)
        with pytest.raises(ConfigError, match="weight = -1"):
            model = copy.deepcopy(LINEAR)
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), job=jobs[0]).step(weight=-1)


@pytest.mark.parametrize("settings", [{}, {"exchange": "ring"}, {"transport": "tcp"}, {"sync_every": 2}], ids=str)
def test_after_close_everything_says_that_this_worker_has_left(settings: dict[str, Any]) -> None:
    def work(job: Job) -> None:
        model = torch.nn.Linear(600, 500)  # its gradients leave while backward runs
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        job.kv.register({"x": torch.zeros(2)}, Rule("SGD", lr=0.1))

        def step() -> None:
            model(torch.ones(1, 600)).sum().backward()
            optimizer.step()

        def push() -> None:
            job.kv.push({"x": torch.zeros(2)})

        step()
        job.close()
        pull, barrier = job.kv.pull, lambda: job.barrier("late")
        state = [] if job.config.sync_every > 1 else [optimizer.state_dict]  # a local optimizer has its own
        for late in (step, step, push, pull, barrier, optimizer.pull, *state):
            with pytest.raises(ConfigError, match=rf"{job.name} has left its job: job.close\(\) was called"):
                late()  # type: ignore[operator]

    with local_job(workers=2, **settings) as jobs:
        jobs.run(work)


TWO_WAYS = r"either use dense gradients \(sparse=False, .* or let the optimizer run .* --sync-every H"


@pytest.mark.parametrize(("policy", "clip_norm"), [("sync", None), ("async", 1.0)])
def test_sparse_gradients_are_refused_and_the_error_names_two_ways(policy: str, clip_norm: float | None) -> None:
    with local_job(workers=1, policy=policy) as jobs:
        model = torch.nn.Embedding(4, 2, sparse=True)
        with pytest.raises(RuleError, match=rf"torch.optim.SparseAdam: .*{TWO_WAYS}"):
            DistributedOptimizer(torch.optim.SparseAdam(list(model.parameters())), model=model, job=jobs[0])
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model=model, job=jobs[0], clip_norm=clip_norm
        )
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(LayoutError, match=rf"'weight' has a sparse gradient, .*{TWO_WAYS}"):
            optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_the_way_by_local_steps_works_for_sparse_gradients(kind: Any) -> None:
    """Two workers that take the same steps are one process that does: the mean of equal changes is that change."""

    def trained(model: torch.nn.Module, optimizer: Any) -> torch.Tensor:
        for number in range(4):
            model(torch.tensor([1, number])).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return next(model.parameters()).detach()

    first = torch.nn.Embedding(4, 2, sparse=True)

    def work(job: Job) -> torch.Tensor:
        model = copy.deepcopy(first)
        return trained(model, DistributedOptimizer(kind(list(model.parameters()), lr=0.1), model=model))

    alone = copy.deepcopy(first)
    expected = trained(alone, kind(list(alone.parameters()), lr=0.1))
    with local_job(workers=2, sync_every=2) as jobs:
        for weight in jobs.run(work):
            torch.testing.assert_close(weight, expected)
