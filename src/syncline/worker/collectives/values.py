"""What scripts give and get: NumPy arrays and torch tensors, as bytes and back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from syncline.core.collectives import ITEM_BYTES
from syncline.core.wire.collectives import Shape
from syncline.errors import CollectiveError
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
