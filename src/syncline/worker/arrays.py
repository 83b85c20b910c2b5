"""Arrays of the caller as bytes and back: NumPy arrays and torch CPU tensors, without importing torch; and copies of
many bytes, shared among as many threads as this process may use.
"""

from __future__ import annotations

import collections
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from syncline.config import num_threads
from syncline.core.layout import FLOATS, ITEM_BYTES, Parameter
from syncline.errors import LayoutError

Bytes = npt.NDArray[np.uint8]
Array = Any  # np.ndarray or torch.Tensor


def _torch() -> Any:
    return sys.modules.get("torch")


def is_torch(array: Array) -> bool:
    torch = _torch()
    return torch is not None and isinstance(array, torch.Tensor)


_names: dict[Any, str] = {}  # a dtype's name takes longer to make than a small array to copy


def dtype_of(array: Array) -> str:
    name = _names.get(array.dtype)
    if name is None:
        name = _names[array.dtype] = str(array.dtype).removeprefix("torch.")
    return name


def describe(name: str, array: Array, group: int = 0) -> Parameter:
    """The array as a parameter of this name; a LayoutError says what cannot be registered or pushed."""
    if is_torch(array):
        if array.layout is not _torch().strided:
            raise LayoutError(f"{name!r} is sparse, and servers take no sparse gradients yet; give its to_dense()")
        if array.device.type != "cpu":
            raise LayoutError(f"{name!r} is on {array.device}; job.kv takes NumPy arrays and torch CPU tensors")
    elif not isinstance(array, np.ndarray | np.generic):
        raise LayoutError(f"{name!r} is a {type(array).__name__}; give NumPy arrays or torch CPU tensors")
    dtype = dtype_of(array)
    if dtype not in ITEM_BYTES:
        raise LayoutError(f"{name!r} has dtype {dtype}; supported: {', '.join(ITEM_BYTES)}")
    return Parameter(name, dtype, tuple(int(size) for size in array.shape), group)


def to_bytes(array: Array) -> Bytes:
    """The array's bytes in C order; a view wherever that is possible."""
    if is_torch(array):
        torch = _torch()
        flat = array.detach().contiguous().reshape(-1)
        view: Bytes = flat.view(torch.uint8).numpy()
        return view
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def writable_bytes(array: Array) -> Bytes | None:
    """The array's own bytes if it can be filled in place, else None."""
    if is_torch(array):
        if not array.is_contiguous():
            return None
        torch = _torch()
        view: Bytes = array.detach().reshape(-1).view(torch.uint8).numpy()
        return view
    if not (isinstance(array, np.ndarray) and array.flags.c_contiguous and array.flags.writeable):
        return None
    return array.reshape(-1).view(np.uint8)


def can_be_filled(array: Array) -> bool:
    return is_torch(array) or bool(getattr(getattr(array, "flags", None), "writeable", False))


def fill(array: Array, data: Bytes) -> None:
    """Copies bytes in C order into an array that may have any strides."""
    source = from_bytes(data, dtype_of(array), tuple(array.shape), as_torch=is_torch(array))
    if is_torch(array):
        with _torch().no_grad():
            array.copy_(source)
    else:
        array[...] = source


def from_bytes(data: Bytes, dtype: str, shape: Sequence[int], *, as_torch: bool) -> Array:
    """An array over these bytes. bfloat16 crosses NumPy as uint16."""
    if as_torch:
        torch = _torch()
        if not data.size:
            return torch.empty(tuple(shape), dtype=getattr(torch, dtype))
        return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(tuple(shape))
    return data.view(np.uint16 if dtype == "bfloat16" else dtype).reshape(tuple(shape))


def address_of(array: Array) -> int:
    return int(array.data_ptr()) if is_torch(array) else int(array.__array_interface__["data"][0])


def check_finite(name: str, array: Array, who: str) -> None:
    """Raises LayoutError for NaN or Inf in a value before it is registered."""
    if dtype_of(array) not in FLOATS:
        return
    test: Callable[[Array], Array] = _torch().isfinite if is_torch(array) else np.isfinite
    if not bool(test(array).all()):
        raise LayoutError(
            f"{who} registers {name!r} with NaN or Inf in it; check how the model is initialised or loaded"
        )


#: Waking a thread pays off from the first size on; chunks up to the second size keep threads evenly loaded.
LEAST_BYTES, MOST_BYTES = 4 << 20, 8 << 20
Pair = tuple[Bytes, Bytes]
T = TypeVar("T")


def copy(pairs: Sequence[Pair]) -> None:
    """Copies each (target, source). Nothing may read or write them meanwhile."""
    total = sum([target.nbytes for target, _ in pairs])
    if count_threads(total) < 2:
        for target, source in pairs:
            target[:] = source
        return
    share(_cut(pairs), _copy_one, total)


def _copy_one(pair: Pair) -> bool:
    pair[0][:] = pair[1]
    return True


def count_threads(num_bytes: int) -> int:
    """How many threads to use for this many bytes."""
    return min(num_threads(), num_bytes // LEAST_BYTES) if num_bytes >= 2 * LEAST_BYTES else 1


def share(items: Iterable[T], work: Callable[[T], bool], num_bytes: int) -> bool:
    """Runs `work` on all items in several threads. Returns whether all returned True; the first False stops all
    threads.
    """
    left = collections.deque(items)
    told = threading.Event()
    others = [_threads().submit(_take, left, work, told) for _ in range(count_threads(num_bytes) - 1)]
    _take(left, work, told)
    for other in others:
        if not other.cancel():  # not started: nothing left to do for it
            other.result()
    return not told.is_set()


def _take(left: collections.deque[T], work: Callable[[T], bool], told: threading.Event) -> None:
    while not told.is_set():
        try:
            item = left.popleft()
        except IndexError:
            return
        if not work(item):
            told.set()


def _cut(pairs: Sequence[Pair]) -> list[Pair]:
    return [
        (target[start : start + MOST_BYTES], source[start : start + MOST_BYTES])
        for target, source in pairs
        for start in range(0, target.nbytes, MOST_BYTES)
    ]


_making = threading.Lock()


def _threads() -> ThreadPoolExecutor:
    with _making:
        return _make_threads()


@functools.cache
def _make_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, num_threads() - 1), thread_name_prefix="Thread-copy")
