"""Replay: when servers change, a worker takes over the newest roster and sends again whatever is open.

A server that is gone, or that answers `Refresh`, makes the script's own thread do this, wherever it waits: a newer
roster arrives soon, or the same server can be reached again. The clocks on each slice decide what a replayed commit
changes: a server answers at once for what it has already.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from syncline import faults
from syncline.core.wire.control import AskRoster, Roster
from syncline.core.wire.message import Message
from syncline.errors import ConnectionLost, FencedError, Refresh, SynclineError, WaitTimeout
from syncline.net.rpc import Stamp
from syncline.worker.exchange.routes import ServerRoutes
from syncline.worker.session import Rosters

T = TypeVar("T")
#: Pause for the coordinator to explain a broken connection, before the server is dialled again.
_MOMENT, _LONGEST_MOMENT = 0.05, 0.5
_ASK_SECONDS = 2.0


class Replay:
    """Keeps an exchange on the newest roster. Belongs to the thread that uses the exchange."""

    def __init__(
        self,
        routes: ServerRoutes,
        rosters: Rosters,
        stamp: Stamp,
        *,
        ask: Callable[[Message, float], Message],
        check: Callable[[], None],
        fenced: Callable[[FencedError], None],
        give_up: Callable[[], None],
        replay_open: Callable[[], None],
    ) -> None:
        """`ask` asks the coordinator once. `check` raises the job's outcome for this worker, if there is one.

        `give_up` stops what is in flight; `replay_open` sends the open commits to the new primaries.
        """
        self._routes, self._rosters, self._stamp = routes, rosters, stamp
        self._ask, self._check, self._fenced = ask, check, fenced
        self._give_up, self._replay_open = give_up, replay_open
        self.roster: Roster = rosters.newest  # the active one
        self._is_broken = False  # open commits must be replayed even if the next roster is the same

    @property
    def generation(self) -> int:
        return self._stamp.generation

    def take_over(self) -> None:
        """Activates the newest roster and replays open commits."""
        roster = self._rosters.newest
        if self._routes.differs(roster):
            self._is_broken = True
        if self._is_broken:
            self._routes.drop(roster)
            self._give_up()
        # Nothing more is sent under the old roster.
        self._stamp.generation = max(roster.generation, self._stamp.generation)
        self._routes.follow(roster)
        self.roster = roster
        if self._is_broken:
            self._replay_open()
            self._is_broken = False
            if faults.armed is not None:
                faults.reach("refresh.done")

    def again(self, action: Callable[[], T], seconds: float) -> T:
        """Runs an action with the servers, again if they change meanwhile."""
        until = time.monotonic() + seconds
        while True:
            generation = self.generation
            try:
                if self.roster is not self._rosters.newest:
                    self.take_over()
                return action()
            except (ConnectionLost, Refresh) as error:
                self.recover(error, generation, until)
            except FencedError as error:
                self._fenced(error)
                raise

    def recover(self, error: SynclineError, generation: int, until: float) -> None:
        """A request of this generation failed: waits for a newer roster, or for the same server to come back, and
        replays all open commits. Raises WaitTimeout after `until`.
        """
        self._is_broken = True
        moment = _MOMENT
        while True:
            self._check()
            self._await_roster(error, generation, min(moment, until - time.monotonic()))
            self._check()
            moment = min(2 * moment, _LONGEST_MOMENT)
            if isinstance(error, Refresh) and max(self._rosters.newest.generation, self.generation) <= generation:
                if time.monotonic() > until:
                    raise WaitTimeout(f"no newer roster has come: {error}")
                continue
            try:
                self.take_over()
                return
            except (ConnectionLost, Refresh) as found:
                error, generation = found, self.generation
            except FencedError as found:
                self._fenced(found)
                raise
            if time.monotonic() > until:
                raise WaitTimeout(f"the servers have not come back: {error}")

    def _await_roster(self, error: SynclineError, generation: int, seconds: float) -> None:
        """Waits a moment for a newer roster, then asks for it."""
        if isinstance(error, Refresh) and self.generation > generation:
            return
        if self._rosters.wait(generation, seconds):
            return
        try:
            answer = self._ask(AskRoster(0), _ASK_SECONDS)
        except (ConnectionLost, WaitTimeout):
            return  # without a coordinator: try the known servers again
        except FencedError as found:
            self._fenced(found)
            raise
        if isinstance(answer, Roster):
            self._rosters.hear(answer)
