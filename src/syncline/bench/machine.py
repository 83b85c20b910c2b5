"""Describes the machine, and measures which share of it other programs used meanwhile."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import resource
from typing import Any

from syncline.config import num_cores
from syncline.net.shm import available_bytes


def describe_machine() -> dict[str, Any]:
    """What the figures depend on; no host name, no user name."""
    return {
        "cores": num_cores(),
        "memory_available_bytes": available_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "gpus": gpu_names(),
    }


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def in_words(machine: dict[str, Any]) -> str:
    has = ", ".join([f"{machine['cores']} cores", *machine["gpus"], machine["system"]])
    return f"{has}, Python {machine['python']}, torch {machine['torch']}"


def gpu_names(folder: str = "/proc/driver/nvidia/gpus") -> list[str]:
    """The names that the NVIDIA driver reports."""
    found = []
    for path in sorted(pathlib.Path(folder).glob("*/information")):
        lines = path.read_text(errors="replace").splitlines()
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return found


class Others:
    """The share of all cores that other processes used since this object was made."""

    def __init__(self) -> None:
        self._began = look()

    def share(self) -> float | None:
        """Between 0 and 1; None where the system has no /proc/stat. Children count as ours once they have ended."""
        if self._began is None or (now := look()) is None:
            return None
        busy, total, own = (after - before for before, after in zip(self._began, now, strict=True))
        return min(1.0, max(0.0, busy - own) / total) if total > 0 else None


def look() -> tuple[float, float, float] | None:
    """CPU seconds: busy and total since boot, and those of this process and its ended children."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    own = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        own += usage.ru_utime + usage.ru_stime
    idle = ticks[3] + ticks[4]  # idle, waiting for a disk
    per_second = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - idle) / per_second, sum(ticks) / per_second, own
