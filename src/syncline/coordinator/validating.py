"""Validations at the coordinator: called, begun when all are there, shared out, and read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from syncline.core.slice_state import Identity
from syncline.core.validation import Validating, Validation
from syncline.core.wire.message import Done, Message
from syncline.core.wire.validation import (
    MEAN,
    WEIGHTS,
    AskReading,
    AskValidationShard,
    Attend,
    Begin,
    Begun,
    Called,
    Come,
    GivenReading,
    LocalCandidate,
)
from syncline.errors import ConfigError
from syncline.net.rpc import Endpoint, Request
from syncline.stats import Wait

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator


class Validations:
    """All of a job. Everything here is under the coordinator's lock; what is decided is the core's."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._told: dict[str, tuple[Endpoint, int]] = {}  # which call a worker has heard, over which connection
        self._there: dict[str, tuple[Request, float]] = {}  # have come, and since when they wait for the others
        self._beginning: dict[str, tuple[Request, int]] = {}  # have the parameters, and wait until all have
        self._waiting: dict[str, tuple[Request, int]] = {}  # for readings
        self._readings: dict[int, dict[str, float]] = {}  # of those that are over, by their turns
        self._cut: tuple[int, bool] = (0, False)  # for which turn a save was asked for, and whether its cut is made

    @property
    def _core(self) -> Validating:
        return Validating(self._c.membership.state.validations)

    # -- calling ------------------------------------------------------------------------------------------

    def come(self, request: Request, message: Come) -> None:
        with self._c.lock:
            before = self._core.called()
            try:
                called = self._core.come(message.step, message.due, message.epoch)
            except ConfigError as error:
                request.refuse(error)
                return
            if called.turn != before.turn:
                self._c.try_keep()
                self.tell()
        request.reply(called)

    def tell(self) -> None:
        """Whoever does not know of a call hears it: also a new life of a name, or one over a new connection."""
        with self._c.lock:
            called = self._core.called()
            if not called.turn or not self._c.membership.formed:
                return
            for name in self._c.membership.workers():
                endpoint = self._c.endpoints.get(name)
                if endpoint is not None and self._told.get(name) != (endpoint, called.turn):
                    endpoint.mention(called)
                    self._told[name] = (endpoint, called.turn)

    # -- coming together ----------------------------------------------------------------------------------

    def attend(self, request: Request, message: Attend) -> None:
        with self._c.lock:
            state, name = self._core.state, request.peer.name
            if message.turn != state.called:
                request.reply(Done())  # it is over, or began without this one; who asks again may be in it
                return
            self._there[name] = (request, time.monotonic())
        self.gather()

    def gather(self) -> None:
        """When all are there, and what they have in common is saved, it begins."""
        with self._c.lock:
            state, missing = self._core.state, self._missing()
            if not state.called or not self._there or missing or not self._is_saved(state.called):
                return
            members = self._c.membership.state.members
            lives = [(name, members[name].incarnation) for name in self._there if name in members]
            now = self._core.begin(state.called, state.step, lives, [WEIGHTS, *self._c.bests.candidates()])
            now.awaited = sorted(now.inside) if self._c.bests.wants_own else []
            now.folder = self._c.bests.mean_folder() if MEAN in now.candidates else ""
            self._readings = {}
            self._c.try_keep()
            there, self._there = self._there, {}
        for request, _ in there.values():
            request.reply(Done())

    def _missing(self) -> list[str]:
        return [name for name in self._c.meeting.workers() if name not in self._there]

    def _is_saved(self, turn: int) -> bool:
        """All stand still: whether the cut of the save that goes with this validation is made, or not wanted."""
        if self._cut[0] != turn:
            self._cut = (turn, not self._c.bests.wants_save)
            if self._c.bests.wants_save:
                self._c.bests.save(turn, self._released(turn))
        return self._cut[1]

    def _released(self, turn: int) -> Callable[[], None]:
        """To be called when the cut is made, or not to be had."""

        def release() -> None:
            with self._c.lock:
                if self._cut[0] == turn:
                    self._cut = (turn, True)
            self.gather()

        return release

    def waits(self, now: float) -> list[Wait]:
        """Under the lock: who waits for whom."""
        if not self._there or not self._missing():
            return []
        since = min(at for _, at in self._there.values())
        return [Wait("", self._core.state.called, self._missing(), now - since, "the validation")]

    # -- inside -------------------------------------------------------------------------------------------

    def begin(self, request: Request, message: Begin) -> None:
        owner = _owner(request)
        with self._c.lock:
            if self._core.of(message.turn, owner) is None:
                request.reply(Begun(message.step))
                return
            self._core.pulled(message.turn, owner, message.step)
            self._beginning[owner[0]] = (request, message.turn)
        self._go_on()

    def ask(self, request: Request, message: AskValidationShard) -> None:
        """What is said with it counts when it is kept, and not before; nor is a validation shard given that is
        not."""
        with self._c.lock:
            core = self._core
            try:
                given = core.ask(_owner(request), message)
            except ConfigError as error:
                request.refuse(error)
                return
            if given.validation_shard or message.validation_shard:
                self._c.try_keep()
        request.reply(given)
        self._go_on()

    def own(self, request: Request, message: LocalCandidate) -> None:
        with self._c.lock:
            self._core.said_own(message.turn, _owner(request), message.set, message.values)
        request.reply(Done())
        self._go_on()

    def ask_reading(self, request: Request, message: AskReading) -> None:
        owner = _owner(request)
        with self._c.lock:
            now = self._core.of(message.turn, owner)
            if now is None or not message.waits:
                if now is not None:
                    now.out(owner)
                    self._c.try_keep()
                request.reply(GivenReading(True, self._readings.get(message.turn, {})))
            else:
                self._waiting[owner[0]] = (request, message.turn)
        self._go_on()

    def gone(self, owner: Identity) -> None:
        """This life of a worker is over."""
        with self._c.lock:
            self._told.pop(owner[0], None)
            self._beginning.pop(owner[0], None)
            self._waiting.pop(owner[0], None)
            self._there.pop(owner[0], None)
            now = self._core.state.now
            if now is None or not now.out(owner):
                return
        self._go_on()

    def _go_on(self) -> None:
        """Whatever has changed: who is to hear of it."""
        with self._c.lock:
            now = self._core.state.now
            begun = self._begun(now)
            over = self._core.end()
            if over is not None:
                self._end(over)
            elif (lost := self._core.give_up()) is not None:
                self._give_up(lost)
            answers: list[tuple[Request, Message]] = []
            for name, (request, turn) in list(self._waiting.items()):
                still = now if over is None and now is not None and now.turn == turn else None
                if still is None or still.has_more:
                    del self._waiting[name]
                    answers.append((request, GivenReading(still is None, self._readings.get(turn, {}))))
        for request, answer in [*begun, *answers]:
            request.reply(answer)

    def _begun(self, now: Validation | None) -> list[tuple[Request, Message]]:
        """All have the parameters; or what they wait for is not to be."""
        found: list[tuple[Request, Message]] = []
        for name, (request, turn) in list(self._beginning.items()):
            if now is None or now.turn != turn:
                found.append((request, Begun(0)))
            elif not now.absent:
                found.append((request, Begun(now.step, now.sets, now.candidates, now.folder)))
            else:
                continue
            del self._beginning[name]
        return found

    def _end(self, over: Validation) -> None:
        """Rules have seen the readings before anybody goes on."""
        values = over.values()
        self._readings = {over.turn: values}
        self._c.try_keep()
        self._c.event(f"validation at step {over.step}: {over.told}")
        self._c.readings.take_whole(values, over.step, over.errors())
        self._c.bests.validated(over)

    def _give_up(self, lost: Validation) -> None:
        self._readings = {}
        self._c.event(
            f"the validation at step {lost.step} was given up: no worker left has its parameters; it is repeated"
        )
        self._c.try_keep()
        self.tell()

    def is_validated(self, metric: str) -> bool:
        """Under the lock: whether this metric comes from validations, and so from nobody's report."""
        return metric in self._core.state.metrics

    def called(self) -> Called:
        return self._core.called()


def _owner(request: Request) -> Identity:
    return (request.peer.name, request.peer.incarnation)
