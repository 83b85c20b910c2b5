"""Converts optimizer state between torch's `state_dict` and the servers' slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from syncline.core.layout import Layout, Slice
from syncline.core.wire.traffic import StateEntry
from syncline.store.weights import AVERAGE_KEY
from syncline.torch.parameters import Tracked
from syncline.worker.arrays import Bytes
from syncline.worker.exchange.servers import ServersExchange

#: State entries with one number per parameter.
SCALARS = frozenset({"step", "eta", "mu", "mu_product"})


def _slices(layout: Layout, tracked: Sequence[Tracked]) -> list[Slice]:
    segments = {layout.where[item.name][0].index for item in tracked}
    return [part for index in sorted(segments) for part in layout.segments[index].slices]


def read_average(exchange: ServersExchange, tracked: Sequence[Tracked]) -> dict[torch.Tensor, torch.Tensor]:
    """The servers' running averages (`--average ema:D`) by parameter."""
    found = read_state(exchange, tracked, AVERAGE_KEY)
    return {parameter: state[AVERAGE_KEY] for parameter, state in found.items() if AVERAGE_KEY in state}


def read_state(
    exchange: ServersExchange, tracked: Sequence[Tracked], only: str = ""
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """The servers' rule state by parameter, in its shape. `only`: this entry, which may be the average; otherwise
    the average is left out.
    """
    layout = exchange.layout
    by_name = {item.name: item.tensor for item in tracked}
    found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    parts = {part.id: part for part in _slices(layout, tracked)}
    for entry, data in exchange.read_state(list(parts.values()), only):
        if entry.key == AVERAGE_KEY != only:
            continue
        part = parts[entry.slice]
        segment = layout.segments[part.segment]
        piece = segment.pieces(part)[entry.piece]
        known = segment.parameters[piece.parameter]
        parameter = by_name[known.name]
        value = torch.from_numpy(data).view(getattr(torch, entry.dtype)).reshape(entry.shape)
        state = found.setdefault(parameter, {})
        if entry.key in SCALARS or entry.shape != (piece.num_items,) or entry.shape == known.shape:
            state[entry.key] = value.clone()
        else:
            whole = state.setdefault(entry.key, torch.zeros(known.shape, dtype=value.dtype))
            whole.view(-1)[piece.start : piece.start + piece.num_items] = value
    return found


def load_state(exchange: ServersExchange, tracked: Sequence[Tracked], state: Mapping[Any, dict[str, Any]]) -> None:
    """Sets the servers' rule state from a torch optimizer's."""
    layout = exchange.layout
    by_name = {item.name: item.tensor for item in tracked}
    parts = _slices(layout, tracked)
    entries: list[tuple[StateEntry, Bytes]] = []
    for part in parts:
        segment = layout.segments[part.segment]
        for number, piece in enumerate(segment.pieces(part)):
            known = segment.parameters[piece.parameter]
            elementwise = segment.rule_of(known).elementwise
            for key, value in state.get(by_name[known.name], {}).items():
                if value is None:
                    continue
                tensor = torch.as_tensor(value).detach().cpu()
                if elementwise and key not in SCALARS and tensor.shape == torch.Size(known.shape):
                    tensor = tensor.reshape(-1)[piece.start : piece.start + piece.num_items]
                entries.append(_entry(part.id, number, key, tensor.contiguous()))
    exchange.write_state(parts, entries)


def _entry(number: int, piece: int, key: str, tensor: torch.Tensor) -> tuple[StateEntry, Bytes]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    data: np.ndarray[Any, np.dtype[np.uint8]] = tensor.reshape(-1).view(torch.uint8).numpy()
    return StateEntry(number, piece, key, dtype, tuple(tensor.shape)), data
