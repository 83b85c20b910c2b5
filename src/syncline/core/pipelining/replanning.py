"""Re-planning: when a job that runs gets another plan. Pure: `now` is an argument, every decision has a reason.

A plan is made again when a worker has died or joined; and when, by what was measured over a minute, another plan
would gain 15 %. Layers are not measured again: a worker that computes its stage in more or less time than predicted
has another speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from syncline.core.pipelining.costs import Device, ModelCosts
from syncline.core.pipelining.planning import Plan, PlanRequest, plan_stages, predict
from syncline.core.units import counted, listed
from syncline.errors import ConfigError

#: A plan is compared with others after so much time of measurements, and replaced if another gains so much.
MEASURE_SECONDS, WORTH = 60.0, 0.15
#: Micro-batches without which a measurement says nothing.
LEAST_MICRO_BATCHES = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StageMeasured:
    """What a worker has computed since it began, as counters."""

    worker: str
    num_micro_batches: int
    busy_seconds: float  #: in forwards and backwards


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Layers that another worker holds from now on; it takes their parameters from the servers."""

    layer: str
    worker: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplanDecision:
    """What is done: with a plan, the job changes to it; without one it cannot go on before a worker joins."""

    plan: Plan | None
    reason: str
    moves: tuple[Move, ...] = ()


class Replanner:
    """Observes members and measurements periodically, and says when to change the plan."""

    def __init__(self, costs: ModelCosts, request: PlanRequest, plan: Plan) -> None:
        """`request` is what the plan was made of."""
        self._costs, self._request, self.plan = costs, request, plan
        self._began: tuple[float, dict[str, StageMeasured]] | None = None
        self._last: dict[str, StageMeasured] = {}  # the newest counters
        self._is_waiting = False  # for workers: no plan is possible with those that are there

    def look(
        self, now: float, devices: Sequence[Device], measured: Sequence[StageMeasured] = ()
    ) -> ReplanDecision | None:
        """Evaluates one observation. `devices`: the workers that are there now."""
        if {device.name for device in devices} != {device.name for device in self._request.devices}:
            return self._follow_members(devices)
        if self._is_waiting:
            return None
        counters = {each.worker: each for each in measured}
        restarted, self._last = self._has_restarted(counters), counters
        if self._began is None or restarted:
            self._began = (now, counters)
            return None
        since, before = self._began
        if now - since < MEASURE_SECONDS:
            return None
        self._began = (now, counters)
        return self._compare(before, counters, now - since)

    def _has_restarted(self, counters: Mapping[str, StageMeasured]) -> bool:
        return self._last.keys() != counters.keys() or any(
            counters[name].num_micro_batches < each.num_micro_batches for name, each in self._last.items()
        )

    def _follow_members(self, devices: Sequence[Device]) -> ReplanDecision:
        before, there = ({device.name for device in each} for each in (self._request.devices, devices))
        said = []
        if gone := sorted(before - there):
            said.append(f"{listed(gone)} {'is' if len(gone) == 1 else 'are'} gone")
        if joined := sorted(there - before):
            said.append(f"{listed(joined)} joined")
        speeds = {device.name: device.speed for device in self._request.devices}
        known = tuple(
            dataclasses.replace(device, speed=speeds.get(device.name, device.speed))
            for device in sorted(devices, key=lambda device: _number_of(device.name))
        )
        self._request = dataclasses.replace(self._request, devices=known)
        self._began = None
        try:
            found, less = self._plan_with_fewer()
        except ConfigError as error:
            self._is_waiting = True
            return ReplanDecision(plan=None, reason=f"{'; '.join(said)}: no plan is possible: {error}")
        self._is_waiting = False
        return self._change(found, "; ".join([*said, less] if less else said))

    def _plan_with_fewer(self) -> tuple[Plan, str]:
        """A plan with the stages that were asked for; else with as many as these workers can be divided by."""
        asked = self._request
        if not asked.devices:
            raise ConfigError("there is no worker; one must join")
        if asked.stages is None or len(asked.devices) % asked.stages == 0:
            return plan_stages(self._costs, asked), ""
        workers = counted(len(asked.devices), "worker")
        # More replicas of fewer stages, or spare workers: whatever trains more.
        made = []
        for used in range(1, len(asked.devices) + 1):
            if used % asked.stages == 0 or used == len(asked.devices):
                stages = asked.stages if used % asked.stages == 0 else None
                some = dataclasses.replace(asked, devices=asked.devices[:used], stages=stages)
                try:
                    made.append(plan_stages(self._costs, some))
                except ConfigError as error:
                    refused = error
        if not made:
            raise refused
        best = max(made, key=lambda plan: plan.samples_per_second)
        held = len(best.stages[0].devices) * best.num_workers
        spare = f", and {counted(len(asked.devices) - held, 'worker')} to spare" if held < len(asked.devices) else ""
        return (
            best,
            f"{workers}: {counted(best.replicas, 'pipeline')} of {counted(best.num_workers, 'worker')}{spare}",
        )

    def _compare(
        self, before: Mapping[str, StageMeasured], after: Mapping[str, StageMeasured], seconds: float
    ) -> ReplanDecision | None:
        """A plan by the speeds that were measured, if it gains enough."""
        speeds = {}
        for stage_worker, predicted in self._predicted_seconds().items():
            if stage_worker not in before:
                return None
            number = after[stage_worker].num_micro_batches - before[stage_worker].num_micro_batches
            busy = after[stage_worker].busy_seconds - before[stage_worker].busy_seconds
            if number < LEAST_MICRO_BATCHES or busy <= 0.0:
                return None
            speeds[stage_worker] = predicted * number / busy
        devices = tuple(
            dataclasses.replace(device, speed=device.speed * speeds[device.name]) if device.name in speeds else device
            for device in self._request.devices
        )
        used = tuple(device for device in devices if device.name in speeds)
        now = dataclasses.replace(self._request, devices=devices)
        current = predict(self._costs, self.plan, dataclasses.replace(now, devices=used))
        asked = dataclasses.replace(now, devices=used) if len(used) < len(devices) else now
        found = plan_stages(self._costs, dataclasses.replace(asked, stages=self._stages_of(asked)))
        gain = found.samples_per_second / current.samples_per_second - 1.0
        if gain < WORTH:
            return None
        self._request = now
        worst = min(speeds, key=lambda name: speeds[name])
        return self._change(
            found,
            f"over {seconds:.0f} s {worst} computed at {speeds[worst]:.0%} of the speed that was predicted; another "
            f"plan would gain {gain:.0%}",
        )

    def _stages_of(self, asked: PlanRequest) -> int | None:
        return asked.stages if asked.stages is None or len(asked.devices) % asked.stages == 0 else None

    def _predicted_seconds(self) -> dict[str, float]:
        """What each worker should compute for one micro-batch, in all its stages."""
        found: dict[str, float] = {}
        groups = {device.name: device.speed for device in self._request.devices}
        for stage in self.plan.stages:
            slowest = min(groups[name] for name in stage.devices)
            for name in stage.devices:
                # Times of a plan are those of the slowest replica.
                seconds = (stage.forward_seconds + stage.backward_seconds) * slowest / groups[name]
                found[name] = found.get(name, 0.0) + seconds
        return found

    def _change(self, plan: Plan, why: str) -> ReplanDecision:
        moves = moved_layers(self._costs, self.plan, plan)
        self.plan, self._began = plan, None
        count = counted(len({move.layer for move in moves}), "layer")
        return ReplanDecision(plan=plan, reason=f"{why}; {count} change hands: {plan.reason}", moves=moves)


def moved_layers(costs: ModelCosts, old: Plan, new: Plan) -> tuple[Move, ...]:
    """What a worker holds in the new plan and did not in the old one. Nothing else has to be read."""
    before = {(layer, name) for layer, name in _held(old)}
    return tuple(
        Move(layer=costs.names[layer], worker=name) for layer, name in _held(new) if (layer, name) not in before
    )


def _held(plan: Plan) -> list[tuple[int, str]]:
    return [
        (layer, name) for stage in plan.stages for layer in range(stage.first, stage.last) for name in stage.devices
    ]


def _number_of(name: str) -> tuple[int, str]:
    digits = name.rpartition("-")[2]
    return (int(digits) if digits.isdecimal() else 0, name)
