"""Paces at the coordinator: workers that are slowed or held by hand. Kept, and told to every life of their names."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from syncline.core.wire.message import Done
from syncline.core.wire.pace import MOST_DELAY_SECONDS, Pace, Paced, told_paused, told_seconds
from syncline.errors import ConfigError, StoreError
from syncline.net.rpc import Endpoint, Request

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator


class Pacing:
    """All paces of a job. Everything here is under the coordinator's lock."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._told: dict[str, tuple[Endpoint, Pace]] = {}  # over which connection a worker has heard which pace

    @property
    def paces(self) -> dict[str, Paced]:
        return self._c.membership.state.paces

    # -- what is said -------------------------------------------------------------------------------------

    def handle(self, request: Request, message: Pace) -> None:
        self.set(message)
        request.reply(Done())

    def set(self, pace: Pace) -> None:
        """From now on this worker goes so fast; kept before anybody is told."""
        with self._c.lock:
            name, before = pace.worker, self.paces.get(pace.worker)
            self._check(pace)
            if pace.is_paused or pace.delay_seconds:
                since = before.since if before is not None and before.is_paused and pace.is_paused else time.time()
                self.paces[name] = Paced(pace.delay_seconds, pace.is_paused, since)
            else:
                self.paces.pop(name, None)
            try:
                self._c.keep()
            except StoreError:
                self.paces.pop(name, None)
                if before is not None:
                    self.paces[name] = before
                raise
            if before is not None and before.is_paused and not pace.is_paused:
                self._c.advanced[name] = time.monotonic()  # it could not advance until now
            self._c.event(f"{name} {_event(pace)}")
            self.tell()

    def _check(self, pace: Pace) -> None:
        state, name = self._c.membership.state, pace.worker
        seconds = pace.delay_seconds
        if not (math.isfinite(seconds) and 0 <= seconds <= MOST_DELAY_SECONDS):
            most = told_seconds(MOST_DELAY_SECONDS)
            raise ConfigError(f"a delay of {seconds:g} s: it must be from 0 to {most}; to hold a worker, --pause")
        if name in self.paces or state.awaited.get(name) == "worker":
            return
        member = state.members.get(name)
        if member is None or member.role != "worker":
            what = f"{name} is no worker" if member is not None else f"there is no {name!r} in this job"
            workers = ", ".join(self._c.membership.workers()) or "none"
            raise ConfigError(f"{what}; its workers are: {workers}")

    def tell(self) -> None:
        """Whoever does not know its pace hears it: a new life of a name, or one over a new connection."""
        with self._c.lock:
            state = self._c.membership.state
            names = set(self.paces) | set(self._told) if state.formed else set()
            for name in names:
                endpoint, known = self._c.endpoints.get(name), self._told.get(name)
                if endpoint is None:
                    self._told.pop(name, None)
                    continue
                paced = self.paces.get(name)
                pace = Pace(name, paced.delay_seconds, paced.is_paused) if paced is not None else Pace(name)
                if known is None or known[0] is not endpoint or known[1] != pace:
                    endpoint.mention(pace)
                    self._told[name] = (endpoint, pace)
                if paced is None:
                    del self._told[name]

    def left(self, name: str) -> None:
        """It has finished, or was asked to leave: the next one of its name is another."""
        self.paces.pop(name, None)
        self._told.pop(name, None)

    # -- what is asked ------------------------------------------------------------------------------------

    def patience(self, name: str) -> float:
        """How much longer others wait for this worker than for one that goes as fast as it can."""
        pace = self.paces.get(name)
        return 0.0 if pace is None else math.inf if pace.is_paused else pace.delay_seconds

    def state_of(self, name: str) -> str:
        pace = self.paces.get(name)
        return pace.state if pace is not None else ""

    def told(self, name: str) -> str:
        pace = self.paces.get(name)
        return f"it {pace.told(time.time())}" if pace is not None else ""

    def add_to(self, why: str) -> str:
        """Who is held is named, also when nobody waits for it."""
        unnamed = {name: pace for name, pace in self.paces.items() if f"{name} " not in why}
        held = told_paused(unnamed, time.time())
        return f"{why}; {held}" if held else why


def _event(pace: Pace) -> str:
    if pace.is_paused:
        return "is paused by hand before its next step"
    if pace.delay_seconds:
        return f"is slowed by hand: {told_seconds(pace.delay_seconds)} before each step"
    return "goes on at its own pace"
