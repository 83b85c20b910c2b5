"""Optimizer state from the servers as NumPy arrays."""

from __future__ import annotations

import numpy as np

from syncline.core.rule import NUMBERS
from syncline.store.weights import AVERAGE_KEY
from syncline.worker.arrays import Bytes
from syncline.worker.exchange.servers import ServersExchange
from syncline.worker.host_memory import HostArray, HostMemory


def read(exchange: ServersExchange, memory: HostMemory, only: str = "") -> dict[str, dict[str, HostArray]]:
    """By name and key. `only`: this entry, which may be the running average; otherwise that is left out."""
    segment = memory.segment
    names = {index: name for name, index in memory.indices.items()}
    parts = {part.id: part for part in segment.slices}
    found: dict[str, dict[str, HostArray]] = {}
    for entry, data in exchange.read_state(list(parts.values()), only):
        if entry.key == AVERAGE_KEY != only:
            continue
        piece = segment.pieces(parts[entry.slice])[entry.piece]
        known, like = segment.parameters[piece.parameter], memory.values[names[piece.parameter]]
        value = _array(data, entry.dtype, like).reshape(entry.shape)
        state = found.setdefault(names[piece.parameter], {})
        if entry.key in NUMBERS or entry.shape != (piece.num_items,) or entry.shape == known.shape:
            state[entry.key] = value.copy()
        else:
            whole = state.setdefault(entry.key, np.zeros(known.shape, value.dtype))
            whole.reshape(-1)[piece.start : piece.start + piece.num_items] = value
    return found


def _array(data: Bytes, dtype: str, like: HostArray) -> HostArray:
    """NumPy has bfloat16 only where the framework brings it along."""
    if dtype != "bfloat16":
        return data.view(dtype)
    return data.view(like.dtype if str(like.dtype) == dtype else np.uint16)
