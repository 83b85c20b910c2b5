"""How busy a process's GPUs are, as NVIDIA's driver says. Nothing is installed for it: its library is the driver's.

A driver may take its time, or stand still with its GPU. So a thread of its own asks it, and a heartbeat takes the
newest answer.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

#: How often the driver is asked. Its own figures are of a sixth of a second to a second.
EVERY_SECONDS = 1.0
_LIBRARY = "libnvidia-ml.so.1"


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: per cent of the last period in which a kernel ran, and in which memory was used."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class GpuMeter:
    """Watches the GPUs of this process from the first time that they are named."""

    def __init__(self, load: Callable[[], Any] = lambda: ctypes.CDLL(_LIBRARY)) -> None:
        self._load = load
        self._ids: tuple[str, ...] = ()
        self._busy: float | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def busy(self, ids: Sequence[str]) -> float | None:
        """The part of the time in which a kernel ran on these GPUs, of any process, in the mean; None: not known,
        or not yet. `ids`: as the driver has them, without "GPU-".
        """
        self._ids = tuple(ids)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)
            self._thread.start()
        return self._busy

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            library = self._load()
            if library.nvmlInit_v2() != 0:
                return
        except (OSError, AttributeError):  # another maker's GPUs, or an old driver
            return
        while True:
            self._busy = busy_of(library, self._ids)
            if self._closed.wait(EVERY_SECONDS):
                return


def busy_of(library: Any, ids: Sequence[str]) -> float | None:
    """The mean over the GPUs that tell it. A part of a GPU (MIG) does not."""
    found = []
    for name in ids:
        handle, said = ctypes.c_void_p(), _Utilization()
        if library.nvmlDeviceGetHandleByUUID(f"GPU-{name}".encode(), ctypes.byref(handle)) == 0 and (
            library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(said)) == 0
        ):
            found.append(said.gpu / 100)
    return sum(found) / len(found) if found else None
