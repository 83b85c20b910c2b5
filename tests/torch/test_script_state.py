"""What a training script has comes back when its job is taken up: schedulers, groups, averages, chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.patience import PATIENCE
from tests.saved_scripts import NAME, Asker, finish, resumes

from syncline.core.wire.checkpoints import Noted
from syncline.errors import ConfigError, StoreError
from syncline.testing.local import local_job
from syncline.torch.data import DataLoader
from syncline.torch.optimizer import DistributedOptimizer
from syncline.worker.current import current_in_thread
from syncline.worker.job import Job

SECONDS = PATIENCE


class Numbers(torch.utils.data.Dataset[Any]):
    """Reading a sample draws from the global generator, as augmentations do."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]) + torch.rand(1)


@pytest.fixture
def made() -> Iterator[Callable[..., tuple[Job, Asker]]]:
    """Jobs of one worker in this process, and the coordinator's voice to it."""
    open_ones = []

    def make(**settings: Any) -> tuple[Job, Asker]:
        whole = local_job(workers=1, **settings)
        local = whole.__enter__()
        thread = current_in_thread(local[0])
        thread.__enter__()
        open_ones.append((whole, thread))
        return local[0], Asker(local.process.endpoints["worker-0"][0])

    yield make
    for whole, thread in reversed(open_ones):
        thread.__exit__(None, None, None)
        whole.__exit__(None, None, None)


class Script:
    """A usual one: a model, an optimizer, a scheduler by epochs, an average of the weights, a scaler."""

    def __init__(self, job: Job, *, lr: float = 0.5, data: Any = None, **options: Any) -> None:
        torch.manual_seed(3)
        self.job = job
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        inner = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.inner = inner
        self.opt = DistributedOptimizer(inner, model=self.model, job=job)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.opt, 1, gamma=0.5)
        self.loader = DataLoader(data or Numbers(), batch_size=2, shuffle=True, job=job, **options)
        job.state["scheduler"], job.state["average"] = self.scheduler, self.average
        job.state["log"] = self.log = []

    def run(self, epochs: int, before: Callable[[int], None] = lambda step: None) -> list[float]:
        losses = []
        for _ in range(epochs):
            for batch in self.loader:
                loss = (self.model(batch) ** 2).mean()
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.average.update_parameters(self.model)
                losses.append(loss.item())
                self.log.append(torch.rand(()).item() + random.random() + np.random.rand())
                before(len(losses))
            self.scheduler.step()
        return losses


def save_at(asker: Asker, folder: Any, clock: int) -> tuple[Callable[[int], None], list[Any]]:
    """What a script calls after every step: one save, whose cut is at this clock."""
    found: list[Any] = []

    def after(step: int) -> None:
        if step == clock - 2:
            found.append(asker.expect())
        if step == clock + 1:
            assert isinstance(found[0].wait(SECONDS), Noted)
            found.append(asker.written(folder, clock))

    return after, found


@pytest.mark.parametrize("clock", [4, 6, 9], ids=["in an epoch", "at its end", "in the second"])
def test_a_script_goes_on_as_if_it_had_not_ended(made, tmp_path, clock):
    """The samples that are left are the ledger's affair: here the script itself reads on from where it was."""
    job, asker = made()
    script = Script(job)
    after, found = save_at(asker, tmp_path / NAME, clock)
    rates = []
    script.run(2, lambda step: (after(step), rates.append(script.opt.param_groups[0]["lr"])))
    digest = finish(tmp_path / NAME, found[1])

    again, _ = made()
    resumes(again, tmp_path / NAME, digest)
    resumed = Script(again)
    assert resumed.log == script.log[:clock] and resumed.job.state["log"] is resumed.log
    epoch, _ = divmod(clock, 6)
    # Epochs that are finished yield nothing; here they are skipped by number, as the loader would.
    seen = []
    at = "end" if clock == 6 else ""
    for number in range(2):
        loop = iter(resumed.loader)
        if number < epoch or at:
            _pass_over(resumed, loop)
        else:
            for step, _batch in enumerate(loop):
                if not seen:
                    seen.append((resumed.opt.param_groups[0]["lr"], resumed.scheduler.last_epoch, torch.rand(())))
                if step == 0:
                    break
            break
        resumed.scheduler.step()
        at = ""
    assert seen[0][:2] == (rates[min(clock, len(rates) - 1)], epoch)


def _pass_over(script: Script, loop: Any) -> None:
    """A loop over an epoch that is finished: its boundary is passed, and no batch comes."""
    reading = loop.gi_frame.f_locals["loop"].reading
    reading._is_finished = True
    assert list(loop) == []


def test_chance_goes_on_before_the_first_batch_is_read(made, tmp_path):
    job, asker = made()
    script, drawn = Script(job), []
    after, found = save_at(asker, tmp_path / NAME, 3)
    batches = []
    kept = script.model.forward
    script.model.forward = lambda batch: batches.append(batch) or kept(batch)  # type: ignore[method-assign]
    script.run(1, lambda step: (after(step), drawn.append(torch.get_rng_state())))
    digest = finish(tmp_path / NAME, found[1])

    again, _ = made()
    resumes(again, tmp_path / NAME, digest)
    resumed = Script(again)
    torch.rand(100)
    first = next(iter(resumed.loader))
    torch.set_rng_state(drawn[2])  # as it was behind step 3, when nothing of the fourth batch was read
    noise = torch.rand(1), torch.rand(1)
    assert torch.allclose(first.frac().sort(0).values, torch.stack(noise).sort(0).values, atol=1e-5)


def test_after_the_first_batch_the_script_is_on_its_own(made, tmp_path):
    job, asker = made()
    script = Script(job)
    after, found = save_at(asker, tmp_path / NAME, 3)
    script.run(1, after)
    digest = finish(tmp_path / NAME, found[1])
    again, _ = made()
    resumes(again, tmp_path / NAME, digest)
    resumed = Script(again)
    resumed.run(1)
    assert len(resumed.log) == 3 + 6 and again.checkpoints.resume.is_over
    again.state["log"] = []
    assert again.state["log"] == []


def test_making_an_iterator_draws_nothing(made):
    job, _ = made()
    loader = DataLoader(torch.arange(8.0), batch_size=2, job=job)
    before = torch.get_rng_state()
    iter(loader)
    assert len(list(loader)) == 4
    with torch.no_grad():
        assert len(list(loader)) == 4
    assert torch.equal(torch.get_rng_state(), before)


def test_an_accumulated_gradient_is_no_boundary(made, tmp_path):
    """Micro-batches that are in no commit are read again: the state must be the one before them."""
    job, asker = made()
    script, states = Script(job), {}
    told: list[Any] = []
    for number, batch in enumerate(script.loader):
        script.model(batch).sum().backward()
        if number == 2:
            told.append(asker.expect())
        if number % 2:
            script.opt.step()
            script.opt.zero_grad()
        states[number] = torch.get_rng_state()
        script.log.append(number)
    assert isinstance(told[0].wait(SECONDS), Noted)
    with pytest.raises(StoreError):  # it was told in the middle of them
        asker.written(tmp_path / NAME, 1)
    written = asker.written(tmp_path / NAME, 2)  # behind the fourth micro-batch
    again, _ = made()
    resumes(again, tmp_path / NAME, finish(tmp_path / NAME, written))
    assert Script(again).log == [0, 1, 2, 3]


def test_local_steps_keep_their_optimizer_and_nothing_between_two_averages(made, tmp_path):
    job, asker = made(sync_every=3)
    script, momentum = Script(job), {}
    told: list[Any] = []

    def after(step: int) -> None:
        if step == 2:
            told.append(asker.expect())
        momentum[step] = script.opt.state_dict()["state"][0]["momentum_buffer"].clone()

    script.run(2, after)
    assert isinstance(told[0].wait(SECONDS), Noted)
    digest = finish(tmp_path / NAME, asker.written(tmp_path / NAME, 2))  # behind six steps
    again, _ = made(sync_every=3)
    resumes(again, tmp_path / NAME, digest)
    resumed = Script(again)
    next(iter(resumed.loader))
    assert torch.equal(resumed.opt.state_dict()["state"][0]["momentum_buffer"], momentum[6])
    assert resumed.opt.param_groups is resumed.inner.param_groups and again.step == 6


def test_between_two_averages_it_is_no_boundary_without_a_loader_either(made):
    job, _ = made(sync_every=2)
    script, clean = Script(job), []
    for _ in range(4):
        script.model(torch.rand(4, 1)).sum().backward()
        script.opt.step()
        clean.append(job.boundary.is_clean)
    assert clean == [False, True, False, True]


def test_what_the_script_says_anew_counts(made, tmp_path):
    job, asker = made()
    script = Script(job)
    after, found = save_at(asker, tmp_path / NAME, 8)
    script.run(2, after)
    digest = finish(tmp_path / NAME, found[1])
    for lr, then in ((0.5, 0.25), (0.01, 0.01)):
        again, _ = made()
        resumes(again, tmp_path / NAME, digest)
        resumed = Script(again, lr=lr)
        next(iter(resumed.loader))
        assert resumed.opt.param_groups[0]["lr"] == then


def test_objects_of_torch_come_back(made, tmp_path):
    def things() -> dict[str, Any]:
        weight = torch.nn.Parameter(torch.ones(3))
        adam = torch.optim.Adam([weight], lr=0.1)
        return {
            "model": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)),
            "adam": adam,
            "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
            "steps": torch.optim.lr_scheduler.MultiStepLR(adam, [2, 2, 5]),
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=3),
            "cycle": torch.optim.lr_scheduler.OneCycleLR(adam, 0.2, total_steps=20),
            "lambda": torch.optim.lr_scheduler.LambdaLR(adam, lambda epoch: 0.5),
            "cosine": torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(adam, 4),
        }

    job, asker = made()
    before = things()
    before["model"](torch.rand(4, 2))
    for group in before["adam"].param_groups:
        group["params"][0].grad = torch.ones(3)
    before["adam"].step()
    before["plateau"].step(1.0)
    for name in ("steps", "cycle", "lambda", "cosine"):
        before[name].step()
    for name, thing in before.items():
        job.state[name] = thing
    job.state["tensor"] = torch.arange(3)
    with job.boundary.waiting():
        assert isinstance(asker.expect().wait(SECONDS), Noted)
        written = asker.written(tmp_path / NAME, 0)
    again, _ = made()
    resumes(again, tmp_path / NAME, finish(tmp_path / NAME, written))
    after = things()
    for name, thing in after.items():
        again.state[name] = thing
        assert str(thing.state_dict()) == str(before[name].state_dict()), name
    assert torch.equal(again.state["tensor"], torch.arange(3))  # never assigned here
    with pytest.raises(StoreError, match=r"job\.state\['model'\]: what 000001-step-10 has of it does not fit"):
        again.state["model"] = torch.nn.Linear(2, 2)


def test_another_worker_takes_the_first_ones_state_but_not_its_chance(made, tmp_path):
    job, asker = made()
    script = Script(job)
    after, found = save_at(asker, tmp_path / NAME, 3)
    script.run(1, after)
    import msgspec

    digest = finish(tmp_path / NAME, msgspec.structs.replace(found[1], worker="worker-7"))
    again, _ = made()
    resumes(again, tmp_path / NAME, digest)
    resumed = Script(again)
    drawn = torch.get_rng_state()
    loop = iter(resumed.loader)
    again.put_back()
    assert resumed.log == script.log[:3] and torch.equal(torch.get_rng_state(), drawn)
    loop.close()


def test_the_optimizer_of_the_job_is_no_part_of_the_state(made):
    job, _ = made()
    script = Script(job)
    with pytest.raises(ConfigError, match="is saved by the job itself"):
        job.state["opt"] = script.opt


def test_a_script_with_a_loop_of_its_own(made, tmp_path):
    """Its numbers come back with its first step, chance when it says where."""
    job, asker = made()
    script, told = Script(job), []
    for step in range(5):
        script.model(torch.rand(4, 1)).sum().backward()
        if step == 1:
            told.append(asker.expect())
        script.opt.step()
        script.scheduler.step()
        state = torch.get_rng_state()
    assert isinstance(told[0].wait(SECONDS), Noted)
    digest = finish(tmp_path / NAME, asker.written(tmp_path / NAME, 5))
    again, _ = made()
    resumes(again, tmp_path / NAME, digest)
    resumed = Script(again)
    again.put_back()
    assert torch.equal(torch.get_rng_state(), state)
    resumed.model(torch.rand(4, 1)).sum().backward()
    drawn = torch.get_rng_state()
    resumed.opt.step()
    assert torch.equal(torch.get_rng_state(), drawn)
    assert resumed.opt.param_groups[0]["lr"] == 0.5 * 0.5**4 and again.checkpoints.resume.is_over
