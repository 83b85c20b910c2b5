"""How much processor time other processes have used."""

from __future__ import annotations

import os
import pathlib

from benchmarks.row import NotMeasured
from syncline.errors import ConnectionLost


def check_processor_is_told() -> None:
    if not os.path.exists("/proc/self/stat"):
        raise NotMeasured("needs a system with /proc/PID/stat")


def processor_seconds(pid: int) -> float:
    """Of all threads of a process since it began, in its own code and in the system's."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConnectionLost(f"the times of process {pid} cannot be read: {error.strerror or error}") from None
    fields = text.rpartition(")")[2].split()  # the name before it may have spaces
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
