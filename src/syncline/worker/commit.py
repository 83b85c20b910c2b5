"""One commit on its way: staged on every server, committed on every server, clipped if asked, answered.

With one server the commit rides on the staged bytes; in a ring too, where votes decide what counts. With several
servers it follows only when all of them have acknowledged theirs, so that a step counts whole. With spare workers the
one that decides who is in a round is told first, and the others with its word. The steps are driven by the answers,
in the threads that bring them; where the waiter reads, it drives them until everything is staged and told to count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from syncline import faults
from syncline.core.rounds import RoundMembership
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import AskClip, Committed
from syncline.errors import ConnectionLost, FencedError, ProtocolError, Refresh, SynclineError, WaitTimeout
from syncline.net.rpc import Call, Latch

_MOMENT = 0.002
#: What the next roster mends: the commit is made again.
MENDED = (ConnectionLost, Refresh)


class Lane(Protocol):
    """One server's part in a commit: how to ask it, and what it answered."""

    call: Call | None
    earlier: Sequence[Call]

    def stage(self) -> Call:
        """Sends what is staged; with one server, or in a ring, it is committed by this."""

    def commit(self, clock: int, roll: RoundMembership | None = None) -> Call:
        """What is staged counts."""

    def clip(self, clock: int, squared_norm: float) -> Call:
        """The norm over all servers."""

    answer: Committed | None


_NOBODY: list[CommitFlow] = []


class CommitFlow:
    """The state machine of one commit over all servers.

    With a window there are several: what is told to count is told in the order of the clocks (`before`), whichever
    is acknowledged first. `squared_norm`: the one it was clipped by, when it is made again. `decider`: the lane of
    the server that decides, with spare workers. `at_once`: what is staged is committed by that.
    """

    def __init__(
        self,
        clock: int,
        lanes: Sequence[Lane],
        before: CommitFlow | None = None,
        squared_norm: float | None = None,
        decider: Lane | None = None,
        at_once: bool = False,
    ) -> None:
        self.clock, self.lanes, self.squared_norm, self._decider = clock, lanes, squared_norm, decider
        self._before, self._is_told = before, False
        self._behind: list[CommitFlow] = _NOBODY
        self._latch = Latch()
        self._lock = threading.Lock()
        self._left = 0
        self._next: Callable[[], None] = self._staged
        self._at_once, self._is_staging, self._is_deciding = at_once or len(lanes) == 1, False, False
        self._is_given_up = False
        self._following = 0
        self.error: SynclineError | None = None

    def start(self) -> None:
        self._is_staging = not self._at_once
        self._next = self._staged if self._is_staging else self._answered
        self._ask_all(lambda lane: lane.stage(), self.lanes)

    def _ask_all(self, ask: Callable[[Lane], Call], lanes: Sequence[Lane]) -> None:
        self._left = len(lanes)
        try:
            for lane in lanes:
                lane.call = ask(lane)
            for lane in lanes:
                assert lane.call is not None
                lane.call.when_done(self._one_done)
        except SynclineError as error:
            self.end(error)

    def _follow(self, ask: Callable[[Lane], Call], lanes: Sequence[Lane]) -> None:
        """What follows from the answers, in whichever thread brought the last of them; unless it was given up."""
        with self._lock:
            if self._is_given_up:
                return
            self._following += 1
        try:
            self._ask_all(ask, lanes)
        finally:
            with self._lock:
                self._following -= 1

    def _one_done(self) -> None:
        if len(self.lanes) > 1:
            with self._lock:
                self._left -= 1
                last = self._left == 0
            if not last:
                self._see_what_broke()
                return
        try:
            self._next()
        except SynclineError as error:
            self.end(error)

    def _see_what_broke(self) -> None:
        """A server that is gone, or knows of a change: the others may not answer before that is seen to."""
        error = self.refusal()
        if isinstance(error, (*MENDED, FencedError)):
            self.end(error)  # anything else is told when all have answered, or when it takes long

    def refusal(self) -> SynclineError | None:
        """What a server has said instead of an answer; what can be mended comes first."""
        found: SynclineError | None = None
        for lane in self.lanes:
            if lane.call is not None and lane.call.is_done and lane.call.answer is None:
                try:
                    lane.call.wait(0)
                except MENDED as error:
                    return error
                except SynclineError as error:
                    found = found or error
        return found

    def give_up(self) -> None:
        """Returns when nothing more is said for this commit: it is made again."""
        with self._lock:
            self._is_given_up = True
        while self._following:
            time.sleep(_MOMENT)

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
        if faults.armed is not None:
            faults.reach("commit.staged")
        before, self._before = self._before, None
        if before is None or before._let_pass(self):
            self._tell()

    def _let_pass(self, other: CommitFlow) -> bool:
        """Whether the one behind may be told to count; if not, it is when this one has been."""
        with self._lock:
            if self._latch.is_open and self.error is not None:
                raise self.error
            if not self._is_told and not self._latch.is_open:
                self._behind = [*self._behind, other]
                return False
        return True

    def _tell(self) -> None:
        """What is staged counts, on every server."""
        if self._decider is not None:
            self._next, self._is_deciding = self._decided, True
            self._is_staging = False
            self._follow(lambda lane: lane.commit(self.clock), [self._decider])
            return
        self._next = self._answered
        self._follow(lambda lane: lane.commit(self.clock), self.lanes)
        if faults.armed is not None:
            faults.reach("commit.told")
        self._is_staging = False
        with self._lock:
            self._is_told = True
            behind, self._behind = self._behind, _NOBODY
        for other in behind:
            other._tell()

    def _decided(self) -> None:
        """The round is closed, with this commit or without it: the others are told so."""
        decider = self._decider
        assert decider is not None and decider.call is not None
        answer = decider.call.wait(0)
        if not isinstance(answer, Committed | AskClip):
            raise ProtocolError(f"a commit was answered with {type(answer).__name__}")
        if faults.armed is not None:
            faults.reach("commit.decided")
        self._next, roll = self._answered, answer.roll
        self._follow(lambda lane: lane.commit(self.clock, roll), [lane for lane in self.lanes if lane is not decider])
        if faults.armed is not None:
            faults.reach("commit.told")
        self._is_deciding = False

    def _answered(self) -> None:
        answers = self._answers()
        shares = [answer.squared_norm for answer in answers if isinstance(answer, AskClip)]
        if shares:
            self._clip(shares)
            return
        for lane, answer in zip(self.lanes, answers, strict=True):
            if not isinstance(answer, Committed):
                raise ProtocolError(f"a commit was answered with {type(answer).__name__}")
            lane.answer = answer
        self.end(None)

    def _clip(self, shares: Sequence[float]) -> None:
        if len(shares) == len(self.lanes):
            # In the order of the servers: every worker comes to the same sum.
            self.squared_norm = sum(shares)
        elif self.squared_norm is None:
            # It was lost with another server; some other worker may know it, and bring it there meanwhile. A Refresh
            # would wait for the next roster: this is asked again in a moment.
            raise ConnectionLost(f"step {self.clock} is clipped on some servers, and its norm is not known here")
        norm = self.squared_norm
        asking = [lane for lane in self.lanes if lane.call is not None and isinstance(lane.call.answer, AskClip)]
        self._follow(lambda lane: lane.clip(self.clock, norm), asking)

    def end(self, error: SynclineError | None) -> None:
        """It is over, well or by this error; whatever comes after that changes nothing."""
        with self._lock:
            if self._latch.is_open:
                return
            self.error = error
            self._latch.open()
            behind, self._behind = self._behind, _NOBODY
        if error is not None:
            for other in behind:  # would be refused for want of this one
                other.end(error)

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

    def arrives(self, seconds: float) -> bool:
        """Waits; whether it was over in time, well or not."""
        if self.is_over:
            return True
        until = time.monotonic() + seconds
        while not self._latch.is_open:
            if not self.go_on(until - time.monotonic()):
                return self._latch.is_open
        return True

    def wait_until_staged(self, timeout_seconds: float) -> None:
        """Where the waiter reads: until every server has acknowledged, and was told that it counts, or the one that
        decides was."""
        self._go_on_while(lambda: self._is_staging, timeout_seconds)

    @property
    def waits_for_decision(self) -> bool:
        """Where the waiter reads: whether the others are to be told by it when the round is closed."""
        return self._is_deciding and not self._latch.is_open and self._is_read_by_waiter

    def wait_until_decided(self, timeout_seconds: float) -> None:
        """Until the others were told, too, that it counts."""
        self._go_on_while(lambda: self._is_deciding, timeout_seconds)

    @property
    def _is_read_by_waiter(self) -> bool:
        return any(lane.call is not None and lane.call.is_read_by_waiter for lane in self.lanes)

    def _go_on_while(self, lasts: Callable[[], bool], timeout_seconds: float) -> None:
        if not self._is_read_by_waiter:
            return
        until = time.monotonic() + timeout_seconds
        while lasts() and not self._latch.is_open:
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
        mixed = self._is_read_by_waiter
        return self._latch.wait(min(seconds, _MOMENT) if mixed else seconds) or mixed
