"""Words that people read."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 slice`, `2 slices`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
