"""The machine in words, and how much of it others used meanwhile: a figure taken beside them says little."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import resource
from typing import Any

from syncline.bench.row import NotMeasured
from syncline.config import num_cores
from syncline.net.shm import available_bytes


def describe_machine() -> dict[str, Any]:
    """What the figures depend on, without a name that would tell whose machine it is."""
    return {
        "cores": num_cores(),
        "memory_available_bytes": available_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "gpus": gpu_names(),
    }


def gpu_names(folder: str = "/proc/driver/nvidia/gpus") -> list[str]:
    """As the driver calls them."""
    found = []
    for path in sorted(pathlib.Path(folder).glob("*/information")):
        lines = path.read_text(errors="replace").splitlines()
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return found


def check_gpu() -> None:
    """Loads torch, which alone knows whether it can use one."""
    import torch

    if not torch.cuda.is_available():
        raise NotMeasured("needs a GPU")


class Others:
    """From when it is made: which part of all cores went to processes that are not ours."""

    def __init__(self) -> None:
        self._began = _look()

    def share(self) -> float | None:
        """Between 0 and 1; None where the system does not tell. Children of ours count once they have ended."""
        if self._began is None or (now := _look()) is None:
            return None
        busy, total, own = (after - before for before, after in zip(self._began, now, strict=True))
        return min(1.0, max(0.0, busy - own) / total) if total > 0 else None


def _look() -> tuple[float, float, float] | None:
    """CPU seconds since the system's start: busy, busy or not; and since ours: used by us and our children."""
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
