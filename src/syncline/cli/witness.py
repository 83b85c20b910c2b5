"""Runs a worker's script and records when its steps are acknowledged, for `syncline chaos`.

Arguments: the output file, then the script with its arguments; a module is given as `-m NAME`. A step is one record;
times are of the system's monotonic clock, shared by all processes of a host.
"""

from __future__ import annotations

import atexit
import os
import pathlib
import runpy
import struct
import sys
import threading
import time
from typing import NamedTuple

from syncline.worker.current import current_job, has_current_job

LOOK_SECONDS = 0.002
_RECORD = struct.Struct("<dqq")


class Step(NamedTuple):
    """A worker's progress: time, acknowledged steps in this life, samples so far."""

    at: float
    number: int
    samples: int


def read_steps(path: pathlib.Path) -> list[Step]:
    """The recorded steps, without a record truncated by its writer's death."""
    data = path.read_bytes()
    return [Step(*record) for record in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size])]


class Witness:
    """Observes the job from a thread beside the script."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._last = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        atexit.register(self.look)
        threading.Thread(target=self._look_regularly, name="witness", daemon=True).start()

    def look(self) -> None:
        if not has_current_job():
            return
        job = current_job()
        with self._lock:
            number = job.exchange.num_landed
            if number != self._last:
                self._last = number
                os.write(self._file, _RECORD.pack(time.monotonic(), number, job.samples_taken))

    def _look_regularly(self) -> None:
        while True:
            self.look()
            time.sleep(LOOK_SECONDS)


def main(words: list[str]) -> None:
    Witness(pathlib.Path(words[0])).start()
    is_module = words[1] == "-m"
    sys.argv = words[2:] if is_module else words[1:]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
