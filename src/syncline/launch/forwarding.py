"""What a member writes, line by line, as it comes; and whether all of it was passed on when the member has ended."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from typing import IO

#: Taken out of the pipe at once; a pipe holds as much.
_CHUNK_BYTES = 1 << 16
_LOOK_SECONDS = 0.005


class Forwarder:
    """Reads a member's output in a thread of its own, to the end; each line goes to `take`."""

    def __init__(self, name: str, output: IO[bytes], take: Callable[[bytes], None]) -> None:
        self._output, self._take = output, take
        self._is_idle = False  # set when all that was read is passed on, taken back before more is read
        self._num_bytes = 0  # passed on
        self._thread = threading.Thread(target=self._run, name=f"log {name}", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Of a member that has ended: returns when all that it has written is passed on; whether it is. Something
        that it has left behind may hold the pipe open, silent or not: that is not waited for."""
        begun, deadline = self._num_bytes, time.monotonic() + seconds
        while not (is_through := self._is_through(begun)) and time.monotonic() < deadline:
            self._thread.join(_LOOK_SECONDS)
        return is_through

    def _is_through(self, begun: int) -> bool:
        """`begun`: what was passed on before; a whole pipe later, and what was just read, the rest is of others."""
        if not self._thread.is_alive() or self._num_bytes - begun >= 2 * _CHUNK_BYTES:
            return True
        with contextlib.suppress(ValueError, OSError):  # it is closed in this moment
            # In this order: what is not in the pipe any more was read while it was not idle.
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
