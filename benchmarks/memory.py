"""How much memory a process has, where pages that it shares count by its share of them (PSS)."""

from __future__ import annotations

import contextlib
import ctypes
import os

from benchmarks.row import NotMeasured
from syncline.errors import ConnectionLost

_MMAP_THRESHOLD = -3  # in malloc.h of glibc


def return_what_is_freed() -> None:
    """In this process, from now on: what malloc would otherwise keep for later would change a figure by chance."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 18)


def check_memory_is_told() -> None:
    if not os.path.exists(_path("self")):
        raise NotMeasured("needs a system with /proc/PID/smaps_rollup")


def pss_bytes(pid: int) -> float:
    try:
        with open(_path(pid), encoding="ascii") as file:
            return _read(file.read())
    except OSError as error:
        raise ConnectionLost(f"the memory of process {pid} cannot be read: {error.strerror or error}") from None


def _path(pid: int | str) -> str:
    return f"/proc/{pid}/smaps_rollup"


def _read(text: str) -> float:
    """Of lines such as `Pss:  1234 kB`."""
    found = [line.split() for line in text.splitlines() if line.startswith("Pss:")]
    if len(found) != 1 or found[0][2:] != ["kB"]:
        raise NotMeasured("needs a system that tells PSS in /proc/PID/smaps_rollup")
    return int(found[0][1]) * 1024.0
