"""Numbers that are packed: as many as was said fit, they come back as near as was said, and who lies is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.core.codecs.codec import Bytes, Floats
from syncline.core.codecs.packing import Fit, fit, pack, unpack
from syncline.core.codecs.topk import LEAST_PACKED, TopK
from syncline.errors import FrameError

SIZE = 3000
KNOWN = fit(TopK(0.05).bound(SIZE), SIZE)
STEP = 1 << 16
CODE = 4 + KNOWN.low_bits


def through(values: Floats, known: Fit, places: np.ndarray | None = None) -> Floats:
    out = np.full(values.size, 7, np.float32)
    unpack(pack(values, np.flatnonzero(values) if places is None else places, known.low_bits), known, out)
    return out


def bits_of(head: tuple[int, int], bits: str) -> Bytes:
    packed = np.packbits(np.array([int(b) for b in bits], np.uint8))
    return np.concatenate([np.array(head, np.uint32).view(np.uint8), packed])


def normal(size: int) -> Floats:
    return np.random.default_rng(0).standard_normal(size).astype(np.float32)


def nearest_power(values: Floats) -> Floats:
    powers = np.exp2(np.arange(-126, 128)).astype(np.float64)
    near = powers[np.abs(np.abs(values.astype(np.float64))[:, None] - powers).argmin(axis=1)]
    return np.copysign(near, values).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20_000), st.sampled_from([0.3, 0.1, 0.05, 0.01, 0.004]), st.integers(0, 3))
def test_as_many_as_was_said_fit_wherever_they_lie(size: int, share: float, seed: int) -> None:
    codec = TopK(share)
    known = codec.packing(size)
    assert (known is not None) == (codec.bound(size) >= 8 * LEAST_PACKED)
    if known is None:
        return
    ones = np.ones(size, np.float32)
    anywhere = np.sort(np.random.default_rng(seed).choice(size, known.num_items, replace=False))
    last, first = np.arange(size - known.num_items, size), np.arange(known.num_items)
    for places in (anywhere, last, first, np.append(first[:-1], size - 1)):
        assert pack(ones, places, known.low_bits).size <= codec.bound(size)
        out = np.full(size, 7, np.float32)
        unpack(pack(ones, places, known.low_bits), known, out)
        assert np.array_equal(np.flatnonzero(out), places)
    if share <= 0.05:
        assert known.num_items > 5 * share * size * (1 - 8 / LEAST_PACKED), (
            "docs/guides/codecs.md says about six times the share"
        )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 50), st.floats(-100, 100))
def test_a_number_comes_as_the_nearest_power_of_two(seed: int, octaves: float) -> None:
    rng = np.random.default_rng(seed)
    values = (np.exp2(rng.uniform(-6, 0, 400) + octaves) * rng.choice([-1, 1], 400)).astype(np.float32)
    found = through(values, Fit(400, 3))
    assert np.array_equal(found, nearest_power(values))
    assert np.abs(found - values).max() <= np.abs(values).max() / 3
    assert np.array_equal((values - found) + found, values), "what is left out is left out exactly"


def test_what_is_far_below_the_largest_does_not_travel() -> None:
    values = np.float32(3) * np.exp2(-np.append(np.zeros(40), np.arange(40))).astype(np.float32)
    assert np.flatnonzero(through(values, Fit(80, 0))).tolist() == list(range(48))
    assert not through(np.array([1e-40, -1e-45], np.float32), Fit(2, 0)).any()
    tiny = np.float32(2.0**-122) * np.exp2(-np.arange(8)).astype(np.float32)
    least = np.float32(2.0**-126)  # nothing comes as less
    assert np.array_equal(through(tiny, Fit(8, 0)), [*tiny[:5], least, 0, 0])


def test_few_that_are_very_large_keep_nobody_from_travelling() -> None:
    """Steps are longer then: what comes is smaller by less than a step, and a fourth more at most."""
    values = normal(1000)
    values[[3, 500]] = [1e6, -1e5]
    found, is_small = through(values, Fit(1000, 2)), np.abs(values) < 10
    assert found[3] == np.float32(2**20) and -1e5 / 3 < found[500] + 1e5 < 1e5
    ratio = found[is_small] / values[is_small]
    assert np.count_nonzero(ratio) > 500 and ratio.max() <= 4 / 3 and ratio[ratio > 0].min() > 2.0**-4
    assert (values - found)[is_small].any()


def test_what_is_not_finite_is_nan_and_what_is_very_large_stays_finite() -> None:
    values = np.array([np.nan, 3.4e38, -np.inf, 3.4e38, -3.4e38, 0, 1], np.float32)
    found = through(values, Fit(6, 1))
    assert np.isnan(found).tolist() == [True, False, True, False, False, False, False]
    assert found.tolist()[1] == 2.0**127 and found[6] == 0
    assert np.array_equal(through(values[3:], Fit(3, 1)), np.float32([2.0**127, -(2.0**127), 0, 0]))


def test_the_bits_are_as_said() -> None:
    """Two numbers, one low bit: -4 at place 2 and 1 at place 5."""
    values = np.array([0, 0, -4, 0, 0, 1], np.float32)
    planes = ["00", "01", "00", "10"]  # steps below the largest power, lowest bit first; then the signs
    gaps = ["00", "01" + "01"]  # 2 and 2: no low bit, once above
    assert np.array_equal(pack(values, np.array([2, 5]), 1), bits_of((2, 1 << 16 | 127 + 2), "".join(planes + gaps)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bits_of((1, STEP + 129), ""), "8 bytes of packed numbers"),
        (bits_of((0, STEP + 129), "1" * 16), "0 packed numbers"),
        (bits_of((KNOWN.num_items + 1, STEP + 129), "1" * 8 * 4000), f"{KNOWN.num_items} at most"),
        (bits_of((1 << 31, STEP + 129), "1" * 16), "packed numbers"),
        (bits_of((1, STEP), "1" * 16), "from power 0"),
        (bits_of((1, STEP + 256), "1" * 16), "from power 256"),
        (bits_of((1, 129), "1" * 16), "by steps of 0"),
        (bits_of((1, 130 * STEP + 129), "1" * 16), "by steps of 130"),
        (bits_of((4, STEP + 129), "1" * 16), "0 places of 4 packed numbers, in 10 bytes"),
        (bits_of((1, STEP + 129), "0" * 16), "0 places of 1"),
        (bits_of((2, STEP + 129), "0" * 2 * CODE + "1" * 4), "places of 2"),
        (bits_of((1, STEP + 129), "0" * CODE + "1" + "0" * 16), "1 places of 1 packed numbers, in 11 bytes"),
        (bits_of((1, STEP + 129), "0" * CODE + "0" * 4000 + "1"), "beyond 3000 places"),
        (bits_of((1, STEP + 3), "111" + "0" * (CODE - 3) + "1"), "below all powers"),
        (bits_of((1, 50 * STEP + 200), "111" + "0" * (CODE - 3) + "1"), "below all powers"),
    ],
)
def test_what_is_no_packing_is_refused(data: Bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        unpack(data, KNOWN, np.empty(SIZE, np.float32))


@given(st.binary(max_size=400), st.integers(0, 40), st.integers(0, 255), st.integers(0, 40))
def test_any_bytes_are_numbers_or_refused(data: bytes, count: int, top: int, step: int) -> None:
    out = np.full(SIZE, np.nan, np.float32)
    head = np.array([count, top | step << 16], np.uint32).tobytes()
    for raw in (data, head + data):
        try:
            unpack(np.frombuffer(raw, np.uint8), KNOWN, out)
        except FrameError:
            continue
        assert np.count_nonzero(out) <= KNOWN.num_items
