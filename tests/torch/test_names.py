"""Names and notices of DistributedOptimizer: whose parameter is whose, and what a user is told once."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

from syncline.testing import local_job
from syncline.torch import DistributedOptimizer, Pipeline
from syncline.worker.job import Job

torch.manual_seed(0)
LINEAR = torch.nn.Linear(4, 3)
BATCH = torch.randn(8, 4)


def backward(model: torch.nn.Module) -> None:
    model(BATCH).square().mean().backward()


def test_names_are_the_models_or_the_optimizers_or_by_position() -> None:
    """And without a model it is said that buffers are not synchronised."""
    model = copy.deepcopy(LINEAR)
    cases: list[tuple[Any, torch.nn.Module | None, list[str]]] = [
        (model.parameters(), model, ["bias", "weight"]),
        (model.parameters(), None, ["group0.0", "group0.1"]),
        ([("mine", model.weight), ("yours", model.bias)], None, ["mine", "yours"]),
    ]
    for parameters, given, names in cases:
        with local_job(workers=1) as jobs:
            DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), model=given, job=jobs[0])
            assert sorted(jobs[0].kv.layout.where) == names
            notices = jobs[0].debug_state().notices
            assert any("buffers are not synchronised" in text for text in notices) == (given is None)


def test_clipping_by_hand_is_told_once_in_sync_with_several_workers() -> None:
    """It clips this worker's own gradient; the round's mean is something else."""

    def train(job: Job, clips: bool) -> int:
        model = copy.deepcopy(LINEAR)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        return sum("clip_grad_norm_ clips this worker's own" in text for text in job.debug_state().notices)

    for clips, workers, expected in ((True, 2, [1, 0]), (False, 2, [0, 0]), (True, 1, [0])):
        with local_job(workers=workers) as jobs:
            assert jobs.run(partial(train, clips=clips)) == expected


def test_what_a_pipeline_adds_to_gradients_is_no_edit_of_the_script() -> None:
    """Gradients of tied weights are added up after the backward of this process. Clipping is told of as ever."""

    def train(job: Job, clips: bool) -> int:
        pipe = Pipeline(copy.deepcopy(torch.nn.Sequential(LINEAR)), torch.nn.functional.mse_loss)
        pipe.after_step(lambda: [p.grad.add_(1.0) for p in pipe.parameters() if p.grad is not None])
        optimizer = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), model=pipe)
        for _ in range(3):
            optimizer.zero_grad()
            pipe.step(BATCH, torch.zeros(8, 3))
            if clips:
                torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.01)
            optimizer.step()
        return sum("gradients were edited" in text for text in job.debug_state().notices)

    for clips, expected in ((False, [0, 0]), (True, [1, 0])):
        with local_job(workers=2) as jobs:
            assert jobs.run(partial(train, clips=clips)) == expected


def test_two_models_with_the_same_names_stay_two() -> None:
    """A generator and a discriminator, say: equal names and shapes must not make them one."""

    def train(job: Job) -> tuple[torch.nn.Module, torch.nn.Module, list[str]]:
        models = [torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)) for _ in range(2)]
        for value, model in enumerate(models):
            torch.nn.init.constant_(model[0].weight, float(value))
        optimizers = [DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), model=m) for m in models]
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                backward(model)
                optimizer.step()
        return models[0], models[1], sorted(job.kv.layout.where)

    with local_job(workers=2) as jobs:
        (one, two, names), (other_one, other_two, _) = jobs.run(train)
    assert torch.equal(one[0].weight, other_one[0].weight) and torch.equal(two[0].weight, other_two[0].weight)
    assert not torch.allclose(one[0].weight, two[0].weight, atol=0.2)
    assert "0.weight" in names and "model2.0.weight" in names and "model2.1.running_mean" in names
