"""The weighted sum, with NumPy and with torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from syncline.reduce import kernels
from syncline.reduce.kernels import BLOCK_BYTES, divide, narrow, numbers_of, sum_dtype, weighted_sum

#: Less than a block, and two blocks with a rest.
SIZES = [7, 2 * BLOCK_BYTES // 4 + 5]
WEIGHTS = (0.25, 3.0, 1.7, 0.4)


@pytest.fixture(params=["torch", "no torch"])
def with_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "no torch":
        monkeypatch.delitem(sys.modules, "torch")
    return bool(request.param == "torch")


def sources_of(dtype: str, size: int, count: int) -> list[Any]:
    random = np.random.default_rng(3)
    return [random.integers(0, 2 if dtype == "bool" else 100, size).astype(dtype) for _ in range(count)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "int16", "uint8", "bool"])
def test_sums_and_means(dtype: str, averages: bool, count: int, size: int, with_torch: bool) -> None:
    """Integers are added up without overflow, and their means are rounded."""
    sources, wide = sources_of(dtype, size, count), sum_dtype(dtype, averages=averages)
    weights = WEIGHTS[:count] if averages else (1.0,) * count
    total, result = np.full(size, 77, wide), np.zeros(size, dtype)
    weighted_sum(list(zip(sources, weights, strict=True)), total, weighted=averages)
    exact = sum(w * s.astype(np.float64) for s, w in zip(sources, weights, strict=True))
    np.testing.assert_allclose(total, exact, rtol=1e-6)
    if averages:
        divide(total, sum(weights))
        exact = exact / sum(weights)
    narrow(total, result)
    expected = exact.astype(dtype) if dtype.startswith("float") else np.rint(exact).astype(np.int64).astype(dtype)
    np.testing.assert_allclose(result, expected, rtol=2e-3 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int16"])
def test_arrays_and_tensors_give_the_same_bits(dtype: str, size: int, weighted: bool) -> None:
    """A ring adds up arrays, servers add up tensors: of every size, in every dtype."""
    wide = sum_dtype(dtype, averages=True)
    tensors = [torch.randn(size, dtype=torch.float64).mul(50).to(getattr(torch, dtype)) for _ in range(3)]
    weights = WEIGHTS if weighted else (1.0,) * 3
    of_tensors = torch.empty(size, dtype=getattr(torch, wide))
    weighted_sum(list(zip(tensors, weights, strict=False)), of_tensors, weighted=weighted)
    divide(of_tensors, 1.3)
    narrowed = torch.empty_like(tensors[0])
    narrow(of_tensors, narrowed)
    arrays = [numbers_of(tensor.view(torch.uint8).numpy(), dtype) for tensor in tensors]
    of_arrays, memory = np.empty(size, wide), np.empty(narrowed.nbytes, np.uint8)
    weighted_sum(list(zip(arrays, weights, strict=False)), of_arrays, weighted=weighted)
    divide(of_arrays, 1.3)
    narrow(of_arrays, numbers_of(memory, dtype))
    assert np.array_equal(of_arrays, of_tensors.numpy())
    assert bytes(memory) == bytes(narrowed.view(torch.uint8).numpy())


def test_staged_tensors_can_be_added_up_into_an_array() -> None:
    """Also where NumPy adds them up."""
    total = np.empty(4, np.float32)
    weighted_sum([(torch.full((4,), float(k)), 1.0) for k in range(3)], total, weighted=False)
    assert total.tolist() == [3.0] * 4


def test_a_sum_that_needs_no_narrowing_is_not_copied() -> None:
    total = np.ones(3)
    narrow(total, total)
    assert total.tolist() == [1.0] * 3


def test_it_does_not_import_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    total = np.empty(BLOCK_BYTES, np.float32)
    kernels.weighted_sum([(np.ones(BLOCK_BYTES, np.float32), 0.5)] * 2, total, weighted=True)
    assert total[-1] == 1.0 and "torch" not in sys.modules
