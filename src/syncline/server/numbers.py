"""The numbers of slices: tensors of torch, or NumPy arrays in a process that does without torch.

A process uses one kind for all its slices, from the first one on. This module does not import torch at its top: in a
ring a server is in the process of a worker, which may use another framework.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from syncline.core.rule import KERAS, PLAIN
from syncline.errors import RuleError
from syncline.extensions import is_named
from syncline.reduce.kernels import Numbers, numpy_dtype

Bytes = npt.NDArray[np.uint8]
#: Rules that NumPy can apply.
NUMPY_RULES = frozenset({"SGD", "Adam", "AdamW", "Adagrad"}) | KERAS | PLAIN
#: Measured by tests/proof/test_numpy_speed.py.
NUMPY_COST = "updates take 1.6 to 3.5 times as long as with torch"
_uses_torch: bool | None = None  # until the first slice comes


def choose_kind(rules: Collection[str]) -> None:
    """Before a slice with these rules is made: torch if the process has loaded it. A process without it loads it only
    for rules that NumPy cannot apply.
    """
    global _uses_torch
    needing = sorted(name for name in rules if name not in NUMPY_RULES)
    if _uses_torch is None:
        if needing:
            with contextlib.suppress(ImportError):
                importlib.import_module("torch")
        _uses_torch = sys.modules.get("torch") is not None
    if needing and not _uses_torch:
        there_are = ", ".join(sorted(NUMPY_RULES - PLAIN))
        what = f"your own rule {needing[0]}" if is_named(needing[0]) else f"rule {needing[0]}"
        raise RuleError(
            f"{what} needs torch on the servers: pip install 'syncline[torch]' (in a ring, also import torch at the "
            f"top of the script); without torch there are: {there_are}"
        )


def why_slower(rules: Collection[str]) -> str:
    """What users should know of servers that apply these rules by NumPy; empty: they do not, or it costs nothing."""
    optimizers = set(rules) - PLAIN
    if uses_torch() or not optimizers or optimizers - NUMPY_RULES:  # for others a server loads torch, or fails
        return ""
    is_installed = importlib.util.find_spec("torch") is not None
    why = "the script has not imported torch" if is_installed else "torch is not installed"
    return f"{why}, so servers compute with NumPy: {NUMPY_COST} (docs/guides/numpy.md)"


def uses_torch() -> bool:
    """Whether slices are tensors of torch."""
    return sys.modules.get("torch") is not None if _uses_torch is None else _uses_torch


def numbers_in(array: Bytes, dtype: str) -> Numbers:
    """The numbers in these bytes, without a copy. Do not write to them if the mapping is read-only."""
    if not uses_torch():
        return array.view(numpy_dtype(dtype))
    torch = sys.modules["torch"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of read-only arrays
        return torch.from_numpy(array).view(getattr(torch, dtype))


def number_of_items(numbers: Numbers) -> int:
    return numbers.size if isinstance(numbers, np.ndarray) else int(numbers.numel())


_names: dict[Any, str] = {}


def dtype_of(numbers: Numbers) -> str:
    name = _names.get(numbers.dtype)
    if name is None:
        name = _names[numbers.dtype] = str(numbers.dtype).removeprefix("torch.")
    return name


def is_floating(numbers: Numbers) -> bool:
    if isinstance(numbers, np.ndarray):
        return bool(numbers.dtype.kind == "f" or numbers.dtype.name == "bfloat16")
    return bool(numbers.is_floating_point())


def address_of(numbers: Numbers) -> int:
    if isinstance(numbers, np.ndarray):
        return int(numbers.__array_interface__["data"][0])
    return int(numbers.data_ptr())


def is_beside(one: Numbers, other: Numbers) -> bool:
    """Whether both are on one device."""
    return isinstance(one, np.ndarray) or one.device == other.device


def empty(shape: int | Sequence[int], dtype: str, like: Numbers) -> Numbers:
    """New numbers on the device of `like`."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, numpy_dtype(dtype))
    torch = sys.modules["torch"]
    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)


def zeros(shape: int | Sequence[int], dtype: str, like: Numbers) -> Numbers:
    made = empty(shape, dtype, like)
    if isinstance(made, np.ndarray):
        made[...] = 0
        return made
    return made.zero_()


def as_numbers(values: Bytes | Sequence[float]) -> Numbers:
    """New numbers in host memory: bytes, or doubles."""
    array = values.copy() if isinstance(values, np.ndarray) else np.asarray(values, np.float64)
    return sys.modules["torch"].from_numpy(array) if uses_torch() else array


def copy_of(numbers: Numbers, like: Numbers) -> Numbers:
    """A copy on the device of `like`."""
    if isinstance(numbers, np.ndarray):
        return numbers.copy()
    return numbers.detach().to(like.device, copy=True)


def widened(numbers: Numbers, dtype: str) -> Numbers:
    """A copy in another dtype."""
    if isinstance(numbers, np.ndarray):
        return numbers.astype(numpy_dtype(dtype))
    return numbers.detach().to(getattr(sys.modules["torch"], dtype), copy=True)


def copy_into(target: Numbers, source: Numbers) -> None:
    """Copies numbers of any dtype."""
    if isinstance(target, np.ndarray):
        with np.errstate(all="ignore"):
            np.copyto(target, source, casting="unsafe")
    else:
        target.copy_(source)


def on_host(numbers: Numbers) -> Numbers:
    """The numbers in host memory, in one piece."""
    return np.ascontiguousarray(numbers) if isinstance(numbers, np.ndarray) else numbers.detach().contiguous().cpu()


def bytes_of(numbers: Numbers) -> Bytes:
    """The bytes of numbers in host memory; a view where they are in one piece."""
    if isinstance(numbers, np.ndarray):
        return np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)
    found: Bytes = numbers.detach().cpu().reshape(-1).view(sys.modules["torch"].uint8).numpy()
    return found


def scaled(numbers: Numbers, factor: float) -> Numbers:
    """The numbers times a factor; integers are rounded."""
    if is_floating(numbers):
        return numbers * numbers.dtype.type(factor) if isinstance(numbers, np.ndarray) else numbers * factor
    if isinstance(numbers, np.ndarray):
        return np.rint(numbers.astype(np.float64) * factor).astype(numbers.dtype)
    return (numbers.double() * factor).round_().to(numbers.dtype)


def add_to(target: Numbers, numbers: Numbers, factor: float = 1.0) -> None:
    """target += factor × numbers, in the dtype of the target."""
    if isinstance(target, np.ndarray):
        with np.errstate(all="ignore"):
            term = numbers if factor == 1.0 else np.multiply(numbers, factor, dtype=target.dtype, casting="unsafe")
            np.add(target, term, out=target, casting="unsafe")
    elif factor == 1.0:
        target.add_(numbers)
    else:
        target.add_(numbers.to(target.dtype), alpha=factor)


def blend(average: Numbers, numbers: Numbers, fraction: float) -> None:
    """average += fraction × (numbers − average)."""
    if isinstance(average, np.ndarray):
        with np.errstate(all="ignore"):
            average += average.dtype.type(fraction) * (numbers.astype(average.dtype, copy=False) - average)
    else:
        average.lerp_(numbers.detach().to(average.dtype), fraction)


def squared_norm(numbers: Numbers) -> float:
    if isinstance(numbers, np.ndarray):
        flat = numbers.reshape(-1).astype(np.float64, copy=False)
        return float(np.dot(flat, flat))
    torch = sys.modules["torch"]
    return float(torch.linalg.vector_norm(numbers, dtype=torch.float64)) ** 2


def are_finite(numbers: Numbers) -> bool:
    if isinstance(numbers, np.ndarray):
        return bool(np.isfinite(numbers).all())
    return bool(sys.modules["torch"].isfinite(numbers).all())
