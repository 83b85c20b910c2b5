"""The proof of the protocol: whole jobs under faults, played from seeds; and the proof that the proof sees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import syncline

from .bugs import BUGS
from .faults import KINDS, RING, SAVES, SPARE, scenario_of
from .job import play
from .world import Violation

QUICK, PROOF, SOAK = 100, 2_000, 200_000
QUICK_SAVES, PROOF_SAVES = 40, 500
QUICK_RINGS, PROOF_RINGS = 30, 800
MOST_FOR_A_BUG = 2_000


def play_all(first: int, last: int) -> None:
    """Every seed, and all that failed at once: the first alone may not be the clearest."""
    failed = []
    for seed in range(first, last):
        try:
            play(seed)
        except Violation as violation:
            failed.append(str(violation))
            if len(failed) >= 5:
                break
    assert not failed, "\n\n".join(failed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_nothing_acknowledged_is_lost_or_doubled(part: int) -> None:
    """All invariants, after every event, under all that a seed can think of; and every job comes to its end."""
    size = QUICK // 5
    play_all(part * size, (part + 1) * size)


@pytest.mark.proof
@pytest.mark.parametrize("part", range(20))
def test_nothing_acknowledged_is_lost_or_doubled_in_many_more_jobs(part: int) -> None:
    size = PROOF // 20
    play_all(part * size, (part + 1) * size)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(100))
def test_nothing_acknowledged_is_lost_or_doubled_for_hours(part: int) -> None:
    size = SOAK // 100
    play_all(part * size, (part + 1) * size)


@pytest.mark.slow
def test_spare_workers_with_several_servers() -> None:
    play_all(SPARE, SPARE + QUICK // 5)


@pytest.mark.proof
@pytest.mark.parametrize("part", range(4))
def test_spare_workers_with_several_servers_in_many_more_jobs(part: int) -> None:
    size = PROOF // 20
    play_all(SPARE + part * size, SPARE + (part + 1) * size)


@pytest.mark.slow
def test_every_cut_is_level() -> None:
    """Jobs that are saved while all that happens: of every worker the same steps on all slices, of the samples what
    these have used; and whoever takes that up reads the others, each once."""
    play_all(SAVES, SAVES + QUICK_SAVES)


@pytest.mark.proof
@pytest.mark.parametrize("part", range(4))
def test_every_cut_is_level_in_many_more_jobs(part: int) -> None:
    size = PROOF_SAVES // 4
    play_all(SAVES + part * size, SAVES + (part + 1) * size)


@pytest.mark.slow
def test_a_round_of_a_ring_is_on_all_copies_or_on_none() -> None:
    """Processes die, come and go, most of all in the middle of changes; and all copies are equal after each."""
    play_all(RING, RING + QUICK_RINGS)


@pytest.mark.proof
@pytest.mark.parametrize("part", range(8))
def test_a_round_of_a_ring_is_on_all_copies_or_on_none_in_many_more_jobs(part: int) -> None:
    size = PROOF_RINGS // 8
    play_all(RING + part * size, RING + (part + 1) * size)


def test_rings_come_to_their_end() -> None:
    """Most do: a job of which nobody has a copy any more ends, and proves little."""
    jobs = [play(seed) for seed in range(RING, RING + 12)]
    assert sum(not job.is_lost for job in jobs) >= 7
    assert any(job.scenario.late_workers for job in jobs) and any(job.scenario.data is None for job in jobs)
    assert {job.scenario.workers for job in jobs} >= {2, 3, 4}


def test_saves_come_to_their_end() -> None:
    """Where nothing goes wrong hardly any is tried again; else what holds of every cut would hold of none."""
    jobs = [play(seed, keep=frozenset()) for seed in range(SAVES, SAVES + 12)]
    quiet = [job.saves for job in jobs if job.scenario.barrier_seconds > 0.1]
    made = sum(len(saves.taken) for saves in quiet)
    assert made >= 2 * len(quiet) and made >= 0.7 * sum(saves.num_begun for saves in quiet)
    assert any(saves.num_further for saves in quiet), "all were level at once"


@given(st.integers(0, 1 << 32), st.sets(st.integers(0, 4)))
def test_any_seed_with_any_of_its_faults(seed: int, faults: set[int]) -> None:
    """What hypothesis finds it makes small: the fewest faults that still do it, each as it was among the others."""
    play(seed, keep=frozenset(faults))


def first_that_catches(bug: str, seeds: Iterable[int]) -> int | None:
    for seed in seeds:
        try:
            play(seed, [bug])
        except Exception:  # a planted bug may also break what the twins take for granted
            return seed
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[pytest.mark.proof] if number % 3 else []) for number, bug in enumerate(BUGS)]
)
def test_a_planted_bug_is_caught(bug: str) -> None:
    """An invariant that never fails proves nothing."""
    meaning, seed = BUGS[bug]
    first = seed // SPARE * SPARE
    around = range(max(first, seed - 20), min(seed + 20, first + MOST_FOR_A_BUG))
    found = first_that_catches(bug, sorted(around, key=lambda near: abs(near - seed)))
    assert found is not None, f"{bug} ({meaning}): not caught by seeds around {seed}"


@pytest.mark.soak
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught_from_the_beginning(bug: str) -> None:
    first = BUGS[bug][1] // SPARE * SPARE
    found = first_that_catches(bug, range(first, first + MOST_FOR_A_BUG))
    print(f"{bug}: caught by seed {found}")
    assert found is not None, f"{bug} ({BUGS[bug][0]}): not caught by {MOST_FOR_A_BUG} seeds"


@pytest.mark.parametrize("seed", range(6))
def test_a_seed_gives_one_trace(seed: int) -> None:
    """Whatever fails can be played again."""
    first, second = play(seed).world, play(seed).world
    assert (first.trace, first.num_events, first.now) == (second.trace, second.num_events, second.now)


def test_a_trace_does_not_depend_on_the_process() -> None:
    """The order of a set differs from process to process: nothing may follow from it."""
    seeds = [*range(12), *range(SAVES, SAVES + 4)]
    code = f"from sim.job import play\nprint([play(seed).world.trace for seed in {seeds}])"
    paths = (Path(__file__).parents[1], Path(syncline.__file__).parents[1])
    traces = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hashes, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            capture_output=True, check=True, text=True,
        ).stdout
        for hashes in ("1", "77")
    }  # fmt: skip
    assert len(traces) == 1


def test_seeds_are_of_every_kind() -> None:
    """A generator that never draws a policy, a fault or a move would prove nothing about it."""
    scenarios = [scenario_of(seed) for seed in range(QUICK)]
    assert {s.policy.split(":")[0] for s in scenarios} == {"sync", "bounded", "async"}
    read = [s for s in scenarios if s.data is not None]
    assert {s.policy.split(":")[0] for s in read} == {"sync", "bounded", "async"} and {s.epochs for s in read} == {
        2,
        3,
    }
    assert any(s.policy == "sync:spare=1" for s in read) and {s.replicas for s in read} == {1, 2}
    assert any(s.late_workers for s in read) and any(s.retires for s in read)
    assert {s.replicas for s in scenarios} == {1, 2}
    assert {s.window for s in scenarios} == {0, 2}
    assert {s.workers for s in scenarios} == {1, 2, 3, 4} and {s.servers for s in scenarios} == {1, 2, 3}
    assert any(s.retires for s in scenarios) and any(s.late_servers for s in scenarios)
    assert any(s.late_workers for s in scenarios)
    words = {word for s in scenarios for script in s.scripts.values() for word in script}
    assert words == {"step", "rest", "barrier", "epoch"}
    assert {fault.kind for s in scenarios for fault in s.faults} == set(KINDS)
    spare = [scenario_of(seed) for seed in range(SPARE, SPARE + QUICK // 5)]
    assert {s.policy for s in spare} == {f"sync:spare={n}" for n in (1, 2, 3)}
    assert {(s.servers > 1, s.replicas) for s in spare} == {(False, 1), (True, 1), (True, 2)}
    assert {s.data is None for s in spare} == {True, False} and any(s.late_servers or s.retires for s in spare)
    saved = [scenario_of(seed) for seed in range(SAVES, SAVES + QUICK_SAVES)]
    assert all(s.saves for s in saved) and {s.barrier_seconds > 0.1 for s in saved} == {True, False}
    assert {s.policy.partition("=")[0] for s in saved} >= {"sync", "async", "sync:spare"}
    assert {s.data is None for s in saved} == {True, False} and any(s.late_workers for s in saved)
