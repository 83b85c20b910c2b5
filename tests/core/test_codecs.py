"""Codecs: what comes back is as near as each one says, and what is no encoding is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from syncline.config import JobConfig
from syncline.core.codecs.codec import Codec, Floats
from syncline.core.codecs.halves import Bf16, Fp16
from syncline.core.codecs.int8 import BLOCK_ITEMS, Int8
from syncline.core.codecs.named import Codecs, codecs_of
from syncline.core.codecs.pieces import NOT_SENT, Encoded, SliceCoder
from syncline.core.codecs.topk import TopK
from syncline.core.layout import Parameter, Segment, arrange, place
from syncline.core.rule import Rule
from syncline.core.settings import check_settings
from syncline.errors import ConfigError, FrameError

ALL: list[Codec] = [Bf16(), Fp16(), Int8(), TopK(0.01), TopK(0.3)]
FINITE = hnp.arrays(
    np.float32,
    st.integers(0, 2100),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
    fill=st.just(np.float32(0.125)),
)


def through(codec: Codec, values: Floats) -> Floats:
    data = codec.encode(values)
    assert data.dtype == np.uint8 and data.flags.c_contiguous and data.size <= codec.bound(values.size)
    out = np.full(values.size, 7, np.float32)
    codec.decode(data, out)
    return out


def normal(size: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(FINITE)
def test_bf16_is_off_by_a_256th_at_most(values: Floats) -> None:
    found = through(Bf16(), values)
    assert np.all(np.abs(found - values) <= np.abs(values) / 256 + 1e-40)
    assert np.array_equal(through(Bf16(), found), found)


def test_bf16_rounds_halves_to_even_and_keeps_what_is_not_finite() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000], np.uint32)
    found = through(Bf16(), bits.view(np.float32)).view(np.uint32)
    assert [hex(b) for b in found] == ["0x3f800000", "0x3f820000", "0x3f810000", "0x3f800000", "0xbf820000"]
    odd = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0], np.uint32)
    found = through(Bf16(), odd.view(np.float32))
    assert np.isnan(found[:3]).all() and found[3] == np.inf and found[4] == -np.inf and found[5] == np.inf
    assert found[6] == 0


def test_fp16_is_that_of_ieee_but_for_what_is_too_large() -> None:
    """All magnitudes, normal and below; and numbers right between two halves."""
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(1 << 16) * 10.0 ** rng.uniform(-10, 6, 1 << 16)).astype(np.float32)
    halves = np.arange(0, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    values = np.concatenate([values, (halves[1:] + halves[:-1]) / 2, [0.0, -0.0, 1e30, -1e30, np.inf, -np.inf]])
    values = values.astype(np.float32)
    expected = np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)
    found = through(Fp16(), values)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
    assert np.isnan(through(Fp16(), np.array([np.nan, 1], np.float32))).tolist() == [True, False]


@settings(max_examples=40, deadline=None)
@given(FINITE)
def test_int8_is_off_by_half_a_step_at_most(values: Floats) -> None:
    found = through(Int8(), values)
    for start in range(0, values.size, BLOCK_ITEMS):
        block = slice(start, start + BLOCK_ITEMS)
        step = np.abs(values[block]).max() / 127
        assert np.all(np.abs(found[block] - values[block]) <= step * 0.5001 + 2e-36)


def test_int8_is_spoilt_by_the_block_and_keeps_zeros() -> None:
    values = normal(3 * BLOCK_ITEMS + 5)
    values[BLOCK_ITEMS + 3], values[-1], values[0] = np.inf, np.nan, 0
    found = through(Int8(), values)
    is_nan = np.isnan(found)
    assert is_nan[BLOCK_ITEMS : 2 * BLOCK_ITEMS].all() and is_nan[-5:].all()
    assert int(is_nan.sum()) == BLOCK_ITEMS + 5 and found[0] == 0
    assert np.isnan(Int8().encode(values)[:16].view(np.float32)).tolist() == [False, True, False, True]
    assert not through(Int8(), np.zeros(2000, np.float32)).any()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9000), st.integers(0, 5), st.sampled_from([0.01, 0.3]))
def test_topk_has_the_largest(size: int, seed: int, share: float) -> None:
    """Of equal ones the first: many are equal here. In small slices as they are, else a third off at most."""
    values = np.round(normal(size, seed) * 4) / 4
    codec = TopK(share)
    found, packing = through(codec, values), codec.packing(size)
    kept = np.flatnonzero(found)
    count = min(packing.num_items if packing else codec.bound(size) // 8, int(np.count_nonzero(values)))
    order = np.lexsort((np.arange(size), -np.abs(values)))
    assert np.array_equal(kept, np.sort(order[:count]))
    if packing is None:
        assert np.array_equal(found[kept], values[kept]) and codec.encode(values).size == 8 * count
    else:
        assert np.all(np.abs(found[kept] - values[kept]) <= np.abs(values[kept]) / 3 * 1.0001)
    assert codec.encode(np.zeros(size, np.float32)).size == 0


def test_topk_of_few_large_ones_among_many_that_are_alike() -> None:
    """A sample that misses them all must not hide them."""
    values = np.full(200_001, 1e-3, np.float32)
    values[[7, 100_003, 200_000]] = [5, -6, 7]
    found = through(TopK(0.0001), values)
    assert found[7] == 5 and found[100_003] == -6 and found[200_000] == 7
    assert np.isnan(through(TopK(0.0001), np.where(values > 6, np.nan, values))[200_000])


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
def test_equal_numbers_have_equal_encodings_within_the_bound(codec: Codec) -> None:
    for size in (0, 1, 1023, 1024, 1025, 40_000):
        values = normal(size)
        assert np.array_equal(codec.encode(values), codec.encode(values.copy()))
        assert codec.encode(values).size <= codec.bound(size)
    ratio = codec.bound(1 << 20) / (4 << 20)
    assert ratio <= {"bf16": 0.5, "fp16": 0.5, "int8": 0.26, "topk:0.01": 0.0201, "topk:0.3": 0.61}[codec.name]


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
def test_what_is_no_encoding_is_refused(codec: Codec) -> None:
    values = normal(3000)
    data, out = codec.encode(values), np.empty(3000, np.float32)
    for wrong in (data[:-1], np.append(data, np.uint8(0))):
        with pytest.raises(FrameError):
            codec.decode(wrong, out)
    with pytest.raises(FrameError):
        codec.decode(data, np.empty(12, np.float32))


def test_places_beyond_the_end_or_out_of_order_are_refused() -> None:
    out = np.empty(100, np.float32)
    for places in ([100, 3], [3, 3], [5, 4], [3, 1 << 31]):
        data = np.concatenate([np.array(places, np.uint32).view(np.uint8), np.ones(2, np.float32).view(np.uint8)])
        with pytest.raises(FrameError, match="places"):
            TopK(0.1).decode(data, out)


# -- slices --------------------------------------------------------------------------------------------------


def segment() -> Segment:
    parameters = [
        Parameter("a.weight", "float32", (30, 50)),
        Parameter("a.bias", "float32", (30,)),
        Parameter("count", "int64", (4,), 1),
        Parameter("mean", "float32", (70,), 1),
        Parameter("b.weight", "float32", (3000,)),
        Parameter("big", "float64", (40,)),
    ]
    return place(arrange(parameters, [Rule("SGD", lr=0.1), Rule("Assign")], "mean"), ["server-0"], {}, 4096, 0)[0]


def test_a_slice_is_encoded_by_parameters_and_what_is_exempt_goes_as_it_is() -> None:
    whole = segment()
    coder = SliceCoder(Bf16(), Codecs(push=Bf16(), exempt=("*.bias",)))
    rng = np.random.default_rng(3)
    seen = set()
    for part in whole.slices:
        data = rng.standard_normal(part.num_bytes // 4).astype(np.float32).view(np.uint8)
        encoded = coder.encode(whole, part, data)
        room = coder.room(whole, part, encoded.sizes)
        assert [r.size for r in room] == [b.size for b in encoded.buffers]
        out = np.zeros(part.num_bytes, np.uint8)
        coder.decode(whole, part, encoded, out)
        for unit in coder.units(whole, part):
            (position,) = unit.places
            name = whole.parameters[position.parameter].name
            seen.add((name, unit.is_encoded))
            one, two = data[position.begin : position.end], out[position.begin : position.end]
            assert np.array_equal(one, two) == (not unit.is_encoded)
        assert coder.encodes(whole, part) == any(unit.is_encoded for unit in coder.units(whole, part))
    names = {name for name, is_encoded in seen if is_encoded}
    assert names == {"a.weight", "b.weight"} and len(seen) == 6


def test_sizes_that_lie_are_refused_before_anything_is_allocated() -> None:
    whole = segment()
    coder = SliceCoder(TopK(0.01), Codecs(push=TopK(0.01), exempt=("*.bias",)))
    part = next(p for p in whole.slices if coder.encodes(whole, p))
    good = coder.encode(whole, part, np.zeros(part.num_bytes, np.uint8)).sizes
    first = next(k for k, unit in enumerate(coder.units(whole, part)) if unit.is_encoded)
    for size in (1 << 60, -2, 8 * 4096):
        wrong = [*good]
        wrong[first] = size
        with pytest.raises(FrameError, match=re.escape("bytes of topk:0.01 for")):
            coder.room(whole, part, wrong)
    with pytest.raises(FrameError, match="units of slice"):
        coder.room(whole, part, [*good, 0])
    assert coder.room(whole, part, [NOT_SENT] * len(good)) == []


def test_what_is_all_zeros_is_not_what_was_not_sent() -> None:
    whole = segment()
    coder = SliceCoder(TopK(0.01), Codecs(push=TopK(0.01)))
    for part in (p for p in whole.slices if coder.encodes(whole, p)):
        out = np.full(part.num_bytes, 9, np.uint8)
        encoded = coder.encode(whole, part, np.zeros(part.num_bytes, np.uint8))
        coder.decode(whole, part, Encoded([NOT_SENT] * len(encoded.sizes), []), out)
        assert (out == 9).all()
        coder.decode(whole, part, encoded, out)
        for unit in coder.units(whole, part):
            assert not any(out[position.begin : position.end].any() for position in unit.places)


def test_the_largest_are_those_of_a_whole_slice_whichever_parameter_they_are_of() -> None:
    parameters = [Parameter(name, "float32", (100,)) for name in ("a", "left.bias", "b")]
    whole = place(arrange(parameters, [Rule("SGD", lr=0.1)], "mean"), ["server-0"], {}, 1 << 20, 0)[0]
    coder = SliceCoder(TopK(0.02), Codecs(push=TopK(0.02), exempt=("*.bias",)))
    (part,) = whole.slices
    data = np.zeros(part.num_bytes // 4, np.float32)
    for name, values in (("a", [1, 2, 3]), ("left.bias", [9, 9, 9]), ("b", [30, 40, 50])):
        offset = whole.offsets[[p.name for p in whole.parameters].index(name)] // 4
        data[offset : offset + 3] = values
    out = np.zeros(part.num_bytes, np.uint8)
    coder.decode(whole, part, coder.encode(whole, part, data.view(np.uint8)), out)
    assert sorted(v for v in out.view(np.float32) if v) == [3, 9, 9, 9, 30, 40, 50]


# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"codec": "int4"}, "--codec 'int4': must be one of bf16, fp16, int8, topk:R"),
        ({"codec": "topk"}, "topk:R is a share of the numbers"),
        ({"codec": "topk:0"}, "topk:R is a share of the numbers"),
        ({"codec": "topk:1.5"}, "topk:R is a share of the numbers"),
        ({"codec": "topk:nan"}, "topk:R is a share of the numbers"),
        ({"pull_codec": "topk:0.01"}, "--pull-codec topk:0.01: a pull needs every parameter"),
        ({"codec_exempt": "*.bias"}, "--codec-exempt '*.bias' needs --codec or --pull-codec"),
    ],
)
def test_what_there_is_not_is_said_at_launch(said: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_settings(JobConfig(**said))


def test_codecs_by_name() -> None:
    assert codecs_of(JobConfig()) == codecs_of(JobConfig(codec="none", pull_codec="none")) == Codecs()
    found = codecs_of(JobConfig(codec="topk:0.01", pull_codec="bf16", codec_exempt="*.bias, norm*"))
    assert found.push == TopK(0.01) and isinstance(found.pull, Bf16) and found.exempt == ("*.bias", "norm*")
    assert codecs_of(JobConfig(codec="mine.codecs:small")).push is None  # not looked for without a loader
    mine = Int8()
    assert codecs_of(JobConfig(codec="mine.codecs:small"), lambda text: mine).push is mine
    with pytest.raises(ConfigError, match=r"--codec mine:x: object has no bound\(\); see syncline.Codec"):
        codecs_of(JobConfig(codec="mine:x"), lambda text: object())
