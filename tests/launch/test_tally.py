"""What the launcher notes for the table: through deaths of workers, and of the coordinator that knows the numbers."""

from __future__ import annotations

from typing import Any

from tests.launch.played import Coordinator

from syncline.core.wire.control import Report, Standings
from syncline.launch.summary import Death, Facts
from syncline.launch.tally import Tally

KILLED = "was killed by SIGKILL"


class Job:
    """A tally, and the coordinator that it hears; the launcher began at second 100."""

    def __init__(self) -> None:
        self.tally, self.now, self.coordinator = Tally(100.0), 100.0, Coordinator(2, 1)
        self.coordinator.change(incarnations={"server-0": 1, "worker-0": 2, "worker-1": 3}, policy="sync")

    def see(self, now: float, **values: Any) -> Standings:
        self.now = now
        self.coordinator.change(**values)
        self.tally.see(self.coordinator.standings, now)
        return self.coordinator.standings

    def facts(self, culprit: str = "") -> Facts:
        return self.tally.facts("over", "runs/x", self.now, culprit)


def report(step: int, samples: int, seconds: float) -> Report:
    return Report(step, samples, seconds, 0, 0, 0, job_step=step)


def test_the_last_reports_count_more_than_the_last_beats() -> None:
    """Servers beat once a second; workers report as they leave."""
    job = Job()
    job.see(107.0, seconds=1.0, step=3)
    reports = {"worker-0": report(40, 640, 8.0), "worker-1": report(40, 640, 8.5)}
    job.see(115.0, seconds=9.0, step=31, reports=reports, verdict="all workers have finished", incarnations={})
    facts = job.facts()
    assert (facts.start_seconds, facts.seconds, facts.num_steps) == (6.0, 15.0, 40)
    assert (facts.num_samples, facts.sample_seconds, facts.is_final, facts.policy) == (1280, 8.5, True, "sync")


def test_a_worker_is_back_when_its_next_life_is_a_member() -> None:
    job = Job()
    job.see(105.0, step=300, reports={"worker-1": report(300, 600, 4.0), "worker-0": report(300, 600, 4.0)})
    job.tally.died("worker-1", KILLED, 106.0, comes_back=True)
    job.see(106.1, incarnations={"server-0": 1, "worker-0": 2, "worker-1": 3})  # not evicted yet
    job.tally.starts_again("worker-1")
    job.see(107.0, incarnations={"server-0": 1, "worker-0": 2}, reports={"worker-0": report(301, 700, 6.0)})
    job.see(108.5, incarnations={"server-0": 1, "worker-0": 2, "worker-1": 9})
    job.see(110.0, reports={"worker-0": report(400, 900, 9.0), "worker-1": report(400, 50, 2.0)})
    facts = job.facts()
    assert facts.deaths == (Death("worker-1", KILLED, 300, True, 2.5),)
    assert facts.num_samples == 900 + 600 + 50, "what its first life read is counted"
    assert facts.sample_seconds == 9.0


def test_a_worker_that_came_back_and_left_between_two_looks_was_back() -> None:
    job = Job()
    job.see(105.0)
    job.tally.died("worker-1", KILLED, 106.0, comes_back=True)
    job.tally.starts_again("worker-1")
    job.see(107.0, incarnations={"server-0": 1, "worker-0": 2})
    assert job.facts().deaths[0].back_seconds is None
    job.see(108.0, incarnations={"server-0": 1}, left=["worker-0", "worker-1"])
    assert job.facts().deaths[0].back_seconds == 2.0


def test_a_life_that_was_never_seen_is_not_taken_for_the_next_one() -> None:
    """It joined and died between two looks: the coordinator still names it when its death is known."""
    job = Job()
    job.see(101.0, incarnations={"server-0": 1})
    job.tally.died("worker-1", KILLED, 102.0, comes_back=True)
    job.see(102.1, incarnations={"server-0": 1, "worker-1": 3})
    job.tally.starts_again("worker-1")
    assert job.facts().deaths[0].back_seconds is None
    job.see(105.0, incarnations={"server-0": 1, "worker-1": 5})
    assert job.facts().deaths[0].back_seconds == 3.0


def test_a_coordinator_that_dies_takes_no_number_with_it() -> None:
    job = Job()
    reports = {"worker-0": report(40, 640, 8.0), "worker-1": report(40, 640, 8.0)}
    job.see(110.0, seconds=9.0, step=40, reports=reports, readings={"loss": 0.5})
    job.tally.died("coordinator", KILLED, 110.1, comes_back=True)
    job.tally.starts_again("coordinator")
    job.see(110.2, seconds=9.0)  # an answer of the one that died
    assert job.facts().deaths[0].back_seconds is None
    job.see(112.1, seconds=0.5, step=0, reports={}, readings={})
    facts = job.facts()
    assert facts.deaths[0].back_seconds == 2.0
    assert (facts.num_steps, facts.num_samples, facts.readings) == (40, 1280, {"loss": 0.5})
    assert facts.start_seconds == 1.0, "that of the job"


def test_a_member_that_dies_again_before_it_is_back() -> None:
    job = Job()
    for at in (101.0, 102.0):
        job.tally.died("worker-1", KILLED, at, comes_back=True)
        job.tally.starts_again("worker-1")
    job.see(105.0, incarnations={"worker-1": 9})
    first, second = job.facts().deaths
    assert first.told() == f"worker-1 {KILLED}, died again before it was back"
    assert second.told() == f"worker-1 {KILLED}, back after 3.0 s"


def test_updates_that_were_revoked_set_the_step_back() -> None:
    job = Job()
    job.see(110.0, step=40)
    job.see(111.0, step=38, num_revoked=2)
    assert (job.facts().num_steps, job.facts().num_revoked) == (38, 2)


def test_bytes_are_left_out_when_a_worker_took_its_own_along() -> None:
    job = Job()
    job.see(101.0, pushed_told="85 B over sockets")
    assert job.facts().pushed == "85 B over sockets"
    job.tally.died("worker-1", KILLED, 102.0, comes_back=True)
    assert job.facts().pushed == ""


def test_the_death_that_ended_the_job_is_in_the_verdict_only() -> None:
    job = Job()
    job.see(101.0)
    job.tally.died("worker-0", "ended with exit code 1", 102.0, comes_back=True)
    job.tally.died("worker-1", "ended with exit code 1", 102.0, comes_back=True)
    assert [death.name for death in job.facts("worker-1").deaths] == ["worker-0"]
