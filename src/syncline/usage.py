"""What a process uses of its machine, and how often a member tells its numbers."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping

from syncline.gpus import GpuMeter
from syncline.stats import MemberStats, ProcessStats, ServerStats, WireStats

#: How often a member sends its numbers with a heartbeat, about: a heartbeat that comes a little early counts.
EVERY_SECONDS, EARLY_SECONDS = 1.0, 0.1
#: Peers named in a member's numbers: those with the most bytes.
MOST_PEERS = 32
_METER = GpuMeter()


def process_stats() -> ProcessStats:
    """The numbers of this process, now."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    held, busy = _on_gpus()
    return ProcessStats(cpu_seconds=seconds, memory_bytes=_resident(own.ru_maxrss), gpu_bytes=held, gpu_busy=busy)


def _resident(peak: int) -> int:
    """The peak is the best that is known where there is no /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return peak * (1 if sys.platform == "darwin" else 1024)


def _on_gpus() -> tuple[int, float | None]:
    """What torch's allocator holds, and how busy the GPUs are on which it holds something. Looking must not
    initialize CUDA.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return 0, None
        held = {number: int(cuda.memory_reserved(number)) for number in range(cuda.device_count())}
        ids = [str(getattr(cuda.get_device_properties(number), "uuid", "")) for number, size in held.items() if size]
        return sum(held.values()), _METER.busy(ids) if any(ids) else None
    except Exception:  # half imported, or another torch
        return 0, None


class TellsStats:
    """Makes a member's numbers for a heartbeat, at most once a second."""

    def __init__(self, wire: Callable[[], WireStats], peers: Callable[[], Mapping[str, WireStats]]) -> None:
        self._wire, self._peers = wire, peers
        self._told_at = 0.0
        self._lock = threading.Lock()

    def due(self, server: Callable[[], ServerStats] | None = None) -> MemberStats | None:
        """The numbers, if it is time for them."""
        with self._lock:
            now = time.monotonic()
            if now - self._told_at < EVERY_SECONDS - EARLY_SECONDS:
                return None
            self._told_at = now
        told = server() if server is not None else None
        known = {name: (wire.bytes_sent, wire.bytes_received) for name, wire in self._peers().items()}
        most = sorted(known, key=lambda name: -sum(known[name]))[:MOST_PEERS]
        return MemberStats(
            process=process_stats(),
            wire=told.wire if told is not None else self._wire(),
            peers={name: known[name] for name in most},
            server=told,
        )
