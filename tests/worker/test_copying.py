"""Large copies by several threads: every byte, once, wherever the cuts fall."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.worker import arrays


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("sizes", [[0], [10], [100, 0, 7], [1000], [64, 65, 63, 1, 640]])
def test_every_byte_arrives(monkeypatch: pytest.MonkeyPatch, num_threads: int, sizes: list[int]) -> None:
    monkeypatch.setattr(arrays, "LEAST_BYTES", 32)
    monkeypatch.setattr(arrays, "MOST_BYTES", 64)
    monkeypatch.setattr(arrays, "num_threads", lambda: num_threads)
    chance = np.random.default_rng(sum(sizes))
    sources = [chance.integers(0, 256, size, np.uint8) for size in sizes]
    targets = [np.zeros(size + 2, np.uint8) for size in sizes]
    arrays.copy([(target[1:-1], source) for target, source in zip(targets, sources, strict=True)])
    for target, source in zip(targets, sources, strict=True):
        assert (target[1:-1] == source).all() and target[0] == target[-1] == 0


def test_a_copy_that_fails_in_another_thread_raises_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "LEAST_BYTES", 1)
    monkeypatch.setattr(arrays, "MOST_BYTES", 8)
    monkeypatch.setattr(arrays, "num_threads", lambda: 2)
    read_only = np.zeros(64, np.uint8)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        arrays.copy([(read_only, np.ones(64, np.uint8))])
