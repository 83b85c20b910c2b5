"""The processor time of a side. What other programs take makes a turn longer, and hardly changes this."""

from __future__ import annotations

import collections
import contextlib
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence

from benchmarks.row import NotMeasured

_PROC = pathlib.Path("/proc")


class ProcessorMeter:
    """Processor time per operation since it was read last, of processes and of all that they have started."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self._pids, self._before = pids, 0.0

    def read(self, num_operations: int) -> float:
        before, self._before = self._before, seconds_of(self._pids())
        return (self._before - before) / num_operations


def seconds_of(pids: Iterable[int]) -> float:
    """Of these processes and all that they have started, once each, while they live; of their ended threads too."""
    children = _children()
    left, total = list(pids), 0.0
    seen: set[int] = set()
    while left:
        pid = left.pop()
        if pid in seen:
            continue
        seen.add(pid)
        left += children[pid]
        with contextlib.suppress(OSError):  # it has just ended
            total += time.clock_gettime(_clock_of(pid))
    return total


def check_is_measured() -> None:
    if not is_measured():
        raise NotMeasured("needs a system that tells the processor time of other processes")


def is_measured() -> bool:
    """Whether this system tells the processor time of other processes."""
    try:
        return (_PROC / "self" / "stat").is_file() and time.clock_gettime(_clock_of(1)) >= 0.0
    except (OSError, AttributeError):
        return False


def _clock_of(pid: int) -> int:
    """Linux' clock of a process, as clock_getcpuclockid makes it."""
    return (~pid << 3) | 2


def _children() -> dict[int, list[int]]:
    """By process: the processes that it has started."""
    found: dict[int, list[int]] = collections.defaultdict(list)
    for path in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may contain anything; state and parent follow it.
            parent = path.read_text(errors="replace").rpartition(")")[2].split()[1]
            found[int(parent)].append(int(path.parent.name))
    return found
