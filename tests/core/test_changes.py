"""Changes: from what all servers answer follows what counts of the fenced, and with which round the others begin."""

from __future__ import annotations

import pytest

from syncline.core.members import Standing
from syncline.core.policy import parse_policy
from syncline.core.reconfigure import Reconfiguration
from syncline.core.replica_sets import ReplicaSet
from syncline.core.rounds import BARRIER_EPOCH, LOOP, Rounds
from syncline.core.wire.control import Prepared


def change(
    fenced: dict[str, int] | None = None,
    entering: dict[str, int] | None = None,
    staying: dict[str, int] | None = None,
    *,
    moves: bool = False,
    phase: int = 0,
    entering_phases: dict[str, int] | None = None,
) -> Reconfiguration:
    return Reconfiguration(
        7, {"server-1": 8, "server-0": 5}, fenced=fenced or {}, entering=entering or {},
        replica_sets=[ReplicaSet(0, "server-0")],
        moves=moves, staying=staying, phase=phase, entering_phases=entering_phases,
    )  # fmt: skip


def answered(one: Reconfiguration, *answers: Prepared) -> Reconfiguration:
    for server, answer in zip(one.servers, answers, strict=True):
        last = one.prepared(server, answer)
    assert last
    return one


def test_it_is_prepared_when_the_last_server_has_answered() -> None:
    one = change({"worker-1": 4})
    assert one.prepare().fenced == [("worker-1", 4)] and one.prepare().generation == 7
    assert not one.prepared("server-0", Prepared([], 0))
    assert not one.prepared("server-0", Prepared([], 1)), "said again it is the same answer"
    assert one.prepared("server-1", Prepared([], 2))
    assert one.num_orphans == 3


def test_what_any_server_has_committed_counts_on_all() -> None:
    here, there = Standing("worker-1", 4, clock=9), Standing("worker-1", 4, clock=8)
    one = answered(change({"worker-1": 4}), Prepared([here], 0), Prepared([there], 0))
    assert one.settle() == [("worker-1", 4, 9)]


def test_what_is_on_any_copy_counts_on_all() -> None:
    """Whoever committed it has given the slice away since: a change was installed by some servers only."""
    copy = Prepared([], 0, [("worker-1", 4, 9)])
    one = answered(change({"worker-1": 4}), copy, Prepared([Standing("worker-1", 4, clock=8)], 0))
    assert one.settle() == [("worker-1", 4, 9)]
    moved = answered(change(staying={"worker-1": 4}, moves=True), copy, Prepared([], 0))
    assert moved.settle() == [("worker-1", 4, 9)], "it may die before it has made that again"


def test_who_is_the_primary_of_nothing_is_not_asked_where_workers_stand() -> None:
    """It hears no commits: what it knows is from the last time that primaries changed, and was dropped since."""
    was = Prepared([Standing("worker-1", 4, clock=9, phase=7, position=9)], 0, is_primary=False)
    now = Prepared([Standing("worker-1", 4, clock=8, position=8)], 0)
    one = answered(change({"worker-1": 4}, {"worker-5": 9}), was, now)
    assert one.settle() == [("worker-1", 4, 8)] and one.turn() == (0, 8) and one.back_at() == 8


@pytest.mark.parametrize("kind", ["resting", "away"])
def test_who_comes_while_all_others_stand_aside_is_not_behind_them(kind: str) -> None:
    """In `bounded:2` two workers rest, or wait at a barrier, after a hundred steps; a third comes and pushes. The
    first that goes on is answered: it does not wait for a hundred steps of the one that has just come."""
    rounds: Rounds[str] = Rounds(parse_policy("bounded:2"), [("worker-1", 4), ("worker-2", 5)])
    for clock in range(1, 101):
        rounds.commit("worker-1", 4, clock, 0, "")
        rounds.commit("worker-2", 5, clock, 0, "")
    for name, life in (("worker-1", 4), ("worker-2", 5)):
        rounds.rest(name, life, 0, at_barrier=kind == "away")
    known = Prepared(list(rounds.standings.values()), 0)
    one = answered(change(entering={"worker-3": 9}), known, Prepared([], 0, is_primary=False))
    assert one.back_at() == 100
    for standing in one.standings():
        rounds.enter(standing)
    rounds.commit("worker-3", 9, 1, one.places()["worker-3"].phase, "", one.back_at())
    rounds.commit("worker-1", 4, 101, 1, "")
    assert rounds.may_answer("worker-1", 101) == (True, "within the bound")


def test_before_anything_is_registered_all_are_heard() -> None:
    one = Reconfiguration(7, {"server-0": 5}, fenced={}, entering={"worker-5": 9}, replica_sets=[], moves=False)
    one.prepared("server-0", Prepared([Standing("worker-1", 4, phase=3)], 0, is_primary=False))
    assert one.turn() == (3, 0)


def lost(*answers: Prepared, staying: dict[str, int] | None = None) -> list[str]:
    return [loss.text for loss in answered(change({}, staying=staying, moves=True), *answers).torn()]


def test_a_step_that_some_slices_cannot_come_to_is_told() -> None:
    """The promoted backup has a step of the dead worker, or is still to get it from one that lives, or not."""
    here = Prepared([], 0, [("worker-1", 4, 9)], [("worker-1", 4, 9, "server-0#5")])

    def there(clock: int, primary: str) -> Prepared:
        return Prepared([], 0, [("worker-1", 4, 8)], [("worker-1", 4, clock, primary)])

    told = ["step 9 of worker-1 is on some slices and not on others"]
    assert lost(here, there(9, "server-2#7")) == []
    assert lost(here, there(8, "server-0#5")) == []
    assert lost(here, there(8, "server-2#7")) == told
    assert lost(here, there(8, "server-1#8")) == told, "its own slices"
    assert lost(here, there(8, "server-0#3")) == told, "another life of that name has come, with nothing"
    assert lost(here, there(8, "server-2#7"), staying={"worker-1": 4}) == [], "it lives, and makes it again"


def test_another_incarnation_of_the_name_is_not_settled() -> None:
    old, new = Standing("worker-1", 4, clock=9), Standing("worker-1", 6, clock=2)
    one = answered(change({"worker-1": 4}), Prepared([old], 0), Prepared([new], 0))
    assert one.settle() == [("worker-1", 4, 9)]


def test_where_primaries_change_the_steps_of_all_are_settled() -> None:
    """Staged bytes do not move along with a slice: a worker that dies right after must not be on some slices only."""
    here, there = Standing("worker-0", 2, clock=5), Standing("worker-0", 2, clock=4)
    one = answered(change(staying={"worker-0": 2}, moves=True), Prepared([here], 0), Prepared([there], 0))
    assert one.settle() == [("worker-0", 2, 5)]
    still = answered(change(staying={"worker-0": 2}), Prepared([here], 0), Prepared([there], 0))
    assert still.settle() == []


def test_those_who_enter_begin_after_the_highest_round_that_any_server_has_opened() -> None:
    here, there = Standing("worker-0", 2, clock=5, phase=1, phase_began=3), Standing("worker-0", 2, clock=4)
    one = answered(change(entering={"worker-5": 9}), Prepared([there], 0), Prepared([here], 0))
    (entered,) = one.install([]).standings
    assert (entered.name, entered.incarnation, entered.clock) == ("worker-5", 9, 0)
    assert entered.turn() == (1, 2), "its first commit is the third of phase 1"


@pytest.mark.parametrize("moves", [False, True])
def test_who_enters_again_goes_on_with_its_clock_in_the_round_after_all_that_were_opened(moves: bool) -> None:
    """It came late to a barrier, and was away meanwhile: one server has gone a round further than the other."""
    at_barrier = Standing("worker-2", 7, clock=4, phase=BARRIER_EPOCH, at_barrier=True)
    here, there = (Standing("worker-1", 2, clock=k, phase=BARRIER_EPOCH) for k in (6, 5))
    one = answered(
        change(entering={"worker-2": 7}, staying={"worker-1": 2, "worker-2": 7}, moves=moves),
        Prepared([here, at_barrier], 0), Prepared([there, at_barrier], 0),
    )  # fmt: skip
    (back,) = [standing for standing in one.standings() if standing.name == "worker-2"]
    assert (back.clock, back.turn(), back.active) == (4, (BARRIER_EPOCH, 6), True)
    assert ("worker-2", 7, 4) in one.settle() or not moves


def test_those_who_enter_behind_a_barrier_are_in_the_new_era() -> None:
    """The first commit from behind the barrier may not be there yet, and levels everyone when it comes."""
    old = Standing("worker-0", 2, clock=5, at_barrier=True)
    one = answered(change(entering={"worker-5": 9}, phase=BARRIER_EPOCH), Prepared([old], 0), Prepared([old], 0))
    assert one.turn() == (BARRIER_EPOCH, 0) and one.standings()[0].turn() == (BARRIER_EPOCH, 0)


def test_those_who_enter_stand_beside_the_slowest() -> None:
    here = [Standing("worker-0", 2, position=8), Standing("worker-1", 3, position=6)]
    there = [Standing("worker-0", 2, position=9), Standing("worker-1", 3, position=7)]
    fenced = Standing("worker-2", 5, position=1, fenced=True)
    one = answered(change(entering={"worker-5": 9}), Prepared([*here, fenced], 0), Prepared(there, 0))
    assert one.back_at() == 7 and one.standings()[0].position == 7


def test_where_primaries_change_everyone_is_told_of_everyone() -> None:
    stay, out = Standing("worker-0", 2, clock=5, inactive=True), Standing("worker-1", 3, clock=5)
    left = Standing("worker-2", 4, clock=1, left=True)
    one = answered(
        change({"worker-1": 3}, staying={"worker-0": 2}, moves=True),
        Prepared([stay, out, left], 0),
        Prepared([Standing("worker-0", 2, clock=4)], 0),
    )
    assert one.standings() == [stay]


def test_whom_no_server_knows_any_more_stays_nevertheless() -> None:
    """The only server of a job died with all standings: they live, and the next one must take their commits."""
    one = answered(change(staying={"worker-0": 2}, moves=True), Prepared([], 0), Prepared([], 0))
    (found,) = one.standings()
    assert (found.name, found.incarnation, found.phase) == ("worker-0", 2, -1)


def test_who_enters_is_beside_those_in_the_loop_not_beside_one_that_has_left_it() -> None:
    """Its rounds would wait for those in the loop, and they, for the end of the epoch, for it."""
    inside = Standing("worker-1", 2, clock=20, phase=LOOP, phase_began=3, inactive=True)
    outside = Standing("worker-2", 3, clock=30, phase=2 * LOOP - 1, phase_began=30, inactive=True)
    assert answered(change(entering={"worker-5": 9}), Prepared([inside], 0), Prepared([outside], 0)).turn() == (
        LOOP,
        17,
    )
    assert answered(change(entering={"worker-5": 9}), Prepared([outside], 0), Prepared([], 0)).turn() == (
        2 * LOOP - 1,
        0,
    )


def test_who_enters_is_beside_those_in_its_own_loop() -> None:
    """One has left the loop early, and is in the next: beside it, the others' rounds would wait for each other."""
    ahead = Standing("worker-0", 2, clock=3, phase=LOOP, phase_began=2)
    inside = Standing("worker-1", 3, clock=7)
    entering = {"worker-2": 9}
    one = answered(
        change(entering=entering, entering_phases={"worker-2": 0}), Prepared([ahead, inside], 0), Prepared([], 0)
    )
    assert one.places()["worker-2"].phase == 0 and one.standings()[0].turn() == (0, 7)
    late = answered(
        change(entering=entering, entering_phases={"worker-2": 5 * LOOP}),
        Prepared([ahead, inside], 0),
        Prepared([], 0),
    )
    assert late.standings()[0].turn() == (LOOP, 1), "no loop of that number has begun"
    before = answered(
        change(entering=entering, entering_phases={"worker-2": 0}), Prepared([ahead], 0), Prepared([], 0)
    )
    assert before.standings()[0].turn() == (0, 0), "alone in its loop, which is before the others'"


def test_who_enters_a_loop_that_all_others_have_left_is_not_at_its_end() -> None:
    """From there its first pause would end the loop: it would be in the next one's rounds, and others wait for it
    and it for them (ring, seeds 3000467 and 3000859)."""
    gone = Standing("worker-0", 2, clock=9, phase=2 * LOOP - 1, phase_began=9, inactive=True)
    one = answered(
        change(entering={"worker-2": 9}, entering_phases={"worker-2": LOOP}), Prepared([gone], 0), Prepared([gone], 0)
    )
    assert one.places()["worker-2"].phase == LOOP and one.standings()[0].turn() == (LOOP, 0)
    rounds: Rounds[str] = Rounds(parse_policy("sync"), [])
    rounds.reset([gone, *one.standings()], {("worker-0", 2): 9})
    assert rounds.commit("worker-2", 9, 1, LOOP, "2@1").apply, "those who have left the loop are not waited for"


@pytest.mark.parametrize(
    ("clock", "boundary", "num_void"), [(7, (6, 2), 1), (8, (6, 2), 0), (7, (7, 5), 0), (9, (2, 5), 3)]
)
def test_who_enters_begins_its_batch_with_the_others(clock: int, boundary: tuple[int, int], num_void: int) -> None:
    """Scripts with several optimizers make several commits of a batch: it takes part in the rest with nothing."""
    standing = Standing("worker-0", 1, clock=clock)
    one = answered(
        change(entering={"worker-1": 9}, staying={"worker-0": 1}), Prepared([standing], 0), Prepared([], 0)
    )
    assert one.places()["worker-1"].num_void == 0, "nothing is known of the others' batches"
    one.boundaries = {"worker-0": boundary}
    assert one.places()["worker-1"].num_void == num_void
