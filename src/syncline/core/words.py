"""Words that people read."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.stats import PushBytes


def counted(number: int, noun: str) -> str:
    """`1 slice`, `2 slices`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(([", ".join(names[:-1])] if len(names) > 1 else []) + list(names[-1:]))


def size(num_bytes: float) -> str:
    """`512 MiB`, `1.3 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def pushed_told(pushed: PushBytes, num_steps: int) -> str:
    """Bytes per step; nothing where nothing was pushed."""
    ways = [(pushed.socket, "over sockets"), (pushed.shared, "through shared memory")]
    return " and ".join(f"{size(count / max(1, num_steps))} {way}" for count, way in ways if count)
