"""Copies with digests: every byte arrives, every changed byte is found, and what is not finite is no secret."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.worker import arrays
from syncline.worker.exchange import finite
from syncline.worker.exchange.finite import copy_digested, is_same

SIZES = [0, 4, 60, 64, 68, 128, 1000]


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"], autouse=True)
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few numbers each, by one thread and by several."""
    monkeypatch.setattr(finite, "PIECE_BYTES", 64)
    monkeypatch.setattr(arrays, "LEAST_BYTES", 32)
    monkeypatch.setattr(arrays, "num_threads", lambda: request.param)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_every_byte_arrives_and_every_changed_byte_is_found(num_bytes: int) -> None:
    source = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    target = np.zeros(num_bytes + 2, np.uint8)
    copied = copy_digested(target[1:-1], source, "int32", look=False)
    assert (target[1:-1] == source).all() and target[0] == target[-1] == 0
    assert is_same(source, copied.digests)
    for place in range(num_bytes):
        source[place] ^= 1
        assert not is_same(source, copied.digests), place
        source[place] ^= 1
    assert is_same(source, copied.digests)


def test_pieces_in_another_order_are_not_the_same() -> None:
    source = np.arange(128, dtype=np.uint8)
    copied = copy_digested(np.empty_like(source), source, "uint8", look=False)
    assert not is_same(np.concatenate([source[64:], source[:64]]), copied.digests)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32"])
@pytest.mark.parametrize("num_items", [1, 16, 77])
def test_it_is_found_by_the_way_whether_all_is_finite(dtype: str, num_items: int) -> None:
    values = np.ones(num_items, dtype)
    target = np.empty_like(values)

    def copied(*, look: bool = True) -> bool:
        return copy_digested(target.view(np.uint8), values.view(np.uint8), dtype, look=look).is_finite

    assert copied() and not copied(look=False), "what was not looked at is not known"
    for place in range(num_items) if dtype != "int32" else ():
        for bad in (np.nan, -np.inf):
            values[place] = bad
            assert not copied(), place
            assert np.array_equal(target, values, equal_nan=True), "it is copied, whatever it is"
        values[place] = 1
