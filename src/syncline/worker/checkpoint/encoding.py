"""Encodes a script's state as JSON and tensors: no pickle, nothing that runs code on load.

None, bools, texts, lists and ordinary numbers stand for themselves; everything else is an object with one key that
names its type. Arrays, tensors and bytes are stored as tensors; the tree has their numbers.
"""

from __future__ import annotations

import collections
import datetime
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from syncline.core.layout import ITEM_BYTES
from syncline.errors import ConfigError, StoreError
from syncline.worker.arrays import Bytes

MAX_TREE_BYTES, MAX_DEPTH, MAX_DIMENSIONS = 64 << 20, 100, 64
#: The tensor of a file that holds the tree.
TREE = "tree"
_USUAL = 1 << 53
_NUMPY_KINDS = "biufcSUmM"
_NUMPY_DTYPE = re.compile(r"[<>|=]?(?:[biufcSU]\d{1,6}|[mM]8(?:\[\d{0,9}[a-zA-Z]{1,3}\])?)")
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": collections.OrderedDict, "counter": collections.Counter}
_KIND_OF: dict[type, str] = {kind: name for name, kind in {**_SEQUENCES, **_MAPPINGS}.items()}


class Encoder:
    """Encodes values as a tree; `tensors` holds copies of the binary data."""

    def __init__(self, *, copies: bool = True) -> None:
        """`copies`: False only checks whether everything can be saved."""
        self.tensors: list[tuple[str, tuple[int, ...], Bytes]] = []  # dtype, shape, bytes
        self._copies = copies

    def encode(self, value: Any, path: str) -> Any:
        """`path`: the name of the value in messages."""
        try:
            return self._encode(value, path, 0)
        except RecursionError:
            raise ConfigError(f"{path}: it is nested too deeply, or contains itself") from None

    def _encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ConfigError(f"{path[:200]}…: it is nested too deeply, or contains itself")
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_USUAL < value < _USUAL else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind is list:
            return [self._encode(item, f"{path}[{n}]", depth + 1) for n, item in enumerate(value)]
        if kind in _MAPPINGS.values():
            pairs = []
            for key, item in value.items():
                inner = f"{path}[{key!r}]"
                pairs.append([self._encode(key, inner, depth + 1), self._encode(item, inner, depth + 1)])
            return {_KIND_OF[kind]: pairs}
        if kind in _SEQUENCES.values() or _is_torch(value, "Size"):
            name = _KIND_OF.get(kind, "tuple")
            return {name: [self._encode(item, f"{path}[{n}]", depth + 1) for n, item in enumerate(value)]}
        return self._encode_bytes(value, path)

    def _encode_bytes(self, value: Any, path: str) -> Any:
        if isinstance(value, bytes | bytearray):
            return {"bytes": self._keep("uint8", (len(value),), lambda: np.frombuffer(value, np.uint8).copy())}
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.kind not in _NUMPY_KINDS or value.dtype.fields is not None:
                raise _refused(path, f"an array of {value.dtype}", "make it one of numbers or texts")
            array, what = np.asarray(value), "scalar" if isinstance(value, np.generic) else "array"
            number = self._keep(
                array.dtype.name if array.dtype.isnative else "", array.shape, lambda: _bytes_of(array)
            )
            return {what: [number, array.dtype.str, list(array.shape)]}
        if _is_torch(value, "Tensor"):
            return self._encode_tensor(value, path)
        if type(value) is datetime.datetime:
            return {"datetime": value.isoformat()}
        raise _unknown(value, path)

    def _encode_tensor(self, value: Any, path: str) -> Any:
        torch: Any = sys.modules["torch"]
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            raise _refused(path, f"a tensor of {value.layout}, {value.device}", "make it a dense one")

        def copied() -> Bytes:
            there = value.detach().resolve_conj().resolve_neg().to("cpu", copy=True).contiguous().reshape(-1)
            there = torch.view_as_real(there).reshape(-1) if there.is_complex() else there
            found: Bytes = there.view(torch.uint8).numpy()
            return found

        dtype = str(value.dtype).removeprefix("torch.")
        number = self._keep(dtype, tuple(value.shape), copied)
        return {"tensor": [number, dtype, list(value.shape), value.device.type]}

    def _keep(self, dtype: str, shape: tuple[int, ...], copied: Callable[[], Bytes]) -> int:
        if self._copies:
            data = copied()
            known = dtype in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[dtype] == data.nbytes
            self.tensors.append((dtype, shape, data) if known else ("uint8", (data.nbytes,), data))
        return len(self.tensors) - 1


def to_json(tree: Any) -> bytes:
    return msgspec.json.encode(tree)


def from_json(data: bytes) -> Any:
    """Parses the tree; a StoreError if it is invalid or too large."""
    if len(data) > MAX_TREE_BYTES:
        raise StoreError(f"a script's state has a tree of {len(data)} bytes; at most {MAX_TREE_BYTES} are read")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise StoreError(f"a script's state cannot be read: {error}") from None


def decode(tree: Any, read: Callable[[int], Bytes], device: Any = "cpu") -> Any:
    """Decodes a tree. `read` returns the bytes of a tensor by number; GPU tensors go to `device`."""
    try:
        return _decode(tree, read, device, 0)
    except StoreError:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise StoreError(f"a script's state cannot be read: {type(error).__name__}: {error}") from None


def _decode(tree: Any, read: Callable[[int], Bytes], device: Any, depth: int) -> Any:
    if depth > MAX_DEPTH + 1:
        raise StoreError("a script's state is too deep to be read")
    if isinstance(tree, list):
        return [_decode(item, read, device, depth + 1) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, found),) = tree.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decode(item, read, device, depth + 1) for item in found)
    if kind in _MAPPINGS:
        made = _MAPPINGS[kind]()
        for key, item in found:
            made[_decode(key, read, device, depth + 1)] = _decode(item, read, device, depth + 1)
        return made
    if kind in ("array", "scalar"):
        array = _array(read(found[0]), found[1], found[2])
        return array[()] if kind == "scalar" else array
    return _LEAVES[kind](found, read, device)


def _array(data: Bytes, dtype: str, shape: Sequence[int]) -> Any:
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise StoreError(f"a script's state has an array of {dtype!r}")
    known = np.dtype(dtype)
    _check_shape(data, known.itemsize, shape)
    return np.array(data.view(known) if data.size else np.empty(0, known)).reshape(shape)


def _tensor(found: Sequence[Any], read: Callable[[int], Bytes], device: Any) -> Any:
    number, name, shape, kind = found
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise StoreError("a script's state has tensors of torch, which this script has not imported; import torch")
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise StoreError(f"a script's state has a tensor of {name!r}")
    data = read(number)
    _check_shape(data, dtype.itemsize, shape)
    made = torch.empty(tuple(shape), dtype=dtype)
    if made.numel():
        flat = torch.view_as_real(made).reshape(-1) if made.is_complex() else made.reshape(-1)
        flat.view(torch.uint8).copy_(torch.from_numpy(data))
    return made if kind == "cpu" or str(device) == "cpu" else made.to(device)


def _check_shape(data: Bytes, item_bytes: int, shape: Sequence[int]) -> None:
    is_shape = len(shape) <= MAX_DIMENSIONS and all(type(n) is int and 0 <= n <= 1 << 48 for n in shape)
    if not is_shape or math.prod(shape) * item_bytes != data.nbytes:
        raise StoreError(f"a script's state has a tensor of {data.nbytes} bytes for a shape of {str(shape)[:200]}")


_LEAVES: dict[str, Callable[[Any, Callable[[int], Bytes], Any], Any]] = {
    "int": lambda found, read, device: int(found[:_USUAL], 16),
    "float": lambda found, read, device: float(found),
    "bytes": lambda found, read, device: read(found).tobytes(),
    "datetime": lambda found, read, device: datetime.datetime.fromisoformat(found),
    "tensor": _tensor,
}


def _bytes_of(array: Any) -> Bytes:
    found: Bytes = np.frombuffer(array.tobytes(), np.uint8)
    return found


def _is_torch(value: Any, name: str) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, name))


def _unknown(value: Any, path: str) -> ConfigError:
    name = type(value).__name__
    if callable(value) and hasattr(value, "__name__"):
        what = "a class" if isinstance(value, type) else "a function"
        return _refused(path, what, "save what it needs to be made again, and make it in the script")
    article = "an" if name[:1].lower() in "aeiou" else "a"
    return _refused(
        path,
        f"{article} {name}",
        "give it state_dict() and load_state_dict() and a name of its own in job.state, or save what it is made of: "
        "numbers, texts, bytes, lists, tuples, sets, dicts, arrays, tensors",
    )


def _refused(path: str, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"{path}: {what} cannot be saved; {remedy}")
