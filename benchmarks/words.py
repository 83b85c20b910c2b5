"""Figures in words."""

from __future__ import annotations

from benchmarks.row import Unit

KIB, MIB = 1 << 10, 1 << 20


def size_in_words(num_bytes: int) -> str:
    """A size that was chosen: whole MiB, or KiB."""
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes / KIB:g} KiB"


def figure(value: float, unit: Unit) -> str:
    """A figure as measured; `processor`: seconds of processor time."""
    return f"{value / MIB:.1f} MiB" if unit == "bytes" else duration(value)


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
