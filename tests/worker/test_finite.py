"""What is not finite is found by name, wherever it lies; nothing else is refused."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.config import JobConfig
from syncline.core.layout import FLOATS, ITEM_BYTES, Layout, Parameter, Segment, arrange, to_ranges
from syncline.core.rule import Rule
from syncline.errors import RuleError
from syncline.worker import arrays
from syncline.worker.arrays import Bytes
from syncline.worker.exchange import finite
from syncline.worker.exchange.commit import Push
from syncline.worker.exchange.finite import Bits, FiniteCheck, FinitePlan, Halves

SGD, ADD, ASSIGN = Rule("SGD", lr=1.0), Rule("Add"), Rule("Assign")
RULES = [SGD, ADD, ASSIGN]
#: The bits of numbers that are just finite, and of some that are not.
FINITE = {"float16": 0x7BFF, "bfloat16": 0x7F7F, "float32": 0x7F7F_FFFF, "float64": 0x7FEF_FFFF_FFFF_FFFF}
INFINITE = {dtype: bits + 1 for dtype, bits in FINITE.items()}


class Arena:
    """Memory as a worker may find it: full of what others left there, which read as floats is NaN, or zeros."""

    def __init__(self, layout: Layout, stale: int = 0xFF) -> None:
        self._arrays = {segment.index: np.full(segment.num_bytes, stale, np.uint8) for segment in layout.segments}

    def __call__(self, segment: Segment, slot: int) -> Bytes:
        return self._arrays[segment.index]

    def items(self, layout: Layout, name: str) -> Any:
        """A parameter's items, as bits."""
        segment, index = layout.where[name]
        parameter, begin = segment.parameters[index], segment.offsets[index]
        data = self._arrays[segment.index][begin : begin + parameter.num_bytes]
        return data.view(f"u{ITEM_BYTES[parameter.dtype]}")


def layout_of(*parameters: Parameter) -> Layout:
    return Layout([arrange(parameters, RULES, "mean")])


def filled(layout: Layout, names: list[str] | None = None, stale: int = 0xFF, bits: int | None = None) -> Arena:
    """Parameters full of these bits, else of numbers at the edge of what is finite; every other has a minus."""
    arena = Arena(layout, stale)
    for name in layout.where if names is None else names:
        segment, index = layout.where[name]
        dtype = segment.parameters[index].dtype
        items = arena.items(layout, name)
        items[:] = FINITE.get(dtype, 0) if bits is None else bits
        if dtype in FLOATS:
            items[::2] |= 1 << 8 * FLOATS[dtype] - 1
    return arena


def pushed(layout: Layout, *names: str) -> Any:
    return to_ranges(layout.parameter_id(name) for name in names or layout.where)


@contextlib.contextmanager
def cut_small(piece_bytes: int, num_threads: int) -> Iterator[None]:
    with (
        mock.patch.object(finite, "PIECE_BYTES", piece_bytes),
        mock.patch.object(finite, "LONG_BYTES", 2 * piece_bytes),
        mock.patch.object(arrays, "LEAST_BYTES", 64),
        mock.patch.object(arrays, "num_threads", lambda: num_threads),
    ):
        yield


parameters = st.lists(
    st.tuples(st.sampled_from([*ITEM_BYTES]), st.integers(0, 80), st.sampled_from([0, 1, 2])), min_size=1, max_size=8
)


@given(parameters, st.data(), st.sampled_from([64, 256, finite.PIECE_BYTES]), st.integers(1, 3), st.booleans())
def test_the_first_bad_parameter_is_found_wherever_it_lies(
    found: list[tuple[str, int, int]], data: st.DataObject, piece_bytes: int, num_threads: int, small: bool
) -> None:
    """Against an oracle: any dtypes, sizes, rules, subsets pushed, cuts and threads, amid zeros or stale bytes.

    Numbers at the edge make the quick look fail, and bytes between them; so there are runs without either.
    """
    made = []
    for number, (dtype, size, group) in enumerate(found):
        kind = group if dtype in FLOATS else 2  # integers and bools: the check does not look at them
        made.append(Parameter(f"p{number}", dtype, (size,), kind))
    layout = layout_of(*made)
    names = [p.name for p in layout.segments[0].parameters]
    sent = data.draw(st.lists(st.sampled_from(names), unique=True))
    arena = filled(layout, sent, data.draw(st.sampled_from([0, 0xFF])), data.draw(st.sampled_from([None, 0, 5])))
    bad = []
    for name in sent:
        segment, index = layout.where[name]
        parameter = segment.parameters[index]
        if parameter.dtype in FLOATS and parameter.num_items and data.draw(st.booleans(), label=f"{name} is bad"):
            place = data.draw(st.integers(0, parameter.num_items - 1))
            sign = data.draw(st.integers(0, 1)) << 8 * FLOATS[parameter.dtype] - 1
            payload = data.draw(st.integers(0, 3))
            arena.items(layout, name)[place] = INFINITE[parameter.dtype] | sign | payload
            if RULES[parameter.group] is not ASSIGN:
                bad.append(name)
    with cut_small(piece_bytes, num_threads), mock.patch.object(finite, "SMALL_BYTES", 1 << 20 if small else 0):
        plan = FinitePlan(to_ranges(layout.parameter_id(name) for name in sent), layout, arena, 0)
        assert plan.first_bad() == min(bad, key=names.index, default=None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_judged_rightly_bit_by_bit(dtype: str) -> None:
    """All 65,536 of them, against NumPy's own word."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = bits.astype(np.uint32) << 16
    expected = np.isfinite(bits.view(np.float16) if dtype == "float16" else wide.view(np.float32))
    for value, is_finite in zip(bits, expected, strict=True):
        assert Bits(np.array([value]).view(np.uint8), dtype).is_finite() == is_finite, hex(value)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-39, 1.5, -3e38, math.nan, -math.nan, math.inf, -math.inf])
def test_singles_and_doubles(dtype: str, value: float) -> None:
    layout = layout_of(Parameter("x", dtype, (3,)))
    arena = filled(layout)
    arena.items(layout, "x").view(dtype)[:] = 1.0
    arena.items(layout, "x").view(dtype)[1] = value
    assert FinitePlan(pushed(layout), layout, arena, 0).first_bad() == (None if math.isfinite(value) else "x")


@pytest.mark.parametrize("size", [100, 100_000])
@pytest.mark.parametrize("huge", [3e38, 1e-23])
def test_neither_a_product_that_overflows_nor_the_users_own_settings_matter(
    size: int, huge: float, recwarn: pytest.WarningsRecorder
) -> None:
    """Huge numbers are finite. A script with np.seterr(all="raise") is not stopped by our arithmetic."""
    layout = layout_of(Parameter("x", "float32", (size,)), Parameter("y", "float32", (size,)))
    arena = filled(layout)
    arena.items(layout, "x").view(np.float32)[:] = huge
    with np.errstate(all="raise"):
        assert FinitePlan(pushed(layout), layout, arena, 0).first_bad() is None
        arena.items(layout, "y").view(np.float32)[:] = np.nan
        assert FinitePlan(pushed(layout), layout, arena, 0).first_bad() == "y"
    assert not recwarn.list


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stale_bytes_between_parameters_refuse_nothing(dtype: str) -> None:
    """Parameters are looked at together with the gaps between them, whose bytes are nobody's."""
    layout = layout_of(*(Parameter(f"p{n}", dtype, (5,)) for n in range(3)))
    arena = filled(layout)
    whole = Bits(arena(layout.segments[0], 0), dtype)
    assert not whole.is_finite()
    check, said = FiniteCheck(JobConfig(workers=2), "worker-1", print), []
    push = Push(pushed=pushed(layout))
    assert check.admit(push, 1, layout, arena, 0) is push and not said and not check.num_refused


@given(parameters, st.data(), st.integers(1, 3))
def test_what_is_looked_at_while_it_is_copied_is_copied_whole(
    found: list[tuple[str, int, int]], data: st.DataObject, num_threads: int
) -> None:
    """Also behind a bad number: it may be an assigned one, and then all of it counts."""
    copies, bad = [], False
    for dtype, size, _ in found:
        source = np.ones(size, f"u{ITEM_BYTES[dtype]}")
        if size and dtype in FLOATS and data.draw(st.booleans()):
            source[data.draw(st.integers(0, size - 1))] = INFINITE[dtype]
            bad = True
        copies.append((np.full(source.nbytes, 7, np.uint8), source.view(np.uint8), dtype))
    with cut_small(64, num_threads):
        assert finite.copy_finite(copies) is not bad
    assert all((target == source).all() for target, source, _ in copies)


@pytest.mark.parametrize("size", range(1, 8))
def test_every_number_is_in_one_half_or_the_other(size: int) -> None:
    for place in range(size):
        values = np.zeros(size, np.float32)
        values[place] = np.inf
        with np.errstate(all="ignore"):
            assert not Halves(values.view(np.uint8)).is_finite()
            assert Halves(np.ones(size, np.float32).view(np.uint8)).is_finite()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", [0, 1, 255, 256, 1234, 1999, 2000])
def test_several_threads_look_at_all_of_it(dtype: str, place: int) -> None:
    layout = layout_of(Parameter("x", dtype, (2001,)))
    arena = filled(layout, stale=0, bits=1)
    with cut_small(64, num_threads=3):
        with mock.patch.object(finite, "SMALL_BYTES", 0):
            plan = FinitePlan(pushed(layout), layout, arena, 0)
        assert plan.first_bad() is None
        arena.items(layout, "x")[place] = INFINITE[dtype]
        assert plan.first_bad() == "x"


# -- refusals ---------------------------------------------------------------------------------------------


class Worker:
    """A check with one parameter, and a clock of its own."""

    def __init__(self, **settings: Any) -> None:
        self.said: list[str] = []
        self.now = 100.0
        self.layout = layout_of(Parameter("w", "float32", (4,)), Parameter("mask", "float32", (4,), 2))
        self.arena = filled(self.layout)
        self.check = FiniteCheck(
            JobConfig(**{"workers": 2, **settings}), "worker-1", self.said.append, lambda: self.now
        )
        self.clock = 0

    def push(self, value: float, name: str = "w", **fields: Any) -> Push:
        self.clock += 1
        self.arena.items(self.layout, name).view(np.float32)[2] = value
        given = Push(pushed=pushed(self.layout, name), **fields)
        result = self.check.admit(given, self.clock, self.layout, self.arena, 0)
        assert result is given or result.pushed == ()
        return result


def test_a_refused_push_keeps_what_its_round_needs_to_know() -> None:
    """The chief's clip_norm and hyperparameters are the round's, whatever its gradients are."""
    worker = Worker()
    overrides = [(0, 0, {"lr": 0.5})]
    result = worker.push(math.nan, weight=7.0, clip_norm=1.0, overrides=overrides)
    assert result == Push(pushed=(), weight=0.0, skip=False, clip_norm=1.0, overrides=overrides)
    assert worker.said == ["the push of step 1 was refused: 'w' is not finite; the round continues without it"]
    assert (worker.check.num_refused, worker.check.is_quarantined) == (1, False)


def test_where_there_are_no_rounds_none_is_spoken_of() -> None:
    worker = Worker(policy="async")
    worker.push(math.inf)
    assert worker.said == ["the push of step 1 was refused: 'w' is not finite; the job continues without it"]


def test_three_in_a_row_quarantine_and_a_finite_one_between_forgives() -> None:
    """From then on nothing counts, finite or not, nor does its overflow skip the rounds of others."""
    worker = Worker()
    for value in (math.nan, math.nan, 1.0, math.nan, math.nan):
        worker.push(value)
    assert not worker.check.is_quarantined and worker.check.num_refused == 4
    worker.push(math.nan)
    assert worker.check.is_quarantined and worker.check.num_refused == 5
    for push in (worker.push(1.0), worker.push(math.nan), worker.push(1.0, skip=True)):
        assert (push.pushed, push.weight, push.skip) == ((), 0.0, False)
    text = "worker-1 is quarantined: 3 pushes in a row were not finite; from now on it only pulls"
    assert worker.said[-1] == text and worker.said.count(text) == 1 and worker.check.num_refused == 5


def test_a_scalers_overflow_neither_counts_nor_forgives() -> None:
    worker = Worker(bad_pushes=2)
    worker.push(math.nan)
    for _ in range(5):
        assert worker.push(math.nan, skip=True).skip
    assert worker.check.num_refused == 1 and not worker.check.is_quarantined
    worker.push(math.nan)
    assert worker.check.is_quarantined


def test_a_push_of_nothing_that_could_be_bad_does_not_forgive() -> None:
    worker = Worker(bad_pushes=2)
    worker.push(math.nan)
    worker.push(-math.inf, "mask")
    worker.push(math.nan)
    assert worker.check.is_quarantined


def test_it_is_said_once_a_second_at_most() -> None:
    worker = Worker(bad_pushes=100)
    for _ in range(10):
        worker.push(math.nan)
        worker.now += 0.25
    steps = [line.partition(" was refused")[0] for line in worker.said]
    assert steps == ["the push of step 1", "the push of step 5", "the push of step 9"]
    assert worker.check.num_refused == 10


def test_the_only_worker_is_not_quarantined_but_stopped() -> None:
    """Nothing would ever change again: parameter, worker, step and remedy are named, again and again."""
    worker = Worker(workers=1, bad_pushes=2)
    assert worker.push(math.nan).pushed == ()
    with pytest.raises(RuleError, match=r"worker-1: 'w' is not finite at step 2; 2 pushes in a row .*clip_norm"):
        worker.push(math.nan)
    with pytest.raises(RuleError, match=r"worker-1: step 3 would not count"):
        worker.push(1.0)


def test_it_can_be_turned_off() -> None:
    worker = Worker(check_finite=False, bad_pushes=1)
    assert worker.push(math.nan).pushed and not worker.said and not worker.check.num_refused


def test_what_is_assigned_may_be_anything() -> None:
    worker = Worker(bad_pushes=1)
    assert worker.push(-math.inf, "mask").pushed and worker.push(math.nan, "mask").pushed


# -- what is kept -----------------------------------------------------------------------------------------


def test_plans_are_kept_and_follow_new_segments_and_new_memory() -> None:
    """A plan holds on to places in memory: it must not outlive them, nor miss what was registered since."""
    worker = Worker(bad_pushes=100)
    made = []
    real: Callable[..., FinitePlan] = FinitePlan

    def counting(*arguments: Any) -> FinitePlan:
        made.append(arguments)
        return real(*arguments)

    with mock.patch.object(finite, "FinitePlan", counting):
        for _ in range(3):
            worker.push(1.0)
        assert len(made) == 1
        worker.arena = filled(worker.layout)
        assert worker.push(math.nan).pushed == () and len(made) == 2
        first = worker.layout.segments[0]
        later = arrange([Parameter("late", "float32", (4,))], RULES, "mean", index=1, first_parameter=2)
        worker.layout = Layout([first, later])
        worker.arena = filled(worker.layout)
        worker.arena.items(worker.layout, "late").view(np.float32)[0] = math.nan
        wide = Push(pushed=((0, 3),))
        assert worker.check.admit(wide, 9, worker.layout, worker.arena, 0).pushed == ()
        assert "'late'" in worker.check.plan(wide.pushed, worker.layout, worker.arena, 0).first_bad().__repr__()
        for size in range(200):
            worker.check.admit(Push(pushed=((0, 1), (2, 3 + size))), 10, worker.layout, worker.arena, 0)
        assert worker.check.num_plans <= 64


def test_slots_are_looked_at_each_in_its_own_memory() -> None:
    layout = layout_of(Parameter("w", "float32", (4,)))
    arenas = [filled(layout), filled(layout)]
    arenas[1].items(layout, "w").view(np.float32)[0] = math.nan
    check = FiniteCheck(JobConfig(workers=2, policy="async", window=1), "worker-1", lambda text: None)

    def arena(segment: Segment, slot: int) -> Bytes:
        return arenas[slot](segment, slot)

    push = Push(pushed=((0, 1),))
    found = [bool(check.admit(push, clock, layout, arena, clock % 2).pushed) for clock in range(4)]
    assert found == [True, False, True, False]
