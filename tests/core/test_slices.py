"""Slice state: the vector clock is the table of what has been applied."""

from __future__ import annotations

import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.core.slice_state import (
    Copy,
    SliceState,
    VersionTable,
    freshest,
    highest_clocks,
    least_clocks,
    num_revoked,
    reach_of,
)
from syncline.errors import ProtocolError

ONE, TWO = ("worker-0", 3), ("worker-1", 4)


def test_a_commit_is_admitted_once() -> None:
    """The same commit again, after a reply was lost, is answered and not applied a second time."""
    state = SliceState()
    assert state.admit(ONE, 1) == "new"
    state.applied([(ONE, 1)], changed=True)
    assert state.admit(ONE, 1) == "already applied"
    assert state.admit(ONE, 2) == "new"
    assert state.admit(TWO, 1) == "new", "each worker has its own clock"


def test_a_gap_is_refused_with_both_clocks() -> None:
    """Skipping over a lost commit would silently lose an update."""
    state = SliceState(clocks={ONE: 4})
    with pytest.raises(ProtocolError, match="worker-0 commits clock 6 on a slice that is at 4"):
        state.admit(ONE, 6)
    assert state.admit(ONE, 5) == "new", "a refusal changes nothing"


def test_another_incarnation_has_a_clock_of_its_own() -> None:
    """A worker that came back counts from 1 again; what its former self did is not mistaken for its own."""
    state = SliceState(clocks={("worker-0", 3): 7})
    assert state.admit(("worker-0", 9), 1) == "new"
    assert state.admit(("worker-0", 3), 7) == "already applied"


def test_a_clock_advances_where_nothing_was_pushed() -> None:
    """A commit advances its clock on every slice, touched or not; the version counts changes only."""
    state = SliceState()
    state.applied([(ONE, 1), (TWO, 1)], changed=False)
    assert (state.version, state.clocks) == (0, {ONE: 1, TWO: 1})
    state.applied([(ONE, 2), (TWO, 2)], changed=True)
    assert (state.version, state.clocks) == (1, {ONE: 2, TWO: 2})


def test_staleness_is_the_updates_since_the_pull() -> None:
    state = SliceState()
    assert state.staleness("worker-0") == 0, "who has never pulled has the registered values: nothing to measure"
    state.seen["worker-0"] = state.version
    for clock in (1, 2, 3):
        state.applied([(TWO, clock)], changed=True)
    assert state.staleness("worker-0") == 3


def test_an_answer_has_the_versions_of_all_slices_and_says_what_was_read() -> None:
    """Slices that did not change are not looked at."""
    states = [SliceState(version=version) for version in (0, 5, 2)]
    table = VersionTable(threading.Lock(), states)
    assert table.read_by("worker-0") == [0, 5, 2]
    states[1].applied([(TWO, 1)], changed=True)
    states[1].applied([(TWO, 2)], changed=True)
    states[2].take_over(9, [], [])
    assert table.newest() == [0, 7, 9]
    assert [state.staleness("worker-0") for state in states] == [0, 2, 7]
    assert [state.staleness("worker-1") for state in states] == [0, 0, 0], "it has read nothing"
    states[1].seen["worker-0"] = 7
    assert states[1].staleness("worker-0") == 0, "pulled by itself since"
    assert table.read_by("worker-0") == [0, 7, 9]
    states[1].applied([(TWO, 3)], changed=True)
    assert [state.staleness("worker-0") for state in states] == [0, 1, 0]


def test_updates_that_no_answer_takes_in_need_no_memory() -> None:
    """Workers over a socket are answered in parts, without the table: a job of weeks may never ask it."""
    states = [SliceState(), SliceState()]
    table = VersionTable(threading.Lock(), states)

    def update(times: int) -> int:
        tracemalloc.start()
        for _ in range(times):
            for state in states:
                state.version += 1
        num_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return num_bytes

    assert update(10_000) < update(100) + 1_000
    assert table.newest() == [10_100, 10_100]


def test_what_was_read_is_known_also_where_slices_move() -> None:
    """Another table, when slices come and go: places differ."""
    one, two = SliceState(version=3), SliceState(version=4)
    table = VersionTable(threading.Lock(), [one, two])
    table.read_by("worker-0")
    for state in (one, two):
        state.applied([(TWO, 1)], changed=True)
    table = VersionTable(threading.Lock(), [two])
    one.report_to(None)
    assert (one.staleness("worker-0"), two.staleness("worker-0")) == (1, 1)
    one.applied([(TWO, 2)], changed=True)
    assert table.newest() == [5] and (one.staleness("worker-0"), one.num_readers) == (2, 1)


def test_nothing_is_known_of_what_a_fenced_worker_has_read() -> None:
    """Its next life begins without."""
    states = [SliceState(), SliceState()]
    table = VersionTable(threading.Lock(), states)
    table.read_by("worker-0")
    states[0].seen["worker-0"] = 0
    for state in states:
        state.applied([(TWO, 1)], changed=True)
        assert state.staleness("worker-0") == 1
        state.fence(ONE)
        assert (state.staleness("worker-0"), state.num_readers) == (0, 0)
        table.read_by("worker-0")  # the next life has read, while others are still to be fenced


def test_a_copy_counts_when_neither_version_nor_writer_has_moved() -> None:
    """A torn copy has two ways to happen: an update finished meanwhile, or one is under way."""
    state = SliceState(version=5)
    assert state.is_still(5)
    assert not state.is_still(4)
    state.writing = True
    assert not state.is_still(5)


@given(st.lists(st.tuples(st.sampled_from([ONE, TWO]), st.integers(1, 6)), max_size=40))
def test_whatever_is_said_each_clock_is_applied_once_and_in_order(said: list[tuple[tuple[str, int], int]]) -> None:
    """Repeats, old commits and gaps in any order: what is applied is 1, 2, 3, … for each worker."""
    state, applied = SliceState(), {ONE: [], TWO: []}
    for worker, clock in said:
        try:
            if state.admit(worker, clock) == "new":
                state.applied([(worker, clock)], changed=True)
                applied[worker].append(clock)
        except ProtocolError:
            assert clock > state.clocks.get(worker, 0) + 1
    for worker, clocks in applied.items():
        assert clocks == list(range(1, state.clocks.get(worker, 0) + 1))
    assert state.version == sum(map(len, applied.values()))


def test_a_fence_refuses_what_is_new_and_answers_what_is_known() -> None:
    """A late copy of an applied commit is still `already applied`; the first new one is refused, with the reason."""
    state = SliceState(clocks={ONE: 4})
    state.fence(ONE)
    assert state.admit(ONE, 4) == "already applied"
    with pytest.raises(ProtocolError, match="worker-0, incarnation 3, is fenced on this slice"):
        state.admit(ONE, 5)
    assert state.admit(("worker-0", 9), 1) == "new", "a later incarnation is not fenced"
    assert state.admit(TWO, 1) == "new"


def test_only_the_highest_fenced_incarnation_of_a_name_is_kept() -> None:
    """A thousand deaths of one worker must not leave a thousand clocks behind."""
    state = SliceState()
    for incarnation in range(1, 1001):
        state.applied([(("worker-0", incarnation), 7)], changed=True)
        state.fence(("worker-0", incarnation))
    assert state.clocks == {("worker-0", 1000): 7} and state.fences == {"worker-0": 1000}
    state.fence(("worker-0", 5))
    assert state.fences == {"worker-0": 1000}, "an old fence that comes late takes nothing back"
    assert all(state.is_fenced(("worker-0", k)) for k in (1, 500, 1000))


def test_a_slice_moves_with_its_version_clocks_and_fences() -> None:
    state, moved = SliceState(), SliceState(version=3, clocks={TWO: 9})
    state.applied([(ONE, 1), (TWO, 1)], changed=True)
    state.fence(("worker-7", 2))
    moved.take_over(state.version, state.clock_entries(), state.fence_entries())
    assert (moved.version, moved.clocks, moved.fences) == (1, {ONE: 1, TWO: 1}, {"worker-7": 2})


def test_the_clock_of_a_worker_at_a_server_is_the_least_of_its_slices() -> None:
    """A promoted slice may lack the last round, or know nothing of a worker: from there on commits are made again."""
    states = [SliceState(clocks={ONE: 5, TWO: 2}), SliceState(clocks={ONE: 4}), SliceState(clocks={ONE: 5, TWO: 3})]
    assert least_clocks(states) == {ONE: 4, TWO: 0}
    assert least_clocks([]) == {}
    assert least_clocks(states[:1]) == {ONE: 5, TWO: 2}


# -- copies that stand in for lost slices -----------------------------------------------------------------


def test_the_freshest_copy_comes_back_with_what_each_worker_was_told() -> None:
    """What was acknowledged to worker-0 is never made again: where it is missing it is revoked, not awaited."""
    copies = {
        ("worker-0", 3): [Copy(7, 4, {"worker-0#3": 6, "worker-1#4": 2}, 9)],
        ("worker-1", 4): [Copy(7, 8, {"worker-0#3": 5, "worker-1#4": 4}, 8), Copy(8, 1, {}, 1)],
    }
    assert freshest(copies, 7) == ("worker-1", Copy(7, 8, {"worker-0#3": 6, "worker-1#4": 4}, 9))
    assert freshest(copies, 8) == ("worker-1", Copy(8, 1, {}, 1))
    assert freshest(copies, 9) is None


def test_the_word_of_another_about_somebody_s_clock_is_not_what_it_was_told() -> None:
    """An older copy may have seen more of a third worker, whose step is then in neither."""
    copies = {("worker-0", 3): [Copy(7, 8, {}, 8)], ("worker-1", 4): [Copy(7, 4, {"worker-2#5": 3}, 4)]}
    assert freshest(copies, 7) == ("worker-0", Copy(7, 8, {}, 8))


def test_revoked_is_what_was_acknowledged_beyond_the_copies() -> None:
    assert num_revoked([Copy(1, 8, {}, 9), Copy(2, 4, {}, 8)]) == 4
    assert num_revoked([]) == 0


def test_how_far_slices_come_with_the_steps_of_those_who_are_out() -> None:
    """Its own come to what is staged; a slice that has come since a worker was fenced lacks nothing of it."""
    out, old = ("worker-1", 4), ("worker-2", 5)
    mine = SliceState(clocks={out: 6, old: 3}, fences={"worker-2": 5})
    new = SliceState(clocks={out: 6})
    promoted = SliceState(clocks={out: 5, old: 2}, fences={"worker-2": 5})
    states = {"server-0#1": [mine, new], "server-1#2": [promoted]}
    staged = {out: 7, old: 0}
    assert reach_of(states, "server-0#1", [out], lambda who: staged[who]) == [
        ("worker-1", 4, 7, "server-0#1"),
        ("worker-1", 4, 5, "server-1#2"),
        ("worker-2", 5, 3, "server-0#1"),
        ("worker-2", 5, 2, "server-1#2"),
    ]
    assert highest_clocks(state.clocks for state in (mine, new, promoted)) == {out: 6, old: 3}
