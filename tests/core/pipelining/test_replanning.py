"""When a plan is made again: members, and what was measured over a minute."""

from __future__ import annotations

import dataclasses

import pytest

from syncline.core.pipelining.costs import Device, LayerCosts, MeasuredBatch, ModelCosts
from syncline.core.pipelining.planning import PlanRequest, plan_stages
from syncline.core.pipelining.replanning import MEASURE_SECONDS, ReplanDecision, Replanner, StageMeasured

COSTS = ModelCosts(
    measured=(
        MeasuredBatch(
            num_samples=8,
            layers=tuple(
                LayerCosts(name=f"blocks.{i}", forward_seconds=1e-3, backward_seconds=2e-3, parameter_bytes=1000)
                for i in range(8)
            ),
        ),
    )
)


def devices(number: int) -> tuple[Device, ...]:
    return tuple(Device(name=f"worker-{index}") for index in range(number))


class Running:
    """A job whose workers compute at these parts of their predicted speed."""

    def __init__(self, number: int = 2, stages: int | None = 2) -> None:
        self.request = PlanRequest(devices=devices(number), batch=64, stages=stages, micro_batches=8)
        self.replanner = Replanner(COSTS, self.request, plan_stages(COSTS, self.request))
        self.now, self.done = 0.0, dict.fromkeys((d.name for d in self.request.devices), (0, 0.0))

    def run(self, seconds: float, **parts: float) -> list[ReplanDecision]:
        """`worker_1=0.5`: that worker is half as fast as it should be."""
        found = []
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            for stage in self.replanner.plan.stages:
                for name in stage.devices:
                    layers = stage.last - stage.first
                    number, busy = self.done[name]
                    speed = parts.get(name.replace("-", "_"), 1.0)
                    self.done[name] = (number + 8, busy + 8 * layers * 3e-3 / speed)
            measured = [
                StageMeasured(worker=n, num_micro_batches=m, busy_seconds=s) for n, (m, s) in self.done.items()
            ]
            decision = self.replanner.look(self.now, self.request.devices, measured)
            if decision is not None:
                found.append(decision)
        return found


def test_a_job_that_runs_as_predicted_keeps_its_plan() -> None:
    assert Running().run(10 * MEASURE_SECONDS) == []


def test_a_worker_at_half_speed_gives_layers_away_after_a_minute_and_once() -> None:
    job = Running()
    assert job.run(MEASURE_SECONDS - 1, worker_1=0.5) == []
    (decision,) = job.run(5 * MEASURE_SECONDS, worker_1=0.5)
    assert decision.plan is not None
    held = {stage.devices[0]: stage.last - stage.first for stage in decision.plan.stages}
    assert held["worker-0"] > 4 > held["worker-1"]
    assert "worker-1 computed at 50% of the speed that was predicted; another plan would gain" in decision.reason
    assert {move.worker for move in decision.moves} == {"worker-0"}
    assert len(decision.moves) == held["worker-0"] - 4  # nothing else changes hands


def test_a_small_gain_is_none() -> None:
    """5 % slower: another plan would gain less than 15 %."""
    assert Running().run(3 * MEASURE_SECONDS, worker_1=0.95) == []


def test_a_worker_that_restarts_begins_the_measurement_again() -> None:
    """Counters start at 0 in the new life; a difference with the old ones would be nonsense."""
    job = Running()
    job.run(MEASURE_SECONDS - 2, worker_1=0.5)
    job.done["worker-1"] = (0, 0.0)
    assert job.run(MEASURE_SECONDS - 2, worker_1=0.5) == []
    assert len(job.run(10, worker_1=0.5)) == 1


def test_a_worker_dies_and_fewer_stages_go_on_until_it_is_back() -> None:
    job = Running(2, 2)
    decision = job.replanner.look(1.0, devices(1))
    assert decision is not None and decision.plan is not None
    assert decision.plan.num_workers == 1 and decision.plan.stages[0].devices == ("worker-0",)
    assert (
        decision.reason.startswith("worker-1 is gone; 1 worker make 1 pipeline of 1")
        or "worker-1 is gone" in decision.reason
    )
    assert {move.layer for move in decision.moves} == {f"blocks.{i}" for i in range(4, 8)}
    back = job.replanner.look(2.0, devices(2))
    assert back is not None and back.plan is not None and back.plan.num_workers == 2
    assert back.reason.startswith("worker-1 joined; 4 layers change hands")


def test_with_three_of_four_workers_one_is_spare_or_the_stages_are_others() -> None:
    job = Running(4, 2)
    decision = job.replanner.look(1.0, devices(3))
    assert decision is not None and decision.plan is not None
    assert "worker-3 is gone; 3 workers: " in decision.reason
    assert job.replanner.look(2.0, devices(3)) is None  # said once


def test_without_room_for_the_model_it_waits_for_a_worker() -> None:
    """Each worker has memory for half of the model."""
    small = tuple(dataclasses.replace(device, memory_bytes=13_000) for device in devices(2))
    request = PlanRequest(devices=small, batch=64, stages=2, micro_batches=8)
    replanner = Replanner(COSTS, request, plan_stages(COSTS, request))
    decision = replanner.look(1.0, small[:1])
    assert decision is not None and decision.plan is None
    assert "worker-1 is gone: no plan is possible: 1 stage does not fit into memory" in decision.reason
    assert replanner.look(2.0, small[:1]) is None
    again = replanner.look(3.0, small)
    assert again is not None and again.plan is not None and "worker-1 joined" in again.reason


def test_no_worker_at_all_is_said() -> None:
    decision = Running().replanner.look(1.0, ())
    assert decision is not None and decision.plan is None and "there is no worker; one must join" in decision.reason


@pytest.mark.parametrize("part", [2.0, 3.0])
def test_a_worker_that_is_faster_than_predicted_gets_more(part: float) -> None:
    (decision,) = Running().run(MEASURE_SECONDS + 2, worker_0=part)
    assert decision.plan is not None
    held = {stage.devices[0]: stage.last - stage.first for stage in decision.plan.stages}
    assert held["worker-0"] > held["worker-1"]
