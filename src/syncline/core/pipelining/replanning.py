"""Re-planning: when a pipeline that runs is cut elsewhere. Pure: `now` is an argument, every decision has a reason.

Layers are not measured again: a process that computes its stages in more or less time than predicted has another
speed. If by what was measured over a minute another cut would gain 15 %, it is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from syncline.core.pipelining.costs import ModelCosts
from syncline.core.pipelining.planning import Plan, PlanRequest, plan_stages, predict
from syncline.core.units import counted

#: A plan is compared with others after so much time of measurements, and replaced if another gains so much.
MEASURE_SECONDS, WORTH = 60.0, 0.15
#: Micro-batches without which a measurement says nothing; it goes on until there are so many.
LEAST_MICRO_BATCHES = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StageMeasured:
    """What a process has computed since the model was cut as it is, as counters."""

    worker: str
    num_micro_batches: float
    busy_seconds: float  #: in forwards and backwards


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplanDecision:
    """The plan that is followed from now on."""

    plan: Plan
    reason: str


class Replanner:
    """Observes measurements periodically, and says when to cut the model elsewhere."""

    def __init__(self, costs: ModelCosts, request: PlanRequest, plan: Plan) -> None:
        """`request` is what the plan was made of; all its devices belong to one pipeline."""
        self._costs, self._request, self.plan = costs, request, plan
        self._began: tuple[float, dict[str, StageMeasured]] | None = None

    def look(self, now: float, measured: Sequence[StageMeasured]) -> ReplanDecision | None:
        """Evaluates one observation."""
        counters = {each.worker: each for each in measured}
        if self._began is None:
            self._began = (now, counters)
            return None
        since, before = self._began
        if now - since < MEASURE_SECONDS or not _says_enough(before, counters):
            return None
        self._began = (now, counters)
        return self._compare(before, counters, now - since)

    def _compare(
        self, before: Mapping[str, StageMeasured], after: Mapping[str, StageMeasured], seconds: float
    ) -> ReplanDecision | None:
        """A plan by the speeds that were measured, if it gains enough."""
        relative = {}
        for worker, predicted in self._predicted_seconds().items():
            number = after[worker].num_micro_batches - before[worker].num_micro_batches
            busy = after[worker].busy_seconds - before[worker].busy_seconds
            relative[worker] = predicted * number / busy
        # Each process keeps its place: their order cannot change while they run.
        devices = tuple(
            dataclasses.replace(device, speed=device.speed * relative[device.name])
            for device in self._request.devices
        )
        now = dataclasses.replace(self._request, devices=devices, keeps_order=True)
        current = predict(self._costs, self.plan, now)
        found = plan_stages(self._costs, now)
        gain = found.samples_per_second / current.samples_per_second - 1.0
        if gain < WORTH:
            return None
        worst = min(relative, key=lambda name: relative[name])
        moved = counted(_num_moved(self.plan, found), "layer")
        reason = (
            f"over {seconds:.0f} s {worst} computed at {relative[worst]:.0%} of the speed that was predicted; "
            f"another cut would gain {gain:.0%}: {moved} change hands; {found.reason}"
        )
        self._request, self.plan, self._began = now, found, None
        return ReplanDecision(plan=found, reason=reason)

    def _predicted_seconds(self) -> dict[str, float]:
        """What each process should compute for one micro-batch, in all its stages."""
        found: dict[str, float] = {}
        for stage in self.plan.stages:
            (name,) = stage.devices
            found[name] = found.get(name, 0.0) + stage.forward_seconds + stage.backward_seconds
        return found


def _says_enough(before: Mapping[str, StageMeasured], after: Mapping[str, StageMeasured]) -> bool:
    return all(
        after[name].num_micro_batches - each.num_micro_batches >= LEAST_MICRO_BATCHES
        and after[name].busy_seconds > each.busy_seconds
        for name, each in before.items()
    )


def _num_moved(old: Plan, new: Plan) -> int:
    """Layers that another process computes."""
    before = {(layer, stage.devices) for stage in old.stages for layer in range(stage.first, stage.last)}
    after = {(layer, stage.devices) for stage in new.stages for layer in range(stage.first, stage.last)}
    return len(after - before)
