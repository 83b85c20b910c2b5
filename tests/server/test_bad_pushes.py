"""A push that is not finite counts nowhere: its clock advances, its round goes on, and it is said by whom and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline import Rule, RuleError
from syncline.testing import local_job
from syncline.worker import kv
from syncline.worker.job import Job

MOMENTUM = Rule("SGD", lr=1.0, momentum=0.5)
#: "a" lies on one server and "b" on another, where there are two.
SERVERS = [pytest.param({}, id="one server"), pytest.param({"servers": 2, "slice_bytes": 64}, id="two servers")]
Values = dict[str, Any]
NAN, INF = float("nan"), float("inf")


def gradient(rank: int, step: int) -> Values:
    """Small integers, all different: sums and halves of them are exact."""
    chance = np.random.default_rng((rank, step))
    return {name: chance.integers(-64, 64, 16).astype(np.float32) for name in "ab"}


def start() -> Values:
    return {name: np.full(16, 1000.0, np.float32) for name in "ab"}


def alone(rounds: list[Values]) -> Values:
    """The parameters after these rounds, each the whole of what was pushed in it."""
    with local_job(workers=1) as jobs:
        jobs[0].kv.register(start(), MOMENTUM)
        for pushed in rounds:
            jobs[0].kv.push(pushed).wait()
        return dict(jobs[0].kv.pull())


def mean(step: int) -> Values:
    return {name: (gradient(0, step)[name] + gradient(1, step)[name]) / 2 for name in "ab"}


def same(one: Values, two: Values) -> bool:
    return all(np.array_equal(one[name], two[name]) for name in "ab")


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("settings", SERVERS)
def test_the_round_is_that_of_the_others_alone(
    settings: Values, bad: float, capfd: pytest.CaptureFixture[str]
) -> None:
    """Worker-1's second push has one bad item, in "b" alone: neither "b" nor "a" of it counts on any server."""

    def work(job: Job) -> tuple[Values, int, dict[str, int], tuple[int, bool]]:
        job.kv.register(start(), MOMENTUM)
        pulled: Values = {}
        for step in range(4):
            pushed = gradient(job.rank, step)
            if (job.rank, step) == (1, 1):
                pushed["b"][11] = bad
            pulled = dict(job.kv.push_pull(pushed, weight=3.0).wait() or {})
        stats = job.stats()
        return pulled, job.exchange.clock, job.kv.pull().versions, (stats.num_refused, stats.is_quarantined)

    with local_job(workers=2, **settings) as jobs:
        results = jobs.run(work)
        commits = [server.num_commits for server in jobs[0].stats().servers]
    expected = alone([mean(0), gradient(0, 1), mean(2), mean(3)])
    for pulled, clock, versions, _ in results:
        assert same(pulled, expected) and clock == 4 and set(versions.values()) == {4}
    assert [refused for *_, refused in results] == [(0, False), (1, False)]
    assert set(commits) == {8}, "the refused push is a commit of its clock on every server"
    lines = [line for line in capfd.readouterr().err.splitlines() if "refused" in line]
    text = "the push of step 2 was refused: 'b' is not finite; the round continues without it"
    assert lines == [f"syncline: worker-1: {text}"]


@pytest.mark.parametrize("settings", SERVERS)
@pytest.mark.parametrize("policy", ["async", "bounded:1", "async+window"])
def test_without_rounds_nothing_of_it_is_applied(policy: str, settings: Values) -> None:
    """Plain sums: what was acknowledged is in, what was refused is not, on no server."""
    if policy == "async+window":
        policy, settings = "async", {**settings, "window": 2}

    def work(job: Job) -> tuple[Values, int, int]:
        job.kv.register(start(), Rule("SGD", lr=1.0))
        tickets = []
        for step in range(6):
            pushed = gradient(job.rank, step)
            if job.rank == 1 and step % 2:
                pushed["a"][0] = NAN
            tickets.append(job.kv.push(pushed))
        for ticket in tickets:
            ticket.wait()
        job.barrier("all in")
        return dict(job.kv.pull()), job.exchange.clock, job.exchange.finite.num_refused

    with local_job(workers=2, policy=policy, **settings) as jobs:
        results = jobs.run(work)
    counted = [gradient(0, step) for step in range(6)] + [gradient(1, step) for step in (0, 2, 4)]
    expected = {name: 1000.0 - sum(pushed[name] for pushed in counted) for name in "ab"}
    for (pulled, clock, num_refused), refused in zip(results, (0, 3), strict=True):
        assert same(pulled, expected) and clock == 6 and num_refused == refused


@pytest.mark.parametrize("settings", SERVERS)
def test_who_is_bad_again_and_again_is_quarantined_and_goes_on_pulling(
    settings: Values, capfd: pytest.CaptureFixture[str]
) -> None:
    """After three in a row even good pushes of worker-1 count for nothing; it sees what the others make."""

    def work(job: Job) -> tuple[Values, bool]:
        job.kv.register(start(), MOMENTUM)
        pulled: Values = {}
        for step in range(7):
            pushed = gradient(job.rank, step)
            if job.rank == 1 and 1 <= step <= 3:
                pushed["a"][3] = NAN
            pulled = dict(job.kv.push_pull(pushed).wait() or {})
        return pulled, job.stats().is_quarantined

    with local_job(workers=2, **settings) as jobs:
        (one, is_bad), (two, is_quarantined) = jobs.run(work)
    assert same(one, two) and same(one, alone([mean(0), *(gradient(0, step) for step in range(1, 7))]))
    assert is_quarantined and not is_bad
    lines = [line for line in capfd.readouterr().err.splitlines() if "quarantined" in line]
    text = "worker-1 is quarantined: 3 pushes in a row were not finite; from now on it only pulls"
    assert lines == [f"syncline: worker-1: {text}"]


def test_a_round_that_nobody_has_anything_for_changes_nothing_and_ends() -> None:
    def work(job: Job) -> tuple[Values, dict[str, int]]:
        job.kv.register(start(), MOMENTUM)
        job.kv.push({"a": np.full(16, NAN, np.float32)}).wait(PATIENCE)
        pulled = job.kv.pull()
        return dict(pulled), pulled.versions

    with local_job(workers=2, servers=2) as jobs:
        for pulled, versions in jobs.run(work):
            assert same(pulled, start()) and set(versions.values()) == {0}


def test_the_only_worker_is_told_instead_of_running_for_nothing() -> None:
    with local_job(workers=1) as jobs:
        kv = jobs[0].kv
        kv.register(start(), MOMENTUM)
        for _ in range(2):
            kv.push({"a": np.full(16, NAN, np.float32)}).wait()
        with pytest.raises(RuleError, match=r"worker-0: 'a' is not finite at step 3; 3 pushes in a row"):
            kv.push({"a": np.full(16, NAN, np.float32)})
        assert same(dict(kv.pull()), start())


def test_masks_are_assigned_with_what_is_in_them() -> None:
    """What is assigned may hold -inf, at the registration and after; only what is added up must not."""
    mask = np.array([0.0, -INF, NAN, 1.0], np.float32)
    with local_job(workers=1, bad_pushes=1) as jobs:
        kv = jobs[0].kv
        kv.register({"mask": mask, "sum": np.zeros(4, np.float32)}, {"mask": Rule("Assign"), "sum": Rule("Add")})
        kv.push({"mask": mask[::-1].copy(), "sum": np.ones(4, np.float32)}).wait()
        pulled = kv.pull()
        assert np.array_equal(pulled["mask"], mask[::-1], equal_nan=True) and (pulled["sum"] == 1.0).all()
        with pytest.raises(RuleError, match="'sum' is not finite"):
            kv.push({"mask": mask, "sum": mask})


def test_gradients_filled_in_place_are_looked_at_too() -> None:
    """They lie in the arena, where the last push's bytes of other parameters are stale, and must not matter."""

    def work(job: Job) -> tuple[Values, int]:
        job.kv.register(start(), MOMENTUM)
        places = job.kv.gradients()
        for value in (NAN, 1.0):
            places["a"][:], places["b"][:] = 1.0, value
            job.kv.push(places).wait()
        places["b"][:] = NAN
        job.kv.push({"a": places["a"]}).wait()
        return dict(job.kv.pull()), job.exchange.finite.num_refused

    with local_job(workers=2) as jobs:
        for pulled, num_refused in jobs.run(work):
            assert num_refused == 1 and pulled["b"][0] == 999.0 and pulled["a"][0] == 1000.0 - 1.0 - 1.5


@pytest.mark.parametrize("bad", ["a", "b"])
def test_what_is_copied_and_what_lies_there_already(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a push whose "a" is copied and whose "b" was filled in place, both must be finite."""
    monkeypatch.setattr(kv, "LOOK_BYTES", 1)

    def work(job: Job) -> tuple[Values, int]:
        job.kv.register(start(), MOMENTUM)
        place = job.kv.gradients(["b"])["b"]
        own = np.ones(16, np.float32)
        place[:] = 1.0
        (own if bad == "a" else place)[15] = NAN
        job.kv.push({"a": own, "b": place}).wait()
        mine = {name: np.full(16, NAN if name == bad else 1.0, np.float32) for name in "ab"}
        job.kv.push(mine).wait()
        job.kv.push({name: np.ones(16, np.float32) for name in "ab"}, weight=2.0).wait()
        return dict(job.kv.pull()), job.exchange.finite.num_refused

    with local_job(workers=2) as jobs:
        for pulled, num_refused in jobs.run(work):
            assert num_refused == 2 and (pulled["a"] == 999.0).all() and (pulled["b"] == 999.0).all()


def test_it_can_be_turned_off() -> None:
    with local_job(workers=1, check_finite=False) as jobs:
        kv = jobs[0].kv
        kv.register(start(), MOMENTUM)
        for _ in range(4):
            kv.push({"a": np.full(16, NAN, np.float32)}).wait()
        assert np.isnan(kv.pull()["a"]).all() and jobs[0].stats().num_refused == 0
