"""Forwards a member's output line by line, and tells whether all of it was forwarded when the member has ended."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from typing import IO

#: Read size; the capacity of a pipe.
_CHUNK_BYTES = 1 << 16
_LOOK_SECONDS = 0.005


class Forwarder:
    """Reads a member's output in its own thread to the end; each line goes to `take`."""

    def __init__(self, name: str, output: IO[bytes], take: Callable[[bytes], None]) -> None:
        self._output, self._take = output, take
        self._is_idle = False  # set when everything read is forwarded, cleared before more is read
        self._num_bytes = 0  # forwarded
        self._thread = threading.Thread(target=self._run, name=f"log {name}", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """For a member that has ended: waits until its output is forwarded; returns whether it is. A child process
        may hold the pipe open; its output is not waited for.
        """
        begun, deadline = self._num_bytes, time.monotonic() + seconds
        while not (is_through := self._is_through(begun)) and time.monotonic() < deadline:
            self._thread.join(_LOOK_SECONDS)
        return is_through

    def _is_through(self, begun: int) -> bool:
        """`begun`: bytes forwarded before. After a full pipe more, the rest is from other processes."""
        if not self._thread.is_alive() or self._num_bytes - begun >= 2 * _CHUNK_BYTES:
            return True
        with contextlib.suppress(ValueError, OSError):  # being closed right now
            # In this order: data that left the pipe was read while it was not idle.
            return not _wait_for(self._output.fileno(), 0.0) and self._is_idle
        return False

    def _run(self) -> None:
        rest = b""
        with contextlib.suppress(ValueError, OSError):  # the pipe is closed at the end
            number = self._output.fileno()
            while True:
                self._is_idle = True
                _wait_for(number, None)
                self._is_idle = False
                data = os.read(number, _CHUNK_BYTES)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(line + b"\n")
                self._num_bytes += len(data)
            if rest:
                self._take(rest)
            self._output.close()


def _wait_for(number: int, seconds: float | None) -> bool:
    """Whether there is something to read, or the end."""
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1e3))
