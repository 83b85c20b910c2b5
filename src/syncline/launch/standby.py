"""A process that is started before a server dies, so that the next one has loaded torch by then.

A new server loads for seconds beside workers that use every core; one that waits takes its plan at once.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

#: Not before the job has run for so long: a short one pays nothing.
STANDBY_AFTER_SECONDS = 10.0


class Standby:
    """At most one such process, on the launcher's own host."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]], *, most_lost: int = 3) -> None:
        """`start` starts one. After `most_lost` that ended while they waited there is no other."""
        self._start, self._num_left = start, most_lost
        self._process: subprocess.Popen[bytes] | None = None

    def make_ready(self) -> None:
        """Starts one, if none waits."""
        if self._process is not None and self._process.poll() is not None:
            self._drop(self._process)
            self._process, self._num_left = None, self._num_left - 1
        if self._process is None and self._num_left > 0:
            try:
                self._process = self._start()
            except OSError:
                self._num_left = 0  # no room for one: servers start as they always do

    def take(self) -> subprocess.Popen[bytes] | None:
        """The one that waits for its plan; it is the caller's from now on."""
        process, self._process = self._process, None
        if process is not None and process.poll() is not None:
            self._drop(process)
            return None
        return process

    def close(self) -> None:
        process, self._process = self._process, None
        self._num_left = 0
        if process is not None:
            process.kill()
            self._drop(process)

    @staticmethod
    def _drop(process: subprocess.Popen[bytes]) -> None:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
