"""Verdicts on planted faults, and none on healthy jobs: synthetic looks with the noise of real ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec
import pytest

from syncline.config import JobConfig
from syncline.core.series import Point, point
from syncline.core.verdicts import StandStill, TellsVerdicts, diverging, flat, verdicts
from syncline.stats import JobFigures, JobVerdict, MemberFigures, Wait

CONFIG = JobConfig(workers=4, servers=3)


def worker(number: int, **figures: float) -> MemberFigures:
    known = {"compute": 0.05, "data": 0.002, "stage": 0.003, "wait": 0.004, "pull": 0.003, "cores": 1.0, **figures}
    return MemberFigures(name=f"worker-{number}", role="worker", num_steps=15, **known)  # type: ignore[arg-type]


def server(number: int, apply: float = 0.001) -> MemberFigures:
    return MemberFigures(
        name=f"server-{number}", role="server", num_rounds=15, apply=apply, busiest=((number, 0.3), (7, 0.0))
    )


def noisy(member: MemberFigures, chance: random.Random) -> MemberFigures:
    def moved(value: float) -> float:
        return value * chance.lognormvariate(0.0, 0.15)

    return MemberFigures(
        name=member.name,
        role=member.role,
        num_steps=member.num_steps,
        compute=moved(member.compute),
        data=moved(member.data),
        stage=moved(member.stage),
        wait=moved(member.wait),
        pull=moved(member.pull),
        apply=moved(member.apply),
        num_rounds=member.num_rounds,
        busiest=member.busiest,
        cores=member.cores,
    )


def history(
    make: Callable[[int], list[MemberFigures]], seconds: int = 40, seed: int = 0, waits: tuple[Wait, ...] = ()
) -> list[JobFigures]:
    """A look a second; `make` gives the members at that second."""
    chance = random.Random(seed)
    return [
        JobFigures(
            at=1000.0 + at,
            step=15 * at,
            seconds=float(at + 1),
            members=tuple(noisy(one, chance) for one in make(at)),
            waits=waits,
            why="step 3 has waited 40.0 s for worker-1" if waits else "",
        )
        for at in range(seconds)
    ]


def healthy(at: int) -> list[MemberFigures]:
    return [*(worker(k) for k in range(4)), *(server(k) for k in range(3))]


def only(found: list[JobVerdict], kind: str, subject: str) -> JobVerdict:
    assert [(one.kind, one.subject) for one in found] == [(kind, subject)], found
    return found[0]


@pytest.mark.parametrize("seed", range(30))
def test_a_healthy_job_has_no_verdict(seed: int) -> None:
    assert verdicts(history(healthy, seed=seed), {}, CONFIG) == []


def test_a_job_that_ends_or_begins_has_none() -> None:
    assert verdicts([], {}, CONFIG) == []
    begun = [*(worker(k) for k in range(3)), worker(3, compute=0.5)]
    assert verdicts(history(lambda at: begun, seconds=3), {}, CONFIG) == []
    assert verdicts(history(lambda at: [worker(0, compute=9.0)]), {}, CONFIG) == []  # alone


@pytest.mark.parametrize("seed", range(10))
def test_a_worker_that_computes_longer(seed: int) -> None:
    """Its neighbours wait for it; the time they wait is no verdict on communication."""

    def members(at: int) -> list[MemberFigures]:
        slow = worker(2, compute=0.15) if at >= 15 else worker(2)
        return [worker(0, wait=0.1), worker(1, wait=0.1), slow, worker(3, wait=0.1), server(0), server(1)]

    found = only(verdicts(history(members, seed=seed), {}, CONFIG), "straggler", "worker-2")
    assert "cause is compute" in found.text and "as long as the others" in found.text
    assert 1010 <= found.since <= 1021


def test_a_short_hiccup_is_no_straggler() -> None:
    def members(at: int) -> list[MemberFigures]:
        return [worker(0), worker(1), worker(2, compute=0.5 if 25 <= at < 29 else 0.05), worker(3)]

    assert verdicts(history(members), {}, CONFIG) == []


def test_a_straggler_by_its_data() -> None:
    members = [worker(0), worker(1), worker(2, compute=0.18, data=0.13)]
    found = verdicts(history(lambda at: members), {}, CONFIG)
    assert [one.kind for one in found] == ["straggler", "data-starvation"]
    assert "cause is its data" in found[0].text and "loader" in found[0].advice


def test_a_straggler_by_its_network() -> None:
    """What it sends and receives takes long; and where that cannot be measured, rounds wait for it alone."""
    members = [worker(0), worker(1), worker(2, stage=0.08, pull=0.06)]
    assert (
        "cause is the network"
        in only(verdicts(history(lambda at: members), {}, CONFIG), "straggler", "worker-2").text
    )
    awaited = (Wait("", 7, ["worker-2"], 0.05, "round"),)
    hidden = [worker(k, wait=0.2) for k in range(3)]  # it waits as long for its own bytes as the others for it
    found = only(verdicts(history(lambda at: hidden, waits=awaited), {}, CONFIG), "straggler", "worker-2")
    assert found.text.endswith("cause is the network; rounds wait for it alone 100% of the time")
    short = [worker(k) for k in range(3)]
    assert verdicts(history(lambda at: short, waits=awaited), {}, CONFIG) == [], "a wait that is not worth a sentence"


def test_a_long_evaluation_is_no_slow_network() -> None:
    """The others wait for the chief alone, once for long. Its compute is long in that half of the window."""

    def members(at: int) -> list[MemberFigures]:
        if 26 <= at < 40:  # nobody makes a step
            return [msgspec.structs.replace(worker(k), num_steps=0) for k in range(3)]
        ends = at == 40
        return [worker(0, compute=14.0 if ends else 0.05), *(worker(k, wait=14.0 if ends else 0.004) for k in (1, 2))]

    awaited = (Wait("", 7, ["worker-0"], 5.0, "round"),)
    looks = history(members, seconds=60)
    looks = [msgspec.structs.replace(one, waits=awaited if 26 <= at < 40 else ()) for at, one in enumerate(looks)]
    for end in range(26, len(looks) + 1):
        found = [one for one in verdicts(looks[:end], {}, CONFIG) if "network" in one.text]
        assert found == [], (end, found)


def test_the_first_steps_of_a_job_are_no_verdict() -> None:
    """The first round of a server is long, and all wait for it; the job has been looked at before."""

    def members(at: int) -> list[MemberFigures]:
        if at < 12:
            return [msgspec.structs.replace(worker(k), num_steps=0) for k in range(3)]
        return [msgspec.structs.replace(worker(k, wait=3.0 if at == 12 else 0.004), num_steps=1) for k in range(3)]

    for end in range(12, 40):
        assert verdicts(history(members, seconds=end), {}, CONFIG) == [], end


def test_a_hot_server_is_named_with_its_slices() -> None:
    members = [*(worker(k, wait=0.08) for k in range(3)), server(0), server(1, apply=0.07), server(2)]
    found = only(
        verdicts(history(lambda at: members), {}, CONFIG, slices={1: "slice 1 (fc.weight)"}), "hot-server", "server-1"
    )
    assert "slice 1 (fc.weight)" in found.text and "slice 7" not in found.text


def test_data_starvation_of_all() -> None:
    members = [worker(k, compute=0.2, data=0.15) for k in range(3)]
    found = only(verdicts(history(lambda at: members), {}, CONFIG), "data-starvation", "")
    assert "worker-0, worker-1 and worker-2 wait for data" in found.text


def test_communication_has_advice_that_fits() -> None:
    members = [*(worker(k, compute=0.02, stage=0.05, wait=0.06, pull=0.05) for k in range(3)), server(0), server(1)]
    found = only(verdicts(history(lambda at: members), {}, CONFIG), "communication", "")
    assert "--codec bf16" in found.advice and "--sync-every auto" in found.advice and "-s 6" in found.advice
    told = verdicts(history(lambda at: members), {}, JobConfig(exchange="ring", codec="bf16", sync_every=8))[0]
    assert "codec" not in told.advice and "-s" not in told.advice.split() and "sync-every" not in told.advice


def test_a_likely_hang_names_the_wait() -> None:
    waits = (Wait("", 3, ["worker-1"], 40.0, "round"),)
    found = verdicts(history(healthy, waits=waits), {}, CONFIG, StandStill(still_seconds=40.0, step_seconds=0.1))
    assert only(found, "hang", "").text.endswith("step 3 has waited 40.0 s for worker-1")
    assert "no step for 40 s" in found[0].text


def test_long_steps_and_busy_scripts_do_not_hang() -> None:
    """An evaluation of minutes makes no step: its workers compute, and no member waits."""
    evaluating = history(healthy)
    assert verdicts(evaluating, {}, CONFIG, StandStill(still_seconds=400.0, step_seconds=0.1)) == []
    waits = (Wait("", 3, ["worker-1"], 40.0, "round"),)
    assert verdicts(history(healthy, waits=waits), {}, CONFIG, StandStill(still_seconds=40.0, step_seconds=5.0)) == []
    held = StandStill(still_seconds=400.0, step_seconds=0.1, is_held=True)
    assert verdicts(history(healthy, waits=waits), {}, CONFIG, held) == []
    idle = history(lambda at: [worker(0, cores=0.01), worker(1, cores=0.02)])
    assert [v.kind for v in verdicts(idle, {}, CONFIG, StandStill(still_seconds=60.0))] == ["hang"]


# -- losses -----------------------------------------------------------------------------------------------


def curve(values: list[float]) -> list[Point]:
    return [point(10 * k, 1000.0 + k, value) for k, value in enumerate(values)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shape", ["exponential", "power", "slow", "noisy"])
def test_a_loss_that_falls_has_no_verdict(seed: int, shape: str) -> None:
    chance = random.Random(seed)
    of: dict[str, Callable[[int], float]] = {
        "exponential": lambda k: 2.3 * math.exp(-k / 60) + chance.gauss(0, 0.02),
        "power": lambda k: 3.0 / (1 + k) ** 0.3 + chance.gauss(0, 0.01),
        "slow": lambda k: 2.0 - 0.003 * k + chance.gauss(0, 0.02),
        "noisy": lambda k: 2.3 * math.exp(-k / 80) * chance.lognormvariate(0, 0.3),
    }
    values = curve([of[shape](k) for k in range(150)])
    for end in range(10, 151, 10):
        assert diverging("loss", values[:end]) == flat("loss", values[:end]) == [], end


def test_a_loss_that_diverges() -> None:
    chance = random.Random(1)
    falls = [2 * math.exp(-k / 30) + chance.gauss(0, 0.02) for k in range(60)]
    rises = [falls[-1] * 1.12**k for k in range(60)]
    found = diverging("train/loss", curve(falls + rises))
    assert found[0].kind == "diverging" and "after" in found[0].text
    not_finite = diverging("loss", curve([*falls, math.nan, math.inf, math.nan]))
    assert "not finite since step 590" in not_finite[0].text
    assert diverging("accuracy", curve(falls + rises)) == [], "more of it is better"


def test_a_loss_that_is_flat() -> None:
    chance = random.Random(1)
    values = [2 * math.exp(-k / 10) + 0.69 + chance.gauss(0, 0.02) for k in range(200)]
    assert "flat" in flat("loss", curve(values))[0].text
    assert flat("loss", curve([2.3] * 100)) and not flat("loss", curve([2.3] * 30))


def test_a_verdict_is_told_once() -> None:
    """Its figures change from look to look."""
    slow = [
        JobVerdict(kind="straggler", subject=f"worker-{k}", text=f"worker-{k} is slow", advice="see") for k in (1, 2)
    ]
    flat_loss = JobVerdict(kind="flat", subject="loss", text="loss is flat")
    tells = TellsVerdicts()
    assert tells.new(slow[:1]) == ["worker-1 is slow: see"]
    assert tells.new([slow[0], flat_loss]) == ["loss is flat"] and tells.new([]) == []
    assert tells.new([JobVerdict(kind="straggler", subject="worker-1", text="slower still"), slow[1]]) == [
        "worker-2 is slow: see"
    ]
