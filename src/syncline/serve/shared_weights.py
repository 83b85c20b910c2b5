"""A version's weights in memory that processes share: one copy of them, however many processes map it."""

from __future__ import annotations

import mmap
import os

import msgspec
import numpy as np

from syncline.errors import StoreError
from syncline.net import shm
from syncline.serve.datatypes import Array
from syncline.serve.model import SavedWeights
from syncline.store.weights import Weight

_ALIGNMENT = 64  # bytes: what vector instructions like
_LENGTH_BYTES = 8


class _Place(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def share(weights: SavedWeights) -> shm.SharedMemory:
    """Copies weights to memory that other processes can map by its descriptor. It cannot be changed later."""
    places, end = [], 0
    for name, (weight, data) in weights.items():
        places.append(_Place(name, weight.dtype, weight.shape, end, data.size))
        end = _aligned(end + data.size)
    header = msgspec.json.encode(places)
    first = _aligned(_LENGTH_BYTES + len(header))
    try:
        memory = shm.create(first + end)
    except OSError as error:
        raise StoreError(f"cannot allocate {first + end} bytes of shared memory for a version: {error}") from None
    memory.array[:_LENGTH_BYTES] = np.frombuffer(len(header).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
    memory.array[_LENGTH_BYTES : _LENGTH_BYTES + len(header)] = np.frombuffer(header, np.uint8)
    for place, (_, data) in zip(places, weights.values(), strict=True):
        memory.array[first + place.begin : first + place.begin + place.num_bytes] = data
    return memory


def mapped(descriptor: int) -> SavedWeights:
    """The weights in such memory, without a copy; the descriptor may be closed then.

    A model that writes to its weights gets own copies of those pages, and changes them for no other process.
    """
    view = mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_COPY)
    content: Array = np.frombuffer(view, np.uint8)
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    places = msgspec.json.decode(view[_LENGTH_BYTES : _LENGTH_BYTES + length], type=list[_Place])
    first = _aligned(_LENGTH_BYTES + length)
    return {
        one.name: (
            Weight(one.name, one.dtype, one.shape),
            content[first + one.begin : first + one.begin + one.num_bytes],
        )
        for one in places
    }


def _aligned(number: int) -> int:
    return -(-number // _ALIGNMENT) * _ALIGNMENT
