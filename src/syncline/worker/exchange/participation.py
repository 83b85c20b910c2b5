"""Whether rounds count this worker: its phase, rests, entering and leaving."""

from __future__ import annotations

from collections.abc import Callable

from syncline import faults
from syncline.core.policy import Policy
from syncline.core.rounds import LOOP
from syncline.core.wire.control import Enter, Entered, Leave, Passed
from syncline.core.wire.traffic import AskPlace, GivenPlace, Rest
from syncline.errors import FencedError
from syncline.net.link import Link
from syncline.worker.exchange.replay import Replay
from syncline.worker.exchange.routes import ServerRoutes

#: How long a server may take to say whether a round waits for this worker.
_WHY_SECONDS = 5.0


class Participation:
    """A worker's participation as told to the servers; told again when the servers change."""

    def __init__(
        self,
        routes: ServerRoutes,
        replay: Replay,
        link: Link,
        *,
        policy: Policy,
        is_late: bool,
        wait_seconds: float,
        is_in_loop: Callable[[], bool],
    ) -> None:
        """`is_late`: the worker joined a running job and enters with its first commit. `is_in_loop`: whether the
        script is in a loop over a loader.
        """
        self._routes, self._replay, self._link, self._is_in_loop = routes, replay, link, is_in_loop
        self._policy, self._wait_seconds = policy, wait_seconds
        self._current_phase, self._rested = 0, False
        self._is_active, self._is_away = True, False
        self.is_late, self.is_leaving = is_late, False
        self._enters_again, self._num_entries = False, 0
        self.back_at: int | None = None  # its position from the next commit on
        self.num_void = 0  # void commits to make before the next one
        self.entered_at = 0  # the job's steps before its first commit since it entered

    @property
    def phase(self) -> int:
        """The phase of the next commit."""
        return self._current_phase + self._rested

    @property
    def must_enter(self) -> bool:
        """Whether the coordinator must assign the position of the next commit."""
        return self.is_late or self._enters_again

    @property
    def must_come_back(self) -> bool:
        return self.must_enter or not self._is_active

    def committed(self, phase: int) -> None:
        self._current_phase, self._rested = phase, False
        self._is_active, self._is_away, self.back_at = True, False, None

    def come_back(self) -> None:
        """Enters after a rest, or late: the coordinator assigns the same position on all servers."""
        is_bounded = self._policy.kind == "bounded"
        if self.must_enter:
            if faults.armed is not None:
                faults.reach("enter.asked")
            loop = self.phase // LOOP * LOOP if self._is_in_loop() else -1
            answer = self._link.call(Enter(self._num_entries, loop), self._wait_seconds)
            assert isinstance(answer, Entered)
            # A worker that paused joins the rounds of its loop again, not a later phase.
            self._current_phase, self._rested = max(answer.phase, self.phase // LOOP * LOOP), False
            self.back_at = answer.back_at if is_bounded else None
            self.is_late = self._enters_again = False
            self.entered_at = answer.step
            self.num_void = answer.num_void if self._policy.stands_still else 0
            self._num_entries += 1
            if self._policy.in_rounds:  # the servers count it from now on, before it commits
                self._is_active, self._is_away = True, False
        elif is_bounded:
            answers = self._replay.again(lambda: self._routes.ask_all(AskPlace()), self._wait_seconds)
            self.back_at = max((a.position for a in answers if isinstance(a, GivenPlace)), default=None)

    def pause(self, *, if_active: bool = False, if_awaited: bool = False) -> None:
        """Takes no part in further rounds of this phase. Sent once until the next commit. `if_awaited`: only if a
        round waits for this worker.

        Policies with rounds have no next phase within a loop: its rounds would wait for all paused workers, which may
        wait for this one. The next commit enters again.
        """
        has_paused = (self._rested and self.phase % LOOP > 0) or (if_active and not self._is_active)
        if has_paused or (if_awaited and not self._routes.is_awaited(_WHY_SECONDS)):
            return
        if self.phase % LOOP < LOOP - 1:  # the last one is the loop's end
            self._rest_from(self.phase)
            self._enters_again = self._policy.stands_still

    def rest(self) -> None:
        """Takes no part in further rounds of this loop."""
        self._enters_again = self._is_away and self._policy.in_rounds
        self._rest_from(self.phase // LOOP * LOOP + LOOP - 1)

    def _rest_from(self, phase: int) -> None:
        self._current_phase, self._rested, self._is_active = phase, True, False
        self._tell_again()

    def enter_barrier(self) -> int:
        """Takes no part in any round until the next commit. Returns the current phase."""
        self._is_active, self._is_away = False, True
        self._tell_again()
        return self.phase

    def pass_barrier(self, passed: Passed) -> None:
        """Starts the phase after the barrier, common to all workers. A worker that arrived late stays out until
        its next commit.
        """
        self._current_phase, self._rested = passed.phase, False
        self._is_active, self._is_away = not passed.is_away, passed.is_away
        self._enters_again = passed.is_away and self._policy.in_rounds

    def _tell_again(self) -> None:
        self._replay.again(self.tell, self._wait_seconds)

    def tell(self) -> None:
        """Tells every server that this worker rests or is at a barrier. A late worker that has not entered is not
        counted anyway.
        """
        if self._is_active or self.is_late or self.is_leaving:
            return
        if self._rested:
            self._routes.ask_all(Rest(self._current_phase, False))
        if self._is_away:
            self._routes.ask_all(Rest(self._current_phase, True))

    def leave(self) -> None:
        """No round waits for this worker any more."""
        if self.is_late or self.is_leaving:
            return
        self.is_leaving = True
        try:
            self._replay.again(lambda: self._routes.ask_all(Leave()), self._wait_seconds)
        except FencedError:
            return  # the servers know already
