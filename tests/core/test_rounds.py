"""Rounds: what is applied together, once and in order, whatever the interleaving."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.core.members import by_name
from syncline.core.policy import Policy, parse_policy
from syncline.core.rounds import Rounds, Verdict, after_barrier
from syncline.errors import FencedError, ProtocolError

SYNC = Policy("sync")
Round = tuple[tuple[str, int], ...]


def rounds_of(policy: Policy | str, num_workers: int) -> Rounds[str]:
    chosen = parse_policy(policy) if isinstance(policy, str) else policy
    return Rounds(chosen, [(f"worker-{k}", 10 + k) for k in range(num_workers)])


def commit(rounds: Rounds[str], worker: int, clock: int, phase: int = 0) -> Verdict[str]:
    name = f"worker-{worker}"
    return rounds.commit(name, 10 + worker, clock, phase, f"{name}@{clock}")


def applied(verdict: Verdict[str]) -> list[Round]:
    """Who is in each round; the item of each commit must be the one that came with it."""
    assert all(c.item == f"{c.worker}@{c.clock}" for each in verdict.apply for c in each)
    return [tuple((c.worker, c.clock) for c in each) for each in verdict.apply]


# -- sync ----------------------------------------------------------------------------------------------------


def test_a_round_is_applied_when_all_have_committed() -> None:
    rounds = rounds_of(SYNC, 3)
    assert applied(commit(rounds, 2, 1)) == []
    waiting = commit(rounds, 0, 1)
    assert (applied(waiting), waiting.reason) == ([], "the round waits for worker-1")
    assert rounds.missing() == ["worker-1"]
    last = commit(rounds, 1, 1)
    assert applied(last) == [(("worker-0", 1), ("worker-1", 1), ("worker-2", 1))]
    assert last.reason == "no round is open"


def test_a_round_is_summed_in_the_order_of_names_not_of_arrival() -> None:
    """Floating-point sums differ by order: twelve workers, worker-10 after worker-9, whoever comes first."""
    rounds, order = rounds_of(SYNC, 12), list(range(12))
    random.Random(5).shuffle(order)
    verdicts = [commit(rounds, worker, 1) for worker in order]
    assert applied(verdicts[-1]) == [tuple((f"worker-{k}", 1) for k in range(12))]


def test_the_same_commit_again_is_already_applied() -> None:
    """A reply that was lost makes a worker ask again: it must be answered, and must not count twice."""
    rounds = rounds_of(SYNC, 2)
    commit(rounds, 0, 1)
    again = commit(rounds, 0, 1)
    assert (again.kind, again.apply, again.reason) == ("open", (), "the round waits for worker-1")
    assert applied(commit(rounds, 1, 1)) == [(("worker-0", 1), ("worker-1", 1))]
    again = commit(rounds, 1, 1)
    assert (again.kind, again.reason) == ("already applied", "worker-1 is at clock 1 already")
    assert commit(rounds, 1, 0).kind == "already applied"


def test_a_gap_is_refused_and_changes_nothing() -> None:
    rounds = rounds_of(SYNC, 1)
    with pytest.raises(ProtocolError, match="worker-0 commits clock 2 after 0; one is missing"):
        commit(rounds, 0, 2)
    assert applied(commit(rounds, 0, 1)) == [(("worker-0", 1),)]


@pytest.mark.parametrize("incarnation", [9, 11])
def test_another_incarnation_is_fenced(incarnation: int) -> None:
    """A worker that was taken for dead and replaced wakes up: nothing it says may count any more."""
    rounds = rounds_of(SYNC, 2)
    for act in (
        lambda: rounds.commit("worker-0", incarnation, 1, 0, "x"),
        lambda: rounds.rest("worker-0", incarnation, 0),
        lambda: rounds.leave("worker-0", incarnation),
    ):
        with pytest.raises(
            FencedError, match=f"worker-0, incarnation {incarnation}, has been evicted, replaced or has left"
        ):
            act()
    assert rounds.clocks() == {"worker-0": (10, 0), "worker-1": (11, 0)}


def test_a_stranger_takes_no_part() -> None:
    with pytest.raises(ProtocolError, match="worker-7 takes no part in this job's rounds"):
        commit(rounds_of(SYNC, 2), 7, 1)


def test_who_is_forgotten_is_fenced_and_no_stranger() -> None:
    """A host was cut off: its worker speaks when nothing of it is open any more, and has to hear that it is out."""
    rounds = rounds_of(SYNC, 3)
    rounds.leave("worker-1", 11)
    rounds.forget_left("worker-1")
    rounds.reset([rounds.standings["worker-0"]], {})
    for number in (1, 2):
        with pytest.raises(FencedError, match=f"worker-{number}, incarnation {10 + number}, has been evicted"):
            rounds.standing(f"worker-{number}", 10 + number)
    with pytest.raises(ProtocolError, match="worker-1 takes no part in this job's rounds"):
        rounds.standing("worker-1", 12)


def test_who_has_left_is_not_waited_for_and_may_not_come_back() -> None:
    rounds = rounds_of(SYNC, 3)
    commit(rounds, 0, 1)
    commit(rounds, 2, 1)
    left = rounds.leave("worker-1", 11)
    assert applied(left) == [(("worker-0", 1), ("worker-2", 1))]
    with pytest.raises(FencedError):
        commit(rounds, 1, 1)


def test_who_leaves_with_an_open_commit_still_counts() -> None:
    rounds = rounds_of(SYNC, 2)
    commit(rounds, 0, 1)
    rounds.leave("worker-0", 10)
    assert applied(commit(rounds, 1, 1)) == [(("worker-0", 1), ("worker-1", 1))]


def test_who_rests_is_left_out_until_its_next_phase() -> None:
    """The last batches of an epoch are uneven: who has none takes part in no more rounds of it."""
    rounds = rounds_of(SYNC, 2)
    commit(rounds, 0, 1)
    assert applied(rounds.rest("worker-1", 11, 0)) == [(("worker-0", 1),)]
    assert applied(commit(rounds, 0, 2)) == [(("worker-0", 2),)]
    assert rounds.rest("worker-1", 11, 0).apply == (), "saying it again changes nothing"


def test_a_new_phase_waits_for_those_still_in_the_old_one() -> None:
    """Worker 1 is an epoch ahead: its first round of it has worker 0 in it, however slow worker 0 is."""
    rounds = rounds_of(SYNC, 2)
    rounds.rest("worker-1", 11, 0)
    assert applied(commit(rounds, 1, 1, phase=1)) == []
    assert rounds.waiting_reason() == "the round waits for worker-0"
    assert applied(commit(rounds, 0, 1)) == [(("worker-0", 1),)]
    assert applied(rounds.rest("worker-0", 10, 0)) == [], "it rests, and will be in the next phase"
    assert applied(commit(rounds, 0, 2, phase=1)) == [(("worker-0", 2), ("worker-1", 1))]


def test_a_phase_that_was_rested_from_is_over() -> None:
    rounds = rounds_of(SYNC, 2)
    commit(rounds, 0, 1)
    rounds.rest("worker-0", 10, 0)
    with pytest.raises(ProtocolError, match="worker-0 commits in phase 0, which it has rested from"):
        commit(rounds, 0, 2)
    commit(rounds, 0, 2, phase=1)
    with pytest.raises(ProtocolError, match="worker-0 commits in phase 0"):
        commit(rounds, 0, 3, phase=0)
    assert rounds.rest("worker-0", 10, 0).apply == ()
    assert rounds.standings["worker-0"].active, "an old rest that comes late is not one from the new phase"


def events_of(worker: int, phases: list[int]) -> Iterator[tuple[str, int, int, int]]:
    """What one worker does in its life: so many commits per phase, a rest after each, and it leaves."""
    clock = 0
    for phase, count in enumerate(phases):
        for _ in range(count):
            clock += 1
            yield ("commit", worker, clock, phase)
        yield ("rest", worker, clock, phase)
    yield ("leave", worker, clock, len(phases))


def run_sync(script: list[list[int]], seed: int) -> list[Round]:
    """One legal interleaving: a worker goes on once its round is applied. Some events are said twice."""
    chance, rounds = random.Random(seed), rounds_of(SYNC, len(script))
    lives = {worker: events_of(worker, phases) for worker, phases in enumerate(script)}
    waits: dict[int, int] = {}  # worker, the clock that it waits for
    found: list[Round] = []
    while lives:
        free = [worker for worker in lives if worker not in waits]
        assert free, f"stuck: {rounds.waiting_reason()} (seed {seed})"
        worker = chance.choice(free)
        event = next(lives[worker], None)
        if event is None:
            del lives[worker]
            continue
        kind, _, clock, phase = event
        if kind == "commit":
            waits[worker] = clock
            verdict = commit(rounds, worker, clock, phase)
            assert chance.random() < 0.7 or commit(rounds, worker, clock, phase).kind != "new"
        elif kind == "rest":
            verdict = rounds.rest(f"worker-{worker}", 10 + worker, phase)
        else:
            verdict = rounds.leave(f"worker-{worker}", 10 + worker)
        for each in applied(verdict):
            found.append(each)
            for name, clock in each:
                assert waits.pop(int(name[7:])) == clock
    assert not waits and not rounds.missing()
    return found


def expected_rounds(script: list[list[int]]) -> list[Round]:
    """By the definition alone: the k-th commits of a phase of all who make that many, phase by phase."""
    found = []
    for phase in range(max(map(len, script))):
        before = [sum(each[:phase]) for each in script]
        for k in range(1, max(each[phase] for each in script if phase < len(each)) + 1):
            there = [w for w, each in enumerate(script) if phase < len(each) and each[phase] >= k]
            found += [tuple((f"worker-{w}", before[w] + k) for w in there)]
    return found


scripts = st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=5).filter(any)


@given(scripts, st.lists(st.integers(0, 2**32), min_size=1, max_size=4))
def test_the_content_of_rounds_does_not_depend_on_the_interleaving(script: list[list[int]], seeds: list[int]) -> None:
    """Equal runs are bit-equal only if timing decides nothing: uneven epochs, rests, repeats, any order."""
    for seed in seeds:
        assert run_sync(script, seed) == expected_rounds(script)


# -- bounded and async ---------------------------------------------------------------------------------------


def test_async_applies_at_once_and_never_holds_an_answer_back() -> None:
    rounds = rounds_of("async", 2)
    for clock in range(1, 50):
        assert applied(commit(rounds, 0, clock)) == [(("worker-0", clock),)]
        assert rounds.may_answer("worker-0", clock) == (True, "applied")


def test_bounded_parks_the_reply_and_names_who_is_behind() -> None:
    """The commit itself is applied on arrival; only its answer waits, for the slowest worker by name."""
    rounds = rounds_of("bounded:2", 3)
    for clock in (1, 2, 3):
        assert applied(commit(rounds, 0, clock)) == [(("worker-0", clock),)]
    assert [rounds.may_answer("worker-0", clock)[0] for clock in (1, 2, 3)] == [True, True, False]
    assert rounds.may_answer("worker-0", 3)[1] == "bounded:2: worker-0 waits for worker-1, worker-2"
    commit(rounds, 1, 1)
    assert rounds.may_answer("worker-0", 3)[1] == "bounded:2: worker-0 waits for worker-2"
    commit(rounds, 2, 1)
    assert rounds.may_answer("worker-0", 3) == (True, "within the bound")


@pytest.mark.parametrize("how", ["rest", "leave"])
def test_a_parked_reply_is_released_when_the_slow_worker_rests_or_leaves(how: str) -> None:
    rounds = rounds_of("bounded:0", 2)
    commit(rounds, 0, 1)
    assert not rounds.may_answer("worker-0", 1)[0]
    if how == "rest":
        rounds.rest("worker-1", 11, 0)
    else:
        rounds.leave("worker-1", 11)
    assert rounds.may_answer("worker-0", 1)[0]
    assert rounds.lag("worker-0", 1) == 0


def test_a_worker_that_comes_back_from_a_rest_is_not_behind() -> None:
    """After a long rest its clock is small. If that were its lag, everyone would stand until it had caught up."""
    rounds = rounds_of("bounded:1", 2)
    rounds.rest("worker-1", 11, 0)
    for clock in range(1, 21):
        commit(rounds, 0, clock)
    commit(rounds, 1, 1, phase=1)
    assert rounds.may_answer("worker-0", 20)[0]
    assert rounds.may_answer("worker-1", 1)[0]
    for clock in (21, 22):
        commit(rounds, 0, clock)
    assert rounds.may_answer("worker-0", 22)[0]
    commit(rounds, 0, 23)
    assert not rounds.may_answer("worker-0", 23)[0], "from now on it is in the race"


def run_bounded(script: list[list[int]], bound: int, window: int, seed: int) -> None:
    """Random lives under `bounded:K`: the lag at each answer is counted here a second time; nobody is stuck."""
    chance, rounds = random.Random(seed), rounds_of(f"bounded:{bound}", len(script))
    lives = {worker: list(events_of(worker, phases)) for worker, phases in enumerate(script)}
    ahead = dict.fromkeys(lives, 0)  # commits, with rests made good
    active, parked, log = set(lives), [], []
    while any(lives.values()) or parked:
        free = []
        for worker, life in lives.items():
            open_now = sum(w == worker for w, _, _ in parked)
            # A worker settles before it rests or leaves, and has at most `window` commits unanswered.
            if life and open_now <= (window if life[0][0] == "commit" else 0):
                free.append(worker)
        assert free, f"stuck: {[rounds.may_answer(f'worker-{w}', c) for w, c, _ in parked]} (seed {seed})"
        worker = chance.choice(free)
        kind, _, clock, phase = lives[worker].pop(0)
        if kind == "commit":
            if worker not in active:
                ahead[worker] = max(ahead[worker], min((ahead[w] for w in active), default=0))
                active.add(worker)
            log += applied(commit(rounds, worker, clock, phase))
            ahead[worker] += 1
            parked.append((worker, clock, ahead[worker]))
        else:
            active.discard(worker)
            if kind == "rest":
                rounds.rest(f"worker-{worker}", 10 + worker, phase)
            else:
                rounds.leave(f"worker-{worker}", 10 + worker)
        for entry in list(parked):
            who, its_clock, its_place = entry
            if rounds.may_answer(f"worker-{who}", its_clock)[0]:
                parked.remove(entry)
                slowest = min(ahead[w] for w in active)
                assert its_place - slowest <= bound, f"lag {its_place - slowest} over {bound} (seed {seed})"
                assert rounds.lag(f"worker-{who}", its_clock) == its_place - slowest
    for worker, phases in enumerate(script):
        mine = [clock for ((name, clock),) in log if name == f"worker-{worker}"]
        assert mine == list(range(1, sum(phases) + 1)), "each commit once, in order"


@given(scripts, st.integers(0, 3), st.integers(0, 3), st.integers(0, 2**32))
def test_the_lag_never_passes_the_bound(script: list[list[int]], bound: int, window: int, seed: int) -> None:
    """Workers that race, rest, come back and leave in any order; nobody is answered too early or held for ever."""
    run_bounded(script, bound, window, seed)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=60), st.sampled_from(["async", "bounded:1"])
)
def test_every_commit_is_applied_once_and_in_order(said: list[tuple[int, int]], policy: str) -> None:
    """Repeats and gaps in any order, from three workers: what is applied is 1, 2, 3, … for each."""
    rounds, found = rounds_of(policy, 3), {k: [] for k in range(3)}
    for worker, clock in said:
        try:
            for each in applied(commit(rounds, worker, clock)):
                found[worker] += [clock for _, clock in each]
        except ProtocolError:
            assert clock > len(found[worker]) + 1
    for worker, clocks in found.items():
        assert clocks == list(range(1, rounds.clocks()[f"worker-{worker}"][1] + 1))


def test_names_are_ordered_by_their_numbers() -> None:
    names = ["worker-10", "worker-9", "server-1", "worker-²", "worker", "worker-a-2", "worker-0"]
    assert sorted(names, key=by_name) == [
        "server-1", "worker", "worker-0", "worker-9", "worker-10", "worker-a-2", "worker-²",
    ]  # fmt: skip


# -- barriers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["sync", "bounded:0"])
def test_nobody_waits_for_a_worker_at_a_barrier(policy: str) -> None:
    """It comes there early and the others still have batches: waiting for its commits, they would never come."""
    rounds = rounds_of(policy, 2)
    commit(rounds, 0, 1)
    rounds.rest("worker-1", 11, 0, at_barrier=True)
    assert rounds.may_answer("worker-0", 1)[0] and rounds.missing() == []
    assert applied(commit(rounds, 0, 2)) == [(("worker-0", 2),)]
    assert not rounds.standings["worker-1"].active


def test_behind_a_barrier_all_stand_level_in_a_new_era() -> None:
    """One has rested twice as often and is ten commits behind: behind the barrier neither counts any more."""
    rounds = rounds_of("bounded:1", 2)
    for phase in range(2):
        rounds.rest("worker-1", 11, phase)
    for clock in range(1, 11):
        commit(rounds, 0, clock)
    for worker in (0, 1):
        rounds.rest(f"worker-{worker}", 10 + worker, 0, at_barrier=True)
    behind = after_barrier(1)
    commit(rounds, 0, 11, behind)
    assert rounds.may_answer("worker-0", 11)[0]
    commit(rounds, 0, 12, behind)
    assert rounds.may_answer("worker-0", 12)[1] == "bounded:1: worker-0 waits for worker-1"
    commit(rounds, 1, 1, behind)
    assert rounds.may_answer("worker-0", 12)[0]


def test_behind_a_barrier_a_round_has_everyone_in_it_again() -> None:
    rounds = rounds_of("sync", 3)
    for worker in (0, 1, 2):
        rounds.rest(f"worker-{worker}", 10 + worker, 0, at_barrier=True)
    behind = after_barrier(0)
    assert applied(commit(rounds, 1, 1, behind)) == []
    assert rounds.waiting_reason() == "the round waits for worker-0, worker-2"
    with pytest.raises(ProtocolError, match="worker-2 commits in phase 0, which it has rested from"):
        commit(rounds, 2, 1, 0)
    assert after_barrier(behind + 5) > after_barrier(5) == behind > 5
