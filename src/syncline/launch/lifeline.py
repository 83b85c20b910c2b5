"""A member's standard input: open as long as the launcher lives; it carries messages about the job's end.

A signal does not tell whether it went to one member or, as from a cluster, to the whole job. So if a job is saved
before it ends, a member that gets SIGTERM first waits for the launcher: if the launcher got it too, it has the job
saved and ends all members. In pods there is no launcher: there the coordinator does so, over the members'
connections.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import IO

#: How long to wait for the launcher to say that the signal went to all.
WORD_SECONDS = 2.0
#: The same in pods, which a cluster does not tell in the same moment.
POD_WORD_SECONDS = 5.0
#: The launcher will end and saves the job first / has done so.
SAVES, ENDS = b"s", b"e"
_is_saving, _ends = threading.Event(), threading.Event()
_stays_seconds = 0.0  # how long the coordinator has asked its members to stay


def hold() -> None:
    """Moves standard input to another descriptor; when it closes, the launcher is gone and this process ends."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    lifeline = os.dup(0)
    os.set_inheritable(lifeline, False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    threading.Thread(target=_watch, args=(lifeline,), name="lifeline", daemon=True).start()


def _watch(lifeline: int) -> None:
    with contextlib.suppress(OSError):
        while word := os.read(lifeline, 1 << 12):
            if ENDS in word:
                _ends.set()
            _is_saving.set()
    _end_group()


def _end_group() -> None:
    """Ends this process and everything that it started."""
    try:
        os.killpg(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(137)


def job_ends(seconds: float) -> None:
    """The coordinator says that the job is saved, then it ends: a member that is told to end stays, for so long at
    most.
    """
    global _stays_seconds
    _stays_seconds = seconds
    _is_saving.set()


def tell(stdin: IO[bytes], word: bytes) -> None:
    """Sends the launcher's message to a member."""
    with contextlib.suppress(OSError, ValueError):
        stdin.write(word)
        stdin.flush()


class ToldToEnd:
    """Handles SIGTERM in a member: runs `action` at the first one, ends at the second.

    `saves`: the job is saved first, if it ends as a whole. `word_seconds`: how long to wait for that word.
    """

    def __init__(self, action: Callable[[], None], *, saves: bool, word_seconds: float = WORD_SECONDS) -> None:
        self._action, self._saves, self._word_seconds = action, saves, word_seconds
        self._is_told = False
        self._owner = os.getpid()

    def __call__(self, number: int, frame: object) -> None:
        if self._is_told or os.getpid() != self._owner:  # inherited by a script's forks
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._is_told = True
        if not self._saves or _ends.is_set():
            self._action()
        else:
            threading.Thread(target=self._wait, name="told to end", daemon=True).start()

    def _wait(self) -> None:
        if not _is_saving.wait(self._word_seconds):
            self._action()
        elif _stays_seconds:
            time.sleep(_stays_seconds)  # the end of the job ends this process before that
            self._action()
        else:
            self._is_told = False  # the launcher sends it again when the job is saved
