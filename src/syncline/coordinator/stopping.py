"""Stop rules at the coordinator: what they decide is kept, and then told to every life of every worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from syncline.config import JobConfig
from syncline.core.metrics import Reading, Steer, told
from syncline.core.stopping import Rules, Steering, Stopping, from_checkpoint, is_reported_late, rules_of
from syncline.errors import StoreError
from syncline.net.rpc import Endpoint

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator

#: Between two saves of what the rules count; what they decide is kept at once.
KEEP_SECONDS = 1.0


class StopRules:
    """All rules of a job. Everything here is under the coordinator's lock; what is decided is the core's."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._told: dict[str, tuple[Endpoint, int]] = {}  # which number a worker has heard, over which connection
        self._parsed: tuple[JobConfig, Rules] | None = None
        self._since: float | None = None  # when the time of training was last counted, by a clock of this process
        self._timer: threading.Timer | None = None
        self._kept_at, self._is_kept = 0.0, True
        self.num_epochs = 0  # finished, of the loader that is furthest

    @property
    def state(self) -> Steering:
        return self._c.membership.state.steering

    @property
    def rules(self) -> Rules:
        """Of the settings that count: the chief's script may have said some when the job began."""
        config = self._c.config
        if self._parsed is None or self._parsed[0] is not config:
            self._parsed = (config, rules_of(config))
        return self._parsed[1]

    @property
    def has_stopped(self) -> bool:
        return self.state.stop is not None

    # -- the time of training -----------------------------------------------------------------------------

    def begin(self) -> None:
        """The job is whole, or goes on under this coordinator: its time runs."""
        with self._c.lock:
            if self.state.counted_at:  # it went on without a coordinator, as long as it may
                gap = time.time() - self.state.counted_at
                self.state.seconds += min(max(0.0, gap), self._c.config.coordinator_seconds)
            self._since = time.monotonic()
            Stopping(self.rules, self.state).begin()
            self.tell()
            left = self.rules.max_seconds - self.seconds()
            if self.rules.max_seconds and not self.has_stopped and self._c.membership.outcome is None:
                self._timer = threading.Timer(max(0.0, left), self._pass_time)
                self._timer.daemon = True
                self._timer.start()

    def seconds(self) -> float:
        """How long the job has trained, with what was trained before it was taken up."""
        return self.state.seconds + (time.monotonic() - self._since if self._since is not None else 0.0)

    def count(self) -> None:
        """Under the lock, before the state is kept: the time so far is in it."""
        if self._since is not None:
            self.state.seconds, self._since = self.seconds(), time.monotonic()
            self.state.counted_at = time.time()

    def _pass_time(self) -> None:
        self._decide(lambda stopping: stopping.pass_time(self.seconds(), self._c.reporting.step()))

    # -- deciding -----------------------------------------------------------------------------------------

    def take(self, fresh: Mapping[str, Reading], step: int) -> None:
        """New readings; and the step of whoever brings them."""
        newest = {**self._c.readings.newest, **fresh}
        self._decide(lambda stopping: stopping.take(fresh, newest, step))
        self._is_kept = self._is_kept and not fresh
        self.look(time.monotonic())

    def reach(self, step: int) -> None:
        """All workers have come to this step; in rounds that is known by one of them."""
        self._decide(lambda stopping: stopping.reach(step))

    def _decide(self, ask: Callable[[Stopping], list[str]]) -> None:
        """What is decided is kept before anybody hears of it; what cannot be kept is decided again later."""
        with self._c.lock:
            before = msgspec.msgpack.encode(self.state)
            number = self.state.number
            events = ask(Stopping(self.rules, self.state))
            if self.state.number == number:
                return
            try:
                self._c.keep()
            except StoreError as error:
                self._c.membership.state.steering = msgspec.msgpack.decode(before, type=Steering)
                self._c.say_trouble(error)
                return
            self._kept_at, self._is_kept = time.monotonic(), True
            for event in events:
                self._c.event(event)
            self.tell()
        if self.has_stopped:
            self._c.handing.answer()  # whoever waits for more to read

    def look(self, now: float) -> None:
        """Now and then: what was counted is kept; a metric that nobody reports is named, once."""
        with self._c.lock:
            if not self._is_kept and now - self._kept_at > KEEP_SECONDS and self._c.try_keep():
                self._kept_at, self._is_kept = now, True
            if self.state.untold and is_reported_late(self._c.readings.num_readings, self.num_epochs):
                self.state.untold = False
                for sentence in self._unreported():
                    self._c.event(sentence)

    def _unreported(self) -> list[str]:
        return Stopping(self.rules, self.state).unreported(self._c.readings.newest)

    # -- telling ------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Whoever does not know what the rules want hears it: a new life of a name, or one over a new connection."""
        with self._c.lock:
            steer = self.state.steer
            if steer == Steer() or not self._c.membership.formed:
                return
            for name in self._c.membership.workers():
                endpoint = self._c.endpoints.get(name)
                if endpoint is not None and self._told.get(name) != (endpoint, steer.number):
                    endpoint.mention(steer)
                    self._told[name] = (endpoint, steer.number)

    def end(self) -> None:
        """Under the lock: the job is over. What has stopped it, what its metrics were, what nobody reported."""
        self.close()
        if self.state.stop is not None:
            self._c.last_word(f"stopped by {self.state.stop}")
        if self._c.readings.values():
            self._c.last_word(f"last readings: {told(self._c.readings.values())}")
        unmet = Stopping(self.rules, self.state).unmet(self._c.readings.newest)
        for sentence in [*self._unreported(), *unmet] if self._c.membership.formed else ():
            self._c.event(sentence)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # -- checkpoints --------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Under the lock: what the rules remember, for a manifest's `steering`."""
        found: dict[str, Any] = msgspec.to_builtins(self.state)
        return found

    def take_up(self, steering: Mapping[str, Any], seconds: float) -> None:
        """Under the lock, before the job forms: goes on with what a manifest remembers."""
        self._c.membership.state.steering = from_checkpoint(steering, seconds)
