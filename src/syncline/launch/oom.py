"""Counts processes that the kernel has killed for lack of memory, to tell such a SIGKILL from others."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

_PROC, _CGROUPS = pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup")


def oom_kills(pid: int, proc: pathlib.Path = _PROC, cgroups: pathlib.Path = _CGROUPS) -> int:
    """OOM kills in this process's cgroup so far, or on the whole machine if cgroups do not count them.

    0 if the kernel does not count, as on macOS. Cgroups count kills for their own limit and for the machine's.
    """
    for path in _counters(pid, proc, cgroups):
        if (found := _count(path)) is not None:
            return found
    return 0


def _counters(pid: int, proc: pathlib.Path, cgroups: pathlib.Path) -> list[pathlib.Path]:
    """The counter files, closest first: the cgroup, then its parents (a container sees only some)."""
    found = []
    for line in _read(proc / str(pid) / "cgroup").splitlines() or _read(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            root, name = cgroups, "memory.events"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.oom_control"
        else:
            continue
        parts = pathlib.PurePosixPath(group).parts[1:]
        found += [root.joinpath(*parts[:depth], name) for depth in range(len(parts), -1, -1)]
    return [*found, proc / "vmstat"]


def _count(path: pathlib.Path) -> int | None:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return None


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


class OomKills:
    """Which deaths the counters explain: each kill explains one death."""

    def __init__(self, count: Callable[[int], int] = oom_kills) -> None:
        self._count = count
        self._num_explained = 0

    def at_start(self, pid: int) -> int:
        """The count when a process starts."""
        return self._count(pid)

    def explains(self, pid: int, at_start: int) -> bool:
        """Whether a process that ended by SIGKILL was killed for lack of memory."""
        before = max(at_start, self._num_explained)
        if self._count(pid) <= before:
            return False
        self._num_explained = before + 1
        return True
