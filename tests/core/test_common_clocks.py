"""Clocks that slices share while rounds pass them by: every slice says the same as if it had counted alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.core.slice_state import CommonClocks, Identity, SliceState
from syncline.errors import ProtocolError

ONE, TWO = ("worker-0", 3), ("worker-1", 4)


class Gate:
    """Counts how often it is taken, and refuses a second holder."""

    def __init__(self) -> None:
        self.is_held, self.num_taken = False, 0

    @contextlib.contextmanager
    def _hold(self) -> Iterator[None]:
        assert not self.is_held, "taken twice: a lock would hang here"
        self.is_held, self.num_taken = True, self.num_taken + 1
        yield
        self.is_held = False

    def __enter__(self) -> None:
        self._held = self._hold()
        self._held.__enter__()

    def __exit__(self, *error: object) -> None:
        self._held.__exit__(None, None, None)


def common() -> CommonClocks:
    return CommonClocks(Gate())


def three(clocks: dict[Identity, int] | None = None) -> tuple[CommonClocks, list[SliceState]]:
    """Three slices that share their clocks."""
    shared, states = common(), [SliceState(clocks=clocks or {ONE: 1}) for _ in range(3)]
    assert all(state.join(shared) for state in states)
    return shared, states


def count(shared: CommonClocks, states: Sequence[SliceState], workers: list[tuple[Identity, int]]) -> None:
    """A round that touches none of these."""
    with shared.lock:
        has_advanced = shared.num_slices > 0 and shared.advance(workers)
    for state in states:
        if not (has_advanced and state.shares(shared)):
            state.applied([each for each in workers if state.admit(*each) == "new"], False)
            state.join(shared)


def test_one_advance_counts_for_all_and_changes_no_version() -> None:
    shared, states = three()
    with shared.lock:
        assert shared.advance([(ONE, 2), (TWO, 1)])
    assert [state.clocks for state in states] == [{ONE: 2, TWO: 1}] * 3
    assert [state.version for state in states] == [0, 0, 0]
    assert all(state.clocks is states[0].clocks for state in states), "one table"


def test_a_table_that_a_reader_holds_never_changes() -> None:
    """A reader without a lock sees all of a round or nothing of it."""
    shared, (state, *_) = three()
    before = state.clocks
    with shared.lock:
        shared.advance([(ONE, 2), (TWO, 1)])
    assert before == {ONE: 1}


@pytest.mark.parametrize("workers", [[(ONE, 1)], [(ONE, 3)], [(ONE, 2), (TWO, 2)]])
def test_a_repetition_or_a_gap_is_left_to_each_slice(workers: list[tuple[Identity, int]]) -> None:
    shared, states = three()
    with shared.lock:
        assert not shared.advance(workers)
    assert all(state.clocks == {ONE: 1} for state in states)
    with pytest.raises(ProtocolError):
        states[0].admit(ONE, 3)


def test_a_fenced_worker_does_not_advance_the_table() -> None:
    shared, states = common(), [SliceState(clocks={ONE: 1, TWO: 1}, fences={"worker-1": 4}) for _ in range(2)]
    assert all(state.join(shared) for state in states)
    with shared.lock:
        assert not shared.advance([(TWO, 2)])
        assert shared.advance([(ONE, 2)])


CHANGES = {
    "a round of its own": lambda state: state.applied([(ONE, 2)], True),
    "a fence": lambda state: state.fence(TWO),
    "another server's state": lambda state: state.take_over(7, [("worker-0", 3, 5)], [("worker-1", 4)]),
    "a worker's copy": lambda state: setattr(state, "clocks", {ONE: 5}),
    "a worker that is set level": lambda state: state.level({TWO: 9}),
    "a seed": lambda state: state.stand_apart(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_happens_to_one_slice_happens_to_no_other(what: str) -> None:
    """It stands apart with what it had, the others go on together, and it misses nothing that they count."""
    shared, (state, *others) = three({ONE: 1, TWO: 1})
    alone = SliceState(clocks={ONE: 1, TWO: 1})
    CHANGES[what](state)
    CHANGES[what](alone)
    assert (state.clocks, state.fences, state.version) == (alone.clocks, alone.fences, alone.version)
    assert not state.shares(shared) and shared.num_slices == 2
    assert all(other.clocks == {ONE: 1, TWO: 1} and not other.fences for other in others)
    with shared.lock:
        assert shared.advance([(TWO, 2)])
    assert state.clocks == alone.clocks and all(other.clocks[TWO] == 2 for other in others)


def test_one_with_other_clocks_or_fences_does_not_join() -> None:
    shared, _ = three()
    for other in (SliceState(clocks={ONE: 2}), SliceState(clocks={ONE: 1}, fences={"worker-1": 4})):
        assert not other.join(shared) and not other.shares(shared)
    assert shared.num_slices == 3


def test_the_first_one_brings_its_table_also_when_all_have_gone() -> None:
    shared, states = three()
    for state in states:
        state.stand_apart()
        state.stand_apart()  # changes nothing more
    assert shared.num_slices == 0
    late = SliceState(clocks={TWO: 8}, fences={"worker-0": 3})
    assert late.join(shared) and (shared.clocks, shared.fences) == ({TWO: 8}, {"worker-0": 3})
    late.fence(TWO)
    assert shared.fences == {"worker-0": 3}, "what it does later is its own"


def test_joining_and_leaving_take_the_lock() -> None:
    """Otherwise a round could be counted between a look at the table and the copy of it."""
    gate = Gate()
    shared, state = CommonClocks(gate), SliceState()
    assert state.join(shared) and gate.num_taken == 1
    state.stand_apart()
    assert gate.num_taken == 2


def test_a_table_that_nothing_advances_any_more_is_as_good_as_ones_own() -> None:
    """A server whose slices change begins another table; each slice counts the next round by itself."""
    shared, (state, *_) = three()
    newer = common()
    count(newer, [state], [(ONE, 2)])
    assert state.clocks == {ONE: 2} and state.shares(newer) and shared.clocks == {ONE: 1}


ROUND = st.tuples(
    st.just("round"), st.sets(st.integers(0, 3)), st.sets(st.sampled_from([ONE, TWO]), min_size=1).map(sorted)
)
CHANGE = st.tuples(st.sampled_from(["fence", "copy", "apart", "again", "table"]), st.integers(0, 3), st.just(()))


@given(st.lists(st.one_of(ROUND, ROUND, CHANGE), max_size=40))
def test_every_slice_says_what_it_would_say_alone(events: list[tuple[str, object, list[Identity]]]) -> None:
    shared, states = common(), [SliceState() for _ in range(4)]
    alone = [SliceState() for _ in range(4)]
    clocks, out = {ONE: 0, TWO: 0}, set[Identity]()
    for what, where, who in events:
        if what == "round":
            assert isinstance(where, set)
            workers = []
            for worker in who:
                if worker not in out:
                    clocks[worker] += 1
                    workers.append((worker, clocks[worker]))
            for number in where:
                states[number].stand_apart()
                states[number].applied(workers, True)
            count(shared, [state for k, state in enumerate(states) if k not in where], workers)
            for number, state in enumerate(alone):
                state.applied(workers, number in where)
        elif what == "fence":  # on all slices, one after the other
            out.add(TWO)
            for state in (*states, *alone):
                state.fence(TWO)
        elif what == "table":
            shared = common()
        else:
            assert isinstance(where, int)
            state = states[where]
            if what == "copy":
                state.clocks = dict(state.clocks)
            elif what == "again":
                state.take_over(state.version, state.clock_entries(), state.fence_entries())
            else:
                state.stand_apart()
        assert [(s.version, s.clocks, s.fences) for s in states] == [(s.version, s.clocks, s.fences) for s in alone]
        assert sum(state.shares(shared) for state in states) == shared.num_slices
