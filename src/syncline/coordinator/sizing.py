"""`-w auto:1:8`: a coordinator that adds and retires workers by what they add."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.core.sizing import Sizing

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator


class WorkerSizing:
    """Looks at the workers' own numbers; everything here is under the coordinator's lock."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._sizing: Sizing | None = None

    def look(self, now: float) -> None:
        config, state = self._c.config, self._c.membership.state
        if not config.auto_workers:
            return
        if self._sizing is None:
            self._sizing = Sizing(max(1, config.least_workers), config.most_workers)
        at_work = [name for name in state.entered if name in self._c.beats and self._c.beats[name][0].step]
        found = self._sizing.look(
            now, state.wanted["worker"], len(at_work), self._c.handing.num_samples, self._waiting(at_work)
        )
        if found is not None:
            self._c.event(found.reason)
            self._c.scaling.scale({"worker": found.count})

    def _waiting(self, names: list[str]) -> float:
        """The part of their steps in which these workers waited for servers, or for each other."""
        times = [self._c.reports[name].times for name in names if name in self._c.reports]
        waited = sum(one.wait for one in times)
        total = sum(one.compute + one.stage + one.wait + one.pull for one in times)
        return waited / total if total else 0.0
