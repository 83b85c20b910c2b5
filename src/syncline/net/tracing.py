"""Sends what a member has traced to its coordinator, and learns by the answers how far apart their clocks are."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from syncline.core.tracing import MOST_SPANS, Knot, PhaseSpan, SpanBuffer
from syncline.core.wire.tracing import GiveSpans, GotSpans
from syncline.errors import SynclineError
from syncline.net.link import Link

SEND_SECONDS = 0.5
#: Clocks are compared at least so often, also where nothing was traced.
COMPARE_SECONDS = 5.0
ANSWER_SECONDS = 2.0
_MICRO = 1e6


class SpanSender:
    """The thread of a member that sends its spans. A coordinator that is gone for a while gets them later."""

    def __init__(self, link: Link, spans: SpanBuffer, clock: Callable[[], float] = time.perf_counter) -> None:
        self._link, self._spans, self._clock = link, spans, clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._number, self._unanswered = 0, list[PhaseSpan]()
        self._knot: Knot | None = None
        self._compared_at = -COMPARE_SECONDS

    def start(self) -> None:
        threading.Thread(target=self._send_regularly, name="trace", daemon=True).start()

    def close(self) -> None:
        """Sends what is left, and waits a little for the answer."""
        self.stop()
        self._send()

    def stop(self) -> None:
        """Sends nothing more."""
        self._closed.set()

    def _send_regularly(self) -> None:
        while True:
            self._send()
            if self._closed.wait(SEND_SECONDS):
                return

    def _send(self) -> None:
        with self._lock, contextlib.suppress(SynclineError):
            while self._send_once():
                pass

    def _send_once(self) -> bool:
        """Whether there may be more."""
        if not self._unanswered:
            self._unanswered = self._spans.take()
            if not self._unanswered and self._clock() - self._compared_at < COMPARE_SECONDS:
                return False
            self._number += 1
        sent = self._clock()
        message = GiveSpans(self._number, round(sent * _MICRO), self._unanswered, self._knot, self._spans.num_dropped)
        answer = self._link.try_call(message).wait(ANSWER_SECONDS)
        got = self._clock()
        self._unanswered, self._compared_at = [], got
        if isinstance(answer, GotSpans):
            middle = (sent + got) / 2
            self._knot = Knot(
                round(middle * _MICRO), round((answer.at - middle) * _MICRO), round((got - sent) / 2 * _MICRO)
            )
        return len(self._spans) >= (1 if self._closed.is_set() else MOST_SPANS)
