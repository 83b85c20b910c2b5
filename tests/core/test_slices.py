"""Slice state: the vector clock is the table of what has been applied."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.core.slices import SliceState
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
