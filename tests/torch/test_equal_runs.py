"""Two equal runs in `sync` are equal bit for bit, whoever is slow when: of shards and of samples by number."""

from __future__ import annotations

import pathlib
import random
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from tests import forked
from tests.patience import JOB_PATIENCE, PATIENT_TOML

from syncline.testing import local_job
from syncline.torch import DataLoader, DistributedOptimizer
from syncline.worker.job import Job

WORKERS, EPOCHS = 3, 3
Made = list[tuple[int, list[float]]]


class Files(torch.utils.data.IterableDataset[torch.Tensor]):
    """Shards of different lengths, some of them empty."""

    def __init__(self, lengths: list[int]) -> None:
        self.shards = list(enumerate(lengths))

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number, length in self.shards:
            for k in range(length):
                yield torch.tensor([0.1 * number, 0.01 * k - 0.3])


def numbers(count: int) -> torch.utils.data.Dataset[Any]:
    return torch.utils.data.TensorDataset(torch.linspace(-1, 1, 2 * count).reshape(count, 2))


def run(data: Any, delays: int, **settings: Any) -> list[Made]:
    """For each worker: what its model was behind each step, and which epoch that was in."""

    def work(job: Job) -> Made:
        draw = random.Random(f"{delays} {job.rank}")
        model = torch.nn.Linear(2, 1).double()
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[0.3, -0.2]]))
            model.bias.zero_()
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), model=model)
        loader: DataLoader[Any] = DataLoader(data, 4, shuffle=True, seed=1, job=job)
        found: Made = []
        for epoch in range(EPOCHS):
            for batch in loader:
                time.sleep(draw.choice((0, 0, 0, 0.002, 0.03)))
                x = (batch[0] if isinstance(batch, list) else batch).double()
                opt.zero_grad()
                torch.tanh(model(x)).pow(2).mean().backward()
                opt.step()
                found.append((epoch, model.weight.flatten().tolist()))
                time.sleep(draw.choice((0, 0, 0, 0.002, 0.03)))
            time.sleep(draw.choice((0, 0.05)))
        job.barrier("trained")
        opt.pull()
        found.append((EPOCHS, model.weight.flatten().tolist()))
        return found

    with local_job(workers=WORKERS, **settings) as jobs:
        return jobs.run(work)


DATA: dict[str, Any] = {
    "shards": Files([10, 0, 23, 1, 8, 4, 17]), "fewer shards than workers": Files([40, 3]),
    "empty shards": Files([0, 0, 5, 9]), "samples": numbers(50), "whole batches": numbers(36),
    "a small last batch": numbers(13), "fewer samples than workers": numbers(2),
}  # fmt: skip
QUICK = ("empty shards", "samples", "a small last batch")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.proof) for kind in DATA]
)
def test_two_equal_runs_are_bit_equal_whoever_is_slow_when(kind: str) -> None:
    first, *others = [run(DATA[kind], delays) for delays in range(4)]
    for other in others:
        assert other == first


@pytest.mark.slow
def test_so_are_those_of_a_ring() -> None:
    first, *others = [run(DATA["shards"], delays, exchange="ring") for delays in range(3)]
    assert all(other == first for other in others)


SCRIPT = """
    import os, pathlib, random, sys, time, torch, syncline
    from syncline.torch import DataLoader, DistributedOptimizer

    class Files(torch.utils.data.IterableDataset):
        def __init__(self):
            self.shards = list(enumerate([10, 0, 23, 1, 8, 4, 17]))
        def __iter__(self):
            for number, length in self.shards:
                yield from (100 * number + k for k in range(length))

    job, draw = syncline.init(), random.Random(os.urandom(8))
    torch.manual_seed(7)
    model = torch.nn.Linear(1, 1)
    opt = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
    read = pathlib.Path(f"read-{job.rank}-{os.getpid()}").open("w", buffering=1)
    loader = DataLoader(Files(), 4, shuffle=True)
    for epoch in range(2):
        for number, x in enumerate(loader):
            time.sleep(draw.choice((0, 0, 0.01, 0.05)))
            if sys.argv[1:] and job.rank == 1 and epoch == 1 and number == 2 and not pathlib.Path("died").exists():
                pathlib.Path("died").touch()
                os._exit(9)
            opt.zero_grad()
            torch.tanh(model(x.float().reshape(-1, 1) / 100)).mean().backward()
            opt.step()
            read.write(" ".join(str(int(v)) for v in (epoch, *x)) + chr(10))
    job.barrier("trained")
    opt.pull()
    if job.is_chief:
        pathlib.Path("model").write_text(" ".join(p.item().hex() for p in model.parameters()))
"""


def run_script(folder: pathlib.Path, *arguments: str) -> tuple[str, dict[int, list[int]]]:
    """The model's bits, and what was read in each epoch."""
    folder.mkdir()
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    (folder / "syncline.toml").write_text(PATIENT_TOML)
    done = forked.run(
        [sys.executable, "-m", "syncline", "run", "-w", "3", "-s", "1", "script.py", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=JOB_PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for path in folder.glob("read-*") for line in path.read_text().splitlines()]
    read = {epoch: sorted(int(n) for each, *some in lines if int(each) == epoch for n in some) for epoch in range(2)}
    return (folder / "model").read_text(), read


@pytest.mark.proof
@pytest.mark.slow
def test_processes_that_read_shards_are_bit_equal_and_a_dead_ones_shards_are_read_by_others(
    tmp_path: pathlib.Path,
) -> None:
    every = sorted(100 * number + k for number, length in DATA["shards"].shards for k in range(length))
    first, again = run_script(tmp_path / "one"), run_script(tmp_path / "two")
    assert first == again and first[1] == {0: every, 1: every}
    assert run_script(tmp_path / "dies", "dies")[1] == {0: every, 1: every}
