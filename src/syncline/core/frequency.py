"""How often something is done: every so many steps, or every so long."""

from __future__ import annotations

from typing import NamedTuple

from syncline.core.durations import duration
from syncline.errors import ConfigError


class Every(NamedTuple):
    """Either of both is 0."""

    steps: int = 0
    seconds: float = 0.0


def every(flag: str, text: str) -> Every:
    """What people type: 500steps, 90s, 10m, 2h."""
    for word in ("steps", "step"):
        if text.endswith(word):
            number = text.removesuffix(word).strip().replace("_", "")
            if not (number.isdecimal() and number.isascii() and 0 < int(number) < 1 << 60):
                raise ConfigError(f"{flag} {text!r}: give a number of steps or a duration, e.g. 500steps, 10m")
            return Every(steps=int(number))
    return Every(seconds=duration(flag, text, "10m, 90s, 500steps"))
