"""A checkpoint's weights as a plain state_dict: no job, no servers, no pickle."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Collection

import torch

from syncline.errors import ConfigError
from syncline.store import weights as saved


def load_state_dict(
    url: str | os.PathLike[str],
    names: Collection[str] | None = None,
    dtype: torch.dtype | str | None = None,
    weights: str = "",
) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint by the model's own names, on the CPU, each with memory of its own.

    `url`: a checkpoint's folder, or a folder of checkpoints (the newest that can be read), or its `best` or `last`;
    any path that fsspec knows. `names`: only these. `dtype`: what is a floating number becomes this. `weights`:
    "parameters", or "average" for the average that `--average ema:DECAY` keeps; else what `best` means. What is
    damaged is never returned: StoreError.
    """
    wanted = _dtype(dtype) if dtype is not None else None
    found = {}
    for name, (weight, data) in saved.load(url, names, weights).items():
        kind = _dtype(weight.dtype)
        tensor = torch.from_numpy(data).view(kind) if data.size else torch.empty(0, dtype=kind)
        tensor = tensor.reshape(weight.shape)
        found[name] = tensor.to(wanted) if wanted is not None and tensor.is_floating_point() else tensor
    return found


def export_state_dict(url: str | os.PathLike[str], path: pathlib.Path, weights: str = "") -> None:
    """Writes the state_dict for `torch.load`; there whole or not at all."""
    state = load_state_dict(url, weights=weights)
    with saved.replaced(path) as part, open(part, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _dtype(given: torch.dtype | str) -> torch.dtype:
    if isinstance(given, torch.dtype):
        return given
    found = getattr(torch, given.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype = {given!r}: give one of torch's, e.g. torch.float32")
    return found
