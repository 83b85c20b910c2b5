"""Counts, sizes and durations in readable form."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from syncline.errors import ConfigError
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


def number_told(value: float | None) -> str:
    """With three digits, and with commas where it is large."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1e9 or (size < 1e-3 and size):
        return f"{value:.2e}"
    if size >= 1e3:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def bytes_told(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{number_told(value / size)} {unit}"
    return f"{value:.0f} B"


def seconds_told(value: float | None) -> str:
    """1.2 ms, 45 s, 3 min 20 s, 2 h 5 min."""
    if value is None or not math.isfinite(value):
        return "–"
    if value < 1e-3:
        return f"{number_told(value * 1e6)} µs" if value else "0 s"
    if value < 1:
        return f"{number_told(value * 1e3)} ms"
    if value < 120:
        return f"{number_told(value)} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 120 else f"{minutes} min {rest} s"


def pushed_told(pushed: PushBytes, num_steps: int) -> str:
    """Bytes per step; empty if nothing was pushed."""
    ways = [(pushed.socket, "over sockets"), (pushed.shared, "through shared memory")]
    return " and ".join(f"{size(count / max(1, num_steps))} {way}" for count, way in ways if count)


_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_STEPS = re.compile(r" *([0-9](?:_?[0-9]){0,17}) *steps?")


class Interval(msgspec.Struct, frozen=True):
    """An interval: steps, seconds, or every epoch. One of the three."""

    steps: int = 0
    seconds: float = 0.0
    is_epoch: bool = False


def duration(flag: str, text: str, example: str = "10s, 1.5m, 1h") -> float:
    """Parses seconds; a ConfigError shows an example."""
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        seconds = float(text.removesuffix(unit)) * _UNITS[unit or "s"]
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 1e9:
        raise ConfigError(f"{flag} {text!r}: give a duration, e.g. {example}")
    return seconds


def interval(flag: str, text: str, *, epochs: bool = False, example: str = "") -> Interval:
    """`500steps`, `1_000steps`, `10m`, and where `epochs` may be said, `epoch`.

    Anything else is a ConfigError that shows examples.
    """
    if epochs and text == "epoch":
        return Interval(is_epoch=True)
    found = _STEPS.fullmatch(text)
    if found is not None and int(found[1]) > 0:
        return Interval(steps=int(found[1]))
    example = example or f"500steps, 10m, 2h{', epoch' if epochs else ''}"
    if text.endswith(("step", "steps")):
        raise ConfigError(f"{flag} {text!r}: give a number of steps from 1 on, or a duration, e.g. {example}")
    return Interval(seconds=duration(flag, text, example))
