"""Evaluation loops: what each worker reads with gradients disabled, what `len` says, and what the user is told."""

from __future__ import annotations

import itertools
import pathlib
import sys
import textwrap
from typing import Any

import pytest
import torch
import torch.utils.data
from tests import forked
from tests.leased import LeaseQueue, alone, order
from tests.patience import JOB_PATIENCE, PATIENT_TOML
from tests.torch.test_data import Numbers, flat, lists, seed_of_the_script, train
from tests.torch.test_shards import ALL, LENGTHS, Files, numbers, source

from syncline.errors import ConfigError
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.torch.data import DataLoader
from syncline.worker.job import Job

__all__ = ["seed_of_the_script"]
DISABLED = pytest.mark.parametrize("disabled", [torch.no_grad, torch.inference_mode], ids=lambda f: f.__name__)


@DISABLED
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_with_gradients_disabled_every_worker_reads_the_whole_set(disabled: Any, options: dict[str, Any]) -> None:
    lease_queue = LeaseQueue(3)
    with disabled():
        for job in lease_queue:
            loader: DataLoader[Any] = DataLoader(Numbers(10), 4, job=job, **options)
            assert lists(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and len(loader) == 3
    assert not lease_queue.heard, "no lease, no epoch"


@pytest.mark.parametrize("data", [Files, source])
def test_a_whole_pass_reads_all_shards(data: Any) -> None:
    lease_queue = LeaseQueue(2)
    with torch.no_grad():
        for job in lease_queue:
            loader: DataLoader[Any] = DataLoader(data(LENGTHS), 4, job=job)
            assert list(itertools.chain(*(numbers(batch) for batch in loader))) == ALL
    assert not lease_queue.heard


def test_an_epoch_does_not_advance_by_a_whole_pass_and_shuffled_passes_differ() -> None:
    job = LeaseQueue(2)[0]
    loader = DataLoader(Numbers(50), 50, True, job=job)
    with torch.no_grad():
        assert [lists(loader)[0], lists(loader)[0]] == [order(50, 0, 0), order(50, 0, 1)]
    assert job.samples.progress == (0, 0, 0)
    lease_queue = LeaseQueue()
    loader = DataLoader(Numbers(50), 50, True, job=lease_queue[0])
    with torch.no_grad():
        lists(loader)
    assert lists(loader) == [order(50, 0, 0)]


def test_len_is_that_of_the_pass() -> None:
    """`loss /= len(test_loader)` often stands outside of the `with`; `tqdm(loader)` asks before the pass."""
    loader = DataLoader(Numbers(40), 4, job=LeaseQueue(2)[0])
    assert len(loader) == 5, "before any pass: this worker's share"
    with torch.no_grad():
        assert len(loader) == 10
        batches = iter(loader)
    assert len(loader) == 10, "during the pass"
    assert len(list(batches)) == len(loader) == 10, "after it"
    training = iter(loader)
    assert len(loader) == 5, "a training pass: the share again"
    training.close()  # type: ignore[attr-defined]
    assert len(loader) == 5


def test_split_gives_each_worker_its_part_of_an_evaluation() -> None:
    lease_queue, read, shards = LeaseQueue(2), [], []
    with torch.no_grad():
        for job in lease_queue:
            loader = DataLoader(Numbers(10), 4, split=True, job=job)
            read += flat(lists(loader))
            assert len(loader) == 2
            shards += [numbers(batch) for batch in DataLoader(Files(LENGTHS), 4, split=True, job=job)]
            assert not job.noticed
    assert sorted(read) == list(range(10)) and sorted(itertools.chain(*shards)) == ALL
    assert not lease_queue.heard


def test_split_is_leased_in_training() -> None:
    lease_queue = LeaseQueue(2, in_rounds=False)
    loaders = [DataLoader(Numbers(20), 4, split=True, job=job) for job in lease_queue]
    read = [flat(train(loader, job)) for loader, job in zip(loaders, lease_queue, strict=True)]
    assert sorted(flat(read)) == list(range(20)) and lease_queue.heard


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "prefetch_factor": 4}])
def test_without_split_every_worker_trains_on_the_whole_set(options: dict[str, Any]) -> None:
    """No lease; passes are numbered, so that their orders differ; batches count when the script takes them."""
    lease_queue = LeaseQueue(2)
    for job in lease_queue:
        loader: DataLoader[Any] = DataLoader(Numbers(10), 4, True, split=False, job=job, **options)
        assert len(loader) == 3 and loader.total_steps == 3
        taken, read = [], []
        for batch in loader:
            taken.append(job.samples.taken)
            read += batch.tolist()
        assert read == order(10, 0, 0) and taken == [4, 8, 10] and job.samples.progress == (0, 3, 3)
        assert flat(lists(loader)) == order(10, 0, 1) and job.samples.progress == (1, 3, 3)
        with torch.no_grad():
            assert flat(lists(loader)) == order(10, 0, 2) and job.samples.taken == 20
        assert not job.num_rests and not job.noticed
    assert not lease_queue.heard
    assert DataLoader(Numbers(10), 4, split=False, job=LeaseQueue(2, in_rounds=False)[0]).total_steps == 6


def test_a_stop_rule_ends_training_on_the_whole_set() -> None:
    job = LeaseQueue(2)[0]
    for number, _ in enumerate(DataLoader(Numbers(20), 4, split=False, job=job), 1):
        job.should_stop = number == 2  # type: ignore[misc]
    assert job.samples.taken == 8


def test_the_first_whole_pass_says_what_changed_and_only_among_several_workers() -> None:
    job = LeaseQueue(2)[0]
    with torch.no_grad():
        lists(DataLoader(Numbers(4), 2, job=job))
    (notice,) = job.noticed
    assert "every worker now reads the whole data set" in notice
    assert "split=True" in notice and "job.validate" in notice
    single = alone()
    with torch.no_grad():
        lists(DataLoader(Numbers(4), 2, job=single))
    assert not single.noticed


def _to_its_end(loader: DataLoader[Any]) -> None:
    lists(loader)


def _left_by_break(loader: DataLoader[Any]) -> None:
    for _ in loader:
        break


def _one_batch(loader: DataLoader[Any]) -> None:
    next(iter(loader))


@pytest.mark.parametrize("read", [_to_its_end, _left_by_break, _one_batch])
def test_samples_that_no_step_used_are_told_with_the_remedy(read: Any) -> None:
    job = LeaseQueue(2, in_rounds=False)[0]
    loader = DataLoader(Numbers(4), 2, job=job)
    read(loader)
    iter(loader)
    (notice,) = job.noticed
    assert "no step used them" in notice and "torch.no_grad()" in notice and "step() inside the loop" in notice
    single = alone()
    read(DataLoader(Numbers(4), 2, job=single))
    assert not single.noticed, "alone nothing is lost by it"


def test_nothing_is_told_of_a_loop_with_steps_or_one_that_failed_or_was_stopped() -> None:
    lease_queue = LeaseQueue(2, in_rounds=False)
    train(DataLoader(Numbers(8), 2, job=lease_queue[0]), lease_queue[0])
    for _ in DataLoader(Numbers(8), 2, job=lease_queue[0]):
        lease_queue[0].step()
        break
    for _ in DataLoader(Numbers(8), 2, job=lease_queue[0]):
        lease_queue[0].should_stop = True  # type: ignore[misc]
    lease_queue[0].should_stop = False  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        _fail(DataLoader(Numbers(8), 2, job=lease_queue[0]))
    assert not lease_queue[0].noticed


def _fail(loader: DataLoader[Any]) -> None:
    for _ in loader:
        raise ZeroDivisionError


def test_a_job_that_ends_after_such_a_loop_is_told_at_its_end() -> None:
    def work(job: Job) -> list[str]:
        loader = DataLoader(Numbers(8), 2, job=job)
        if job.is_chief:
            next(iter(loader))
        job.close()
        return [text for text in job.debug_state().notices if "no step used them" in text]

    with local_job(workers=2) as jobs:
        chief, other = jobs.run(work)
    assert len(chief) == 1 and not other


@pytest.mark.parametrize("split", [0, 1, "yes"])
def test_split_is_none_or_a_bool(split: Any) -> None:
    with pytest.raises(ConfigError, match=r"split = .*: give None, True or False"):
        DataLoader(Numbers(4), 2, split=split, job=alone())


def test_the_chief_alone_evaluates_on_the_whole_set_between_two_steps() -> None:
    def work(job: Job) -> int:
        model = torch.nn.Linear(1, 1)
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        tests, seen = DataLoader(Numbers(100), 8, job=job, name="test"), 0
        for batch in DataLoader(Numbers(16), 2, job=job, name="train"):
            model(batch.float().reshape(-1, 1)).mean().backward()
            opt.step()
            opt.zero_grad()
            if job.is_chief:
                with torch.no_grad():
                    seen = sum(len(batch) for batch in tests)
        return seen

    with local_job(workers=2) as jobs:
        assert jobs.run(work) == [100, 0]


SCRIPT = """
    import torch, syncline
    import torch.nn.functional as F
    from syncline.torch import DataLoader, DistributedOptimizer

    def test(model, test_loader):
        model.eval()
        test_loss, correct = 0, 0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                correct += output.argmax(dim=1).eq(target).sum().item()
        test_loss /= len(test_loader.dataset)
        print(f"Accuracy: {correct}/{len(test_loader.dataset)} batches {len(test_loader)}", flush=True)

    job = syncline.init()
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.LogSoftmax(dim=1))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.copy_(torch.tensor([1.0, 0.0]))
    opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
    x, y = torch.ones(100, 4), (torch.arange(100) < 33).long()
    train = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10, shuffle=True)
    for data, target in train:
        opt.zero_grad()
        F.nll_loss(model(data), target).backward()
        opt.step()
    test(model, DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10))
"""


def test_the_script_of_the_tutorial_prints_the_truth(tmp_path: pathlib.Path) -> None:
    """With the imports swapped as the README shows: 67 of 100, in every worker."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "syncline.toml").write_text(PATIENT_TOML)
    done = forked.run(
        [sys.executable, "-m", "syncline", "run", "-w", "2", "-s", "1", "--name", "tutorial", str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=JOB_PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Accuracy: 67/100 batches 10") == 2, done.stdout
    assert done.stdout.count("every worker now reads the whole data set") == 1, done.stdout
