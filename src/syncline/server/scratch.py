"""Memory that a thread of a server computes in, again and again."""

from __future__ import annotations

import threading

import torch

_local = threading.local()
_MOST_KEPT = 1024


def scratch(dtype: torch.dtype, flat: torch.Tensor, start: int, num_items: int) -> torch.Tensor:
    """This thread's own for a slice, or a part of it; the same tensor again for the same part."""
    kept: dict[object, torch.Tensor] = _local.__dict__.setdefault("kept", {})
    kind = (dtype, flat.device)
    key = (kind, start, num_items)
    if key not in kept:
        if len(kept) > _MOST_KEPT:
            kept.clear()
        if kind not in kept or kept[kind].numel() < flat.numel():
            for old in [known for known in kept if known == kind or known[0] == kind]:  # type: ignore[index]
                del kept[old]
            kept[kind] = torch.empty(flat.numel(), dtype=dtype, device=flat.device)
        kept[key] = kept[kind][start : start + num_items]
    return kept[key]
