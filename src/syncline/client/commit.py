"""One commit on its way: staged on every server, committed on every server, clipped if asked, answered.

With one server the commit rides on the staged bytes. With several, it follows only when all of them have
acknowledged theirs, so that a step counts whole. The steps are driven by the answers, in the threads that
bring them; where the waiter reads, it drives them until everything is staged and told to count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from syncline.core.messages import AskClip, Committed, Message
from syncline.errors import ProtocolError, SynclineError, WaitTimeout
from syncline.net.rpc import Call, Latch

_MOMENT = 0.002


class Lane(Protocol):
    """One server's part in a commit: how to ask it, and what it answered."""

    call: Call | None
    earlier: Sequence[Call]

    def stage(self) -> Call:
        """Sends what is staged; with one server, it is committed by this."""

    def commit(self, clock: int) -> Call:
        """What is staged counts."""

    def clip(self, clock: int, squared_norm: float) -> Call:
        """The norm over all servers."""

    answer: Committed | None


class CommitFlow:
    """The state machine of one commit over all servers."""

    def __init__(self, clock: int, lanes: Sequence[Lane]) -> None:
        self.clock, self.lanes = clock, lanes
        self._latch = Latch()
        self._lock = threading.Lock()
        self._left = 0
        self._next: Callable[[], None] = self._staged
        self._is_staging = False
        self.error: SynclineError | None = None

    def start(self) -> None:
        self._is_staging = len(self.lanes) > 1
        self._next = self._staged if self._is_staging else self._answered
        self._ask_all(lambda lane: lane.stage())

    def _ask_all(self, ask: Callable[[Lane], Call]) -> None:
        self._left = len(self.lanes)
        try:
            for lane in self.lanes:
                lane.call = ask(lane)
            for lane in self.lanes:
                assert lane.call is not None
                lane.call.when_done(self._one_done)
        except SynclineError as error:
            self._end(error)

    def _one_done(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            try:
                self._next()
            except SynclineError as error:
                self._end(error)

    def _answers(self) -> list[Message]:
        answers = []
        for lane in self.lanes:
            for early in lane.earlier:
                early.wait(0)
            assert lane.call is not None
            answers.append(lane.call.wait(0))
        return answers

    def _staged(self) -> None:
        self._answers()
        self._next = self._answered
        self._ask_all(lambda lane: lane.commit(self.clock))
        self._is_staging = False

    def _answered(self) -> None:
        answers = self._answers()
        shares = [answer.squared_norm for answer in answers if isinstance(answer, AskClip)]
        if len(shares) == len(answers):
            # In the order of the servers: every worker comes to the same sum.
            norm = sum(shares)
            self._ask_all(lambda lane: lane.clip(self.clock, norm))
            return
        for lane, answer in zip(self.lanes, answers, strict=True):
            if not isinstance(answer, Committed):
                raise ProtocolError(f"a commit was answered with {type(answer).__name__}")
            lane.answer = answer
        self._end(None)

    def _end(self, error: SynclineError | None) -> None:
        self.error = error
        self._latch.open()

    @property
    def is_over(self) -> bool:
        return self._latch.is_open

    def done(self) -> bool:
        """Whether it is over; looks at what has come where nobody else reads it."""
        if not self._latch.is_open:
            for lane in self.lanes:
                if lane.call is not None:
                    lane.call.done()
        return self._latch.is_open

    def wait(self, timeout_seconds: float) -> None:
        until = time.monotonic() + timeout_seconds
        while not self._latch.is_open:
            if not self.go_on(until - time.monotonic()):
                raise WaitTimeout(f"no answer within {timeout_seconds:g} s")
        if self.error is not None:
            raise self.error

    def wait_until_staged(self, timeout_seconds: float) -> None:
        """Where the waiter reads: until every server has acknowledged, and was told that it counts."""
        if not any(lane.call is not None and lane.call.is_read_by_waiter for lane in self.lanes):
            return
        until = time.monotonic() + timeout_seconds
        while self._is_staging and not self._latch.is_open:
            if not self.go_on(until - time.monotonic()):
                raise WaitTimeout(f"no answer within {timeout_seconds:g} s")

    def go_on(self, seconds: float) -> bool:
        """Waits for something to happen, and reads it where the waiter reads; False when nothing did in time."""
        if seconds < 0:
            return False
        for lane in self.lanes:
            call = lane.call
            if call is not None and call.is_read_by_waiter and not call.is_done:
                return call.read(seconds)
        # What other threads read, they bring; or they are about to, between an answer and what follows from it.
        mixed = any(lane.call is not None and lane.call.is_read_by_waiter for lane in self.lanes)
        return self._latch.wait(min(seconds, _MOMENT) if mixed else seconds) or mixed
