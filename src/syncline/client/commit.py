"""One commit on its way: staged on every server, committed on every server, clipped if asked, answered.

With one server the commit rides on the staged bytes. With several, it follows only when all of them have
acknowledged theirs, so that a step counts whole. The steps are driven by the answers, in the threads that
bring them: nobody has to wait for a commit to go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from syncline.core.messages import AskClip, CommitStaged, Committed, GiveClip, Message
from syncline.errors import ProtocolError, SynclineError, WaitTimeout
from syncline.net.rpc import Call


class Lane:
    """One server's part in a commit: how to ask it, and what it answered."""

    def __init__(
        self,
        stage: Callable[[], Call],
        ask: Callable[[Message], Call],
        pull: list[int],
        earlier: Sequence[Call] = (),
    ) -> None:
        self.stage, self.ask, self.pull, self.earlier = stage, ask, pull, earlier
        self.call: Call | None = None
        self.versions: list[int] = []


class CommitFlow:
    """The state machine of one commit over all servers. `ended` is called once, with the error if any."""

    def __init__(self, clock: int, lanes: Sequence[Lane]) -> None:
        self.clock, self.lanes = clock, lanes
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._left = 0
        self._next: Callable[[], None] = self._staged
        self.error: SynclineError | None = None

    def start(self) -> None:
        self._next = self._answered if len(self.lanes) == 1 else self._staged
        self._ask_all([lane.stage for lane in self.lanes])

    def _ask_all(self, asks: Sequence[Callable[[], Call]]) -> None:
        self._left = len(self.lanes)
        try:
            for lane, ask in zip(self.lanes, asks, strict=True):
                lane.call = ask()
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
        self._ask_all([partial(lane.ask, CommitStaged(self.clock, lane.pull)) for lane in self.lanes])

    def _answered(self) -> None:
        answers = self._answers()
        shares = [answer.squared_norm for answer in answers if isinstance(answer, AskClip)]
        if len(shares) == len(answers):
            # In the order of the servers: every worker comes to the same sum.
            norm = sum(shares)
            self._ask_all([partial(lane.ask, GiveClip(self.clock, norm, lane.pull)) for lane in self.lanes])
            return
        for lane, answer in zip(self.lanes, answers, strict=True):
            if not isinstance(answer, Committed):
                raise ProtocolError(f"a commit was answered with {type(answer).__name__}")
            lane.versions = answer.versions
        self._end(None)

    def _end(self, error: SynclineError | None) -> None:
        self.error = error
        self._event.set()

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_seconds: float) -> None:
        if not self._event.wait(timeout_seconds):
            raise WaitTimeout(f"no answer within {timeout_seconds:g} s")
        if self.error is not None:
            raise self.error
