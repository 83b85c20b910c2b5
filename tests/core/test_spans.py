"""Spans: cut and put together, they hold the same positions, each once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.core.leasing.ranges import Span, comb, count, joined


def positions(spans: list[Span]) -> list[int]:
    return [position for span in spans for position in span.positions().tolist()]


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start = draw(st.integers(0, 40))
    width = draw(st.integers(1, 5))
    if draw(st.booleans()):
        return Span(start, start + draw(st.integers(0, 40)))
    period = draw(st.integers(width + 1, 12))
    return comb(start, draw(st.integers(1, 8)), period, width)


@given(spans(), st.integers(0, 60), st.integers(0, 60))
def test_a_piece_is_cut_by_counting_along(span: Span, begin: int, end: int) -> None:
    assert positions(span.cut(begin, end)) == span.positions().tolist()[begin:end]
    assert count(span.cut(begin, end)) == len(span.positions().tolist()[begin:end])
    assert len(span.cut(begin, end)) <= 3


@given(spans(), st.integers(0, 20), st.integers(0, 20))
def test_positions_of_a_part(span: Span, begin: int, end: int) -> None:
    begin, end = min(begin, len(span)), min(end, len(span))
    assert span.positions(begin, end).tolist() == span.positions().tolist()[begin:end]


@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=2, max_size=4), st.data())
def test_what_workers_give_back_of_a_block_is_one_range_again(
    first: int, widths: list[int], data: st.DataObject
) -> None:
    """Each has read another number of batches: behind the one that read most it is one range."""
    period, teeth = sum(widths), 6
    parts = [comb(first + sum(widths[:k]), teeth, period, width) for k, width in enumerate(widths)]
    read = [data.draw(st.integers(0, teeth)) for _ in widths]
    left = [
        piece
        for part, done, width in zip(parts, read, widths, strict=True)
        for piece in part.cut(done * width, len(part))
    ]
    found = joined(left)
    assert sorted(positions(found)) == sorted(positions(left)) and len(set(positions(found))) == count(found)
    if max(read) < teeth:
        whole = Span(first + max(read) * period, first + teeth * period)
        assert any(not s.period and s.start <= whole.start and s.stop >= whole.stop for s in found)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_joined_holds_the_same_positions_in_no_more_spans(owners: list[int]) -> None:
    """Any partition of a range into single positions comes back as one."""
    singles = [Span(k, k + 1) for k, owner in enumerate(owners) if owner]
    found = joined(singles)
    assert sorted(positions(found)) == [s.start for s in singles]
    assert len(found) <= len(singles) and joined(found) == found


def test_one_billion_samples_are_one_span() -> None:
    parts = [comb(k * 32, 10**9 // 128, 128, 32) for k in range(4)]
    assert joined(parts) == [Span(0, 10**9 // 128 * 128)]
    assert parts[3].cut(10**8, 10**8 + 64)[0].start == 96 + (10**8 // 32) * 128


@pytest.mark.parametrize("numbers", [(3, 2), (-1, 2), (0, 10, 4, 0), (0, 10, 4, 4), (0, 9, 4, 2)])
def test_a_span_that_cannot_be(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="from"):
        Span(*numbers)
