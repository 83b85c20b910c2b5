"""Adds up, averages and compares the numbers of several ranks. Servers, rings and collectives use these kernels.

Numbers are NumPy arrays, or tensors of torch: those of half precision, which NumPy lacks or is slow with, and those
on a GPU. This module never imports torch; it uses torch if the process has loaded it. All kernels add in the order of
the sources. In processes that have loaded torch, equal numbers give equal bits, whichever kernel adds them up.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from syncline.core.layout import INTEGERS
from syncline.errors import RuleError
from syncline.net.memory import aligned_zeros

Bytes = npt.NDArray[np.uint8]
#: A NumPy array, or a tensor of torch.
Numbers = Any
BLOCK_BYTES = 256 << 10
_HALF = ("bfloat16", "float16")
_NUMPY: dict[str, Callable[..., Any]] = {
    "average": np.add, "sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply,
}  # fmt: skip
_TORCH = {"average": "add", "sum": "add", "min": "minimum", "max": "maximum", "product": "mul"}
#: Scripts see infinities in the result; NumPy's warnings would name a line of ours.
_QUIET = np.errstate(all="ignore")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of this name. bfloat16 is that of ml_dtypes, which JAX, Keras and TensorFlow bring along."""
    if name == "bfloat16":
        try:
            name = importlib.import_module("ml_dtypes").bfloat16
        except ImportError:
            raise RuleError("bfloat16 needs torch or ml_dtypes: pip install 'syncline[torch]'") from None
    return np.dtype(name)


def numbers_of(data: Bytes, dtype: str) -> Numbers:
    """The numbers in these bytes, without a copy: a NumPy array, or a tensor for half precision."""
    torch = _torch_for(dtype)
    return data.view(numpy_dtype(dtype)) if torch is None else torch.from_numpy(data).view(getattr(torch, dtype))


def _torch_for(dtype: str) -> Any:
    """torch, if numbers of this dtype need it and it is loaded."""
    return sys.modules.get("torch") if dtype in _HALF else None


# -- weighted sums --------------------------------------------------------------------------------------------


def sum_dtype(dtype: str, *, averages: bool) -> str:
    """The dtype in which numbers are added up: half precision in float32, integers in int64, or in float64 if their
    mean is wanted.
    """
    if dtype in INTEGERS:
        return "float64" if averages else "int64"
    return "float32" if dtype in _HALF else dtype


def weighted_sum(sources: Sequence[tuple[Numbers, float]], total: Numbers, *, weighted: bool) -> None:
    """Writes Σ gᵢ, or Σ wᵢgᵢ, into `total`, in the given order. `total` may have a wider dtype than the sources. If
    it is a tensor, the sources are tensors too.
    """
    if not isinstance(total, np.ndarray):
        _sum_tensors(sys.modules["torch"], sources, total, weighted)
        return
    torch = _torch_for_sum(sources, total, weighted)
    if torch is None:
        _sum_arrays([(_as_array(numbers), weight) for numbers, weight in sources], total, weighted)
    else:
        found = [(_as_tensor(torch, numbers), weight) for numbers, weight in sources]
        _sum_tensors(torch, found, torch.from_numpy(total), weighted)


def _torch_for_sum(sources: Sequence[tuple[Numbers, float]], total: npt.NDArray[Any], weighted: bool) -> Any:
    """Chooses the kernel of a sum in an array: torch, or None for NumPy.

    Measured with float32: NumPy takes half of torch's time for 1 to 64 KiB; for 16 MiB it takes up to 1.16 times as
    long, with weights 1.3 times. Weighted sums always use torch if it is loaded: its kernel rounds `total + w * g`
    once, NumPy rounds twice, and the bits of a sum must not depend on its size.
    """
    torch = sys.modules.get("torch")
    is_half = any(not isinstance(numbers, np.ndarray) and numbers.element_size() == 2 for numbers, _ in sources)
    return torch if is_half or weighted or total.nbytes > BLOCK_BYTES else None


def _as_array(numbers: Numbers) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = numbers if isinstance(numbers, np.ndarray) else numbers.numpy()
    return found


def _as_tensor(torch: Any, numbers: Numbers) -> Any:
    return torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else numbers


def _casting_to(dtype: np.dtype[Any]) -> Any:
    """Options of a ufunc that computes in this dtype, whatever its arguments have."""
    return {"dtype": dtype, "casting": "unsafe"}


@_QUIET
def _sum_arrays(sources: Sequence[tuple[npt.NDArray[Any], float]], total: npt.NDArray[Any], weighted: bool) -> None:
    """In blocks, so that products need no memory of the size of `total` and stay in the cache."""
    (first, first_weight), *rest = sources
    size, how = BLOCK_BYTES // total.itemsize, _casting_to(total.dtype)
    scratch = np.empty(min(size, total.size), total.dtype) if weighted and rest else total
    for start in range(0, total.size, size):
        block = slice(start, min(start + size, total.size))
        into = total[block]
        if weighted:
            np.multiply(first[block], first_weight, out=into, **how)
            product = scratch[: len(into)]
            for numbers, weight in rest:
                np.multiply(numbers[block], weight, out=product, **how)
                np.add(into, product, out=into)
        elif rest:
            np.add(first[block], rest[0][0][block], out=into, **how)
            for numbers, _ in rest[1:]:
                np.add(into, numbers[block], out=into, **how)
        else:
            np.copyto(into, first[block], casting="unsafe")


def _sum_tensors(torch: Any, sources: Sequence[tuple[Any, float]], total: Any, weighted: bool) -> None:
    (first, weight), *rest = sources
    if rest and not weighted and first.dtype == total.dtype:
        torch.add(first, rest.pop(0)[0], out=total)
    else:
        total.copy_(first)  # `out=` would still compute in the dtype of the sources
        if weighted:
            total.mul_(weight)
    for numbers, weight in rest:
        total.add_(numbers, alpha=weight if weighted else 1)


def divide(total: Numbers, by: float) -> None:
    """Divides in place."""
    if isinstance(total, np.ndarray):
        with np.errstate(all="ignore"):
            np.divide(total, by, out=total)
    else:
        total.div_(by)


def narrow(total: Numbers, into: Numbers) -> None:
    """Copies a sum into memory of its own dtype. Rounds means of integers, also in `total`."""
    if into is total:
        return
    if isinstance(total, np.ndarray) and isinstance(into, np.ndarray):
        if total.dtype.kind == "f" and into.dtype.kind in "biu":  # bfloat16 is of the kind "V"
            np.rint(total, out=total)
        with np.errstate(all="ignore"):
            np.copyto(into, total, casting="unsafe")
        return
    torch = sys.modules["torch"]
    total, into = _as_tensor(torch, total), _as_tensor(torch, into)
    is_mean = not into.is_floating_point() and total.is_floating_point()
    into.copy_(total.round_() if is_mean else total)


# -- collectives ----------------------------------------------------------------------------------------------


class Reducer:
    """One op on one dtype, over `count` ranks in all."""

    def __init__(self, dtype: str, op: str, count: int) -> None:
        self._dtype, self._count, self._is_average = dtype, count, op == "average"
        self._torch = torch = _torch_for(dtype)
        self._numpy = numpy_dtype(dtype) if torch is None else None
        self._merge = getattr(torch, _TORCH[op]) if torch is not None else _NUMPY[op]

    def _typed(self, data: Bytes) -> Numbers:
        return numbers_of(data, self._dtype) if self._torch is not None else data.view(self._numpy)

    @_QUIET
    def merge(self, into: Bytes, earlier: Bytes) -> None:
        """Merges the numbers of earlier ranks into `into`."""
        target = self._typed(into)
        self._merge(self._typed(earlier), target, out=target)

    def finish(self, data: Bytes) -> None:
        """Divides the total of all ranks, if an average is wanted."""
        if self._is_average:
            target = self._typed(data)
            (self._torch.div if self._torch is not None else np.divide)(target, self._count, out=target)

    @_QUIET
    def small(self, sources: Sequence[Bytes]) -> Bytes:
        """Merges all sources into new memory."""
        result = sources[0].copy()
        total = self._typed(result)
        for source in sources[1:]:
            self._merge(total, self._typed(source), out=total)
        self.finish(result)
        return result

    @_QUIET
    def few(self, sources: Sequence[Any], out: Any = None) -> Any:
        """Merges two or more typed arrays; `out` may be one of them."""
        is_pair = len(sources) == 2
        total = self._merge(sources[0], sources[1], out=out if is_pair else None)
        for source in sources[2:]:
            self._merge(total, source, out=total)
        if self._is_average:
            np.divide(total, self._count, out=total)
        if out is not None and not is_pair:
            out[...] = total
        return total

    @_QUIET
    def reduce(self, sources: Sequence[Bytes], targets: Sequence[Bytes], *, is_all: bool = True) -> None:
        """Merges all sources and copies the result to every target; a target may be a source. `is_all`: these are all
        ranks, so averages are final.
        """
        size = len(sources[0])
        in_place = targets[0] is sources[0]
        scratch = aligned_zeros(min(BLOCK_BYTES, size)) if not in_place else None
        for start in range(0, size, BLOCK_BYTES):
            end = min(size, start + BLOCK_BYTES)
            blocks = [source[start:end] for source in sources]
            found = blocks[0] if scratch is None else scratch[: end - start]
            if scratch is not None and len(blocks) == 1:
                found[...] = blocks[0]
            total = self._typed(found)
            for k, block in enumerate(blocks[1:]):
                self._merge(total if k else self._typed(blocks[0]), self._typed(block), out=total)
            if is_all:
                self.finish(found)
            for target in targets:
                if target is not sources[0] or scratch is not None:
                    target[start:end] = found
