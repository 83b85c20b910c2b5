"""Layout: every item of every parameter has one place, and a model that differs is named with both shapes."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.core.layout import (
    ALIGN,
    INTEGERS,
    ITEM_BYTES,
    MAX_DIMENSIONS,
    Layout,
    Parameter,
    Segment,
    arrange,
    covers,
    in_ranges,
    place,
    to_ranges,
    without,
)
from syncline.core.rule import Rule
from syncline.errors import LayoutError, RuleError

RULES = (Rule("Adam", lr=0.1), Rule("Add"), Rule("Assign"), Rule("Adafactor", lr=0.1))
shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> list[Parameter]:
    """Models of mixed dtypes and rules, with empty and zero-dimensional parameters among them."""
    found = []
    for number in range(draw(st.integers(1, 12))):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        groups = [2] if dtype == "bool" else [1, 2] if dtype in INTEGERS else [0, 1, 2, 3]
        found.append(Parameter(f"p{number}", dtype, draw(shapes), draw(st.sampled_from(groups))))
    return found


@st.composite
def placed(draw: st.DrawFn) -> Segment:
    servers = [f"server-{k}" for k in range(draw(st.integers(1, 4)))]
    segment, _ = place(
        arrange(draw(models()), RULES, "mean"), servers, {}, draw(st.sampled_from([64, 192, 1024, 1 << 20])), 0
    )
    return segment


@given(models())
def test_offsets_are_aligned_and_nothing_overlaps(parameters: list[Parameter]) -> None:
    segment = arrange(parameters, RULES, "mean")
    assert sorted(p.name for p in segment.parameters) == sorted(p.name for p in parameters)
    assert all(offset % ALIGN == 0 for offset in segment.offsets)
    ends = [offset + p.num_bytes for p, offset in zip(segment.parameters, segment.offsets, strict=True)]
    assert all(end <= start for end, start in zip(ends, segment.offsets[1:], strict=False))
    assert all(end <= segment.num_bytes for end in ends)


@given(models())
def test_a_dtype_is_one_run_and_what_stays_whole_comes_first_in_it(parameters: list[Parameter]) -> None:
    """Slices have one dtype, and what may be cut is one run per dtype: otherwise placement could not be even."""
    segment = arrange(parameters, RULES, "mean")
    runs = [(p.dtype, segment.rule_of(p).elementwise) for p in segment.parameters]
    assert len([key for key, _ in itertools.groupby(runs)]) == len(set(runs))
    for one, two in itertools.pairwise(runs):
        assert not (one[0] == two[0] and one[1] and not two[1])


@given(placed())
def test_the_pieces_of_all_slices_cover_every_item_exactly_once(segment: Segment) -> None:
    """An item in no piece is never updated, one in two pieces is updated twice."""
    seen: Counter[tuple[int, int]] = Counter()
    for part in segment.slices:
        for piece in segment.pieces(part):
            parameter = segment.parameters[piece.parameter]
            assert parameter.dtype == part.dtype
            size = ITEM_BYTES[parameter.dtype]
            assert part.offset + piece.offset == segment.offsets[piece.parameter] + piece.start * size
            assert piece.offset + piece.num_items * size <= part.num_bytes
            seen.update((piece.parameter, piece.start + k) for k in range(piece.num_items))
    expected = {(index, item) for index, p in enumerate(segment.parameters) for item in range(p.num_items)}
    assert set(seen) == expected
    assert not seen or max(seen.values()) == 1


@given(placed())
def test_a_parameter_whose_rule_looks_at_it_whole_is_never_cut(segment: Segment) -> None:
    """Half a matrix under Muon, or half a row sum under Adafactor, would be updated by other numbers."""
    counts: Counter[int] = Counter()
    for part in segment.slices:
        for piece in segment.pieces(part):
            parameter = segment.parameters[piece.parameter]
            counts[piece.parameter] += 1
            if not segment.rule_of(parameter).elementwise:
                assert (piece.start, piece.num_items) == (0, parameter.num_items)
    for index, parameter in enumerate(segment.parameters):
        if not segment.rule_of(parameter).elementwise:
            assert counts[index] == (1 if parameter.num_items else 0)


def test_empty_and_zero_dimensional_parameters_have_a_place() -> None:
    """A scalar has one item; an empty one has none, and does not shadow its neighbour at the same offset."""
    given = [
        Parameter("none", "float32", (0, 7)),
        Parameter("scalar", "float32", ()),
        Parameter("last", "float32", (0,)),
    ]
    segment, _ = place(arrange(given, RULES, "mean"), ["server-0"], {}, 64, 0)
    assert segment.offsets == (0, 0, 64)
    (part,) = segment.slices
    assert [(p.parameter, p.start, p.num_items) for p in segment.pieces(part)] == [(1, 0, 1)]
    assert place(arrange(given[:1], RULES, "mean"), ["server-0"], {}, 64, 0)[0].slices == ()
    assert given[1].describe() == "float32[]"


def test_a_later_segment_moves_nothing() -> None:
    layout = Layout()
    one = arrange([Parameter("a", "float32", (3,))], RULES, "mean")
    layout.add(one)
    layout.add(arrange([Parameter("b", "float32", (3,))], RULES, "sum", index=1, ordinal=1, first_parameter=1))
    assert layout.where["a"] == (one, 0)
    assert [layout.parameter_id(name) for name in "ab"] == [0, 1]
    assert layout.num_parameters == 2


@given(st.sets(st.integers(0, 60)))
def test_ranges_say_the_same_as_the_ids(ids: set[int]) -> None:
    ranges = to_ranges(ids)
    assert [n for low, high in ranges for n in range(low, high)] == sorted(ids)
    assert all(one[1] < two[0] for one, two in itertools.pairwise(ranges)), "neighbours are one range"
    assert [n for n in range(-2, 64) if in_ranges(ranges, n)] == sorted(ids)


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)))
def test_ranges_less_others_are_the_ids_less_the_others(ids: set[int], others: set[int]) -> None:
    assert without(to_ranges(ids), to_ranges(others)) == to_ranges(ids - others)


def test_covers_is_whether_every_id_is_there() -> None:
    """Every set of ids up to 5 and every start and stop: the mistakes are at the edges."""
    for bits in range(1 << 6):
        ids = {number for number in range(6) if bits >> number & 1}
        for start, stop in itertools.product(range(-1, 8), repeat=2):
            assert covers(to_ranges(ids), start, stop) == all(number in ids for number in range(start, stop))


ONE = Parameter("w", "float32", (2,))


@pytest.mark.parametrize(
    ("parameters", "rules", "reduce", "kind", "message"),
    [
        ([ONE, ONE], RULES, "mean", LayoutError, "two parameters are named 'w'; names must differ"),
        ([], RULES, "mean", LayoutError, "nothing to register: the parameters are empty"),
        ([ONE], RULES, "median", LayoutError, "reduce = 'median': must be one of mean, sum"),
        (
            [Parameter("w", "complex64", (2,))],
            RULES,
            "mean",
            LayoutError,
            "'w' has dtype complex64; supported: float16, ",
        ),
        (
            [Parameter("w", "float32", (2, -1))],
            RULES,
            "mean",
            LayoutError,
            "'w' has a negative size in its shape (2, -1)",
        ),
        ([Parameter("w", "float32", (1,) * 65)], RULES, "mean", LayoutError, "'w' has 65 dimensions; at most 64"),
        ([Parameter("w", "float32", (2,), 9)], RULES, "mean", LayoutError, "'w' names rule 9; there are 4"),
        ([Parameter("w", "float32", (2,), -1)], RULES, "mean", LayoutError, "'w' names rule -1; there are 4"),
        (
            [Parameter("n", "int64", (), 0)],
            RULES,
            "mean",
            RuleError,
            "'n' is int64[]; integers take Add or Assign, not Adam",
        ),
        ([Parameter("n", "bool", (3,), 1)], RULES, "mean", RuleError, "'n' is bool[3]; bool takes Assign, not Add"),
        (
            [Parameter("fc.bias", "float32", (10,))],
            [Rule("Muon", lr=0.1)],
            "mean",
            RuleError,
            "'fc.bias' is float32[10]; Muon takes matrices only",
        ),
        (
            [Parameter("w", "float64", (1 << 22, 1 << 20))],
            RULES,
            "mean",
            LayoutError,
            "35184372088832 bytes in one registration; at most 17592186044416",
        ),
    ],
)
def test_what_cannot_be_registered_is_named(
    parameters: list[Parameter], rules: list[Rule], reduce: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        arrange(parameters, rules, reduce)


def test_a_shape_of_many_dimensions_is_refused_before_it_is_multiplied() -> None:
    """A product of a million large numbers would keep the coordinator busy for minutes."""
    many = Parameter("w", "float32", (1 << 63,) * 1_000_000)
    with pytest.raises(LayoutError, match=f"at most {MAX_DIMENSIONS}"):
        arrange([many], RULES, "mean")


@pytest.fixture
def layout() -> Layout:
    known = [Parameter("fc.weight", "float32", (10, 120)), Parameter("fc.bias", "float32", (10,))]
    return Layout([arrange(known, RULES, "mean")])


def test_another_model_is_named_with_both_shapes(layout: Layout) -> None:
    with pytest.raises(LayoutError) as caught:
        layout.check_same([Parameter("fc.weight", "float32", (10, 84))], "worker-1")
    assert str(caught.value) == (
        "worker-1 registered 'fc.weight' as float32[10, 84], the job has float32[10, 120]; "
        "start worker-1 with the same model as the rest of the job"
    )


def test_another_dtype_is_named_with_both(layout: Layout) -> None:
    with pytest.raises(LayoutError, match=r"as bfloat16\[10\], the job has float32\[10\]; start worker-2"):
        layout.check_same([Parameter("fc.bias", "bfloat16", (10,))], "worker-2")


def test_a_parameter_too_many_or_too_few_is_named(layout: Layout) -> None:
    with pytest.raises(LayoutError, match=r"'gate' as float32\[1\], the job has no parameter of that name; start w"):
        layout.check_same([Parameter("gate", "float32", (1,))], "worker-1")
    with pytest.raises(LayoutError, match=r"worker-1 did not register 'fc\.bias', the job has it as float32\[10\]"):
        layout.check_complete(layout.segments[0], [Parameter("fc.weight", "float32", (10, 120))], "worker-1")


def test_the_group_of_a_parameter_is_no_difference(layout: Layout) -> None:
    """Rules are the chief's: a worker that numbers its groups otherwise has the same model."""
    layout.check_same([Parameter("fc.bias", "float32", (10,), 1)], "worker-1")
