"""The server's threads: one pool as wide as its cores, or the caller's own thread in an embedded job."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from syncline.config import num_cores

Task = Callable[[], None]
#: Updates up to this size are applied in the calling thread: a hand-over would take longer.
_SMALL_BYTES, _SMALL_SLICES = 1 << 18, 16


def is_small(slice_bytes: Sequence[int]) -> bool:
    """Whether slices of these sizes are applied faster without a hand-over to other threads."""
    return len(slice_bytes) <= _SMALL_SLICES and sum(slice_bytes) <= _SMALL_BYTES


class Pool(Protocol):
    """Runs tasks; a task must not raise."""

    def submit(self, task: Task) -> None:
        """Runs the task, now or soon."""

    def close(self) -> None:
        """Lets what was submitted finish, then ends."""


class InlinePool:
    """Runs every task in the thread that submits it."""

    def submit(self, task: Task) -> None:
        task()

    def close(self) -> None:
        pass


class ThreadPool:
    """One thread per core of this process. Exceptions of tasks go to `broken`."""

    def __init__(self, broken: Callable[[Exception], None], num_threads: int | None = None) -> None:
        count = num_threads or num_cores()
        self._broken = broken
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"pool-{k}", daemon=True) for k in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # a bug must surface as an error, not as a hang
                self._broken(error)

    def submit(self, task: Task) -> None:
        self._tasks.put(task)

    def close(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)
