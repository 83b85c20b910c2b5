"""Scripts that are not as simple as the README's: several optimizers, tensors that are replaced, odd buffers."""

from __future__ import annotations

import copy

import pytest
import torch

import syncline
from syncline.errors import LayoutError
from syncline.testing import local_job
from syncline.torch import DataLoader, DistributedOptimizer
from syncline.torch.carriers import LOOK_BYTES
from syncline.worker.job import Job

torch.manual_seed(0)
NET = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
BATCH = torch.randn(8, 4)


def backward(model: torch.nn.Module) -> None:
    model(BATCH).square().mean().backward()


def test_two_optimizers_on_one_model_each_update_their_own() -> None:
    """What the first does not have must not be taken for something that is assigned."""

    def train(job: Job | None) -> torch.nn.Module:
        model = copy.deepcopy(NET)
        opts: list[torch.optim.Optimizer] = [
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            torch.optim.Adam(model[1].parameters(), lr=0.01),
        ]
        if job is not None:
            opts = [DistributedOptimizer(opt, model=model, job=job) for opt in opts]
        for _ in range(3):
            model.zero_grad()
            backward(model)
            for opt in opts:
                opt.step()
        return model

    expected = train(None)
    with local_job(workers=2) as jobs:
        for model in jobs.run(train):
            for one, other in zip(model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(one, other)


def test_each_of_two_optimizers_weighs_its_step_by_the_samples() -> None:
    """The second step of a batch weighs as much as the first."""
    data = torch.utils.data.TensorDataset(torch.tensor([[1.0], [1.0], [4.0]]))

    def train(job: Job) -> list[float]:
        models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        opts = []
        for model in models:
            torch.nn.init.zeros_(model.weight)
            opts.append(DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model))
        for (x,) in DataLoader(data, batch_size=2):
            for model, opt in zip(models, opts, strict=True):
                model(x).mean().backward()
                opt.step()
        return [model.weight.item() for model in models]

    with local_job(workers=2) as jobs:
        for weights in jobs.run(train):
            torch.testing.assert_close(torch.tensor(weights), torch.tensor([-2.0, -2.0]))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_that_have_a_graph_count_as_others_do() -> None:
    """A penalty on the gradient needs `backward(create_graph=True)`. The model is so large that NumPy copies it."""
    wide = torch.nn.Linear(4, LOOK_BYTES // 4)

    def train(job: Job | None) -> torch.nn.Module:
        model = copy.deepcopy(wide)
        opt: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if job is not None:
            opt = DistributedOptimizer(opt, model=model, job=job)
        for _ in range(3):
            opt.zero_grad()
            model(BATCH).square().mean().backward(create_graph=True)
            torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().backward()
            opt.step()
        return model

    expected = train(None)
    with local_job(workers=2) as jobs:
        for model in jobs.run(train):
            for one, other in zip(model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(one, other)


def test_groups_that_begin_equal_may_part_later() -> None:
    def train(job: Job) -> torch.nn.Module:
        model = copy.deepcopy(NET)
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
        opt = DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), model=model)
        opt.param_groups[1]["lr"] = 0.0
        backward(model)
        opt.step()
        return model

    with local_job(workers=1) as jobs:
        (model,) = jobs.run(train)
    assert not torch.equal(model[0].weight, NET[0].weight) and torch.equal(model[1].weight, NET[1].weight)


def test_models_made_one_after_the_other_do_not_inherit() -> None:
    """Cross-validation in one job: a new model has its own values, whatever has become of the old one."""
    with local_job(workers=1) as jobs:
        for fold in range(4):
            model = torch.nn.Linear(2, 2)
            torch.nn.init.constant_(model.weight, float(fold))
            opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, job=jobs[0])
            assert (model.weight == fold).all()
            model(torch.ones(1, 2)).sum().backward()
            opt.step()
            del model, opt


def test_a_model_whose_tensors_were_replaced_still_gets_the_updates() -> None:
    """model.to(), an exchange of weights, a buffer that is assigned again."""

    def train(job: Job) -> tuple[float, float, float]:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1, affine=False))
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        torch.nn.init.zeros_(model[0].weight)
        model[0].weight.data = model[0].weight.data.clone()
        model[1].running_mean = torch.full((1,), 5.0 + job.rank)
        model[0].weight.grad = torch.ones(1, 1)
        opt.step()
        on_server = job.kv.pull(["0.weight"])["0.weight"].item()
        return model[0].weight.item(), on_server, model[1].running_mean.item()

    with local_job(workers=2) as jobs:
        results = jobs.run(train)
    assert results[0] == results[1] and results[0][0] == results[0][1] and results[0][2] == 5.0


def test_a_mask_of_minus_infinity_and_a_complex_buffer_are_no_obstacle() -> None:
    with local_job(workers=1) as jobs:
        model = copy.deepcopy(NET)
        model.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
        model.register_buffer("rotary", torch.zeros(2, dtype=torch.complex64))
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, job=jobs[0])
        backward(model)
        opt.step()
        assert model.mask[0, 1] == float("-inf")
        assert any("1 buffers of a type that servers cannot host" in text for text in jobs[0].debug_state().notices)


def change_and_train(job: Job | None, through_data: bool) -> torch.nn.Module:
    """Loads weights when the optimizer is there already, as to resume, and clamps them after each step."""
    model = copy.deepcopy(NET)
    opt: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if job is not None:
        opt = DistributedOptimizer(opt, model=model, job=job)
    model.load_state_dict({name: tensor + 1 for name, tensor in NET.state_dict().items()})
    for _ in range(3):
        opt.zero_grad()
        backward(model)
        opt.step()
        with torch.no_grad():
            for parameter in model.parameters():
                (parameter.data if through_data else parameter).clamp_(-1.2, 1.2)
    return model


@pytest.mark.parametrize("through_data", [False, True])
def test_alone_what_a_script_writes_to_parameters_counts(through_data: bool) -> None:
    expected = change_and_train(None, through_data)
    with syncline.init() as job:
        for one, other in zip(change_and_train(job, through_data).parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_weights_that_are_loaded_before_the_first_step_count_in_rounds(policy: str) -> None:
    """On arrival another worker may have pushed before: then it is said that they do not count."""

    def train(job: Job) -> torch.nn.Module:
        model = copy.deepcopy(NET)
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
        model.load_state_dict({name: tensor + 1 for name, tensor in NET.state_dict().items()})
        backward(model)
        opt.step()
        return model

    with local_job(workers=2, policy=policy) as jobs:
        models = jobs.run(train)
        notices = jobs[0].debug_state().notices
        assert any("has written to parameters" in text for text in notices) == (policy == "async")
    for model in models:
        for one, other in zip(model.parameters(), NET.parameters(), strict=True):
            torch.testing.assert_close(one, other + 1 if policy == "sync" else other)


@pytest.mark.parametrize("through_data", [False, True])
def test_a_later_change_that_does_not_count_is_said(through_data: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of weights that were exchanged for an evaluation, and put back."""
    monkeypatch.setattr("syncline.torch.optimizer.LOOK_STEPS", 1)
    with local_job(workers=2) as jobs:

        def train(job: Job) -> list[bool]:
            model, told = copy.deepcopy(NET), []
            opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
            for number in range(4):
                own = copy.deepcopy(model.state_dict())
                model.load_state_dict(NET.state_dict())
                model.load_state_dict(own)
                if number == 3 and through_data:
                    model[1].weight.data.mul_(0.5)
                elif number == 3:
                    model.load_state_dict(NET.state_dict())
                backward(model)
                opt.step()
                opt.pull()
                told.append(any("has written to parameters" in text for text in job.debug_state().notices))
            return told

        assert jobs.run(train)[0] == [False, False, False, True]


def several_optimizers(job: Job | None) -> torch.nn.Module:
    """As one fine-tunes: some parameters first, then all of them by another rule; then the first optimizer again, in
    turn with one that has only some of them; at last the same optimizer, made again."""
    model = copy.deepcopy(NET)

    def wrap(opt: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return opt if job is None else DistributedOptimizer(opt, model=model, job=job)

    def steps(*opts: torch.optim.Optimizer) -> None:
        for _ in range(3):
            for opt in opts:
                model.zero_grad()
                backward(model)
                opt.step()

    head = wrap(torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9))
    steps(head)
    every = wrap(torch.optim.Adagrad(model.parameters(), lr=0.01))
    steps(every)
    body = wrap(torch.optim.Adagrad(model[0].parameters(), lr=0.01))
    steps(head, body, every)
    steps(wrap(torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)))
    return model


def test_alone_several_optimizers_have_the_same_parameters_as_in_torch() -> None:
    expected = several_optimizers(None)
    with syncline.init() as job:
        for one, other in zip(several_optimizers(job).parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other)


def test_one_cycle_stays_at_its_end_where_a_worker_makes_more_steps() -> None:
    """In a job of several workers: after a death the others make more steps than they could know of."""
    with local_job(workers=1) as jobs:
        model, rates = copy.deepcopy(NET), []
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, job=jobs[0])
        scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=3)
        for _ in range(6):
            backward(model)
            opt.step()
            scheduler.step()
            rates.append(opt.param_groups[0]["lr"])
        assert rates[2:] == rates[2:3] * 4 and scheduler.last_epoch == 3
        assert any("come to the end of its 3 steps" in text for text in jobs[0].debug_state().notices)
        assert isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR)
        assert "notice" not in str(scheduler.state_dict().keys())


def test_alone_one_cycle_raises_as_in_torch() -> None:
    with syncline.init() as job:
        model = copy.deepcopy(NET)
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, job=job)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=3)
        with pytest.raises(ValueError, match="Tried to step"):
            for _ in range(6):
                backward(model)
                opt.step()
                scheduler.step()


def test_a_parameter_has_one_rule_in_a_job() -> None:
    with local_job(workers=1) as jobs:
        model = torch.nn.Linear(2, 2)
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, job=jobs[0])
        with pytest.raises(LayoutError, match="registered 'weight' with Adam and reduce='mean', the job has SGD"):
            DistributedOptimizer(torch.optim.Adam(model.parameters()), model=model, job=jobs[0])


def test_local_steps_are_not_lost_when_parameters_are_added() -> None:
    def train(job: Job) -> float:
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight)
        opt = DistributedOptimizer(torch.optim.SGD([model.weight], lr=0.1))
        for number in range(4):
            if number == 2:
                opt.add_param_group({"params": [model.bias]})
            model.weight.grad = torch.ones(1, 1)
            opt.step()
        opt.pull()
        return model.weight.item()

    with local_job(workers=2, sync_every=4) as jobs:
        torch.testing.assert_close(torch.tensor(jobs.run(train)), torch.tensor([-0.4, -0.4]))
