"""Sums of the last seconds: the same as the plain formulas say, over random looks."""

from __future__ import annotations

import random
import statistics

import msgspec
import pytest

from syncline.core.windows import Window, add_up
from syncline.stats import JobFigures, MemberFigures, Wait

PHASES = ("compute", "data", "stage", "wait", "pull", "transfer", "total")


def looks(seed: int, num_workers: int = 6) -> list[JobFigures]:
    """Members come and go, and make no step in some looks; some figures are equal."""
    chance = random.Random(seed)
    found = []
    for at in range(30):
        members = [
            MemberFigures(
                name=f"worker-{k}",
                role="worker",
                num_steps=chance.choice((0, 1, 15)),
                **{phase: chance.choice((0.0, 0.1, chance.random())) for phase in PHASES[:5]},
            )
            for k in range(num_workers)
            if chance.random() < 0.8
        ]
        members += [
            MemberFigures(name=f"server-{k}", role="server", num_rounds=chance.choice((0, 9)), apply=chance.random())
            for k in range(2)
        ]
        waits = (Wait("", 1, chance.choice((["worker-1"], ["worker-1", "worker-2"])), 1.0, "round"),)
        found.append(JobFigures(at=100.0 + at, members=tuple(members), waits=waits))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_means_are_weighted_by_steps(seed: int) -> None:
    found = looks(seed)
    part = add_up(found)
    for name, means in part.workers.items():
        own = [one for look in found for one in look.members if one.name == name and one.num_steps]
        steps = sum(one.num_steps for one in own)
        assert means.num_steps == steps
        for phase in PHASES[:5]:
            expected = sum(getattr(one, phase) * one.num_steps for one in own) / steps
            assert getattr(means, phase) == pytest.approx(expected)
    for name, seconds in part.apply_seconds.items():
        own = [one for look in found for one in look.members if one.name == name]
        expected = sum(one.apply * one.num_rounds for one in own) / sum(one.num_rounds for one in own)
        assert seconds == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("num_workers", [2, 3, 4, 7])
def test_what_is_usual_is_the_median_of_the_others(seed: int, num_workers: int) -> None:
    part = add_up(looks(seed, num_workers))
    for name in part.workers if len(part.workers) > 1 else ():
        for phase in PHASES:
            others = [getattr(one, phase) for one in part.workers.values() if one.name != name]
            assert part.usual(phase, name) == pytest.approx(statistics.median(others)), (name, phase)


@pytest.mark.parametrize("seed", range(10))
def test_the_whole_is_the_sum_of_its_halves(seed: int) -> None:
    window = Window(looks(seed))
    whole = add_up(window.looks)
    assert len(window.looks) == 20 and window.is_enough
    assert window.whole.workers.keys() == whole.workers.keys()
    for name, means in whole.workers.items():
        assert window.whole.workers[name].total == pytest.approx(means.total)
    assert window.whole.apply_seconds == pytest.approx(whole.apply_seconds)
    for part, looks_of in zip(window.awaited, (window.looks, window.looks[:10], window.looks[10:]), strict=True):
        alone = sum(look.waits[0].for_whom == ["worker-1"] for look in looks_of)
        assert part == ({"worker-1": alone / len(looks_of)} if alone else {})


def test_the_start_of_a_job_is_in_no_window() -> None:
    """Nor are its first steps, which take long."""
    idle, first, *others = looks(3)
    idle = msgspec.structs.replace(idle, members=())
    busy = JobFigures(at=first.at, members=(MemberFigures(name="worker-0", role="worker", num_steps=1),))
    assert Window([idle, busy, *others[:5]]).looks == others[:5]
    assert not Window([idle, idle]).is_enough and not Window([idle, busy]).is_enough
