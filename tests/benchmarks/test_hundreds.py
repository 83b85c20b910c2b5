"""The crowd that is played to a real coordinator: few members here, and short turns."""

from __future__ import annotations

import time

import pytest
from tests.patience import PATIENCE

from benchmarks import hundreds
from benchmarks.row import Effort, Outcome, Reach
from syncline.core.wire.control import AskLook, AskStatus, GivenLook, GivenStatus
from syncline.errors import JobFailed
from syncline.launch import jobfile
from syncline.launch.watching import ask
from syncline.stats import JobLook

pytest.importorskip("starlette")
REACH = Reach("at most", 1.0)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hundreds, "START_SECONDS", PATIENCE)
    monkeypatch.setattr(hundreds, "WARM_SECONDS", 0.1)
    monkeypatch.setattr(hundreds, "TURN_SECONDS", 0.2)


def seems_real(look: JobLook | None) -> bool:
    members = look.figures.members if look is not None else ()
    workers = [member for member in members if member.role == "worker"]
    servers = [member for member in members if member.role == "server"]
    return (
        len(workers) == 5
        and len(servers) == 2
        and all(one.num_steps and one.compute and one.peers and one.cores for one in workers)
        and all(one.num_rounds and one.apply and one.busiest for one in servers)
    )


@pytest.mark.slow
def test_members_that_are_played_look_real() -> None:
    """The coordinator has them all, with steps, times and readings, a registered model, and a browser's look."""
    with hundreds.hundreds(5, 2) as job:
        file, until = jobfile.read(job.file), time.monotonic() + PATIENCE
        while not (job.num_looks and seems_real(ask(file, AskLook(), GivenLook).look)):
            job.look()
            assert time.monotonic() < until
            time.sleep(0.1)
        status = ask(file, AskStatus(), GivenStatus).status
        job.process.kill()
        job.process.wait()
        with pytest.raises(JobFailed, match="the coordinator has ended"):
            job.look()
    assert {member.name for member in status.members} == {*(f"worker-{k}" for k in range(5)), "server-0", "server-1"}
    assert sum(member.num_primary for member in status.members) > 0 and "loss" in status.readings
    assert status.step


@pytest.mark.slow
def test_both_rows_have_figures_of_the_coordinator(fast: Effort) -> None:
    spent = hundreds.coordinator_processor("h", 4, 1, 0.2, reach=REACH)
    samples = spent.measure(fast)
    assert set(samples.reference) == {0.2} and min(samples.ours) >= 0 and max(samples.ours) < 2
    memory = hundreds.coordinator_memory_of_many("m", 4, 1, 200e6, reach=REACH)
    samples = memory.measure(fast)
    assert 0.1 < Outcome(memory, samples).ratio < 2
