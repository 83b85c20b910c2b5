"""When a pipeline that runs is cut elsewhere: by what was measured over a minute."""

from __future__ import annotations

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


class Running:
    """A pipeline whose processes compute at these parts of their predicted speed."""

    def __init__(self, number: int = 2, schedule: str = "1f1b") -> None:
        devices = tuple(Device(name=f"process {index}") for index in range(number))
        self.request = PlanRequest(devices=devices, batch=64, stages=number, micro_batches=8, schedule=schedule)
        self.replanner = Replanner(COSTS, self.request, plan_stages(COSTS, self.request))
        self.now, self.done = 0.0, dict.fromkeys((device.name for device in devices), (0, 0.0))

    def run(self, seconds: float, speeds: dict[int, float], steps_per_second: int = 1) -> list[ReplanDecision]:
        """`{1: 0.5}`: that process is half as fast as it should be. Counters begin again with every cut."""
        found = []
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            busy = dict.fromkeys(self.done, 0.0)
            for stage in self.replanner.plan.stages:
                (name,) = stage.devices
                speed = speeds.get(int(name.split()[1]), 1.0)
                busy[name] += 8 * steps_per_second * (stage.last - stage.first) * 3e-3 / speed
            for name, more in busy.items():
                number, before = self.done[name]
                self.done[name] = (number + 8 * steps_per_second, before + more)
            measured = [
                StageMeasured(worker=n, num_micro_batches=m, busy_seconds=s) for n, (m, s) in self.done.items()
            ]
            decision = self.replanner.look(self.now, measured)
            if decision is not None:
                found.append(decision)
                self.done = dict.fromkeys(self.done, (0, 0.0))
        return found

    def held(self) -> list[int]:
        return [stage.last - stage.first for stage in self.replanner.plan.stages]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_a_job_that_runs_as_predicted_keeps_its_plan(schedule: str) -> None:
    assert Running(schedule=schedule).run(5 * MEASURE_SECONDS, {}) == []


def test_two_slow_processes_keep_it_too() -> None:
    """Both share the memory's bandwidth, say: another cut would gain nothing."""
    assert Running().run(5 * MEASURE_SECONDS, {0: 0.5, 1: 0.5}) == []


def test_a_process_at_half_speed_gives_layers_away_after_a_minute_and_once() -> None:
    job = Running()
    assert job.run(MEASURE_SECONDS, {1: 0.5}) == []
    (decision,) = job.run(5 * MEASURE_SECONDS, {1: 0.5})
    kept, given = job.held()
    assert kept > 4 > given and decision.plan is job.replanner.plan
    assert "process 1 computed at 50% of the speed that was predicted; another cut would gain" in decision.reason
    assert f"{kept - 4} layer" in decision.reason
    assert [stage.devices for stage in decision.plan.stages] == [("process 0",), ("process 1",)]


def test_the_first_process_may_be_the_slow_one() -> None:
    """The order of the processes stays: a process cannot take another's place while it runs."""
    job = Running()
    assert len(job.run(2 * MEASURE_SECONDS + 2, {0: 0.4})) == 1
    first, second = job.held()
    assert first < 4 < second


def test_a_small_gain_is_none() -> None:
    """5 % slower: another plan would gain less than 15 %."""
    assert Running().run(3 * MEASURE_SECONDS, {1: 0.95}) == []


def test_what_was_slow_and_recovers_gets_its_layers_back() -> None:
    job = Running()
    assert len(job.run(2 * MEASURE_SECONDS, {1: 0.4})) == 1
    assert job.held()[0] > 4
    assert len(job.run(3 * MEASURE_SECONDS, {})) == 1
    assert job.held() == [4, 4]


def test_long_steps_are_measured_for_longer() -> None:
    """Four micro-batches in a minute say nothing yet; eight in two minutes do."""
    job = Running()
    predicted = 4 * 3e-3

    def measured(number: int) -> list[StageMeasured]:
        busy = (number * predicted, number * predicted / 0.4)
        return [
            StageMeasured(worker=f"process {k}", num_micro_batches=number, busy_seconds=busy[k]) for k in range(2)
        ]

    assert job.replanner.look(0.0, measured(0)) is None
    assert job.replanner.look(MEASURE_SECONDS + 1, measured(4)) is None
    decision = job.replanner.look(2 * MEASURE_SECONDS + 2, measured(8))
    assert decision is not None and "over 122 s process 1 computed at 40%" in decision.reason
