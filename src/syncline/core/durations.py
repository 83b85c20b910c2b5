"""Durations, as people type them."""

from __future__ import annotations

from syncline.errors import ConfigError

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(flag: str, text: str, example: str = "10s, 1.5m, 1h") -> float:
    """Seconds; what is none is a ConfigError that shows one."""
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        seconds = float(text.removesuffix(unit)) * _UNITS[unit or "s"]
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 1e9:
        raise ConfigError(f"{flag} {text!r}: give a duration, e.g. {example}")
    return seconds
