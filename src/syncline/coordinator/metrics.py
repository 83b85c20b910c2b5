"""Metrics at the coordinator: workers' reports become readings, which the stop rules see at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from syncline.core.metrics import Merging, Metrics, Reading
from syncline.net.rpc import Request

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator


class Readings:
    """All readings of a job. Everything here is under the coordinator's lock."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._merging = Merging(coordinator.membership.state.metrics)
        self._steps: dict[str, int] = {}  # of every worker, by its reports

    @property
    def newest(self) -> dict[str, Reading]:
        return self._c.membership.state.metrics.readings

    @property
    def num_readings(self) -> int:
        return self._c.membership.state.metrics.num_readings

    def values(self) -> dict[str, float]:
        """The newest value of each metric, as far as it is a number: for a manifest, and to be shown."""
        return {name: reading.value for name, reading in self.newest.items() if math.isfinite(reading.value)}

    def handle(self, request: Request, message: Metrics) -> None:
        """A worker's report; its answer is what the rules want by now."""
        name, incarnation = request.peer.name, request.peer.incarnation
        with self._c.lock:
            if self._merging.is_new(name, incarnation, message.number):
                if message.is_whole:
                    values = {n: value for n, (value, _) in message.values.items()}
                    found = [self._merging.whole(values, message.step, message.errors)]
                else:
                    told = {n: v for n, v in message.values.items() if not self._c.validating.is_validated(n)}
                    found = self._merging.take(name, told, message.step, self._taking_part(), message.errors)
                self._steps[name] = message.step
                for fresh in found or [{}]:
                    self._c.stopping.take(fresh, message.step)
                self._c.stopping.reach(self._step())
            steer = self._c.membership.state.steering.steer
        request.reply(steer)

    def take_whole(self, values: Mapping[str, float], step: int, errors: Mapping[str, float] = {}) -> None:
        """Readings that were merged already, by whoever calls this: rules have seen them when it returns."""
        with self._c.lock:
            self._c.stopping.take(self._merging.whole(values, step, errors), step)

    def gone(self) -> None:
        """Somebody has left, or is out: a reading that waited for it may be whole."""
        with self._c.lock:
            self._steps = {name: step for name, step in self._steps.items() if name in self._taking_part()}
            fresh = self._merging.gone(self._taking_part())
            if fresh:
                self._c.stopping.take(fresh, max(reading.step for reading in fresh.values()))
            self._c.stopping.reach(self._step())

    def _step(self) -> int:
        """The job's, by the reports of those who are there; where workers step by themselves, the slowest's."""
        if self._c.config.sync_every > 1:
            return min((self._steps.get(name, 0) for name in self._taking_part()), default=0)
        return max(self._steps.values(), default=0)

    def _taking_part(self) -> list[str]:
        entered = self._c.membership.state.entered
        return [name for name in self._c.membership.workers() if name in entered]
