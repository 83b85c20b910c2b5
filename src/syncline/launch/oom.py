"""How many processes the kernel has killed for want of memory, so that a SIGKILL can be told apart from others."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

_PROC, _CGROUPS = pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup")


def oom_kills(pid: int, proc: pathlib.Path = _PROC, cgroups: pathlib.Path = _CGROUPS) -> int:
    """Kills in the control group of this process so far, or of the whole machine where groups are not counted.

    0 where the kernel counts none, as on macOS. Groups count kills for a limit of their own and for the machine's.
    """
    for path in _counters(pid, proc, cgroups):
        if (found := _count(path)) is not None:
            return found
    return 0


def _counters(pid: int, proc: pathlib.Path, cgroups: pathlib.Path) -> list[pathlib.Path]:
    """Where to look, the closest first: the group, then those around it (a container sees only some of them)."""
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
    """Which deaths of members the counters explain: each kill explains one, of a process that was there by then."""

    def __init__(self, count: Callable[[int], int] = oom_kills) -> None:
        self._count = count
        self._num_explained = 0

    def at_start(self, pid: int) -> int:
        """The count when a process starts."""
        return self._count(pid)

    def explains(self, pid: int, at_start: int) -> bool:
        """Whether a process that SIGKILL has ended was killed for want of memory."""
        before = max(at_start, self._num_explained)
        if self._count(pid) <= before:
            return False
        self._num_explained = before + 1
        return True
