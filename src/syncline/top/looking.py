"""Looks at a job once a second, from outside, as long as it runs. A coordinator that is gone is waited for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import msgspec

from syncline.core.wire.control import AskLook, GivenLook
from syncline.errors import SynclineError
from syncline.launch.folder import holder_of
from syncline.launch.jobfile import JobFile
from syncline.launch.watching import reach_coordinator
from syncline.net.rpc import Endpoint
from syncline.stats import JobLook

LOOK_SECONDS = 1.0
ANSWER_SECONDS = 3.0
_END_SECONDS = 1.0


class Trouble(msgspec.Struct, frozen=True):
    """There is no look, for this reason."""

    text: str
    is_over: bool = False  #: the job has ended: there will be no other look


Seen = JobLook | Trouble


class Looking:
    """The thread that looks. Everything seen goes to `show`, which must not block."""

    def __init__(self, file: JobFile, show: Callable[[Seen], None]) -> None:
        self._file, self._show = file, show
        self._endpoint: Endpoint | None = None
        self._closed = threading.Event()
        self._is_here = file.folder.is_dir()  # else the job runs on another machine
        self._silent_since: float | None = None
        self._thread = threading.Thread(target=self._look_regularly, name="look", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        endpoint = self._endpoint
        if endpoint is not None:
            endpoint.close()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def _look_regularly(self) -> None:
        while not self._closed.is_set():
            seen = self._look()
            if self._closed.is_set():
                return
            if seen is not None:
                self._show(seen)
            if isinstance(seen, Trouble) and seen.is_over:
                return
            if isinstance(seen, JobLook) and seen.figures.verdict:
                return  # its coordinator ends now
            self._closed.wait(LOOK_SECONDS)

    def _look(self) -> Seen | None:
        try:
            if self._endpoint is None or not self._endpoint.is_open:
                self._endpoint = reach_coordinator(self._file, ANSWER_SECONDS)
            answer = self._endpoint.call(AskLook()).wait(ANSWER_SECONDS)
            self._silent_since = None
            return answer.look if isinstance(answer, GivenLook) else None
        except (SynclineError, OSError) as error:
            if self._endpoint is not None:
                with contextlib.suppress(SynclineError, OSError):
                    self._endpoint.close()
                self._endpoint = None
            return self._trouble(error)

    def _trouble(self, error: Exception) -> Trouble:
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        if self._is_here and not holder_of(self._file.folder):
            return Trouble("the job has ended", is_over=True)
        return Trouble(f"no answer from the coordinator for {now - self._silent_since:.0f} s: {error}")
