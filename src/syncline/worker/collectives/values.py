"""What scripts give and get: NumPy arrays and torch tensors, as bytes and back; and how values of several ranks
are reduced to one, block by block, in the order of the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from syncline.core.collectives import ITEM_BYTES
from syncline.core.wire.collectives import Shape
from syncline.errors import CollectiveError
from syncline.net.memory import aligned_zeros
from syncline.worker.arrays import Array, Bytes, dtype_of, fill, from_bytes, is_torch, to_bytes, writable_bytes


class Value(NamedTuple):
    """An array of the caller's: what it is, and its bytes in C order."""

    array: Array  # as it was given; None: nothing was
    dtype: str
    shape: Shape
    data: Bytes
    is_view: bool  # the bytes are the caller's own

    @property
    def of_torch(self) -> bool:
        return is_torch(self.array)


NOTHING = Value(None, "", (), np.empty(0, np.uint8), False)


def value_of(array: Any) -> Value:
    """A CollectiveError says what cannot be sent."""
    if is_torch(array):
        return _tensor(array)
    if not isinstance(array, np.ndarray):
        array = np.asarray(array)  # a number, a list
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("="))
    dtype, flags = dtype_of(array), array.flags
    if dtype not in ITEM_BYTES:
        raise CollectiveError(f"an array of {dtype} cannot be sent; there are {', '.join(ITEM_BYTES)}")
    if flags.c_contiguous and flags.writeable:
        return Value(array, dtype, array.shape, array.reshape(-1).view(np.uint8), True)
    data = to_bytes(array)
    if not data.flags.writeable:
        data = data.copy()  # torch wants none that cannot be written
        return Value(array, dtype, array.shape, data, False)
    return Value(array, dtype, array.shape, data, bool(flags.c_contiguous))


def _tensor(tensor: Any) -> Value:
    dtype = dtype_of(tensor)
    if tensor.layout is not sys.modules["torch"].strided or dtype not in ITEM_BYTES:
        raise CollectiveError(f"a tensor of {dtype}, {tensor.layout} cannot be sent; use a dense one of numbers")
    is_plain = tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())
    plain = tensor.detach() if is_plain else tensor.detach().cpu().resolve_conj().resolve_neg()
    return Value(tensor, dtype, tuple(tensor.shape), to_bytes(plain), is_plain and tensor.is_contiguous())


def joined(values: Sequence[Value]) -> Bytes:
    """The bytes of several, one behind the other."""
    return values[0].data if len(values) == 1 else np.concatenate([value.data for value in values])


def own_bytes(array: Array) -> Bytes | None:
    """The bytes of an array that can be filled in place; None where that takes a copy."""
    if is_torch(array) and (array.device.type != "cpu" or array.is_conj() or array.is_neg()):
        return None
    return writable_bytes(array)


def made(data: Bytes, dtype: str, shape: Shape, like: Array, *, of_torch: bool) -> Array:
    """A new array over these bytes: a tensor, where `like` is one, on its device."""
    torch = sys.modules.get("torch")
    if of_torch and torch is not None:
        tensor = from_bytes(data, dtype, shape, as_torch=True)
        return tensor.to(like.device) if is_torch(like) else tensor
    if dtype == "bfloat16":
        raise CollectiveError("a tensor of bfloat16 has come, and torch is not imported in this worker; import it")
    return from_bytes(data, dtype, shape, as_torch=False)


def put(array: Array, data: Bytes, what: str) -> Array:
    """Fills the caller's array, of any strides and on any device, with these bytes."""
    own = own_bytes(array)
    if own is not None:
        if own is not data:
            own[...] = data
        return array
    if not is_torch(array) and not (isinstance(array, np.ndarray) and array.flags.writeable):
        raise CollectiveError(f"{what}: the result cannot be written into a {type(array).__name__}")
    fill(array, data)
    return array


def place_of(out: Array) -> tuple[str, Shape] | None:
    """Dtype and shape of an array that was given for a result, if one was."""
    if out is None:
        return None
    return (dtype_of(out), tuple(out.shape)) if is_torch(out) or isinstance(out, np.ndarray) else ("", ())


BLOCK_BYTES = 256 << 10
_NUMPY: dict[str, Callable[..., Any]] = {
    "average": np.add, "sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply,
}  # fmt: skip
_TORCH = {"average": "add", "sum": "add", "min": "minimum", "max": "maximum", "product": "mul"}
#: What overflows is the script's own affair, wherever it happens to be added up.
_QUIET = np.errstate(all="ignore")


class Reducer:
    """One op on one dtype, over `count` ranks in all."""

    def __init__(self, dtype: str, op: str, count: int) -> None:
        self._dtype, self._count, self._is_average = dtype, count, op == "average"
        # NumPy has no bfloat16, and is slow with float16.
        torch = sys.modules.get("torch") if dtype in ("bfloat16", "float16") else None
        self._torch: Any = torch
        self._numpy = np.dtype(dtype) if torch is None else None
        self._merge = getattr(torch, _TORCH[op]) if torch is not None else _NUMPY[op]

    def _typed(self, data: Bytes) -> Array:
        if self._torch is not None:
            return self._torch.from_numpy(data).view(getattr(self._torch, self._dtype))
        return data.view(self._numpy)

    @_QUIET
    def merge(self, into: Bytes, earlier: Bytes) -> None:
        """What earlier ranks have, and what is here, is here."""
        target = self._typed(into)
        self._merge(self._typed(earlier), target, out=target)

    def finish(self, data: Bytes) -> None:
        """Of numbers of all ranks: where they are averaged, this makes the average."""
        if self._is_average:
            target = self._typed(data)
            (self._torch.div if self._torch is not None else np.divide)(target, self._count, out=target)

    @_QUIET
    def small(self, sources: Sequence[Bytes]) -> Bytes:
        """All sources, in new memory."""
        result = sources[0].copy()
        total = self._typed(result)
        for source in sources[1:]:
            self._merge(total, self._typed(source), out=total)
        self.finish(result)
        return result

    @_QUIET
    def few(self, sources: Sequence[Array], out: Array = None) -> Array:
        """The same of arrays of numbers, two at least; `out` may be one of them."""
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
        """All sources, into every target; a target may be a source. `is_all`: these are all ranks."""
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
