"""The table at the end of a job: each kind of end has its rows, and no row says more than is known."""

from __future__ import annotations

import dataclasses

import pytest

from syncline.launch.summary import COLUMNS, Death, Facts, duration, finished, lines

WELL = Facts(
    verdict=finished(2, 2),
    seconds=41.0,
    logs="runs/train",
    is_known=True,
    is_final=True,
    start_seconds=6.04,
    policy="sync",
    num_steps=1407,
    num_samples=120_000,
    sample_seconds=35.17,
    readings={"loss": 0.31, "accuracy": 0.893},
)
KILLED = Death("worker-1", "was killed by SIGKILL", 300, True, 2.13)


def table(**changes: object) -> str:
    return "\n".join(lines(dataclasses.replace(WELL, **changes)))  # type: ignore[arg-type]


def labels(**changes: object) -> list[str]:
    rows = lines(dataclasses.replace(WELL, **changes))[1:]  # type: ignore[arg-type]
    return [row[2:15].strip() for row in rows if row[2] != " "]


def test_a_job_that_ended_well() -> None:
    assert lines(WELL) == [
        "the job has finished: all 2 workers ended well",
        "  time         41 s, 6.0 s of it to start",
        "  steps        1,407 (sync), 120,000 samples read, 3,412 samples/s",
        "  metrics      accuracy 0.893, loss 0.31",
        "  logs         runs/train",
    ]


@pytest.mark.parametrize(
    ("num_well", "num_workers", "who"),
    [(1, 1, "its worker"), (3, 3, "all 3 workers"), (1, 2, "1 of 2 workers"), (0, 1, "0 of 1 worker")],
)
def test_the_verdict_counts_only_workers_that_ended_well(num_well: int, num_workers: int, who: str) -> None:
    assert finished(num_well, num_workers) == f"the job has finished: {who} ended well"


def test_a_job_without_samples_has_steps_only() -> None:
    assert "  steps        1,407 (sync)\n" in table(num_samples=0, sample_seconds=0.0)


def test_a_stop_rule_the_best_checkpoint_saves_and_bytes_have_rows() -> None:
    said = table(
        stop="--stop 'accuracy>=0.9': accuracy = 0.912 at step 480",
        best="accuracy 0.912 at step 480: saves/000012-step-480",
        saves="12 saved in saves; the last: 000012-step-480",
        pushed="85 B over sockets",
    )
    assert "  stopped by   --stop 'accuracy>=0.9': accuracy = 0.912 at step 480\n" in said
    assert "  best         accuracy 0.912 at step 480: saves/000012-step-480\n" in said
    assert "  checkpoints  12 saved in saves; the last: 000012-step-480\n" in said
    assert "  pushed       85 B over sockets per step, by all workers\n" in said


def test_numbers_from_before_the_end_are_called_so() -> None:
    """The job failed, or was interrupted, or its coordinator was lost."""
    said = table(verdict="the job has failed: worker-0 ended with exit code 1", is_final=False)
    assert said.startswith("the job has failed: worker-0 ended with exit code 1\n")
    assert "3,412 samples/s; as last reported\n" in said


def test_a_job_that_did_not_start_says_what_was_missing_once() -> None:
    facts = {"start_seconds": None, "missing": ("worker-0", "worker-1"), "is_final": False, "readings": {}}
    assert "41 s; the job did not start: waited for worker-0, worker-1\n" in table(**facts)
    assert "41 s; the job did not start\n" in table(verdict="worker-0, worker-1 did not come up", **facts)
    assert labels(**facts) == ["time", "logs"]


def test_what_no_coordinator_ever_said_is_left_out() -> None:
    facts = Facts(verdict="interrupted by SIGINT", seconds=0.5, logs="runs/x")
    assert lines(facts) == ["interrupted by SIGINT", "  time         0.5 s", "  logs         runs/x"]


def test_deaths_and_what_they_cost() -> None:
    gone = Death("worker-0", "was killed by SIGTERM", 0, False)
    late = Death("server-0", "was killed by SIGKILL", 1400, True)
    said = " ".join(table(deaths=(KILLED, gone, late), num_revoked=3).split())
    assert "deaths worker-1 was killed by SIGKILL at step 300, back after 2.1 s;" in said
    assert "worker-0 was killed by SIGTERM, not restarted;" in said
    assert (
        "server-0 was killed by SIGKILL at step 1,400, not back before the end; 3 acknowledged updates revoked"
        in said
    )


def test_samples_of_a_worker_that_died_are_not_known_exactly() -> None:
    assert "about 120,000 samples read, about 3,412 samples/s" in table(deaths=(KILLED,))
    other = dataclasses.replace(KILLED, name="coordinator")
    assert "(sync), 120,000 samples read" in table(deaths=(other,))


def test_many_deaths_are_counted_by_member() -> None:
    deaths = [dataclasses.replace(KILLED, name=f"worker-{k}", back_seconds=1.0 + k) for k in (10, 2, 2, 2)]
    deaths += [dataclasses.replace(KILLED, back_seconds=None, died_again=again) for again in (True, False)]
    said = " ".join(table(deaths=deaths).split())
    assert "deaths 6 (worker-1 2, worker-2 3, worker-10 1); 4 back after 11 s at most; 1 died again" in said
    assert "1 died again before that; 1 not back logs" in said


def test_it_is_narrow_and_cuts_no_path() -> None:
    path = "runs/" + "x" * 120
    rows = lines(dataclasses.replace(WELL, deaths=[KILLED] * 3, logs=path, best="accuracy " * 20))
    assert all(len(row) <= COLUMNS for row in rows if path not in row)
    assert sum(path in row for row in rows) == 1
    assert [row for row in rows if "back after" in row][1].startswith(" " * 15), "under the first one's text"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (119.4, "119 s"), (200.0, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said
