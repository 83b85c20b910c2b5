from __future__ import annotations


def bench() -> None:
    """x"""
