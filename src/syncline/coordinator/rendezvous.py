"""Barriers at the coordinator: everyone who takes part comes, then all go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from syncline.core.membership import Barriers
from syncline.core.wire.control import Barrier, Passed
from syncline.errors import StoreError
from syncline.net.rpc import Request
from syncline.stats import Wait

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator


class Meeting:
    """Workers that wait for each other."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        state = coordinator.membership.state
        self._barriers = Barriers(state.phase, state.passed)
        self._there: dict[tuple[str, int], list[tuple[Request, float]]] = {}

    def arrive(self, request: Request, message: Barrier) -> None:
        with self._c.lock:
            if not self._barriers.arrive(message.name, message.turn, request.peer.name, message.phase):
                begun, turn = self._c.membership.state.phase, self._barriers.passed[message.name]
                request.reply(self._barriers.behind_passed(message.phase, begun, turn))
                return
            waiting = self._there.setdefault((message.name, message.turn), [])
            waiting[:] = [w for w in waiting if w[0].peer.name != request.peer.name]
            waiting.append((request, time.monotonic()))
        self.release()

    def workers(self) -> list[str]:
        """For whom barriers wait: those who take part, and those who are out and not settled yet."""
        state, finishing = self._c.membership.state, self._c.membership.finishing
        names = [name for name in (*state.entered, *state.fencing) if name not in finishing]
        return names or [name for name in self._c.membership.workers() if name not in finishing]

    def release(self) -> None:
        """Whoever is at a barrier that is whole goes on, once that is kept."""
        state = self._c.membership.state
        self._c.validating.gather()
        with self._c.lock:
            whole = self._barriers.ready(self.workers())
            if not whole:
                return
            before = (state.phase, dict(state.passed))
            answers = self._barriers.pass_all(whole)
            state.phase = answers[-1]
            try:
                self._c.keep()
            except StoreError as error:
                state.phase = before[0]
                self._barriers.take_back(before[1])
                self._c.say_trouble(error)
                return
            passed = [(self._there.pop(key, []), Passed(phase)) for key, phase in zip(whole, answers, strict=True)]
            self._barriers.forget(whole)
        for waiting, answer in passed:
            for request, _ in waiting:
                request.reply(answer)

    def waits(self, now: float) -> list[Wait]:
        """Under the lock."""
        found = []
        for (name, turn), waiting in self._there.items():
            missing = self._barriers.missing(name, turn, self.workers())
            since = min(at for _, at in waiting)
            found.append(Wait("", turn, missing, now - since, f"the barrier {name!r}"))
        return found
