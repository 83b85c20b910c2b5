"""Runs one sink in a thread of its own. Nothing waits for it: what it cannot take in time is left out."""

from __future__ import annotations

import collections
import functools
import threading
import time
from collections.abc import Callable, Sequence

from syncline.core.media import ReportedMedia
from syncline.sinks.choosing import Choice
from syncline.sinks.sink import Sink, SinkError, SinkRefusal, SinkRun
from syncline.stats import JobLook

#: A sink is made after so long, or at the end: a short job does not pay for imports beside its training.
WARM_SECONDS = 20.0
#: Looks that wait for a sink; of more, the oldest are left out.
MOST_WAITING = 300
#: After trouble, the next attempt; and the next time that the same trouble is said.
AGAIN_SECONDS = 30.0
SILENT_SECONDS = 3_600.0
#: Refusals that are said.
MOST_REFUSALS = 20
#: For what waits, at the end of the job.
END_SECONDS = 10.0


class SinkThread:
    """Takes looks from the recorder's thread."""

    def __init__(self, choice: Choice, run: SinkRun, log: Callable[[str], None]) -> None:
        self._choice, self._run, self._log = choice, run, log
        self._waiting: collections.deque[tuple[JobLook, Sequence[ReportedMedia]]] = collections.deque(
            maxlen=MOST_WAITING
        )
        self._wake, self._closed = threading.Event(), threading.Event()
        self._has_failed, self._num_refusals = False, 0
        self._sink: Sink | None = None
        self._not_before = self._silent_until = float("-inf")
        self._thread = threading.Thread(target=self._work, name=f"sink {choice.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self, look: JobLook, media: Sequence[ReportedMedia]) -> None:
        """Does not wait."""
        if look.readings or look.events or media or look.number % 10 == 0:
            self._waiting.append((look, media))
            self._wake.set()

    def close(self, *, has_failed: bool) -> None:
        """Waits a little until it has taken everything."""
        self._has_failed = has_failed
        self._closed.set()
        self._wake.set()
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            self._log(f"{self._choice.name} did not take the last readings in {END_SECONDS:.0f} s; they are left out")

    # -- in the thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        self._closed.wait(WARM_SECONDS)
        while not self._closed.is_set():
            self._wake.wait()
            self._wake.clear()
            self._write_waiting()
        self._not_before = float("-inf")
        self._write_waiting()
        if self._sink is not None:
            self._attempt(lambda sink: sink.close(has_failed=self._has_failed))

    def _write_waiting(self) -> None:
        """Looks wait here until there is a sink; what a sink cannot write then, it keeps itself."""
        while self._waiting and time.monotonic() >= self._not_before:
            self._attempt(_begin)
            if self._sink is None:
                return
            look, media = self._waiting.popleft()
            self._attempt(functools.partial(_write, look, media))

    def _attempt(self, act: Callable[[Sink], None]) -> None:
        try:
            if self._sink is None:
                self._sink = self._choice.make(self._run)
            act(self._sink)
        except SinkRefusal as refusal:
            if self._num_refusals < MOST_REFUSALS:
                self._num_refusals += 1
                self._log(f"{self._choice.name}: {refusal}; the rest goes on")
        except SinkError as error:
            self._failed(str(error))
        except Exception as error:  # of a package that we do not know: no reason to fail a job
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, trouble: str) -> None:
        self._not_before = time.monotonic() + AGAIN_SECONDS
        if time.monotonic() >= self._silent_until:
            self._silent_until = time.monotonic() + SILENT_SECONDS
            self._log(f"{self._choice.name} cannot take readings: {trouble}; the job goes on, and tries it again")


def _begin(sink: Sink) -> None:
    """Makes it, where there is none yet."""


def _write(look: JobLook, media: Sequence[ReportedMedia], sink: Sink) -> None:
    sink.write(look, media)
