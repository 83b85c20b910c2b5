"""`syncline status`: all that matters, within a hundred columns."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.cli.standing import COLUMNS, show_status
from syncline.stats import EpochProgress, JobStatus, MemberStatus, Wait


def member(name: str, **values: Any) -> MemberStatus:
    known: dict[str, Any] = {
        "name": name,
        "role": name.partition("-")[0],
        "incarnation": 3,
        "host": "local",
        "since": 1,
        "heard_seconds": 0.12,
        "deadline_seconds": 2.0,
        "rtt_seconds": 0.00042,
        "state": "working",
        "pid": 4711,
    }
    return MemberStatus(**{**known, **values})


def job(**values: Any) -> JobStatus:
    known: dict[str, Any] = {
        "job": "3f2a", "name": "demo", "term": 2, "generation": 7, "policy": "sync", "replicas": 2,
        "ack": "replicated", "protection": "every slice has a backup (process-level only)", "seconds": 61.0,
        "members": [member("server-0", num_primary=3, num_backup=2), member("worker-0", step=1812, lag=1)],
        "waits": [], "why": "no member waits for another", "events": [],
    }  # fmt: skip
    return JobStatus(**{**known, **values})


def test_a_quiet_job() -> None:
    assert show_status(job()).splitlines() == [
        "demo: sync · 2 replicas, ack replicated · term 2 · generation 7 · 61 s",
        "a server's death: every slice has a backup (process-level only)",
        "",
        "member    incarnation  host    pid  state     step  lag  heard     rtt  slices",
        "server-0            3  local  4711  working              0.1 s  0.4 ms     3+2",
        "worker-0            3  local  4711  working  1,812    1  0.1 s  0.4 ms",
        "",
        "waits: none",
    ]


def test_a_job_that_starts_says_for_whom_it_waits() -> None:
    """Right after `run --detach` no member has joined: there is no table, and nothing that looks like an error."""
    names = [f"worker-{k}" for k in range(8)]
    text = show_status(job(members=[], missing=["server-0", *names]))
    assert "member " not in text
    waits = "it waits for server-0, worker-0, worker-1, worker-2, worker-3, worker-4 and 3 more to join"
    assert f"the job has not started yet: {waits}" in " ".join(text.split())
    text = show_status(job(members=[member("server-0")], missing=["worker-7"]))
    assert "server-0" in text and "the job has not started yet: it waits for worker-7 to join" in text


def test_how_far_the_epochs_are_and_who_has_read_how_much() -> None:
    epoch = EpochProgress(
        loader="loader-0", epoch=1, num_samples=1000, num_done=380, num_passed_over=16, num_quarantined=4,
        leased={"worker-0": 64},
    )  # fmt: skip
    lines = show_status(
        job(epochs=[epoch], members=[member("worker-0", step=12, samples_per_second=1234.5, share=0.25)])
    ).splitlines()
    assert lines[3].endswith("slices  samples/s  share") and lines[4].endswith("1,234   25 %")
    assert "loader-0: epoch 2 (40 %): 380 samples done, 16 passed over, 4 quarantined, leased: worker-0 64" in lines


def test_who_waits_for_whom_and_what_happened() -> None:
    text = show_status(
        job(
            waits=[Wait("worker-0", 812, ["worker-2"], 3.1, "round"), Wait("", 1, ["worker-2"], 4.0, "barrier")],
            why="step 812 has waited 3.1 s for worker-2 on host b (last heard of 3.0 s ago; evicted in 0.9 s)",
            events=[f"event {k}" for k in range(20)],
            verdict="worker-2 was killed",
        )
    )
    assert "  the round at step 1 waits for worker-2: 4.0 s (barrier)\n  worker-0 at step 812 waits for" in text
    assert "event 19" in text and "event 10" in text and "event 9\n" not in text
    assert text.endswith("the job is over: worker-2 was killed")


@pytest.mark.parametrize("length", [1, 40, 300])
def test_nothing_is_wider_than_a_hundred_columns(length: int) -> None:
    word = "x" * length
    long = member(
        f"worker-{10**5}", host=word, state=word, step=10**9, lag=10**6, heard_seconds=1e5, num_restarts=9, pid=10**7
    )
    status = job(
        name=word,
        protection=f"{word} " * 9,
        members=[long],
        events=[f"{word} " * 9],
        waits=[Wait(word, 7, [word] * 5, 3.0, word)],
        why=word,
    )
    assert max(len(line) for line in show_status(status).splitlines()) <= COLUMNS


def test_readings_and_rules() -> None:
    lines = show_status(
        job(readings={"loss": 0.25, "accuracy": 0.9}, stop="--stop 'loss<1': loss = 0.25", lr_factor=0.1)
    )
    assert "readings: accuracy 0.9, loss 0.25" in lines
    assert "learning rates are multiplied by 0.1" in lines
    assert "training has stopped by --stop 'loss<1': loss = 0.25" in lines


def test_a_loop_over_steps_has_steps_and_no_samples() -> None:
    epoch = EpochProgress(loader="steps-0", epoch=0, num_samples=1000, num_done=400, num_passed_over=2, is_steps=True)
    shown = show_status(job(epochs=[epoch]))
    assert "job.steps: 40 % of 1,000 steps: 400 steps done, 2 passed over" in shown and "samples" not in shown
