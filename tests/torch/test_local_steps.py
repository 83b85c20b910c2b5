"""`--sync-every H`: local steps, then the weighted mean of the deltas."""

from __future__ import annotations

import copy

import torch

from syncline.testing import local_job
from syncline.torch import DataLoader, DistributedOptimizer
from syncline.worker.job import Job

torch.manual_seed(0)
LINEAR = torch.nn.Linear(3, 2)


def local_path(inputs: list[torch.Tensor], steps: int) -> torch.nn.Module:
    model = copy.deepcopy(LINEAR)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for x in inputs[:steps]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def inputs_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 3, generator=generator) for _ in range(5)]


def test_the_mean_of_the_deltas_is_weighted_and_state_stays_local() -> None:
    """After H steps every worker has base + Σ w·delta / Σ w, and goes on with its own Adam state."""

    def train(job: Job) -> tuple[list[torch.Tensor], int]:
        model = copy.deepcopy(LINEAR)
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
        seen = []
        for x in inputs_of(job.rank)[:4]:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            # What counts is the sum over the steps: 3 for the chief, 9 for the other. The last alone is 1 to 1.
            optimizer.step(weight=((1.0, 1.0, 1.0, 1.0), (4.0, 4.0, 1.0, 1.0))[job.rank][len(seen)])
            seen.append(model.weight.detach().clone())
        assert len(optimizer.state_dict()["state"]) == 2
        return seen, job.step

    with local_job(workers=2, sync_every=3) as jobs:
        (one, steps), (two, _) = jobs.run(train)
    ends = [local_path(inputs_of(rank), 3).weight.detach() for rank in range(2)]
    expected = LINEAR.weight.detach() + (1 * (ends[0] - LINEAR.weight) + 3 * (ends[1] - LINEAR.weight)).detach() / 4
    assert not torch.equal(one[1], two[1])
    torch.testing.assert_close(one[2], expected)
    assert torch.equal(one[2], two[2])
    assert not torch.equal(one[3], two[3]) and steps == 4


def test_what_is_left_at_the_end_of_the_data_is_averaged_too() -> None:
    """Five and four batches with H = 3: the last, shorter phase counts; nobody hangs."""
    data = torch.utils.data.TensorDataset(torch.arange(17.0).reshape(17, 1))

    def train(job: Job) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        for _ in DataLoader(data, batch_size=2):
            model.weight.grad = torch.ones(1, 1)
            optimizer.step()
        return model.weight.item()

    with local_job(workers=2, sync_every=3) as jobs:
        one, two = jobs.run(train)
        final = [job.kv.pull()["weight"].item() for job in jobs]
    assert final[0] == final[1] == max(one, two, key=abs)


def test_any_optimizer_will_do() -> None:
    class Mine(torch.optim.SGD):
        pass

    def train(job: Job) -> torch.Tensor:
        model = copy.deepcopy(LINEAR)
        optimizer = DistributedOptimizer(Mine(model.parameters(), lr=0.1), model=model)
        for x in inputs_of(0)[:2]:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model.weight.detach()

    with local_job(workers=2, sync_every=2) as jobs:
        one, two = jobs.run(train)
    assert torch.equal(one, two) and not torch.equal(one, LINEAR.weight)


def test_lbfgs_gets_its_closure() -> None:
    """It evaluates the closure itself, several times in a step."""

    def train(job: Job) -> float:
        model = copy.deepcopy(LINEAR)
        optimizer = DistributedOptimizer(torch.optim.LBFGS(model.parameters(), lr=0.5), model=model)
        (x,) = inputs_of(job.rank)[:1]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        before = closure().item()
        for _ in range(2):
            optimizer.step(closure)
        return model(x).square().mean().item() / before

    with local_job(workers=2, sync_every=2) as jobs:
        assert all(part < 0.5 for part in jobs.run(train))
