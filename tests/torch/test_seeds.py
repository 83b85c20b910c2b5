"""Where the seed of a loader's order comes from, and that all workers of a job have the same one."""

from __future__ import annotations

import pathlib
import sys
import textwrap
import threading
from typing import Any

import msgspec
import pytest
import torch
from tests import forked
from tests.leased import FakeJob, LeaseQueue, alone, order
from tests.patience import JOB_PATIENCE, PATIENT_TOML
from tests.torch.test_data import Numbers, flat, lists, train

from syncline.core.checkpoint.snapshot import ledger_at, ledger_to_resume
from syncline.core.leasing.leases import LeaseState, Leasing
from syncline.torch import data
from syncline.torch.data import DataLoader
from syncline.worker.data import leases


def shuffled(job: FakeJob | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(50), 50, True, job=job or alone(), **options)


def follows(batch: list[int], whole: list[int]) -> bool:
    """Whether its samples stand one behind the other in this order."""
    at = whole.index(batch[0])
    return batch == whole[at : at + len(batch)]


def test_the_seed_is_the_loaders_else_the_generators_else_the_scripts() -> None:
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4)
    assert lists(shuffled(seed=5, generator=generator)) == [order(50, 5, 0)]
    assert lists(shuffled(generator=generator)) == [order(50, 4, 0)]
    assert lists(shuffled()) == [order(50, 3, 0)]


def test_a_script_that_has_set_no_seed_has_the_order_of_seed_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch seeds itself with random bits; two runs of such a script still read in one order."""
    torch.manual_seed(1 << 60)
    monkeypatch.setattr(data, "SEED_AT_IMPORT", 1 << 60)
    assert lists(shuffled()) == [order(50, 0, 0)]
    torch.manual_seed(7)
    monkeypatch.setattr(data, "SEED_AT_IMPORT", 7)
    assert lists(shuffled()) == [order(50, 7, 0)], "set before our import"


@pytest.mark.parametrize("seed", [-1, (1 << 64) + 3])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert lists(shuffled(seed=seed)) == [order(50, seed, 0)]


def test_the_seed_is_taken_at_the_first_training_pass_and_kept() -> None:
    """A script may call `manual_seed` behind the loader, and again in the middle of training."""
    torch.manual_seed(1)
    loader = shuffled()
    with torch.no_grad():
        assert lists(loader) == [order(50, 1, 0)], "an evaluation decides nothing"
    torch.manual_seed(2)
    assert lists(loader) == [order(50, 2, 0)]
    torch.manual_seed(9)
    assert lists(loader) == [order(50, 2, 1)]
    with torch.no_grad():
        assert lists(loader) == [order(50, 2, 1)], "the job's seed, where it is known"


@pytest.mark.parametrize("in_rounds", [True, False])
def test_workers_with_different_seeds_read_every_sample_once_in_the_chiefs_order(in_rounds: bool) -> None:
    """`torch.manual_seed(job.rank)` is in many scripts: with orders of their own, samples were lost and repeated."""
    lease_queue = LeaseQueue(3, in_rounds=in_rounds)

    def work(job: FakeJob) -> list[list[list[int]]]:
        loader: DataLoader[Any] = DataLoader(
            Numbers(60), 4, True, generator=torch.Generator().manual_seed(10 + job.rank), job=job
        )
        return [train(loader, job) for _ in range(2)]

    found = lease_queue.run(work)
    for epoch in range(2):
        batches = [batch for each in found for batch in each[epoch]]
        assert sorted(flat(batches)) == list(range(60))
        assert all(follows(batch, order(60, 10, epoch)) for batch in batches)


def test_a_worker_that_comes_before_the_chief_waits_for_its_seed() -> None:
    lease_queue, waits = LeaseQueue(2, in_rounds=False), threading.Event()

    def work(job: FakeJob) -> int:
        if job.rank == 0:
            assert waits.wait(JOB_PATIENCE)
        else:
            threading.Timer(0.3, waits.set).start()
        loader = shuffled(job, seed=5 + job.rank)
        lists(loader)
        return loader.seed

    assert lease_queue.run(work) == [5, 5]


def test_a_chief_that_does_not_read_this_loader_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "CHIEF_SECONDS", 0.1)
    lease_queue = LeaseQueue(2, in_rounds=False)
    assert flat(train(shuffled(lease_queue[1], seed=6), lease_queue[1])) == order(50, 6, 0)
    assert flat(train(shuffled(lease_queue[1], seed=8, name="own"), lease_queue[1])) == order(50, 8, 0)
    again = shuffled(lease_queue[0], seed=7)
    assert train(again, lease_queue[0]) == [] and again.seed == 6, "and then its seed counts for all"


def test_the_seed_goes_on_with_the_journal_and_a_checkpoint() -> None:
    state = LeaseState()
    assert Leasing(state, in_rounds=True).seed("a", 5, counts=True) == 5
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=LeaseState)
    assert Leasing(kept, in_rounds=True).seed("a", 6, counts=True) == 5
    assert Leasing(ledger_to_resume(ledger_at(state, [], [])), in_rounds=True).seed("a", 6, counts=True) == 5


SCRIPT = """
    import os, pathlib, sys, time, torch, syncline
    from syncline.torch import DataLoader, DistributedOptimizer

    job = syncline.init()
    torch.manual_seed(100 + job.rank)
    model = torch.nn.Linear(1, 1)
    opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
    loader = DataLoader(torch.utils.data.TensorDataset(torch.arange(40.0).reshape(-1, 1)), 5, shuffle=True)
    if job.is_chief:
        time.sleep(1)                                   # the other one opens the loader first
    read = pathlib.Path(f"read-{job.rank}-{os.getpid()}").open("w", buffering=1)
    for epoch in range(2):
        for number, (x,) in enumerate(loader):
            if job.rank == 1 and epoch == 0 and number == 1 and not pathlib.Path("died").exists():
                pathlib.Path("died").touch()
                os._exit(9)                             # its next life draws other seeds, and reads in the same order
            model(x).mean().backward()
            opt.step()
            opt.zero_grad()
            read.write(f"{epoch} " + " ".join(str(int(v)) for v in x.flatten().tolist()) + chr(10))
"""


@pytest.mark.proof
def test_a_script_that_seeds_by_rank_loses_and_repeats_nothing(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "syncline.toml").write_text(PATIENT_TOML)
    done = forked.run(
        [sys.executable, "-m", "syncline", "run", "-w", "2", "-s", "1", "script.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=JOB_PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for path in tmp_path.glob("read-*") for line in path.read_text().splitlines()]
    for epoch in range(2):
        read = [[int(number) for number in numbers] for each, *numbers in lines if int(each) == epoch]
        assert sorted(flat(read)) == list(range(40))
        assert all(follows(batch, order(40, 100, epoch)) for batch in read), "in the chief's order"
