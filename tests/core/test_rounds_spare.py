"""`sync:spare=N`: a round is closed when all but N have committed; who comes later is late, and in the next one."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from syncline.core.members import Standing
from syncline.core.policy import Policy
from syncline.core.rounds import Rounds, Verdict, after_barrier

Round = tuple[tuple[str, int], ...]


def rounds_of(spare: int, num_workers: int) -> Rounds[str]:
    return Rounds(Policy("sync", spare=spare), [(f"worker-{k}", 10 + k) for k in range(num_workers)])


def commit(rounds: Rounds[str], worker: int, clock: int, phase: int = 0) -> Verdict[str]:
    return rounds.commit(f"worker-{worker}", 10 + worker, clock, phase, "")


def rest(rounds: Rounds[str], worker: int, phase: int = 0) -> list[Round]:
    return applied(rounds.rest(f"worker-{worker}", 10 + worker, phase))


def applied(verdict: Verdict[str]) -> list[Round]:
    return [tuple((c.worker, c.clock) for c in each) for each in verdict.apply]


def test_a_round_closes_without_the_last_one() -> None:
    rounds = rounds_of(1, 3)
    first = commit(rounds, 2, 1)
    assert applied(first) == [] and first.reason == "the round waits for worker-0, worker-1, all but 1 of them"
    assert applied(commit(rounds, 0, 1)) == [(("worker-0", 1), ("worker-2", 1))]
    late = commit(rounds, 1, 1)
    assert (late.kind, applied(late)) == ("late", [(("worker-1", 1),)]), "its clock advances, on every slice"
    assert late.reason == "sync:spare=1: the round was closed without worker-1"
    again = commit(rounds, 1, 1)
    assert (again.kind, again.apply) == ("late", ()), "said again it is answered alike, and nothing follows from it"


def test_who_was_late_is_in_the_next_round() -> None:
    rounds = rounds_of(1, 3)
    for clock in (1, 2, 3):
        for worker in (0, 2):
            commit(rounds, worker, clock)
    assert commit(rounds, 1, 1).kind == "late", "three rounds late, in one commit"
    assert applied(commit(rounds, 1, 2)) == []
    assert applied(commit(rounds, 0, 4)) == [(("worker-0", 4), ("worker-1", 2))]
    assert commit(rounds, 2, 4).kind == "late"
    assert commit(rounds, 1, 2).kind == "already applied", "it was in a round: not late any more"


def test_a_round_needs_somebody() -> None:
    """However many are spare: nothing is applied that nobody has committed."""
    rounds = rounds_of(3, 3)
    assert rounds.release().apply == ()
    assert applied(commit(rounds, 0, 1)) == [(("worker-0", 1),)]


def test_who_rests_left_or_is_away_takes_no_part_and_is_not_one_of_the_spare_ones() -> None:
    rounds = rounds_of(1, 4)
    rest(rounds, 3)
    assert applied(commit(rounds, 0, 1)) == [], "of three, two must be there"
    assert applied(commit(rounds, 1, 1)) == [(("worker-0", 1), ("worker-1", 1))]
    assert applied(commit(rounds, 0, 2)) == []
    assert applied(rounds.leave("worker-1", 11)) == [(("worker-0", 2),)], "of two, one"


def test_a_dead_one_that_is_not_settled_may_be_the_spare_one() -> None:
    rounds = rounds_of(1, 3)
    rounds.fence("worker-2", 12)
    commit(rounds, 0, 1)
    assert applied(commit(rounds, 1, 1)) == [(("worker-0", 1), ("worker-1", 1))]
    assert rounds.leave_fenced("worker-2", 12).apply == ()


def test_who_is_left_behind_in_an_old_phase_goes_on_with_the_others() -> None:
    """Its own count of rests is behind for the rest of the era; that is no error, and it is late once only."""
    rounds = rounds_of(1, 3)
    for worker in (0, 1):
        rest(rounds, worker)
        commit(rounds, worker, 1, phase=1)
    assert commit(rounds, 2, 1, phase=0).kind == "late"
    assert applied(commit(rounds, 2, 2, phase=0)) == []
    assert applied(commit(rounds, 0, 2, phase=1)) == [(("worker-0", 2), ("worker-2", 2))]
    assert rest(rounds, 2, phase=0) == [] and not rounds.standings["worker-2"].active
    assert commit(rounds, 1, 2, phase=1).kind == "late"
    assert commit(rounds, 2, 3, phase=1).kind == "new", "it comes back from its rest"


def test_behind_a_barrier_all_are_level_again() -> None:
    rounds = rounds_of(1, 3)
    for clock in (1, 2):
        for worker in (0, 1):
            commit(rounds, worker, clock)
    barrier_epoch = after_barrier(0)
    assert applied(commit(rounds, 2, 1, phase=barrier_epoch)) == []
    assert applied(commit(rounds, 1, 3, phase=barrier_epoch)) == [(("worker-1", 3), ("worker-2", 1))]


def test_who_enters_does_so_after_the_last_closed_round() -> None:
    rounds = rounds_of(1, 3)
    for clock in (1, 2):
        for worker in (0, 1):
            commit(rounds, worker, clock)
    rounds.enter(Standing("worker-3", 13, phase=0, phase_began=-2))
    assert applied(commit(rounds, 3, 1)) == []
    commit(rounds, 0, 3)
    assert applied(commit(rounds, 1, 3)) == [(("worker-0", 3), ("worker-1", 3), ("worker-3", 1))]


def lives(worker: int, phases: list[int]) -> Iterator[tuple[str, int, int]]:
    clock = 0
    for phase, count in enumerate(phases):
        for _ in range(count):
            clock += 1
            yield ("commit", clock, phase)
        yield ("rest", clock, phase)
    yield ("leave", clock, len(phases))


@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=5),
    st.integers(0, 5),
    st.integers(0, 2**32),
)
def test_random_lives(script: list[list[int]], spare: int, seed: int) -> None:
    """Every commit is in exactly one round or late; no more are left out of a round than may be; nobody is stuck; and
    nobody that is waited for is late: late is who comes after a round of its own was closed without it."""
    chance, rounds = random.Random(seed), rounds_of(spare, len(script))
    going = {worker: lives(worker, phases) for worker, phases in enumerate(script)}
    waiting: dict[str, int] = {}
    counted: list[tuple[str, int]] = []
    late: list[tuple[str, int]] = []
    made = 0
    while going:
        free = [worker for worker in going if f"worker-{worker}" not in waiting]
        assert free, f"stuck: {rounds.waiting_reason()}"
        worker = chance.choice(free)
        name, event = f"worker-{worker}", next(going[worker], None)
        if event is None:
            del going[worker]
            continue
        kind, clock, phase = event
        if kind == "commit":
            made += 1
            waiting[name] = clock
            verdict = commit(rounds, worker, clock, phase)
        elif kind == "rest":
            verdict = rounds.rest(name, 10 + worker, phase)
        else:
            verdict = rounds.leave(name, 10 + worker)
        if verdict.kind == "late":
            assert applied(verdict) == [((name, clock),)] and spare
            late.append((name, clock))
            del waiting[name]
            assert rounds.standings[name].turn() == rounds.closed
            continue
        for members in applied(verdict):
            counted += members
            for member, at in members:
                assert waiting.pop(member) == at
        if kind == "commit" and chance.random() < 0.2:
            assert commit(rounds, worker, clock, phase).kind in ("open", "already applied", "late")
    assert sorted(counted + late) == sorted({*counted, *late}) and len(counted) + len(late) == made
    assert not late or spare
    assert not list(rounds.open_commits())
