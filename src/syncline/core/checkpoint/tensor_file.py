"""A safetensors file: the length of its header, the header (JSON), the bytes of its tensors without a gap.

Written by hand since it is so little; https://github.com/huggingface/safetensors has the format's definition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from syncline.core.layout import ITEM_BYTES, MAX_DIMENSIONS
from syncline.errors import DamagedError, StoreError

#: What the format's own reader takes at most.
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1 << 20
MAX_TENSOR_BYTES = 1 << 44
LENGTH_BYTES = 8
_METADATA = "__metadata__"
#: Our names to the format's.
DTYPES = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}
_OURS = {theirs: ours for ours, theirs in DTYPES.items()}
_MORE_ITEM_BYTES = {"float8_e4m3fn": 1, "float8_e5m2": 1, "uint16": 2, "uint32": 4, "uint64": 8}
ITEM_SIZES = {**ITEM_BYTES, **_MORE_ITEM_BYTES}

#: Of one tensor: its name, dtype and shape.
Planned = tuple[str, str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A tensor and where its bytes lie, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def num_bytes_of(dtype: str, shape: Sequence[int], what: str) -> int:
    """The size of a tensor; a type that is not known, a shape that cannot be: StoreError."""
    if dtype not in ITEM_SIZES:
        raise StoreError(f"{what} is {dtype}; there are {', '.join(ITEM_SIZES)}")
    if len(shape) > MAX_DIMENSIONS:
        raise StoreError(f"{what} has {len(shape)} dimensions; at most {MAX_DIMENSIONS}")
    size = ITEM_SIZES[dtype]
    for length in shape:
        if not 0 <= length <= MAX_TENSOR_BYTES:
            raise StoreError(f"{what} has the shape {tuple(shape)}")
        size *= length
        if size > MAX_TENSOR_BYTES:
            raise StoreError(f"{what} has more than {MAX_TENSOR_BYTES} bytes")
    return size


def plan(tensors: Iterable[Planned], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[Entry]]:
    """The header of a file of these tensors, its length in front; and where each tensor lies.

    Those of large items come first, so that each lies at a multiple of its items' size.
    """
    tensors = list(tensors)
    if len({name for name, _, _ in tensors}) != len(tensors) or any(name == _METADATA for name, _, _ in tensors):
        raise StoreError(f"names of tensors must differ from each other and from {_METADATA}")
    if len(tensors) > MAX_TENSORS:
        raise StoreError(f"{len(tensors)} tensors in one file; at most {MAX_TENSORS}")
    sizes = {name: num_bytes_of(dtype, shape, repr(name)) for name, dtype, shape in tensors}
    entries, end = [], 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -ITEM_SIZES[tensor[1]]):
        begin, end = end, end + sizes[name]
        entries.append(Entry(name, dtype, tuple(shape), begin, end))
    told: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    for entry in entries:
        places = (entry.begin, entry.end)
        told[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": places}
    text = msgspec.json.encode(told)
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise StoreError(f"a header of {len(text)} bytes; at most {MAX_HEADER_BYTES}")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, entries


def header_bytes(first: bytes, file_bytes: int, what: str) -> int:
    """How long the header is, with its length in front, by the first bytes of a file of this size."""
    if len(first) < LENGTH_BYTES:
        raise DamagedError(f"{what} is cut short: it has no header")
    found = LENGTH_BYTES + int.from_bytes(first[:LENGTH_BYTES], "little")
    if found > LENGTH_BYTES + MAX_HEADER_BYTES or found > file_bytes:
        raise DamagedError(f"{what} is damaged: a header of {found - LENGTH_BYTES} bytes in a file of {file_bytes}")
    return found


class _Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor, as a header has it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def parse(header: bytes, file_bytes: int, what: str) -> list[Entry]:
    """The tensors of a file, in the order of their bytes: without overlap, without gap, up to the file's end."""
    try:
        told = msgspec.json.decode(header[LENGTH_BYTES:], type=dict[str, Any])
        told.pop(_METADATA, None)
        if len(told) > MAX_TENSORS:
            raise StoreError(f"{what} has {len(told)} tensors; at most {MAX_TENSORS}")
        tensors = msgspec.convert(told, dict[str, _Told])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DamagedError(f"{what} is damaged: its header cannot be read ({error})") from error
    entries = []
    for name, tensor in tensors.items():
        if tensor.dtype not in _OURS:
            raise StoreError(f"{what}: {name!r} is {tensor.dtype}, which is not known here")
        entries.append(Entry(name, _OURS[tensor.dtype], tensor.shape, *tensor.data_offsets))
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    if len(header) + check_entries(entries, what) != file_bytes:
        raise DamagedError(f"{what} is damaged: its tensors do not fill it")
    return entries


def check_entries(entries: Iterable[Any], what: str) -> int:
    """Where the last of these ends (they may be a manifest's too); one that overlaps or leaves a gap: StoreError."""
    end = 0
    for entry in entries:
        size = num_bytes_of(entry.dtype, entry.shape, f"{what}: {entry.name!r}")
        if entry.begin != end or entry.end != end + size:
            raise DamagedError(
                f"{what} is damaged: {entry.name!r} is said to lie at {entry.begin} to {entry.end}, "
                f"it has {size} bytes and begins at {end}"
            )
        end = entry.end
    return end
