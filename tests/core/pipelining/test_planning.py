"""Plans: counts, reasons, memory, and errors that say what helps."""

from __future__ import annotations

import dataclasses
import itertools
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.core.pipelining.costs import (
    Device,
    DeviceLink,
    LayerCosts,
    LinkBetween,
    Links,
    MeasuredBatch,
    MemoryModel,
    ModelCosts,
)
from syncline.core.pipelining.planning import Plan, PlanRequest, plan_stages, predict
from syncline.errors import ConfigError

MS = 1e-3


def model(*seconds: float, batch: int = 64, output_bytes: int = 1000, parameter_bytes: int = 1000) -> ModelCosts:
    """Layers with so many milliseconds forward and twice as many backward for a batch of 64."""
    layers = tuple(
        LayerCosts(
            name=f"blocks.{index}",
            forward_seconds=each * MS,
            backward_seconds=2 * each * MS,
            kept_bytes=1000 * batch,
            output_bytes=output_bytes,
            parameter_bytes=parameter_bytes,
        )
        for index, each in enumerate(seconds)
    )
    small = tuple(
        dataclasses.replace(
            layer,
            forward_seconds=layer.forward_seconds / batch,
            backward_seconds=layer.backward_seconds / batch,
            kept_bytes=layer.kept_bytes // batch,
            output_bytes=max(1, layer.output_bytes // batch),
        )
        for layer in layers
    )
    return ModelCosts(
        measured=(MeasuredBatch(num_samples=1, layers=small), MeasuredBatch(num_samples=batch, layers=layers))
    )


def workers(*speeds: float, memory_bytes: int = 0) -> tuple[Device, ...]:
    return tuple(
        Device(name=f"worker-{index}", speed=speed, memory_bytes=memory_bytes) for index, speed in enumerate(speeds)
    )


def test_a_cut_in_the_middle_of_the_work_with_its_reason() -> None:
    costs = model(4, 1, 1, 1, 1)
    plan = plan_stages(costs, PlanRequest(devices=workers(1, 1), batch=64, stages=2, micro_batches=8))
    assert plan.cut_before == ("blocks.1",) and plan.cuts == (0, 1, 5)
    assert [stage.devices for stage in plan.stages] == [("worker-0",), ("worker-1",)]
    assert plan.step_seconds == pytest.approx(9 * 12 * MS / 8)  # 8 micro-batches of 12 ms / 8, and one more to fill
    assert plan.bubble == pytest.approx(1 / 9) and plan.is_exact and plan.is_measured
    assert plan.reason.startswith("cut before blocks.1 (1 + 4 of 5 layers); the slowest stage is stage 0 with 1.5 ms")
    assert "8 micro-batches leave a bubble of 11%" in plan.reason


def test_the_fast_worker_gets_more_layers_wherever_it_stands() -> None:
    costs = model(*[1.0] * 8)
    for speeds in ((1, 3), (3, 1)):
        plan = plan_stages(costs, PlanRequest(devices=workers(*speeds), batch=64, stages=2, micro_batches=8))
        held = {stage.devices[0]: stage.last - stage.first for stage in plan.stages}
        assert held[f"worker-{speeds.index(3)}"] == 6


def test_a_slow_link_is_put_where_little_crosses() -> None:
    """Two cuts, of which one is wide: it goes where the layers are joined by a fast link."""
    costs = model(*[1.0] * 3, output_bytes=64)
    layers = list(costs.measured[1].layers)
    layers[0] = dataclasses.replace(layers[0], output_bytes=64_000_000)
    costs = ModelCosts(measured=(MeasuredBatch(num_samples=64, layers=tuple(layers)),))
    pair = LinkBetween(one="worker-0", two="worker-1", link=DeviceLink(bytes_per_second=1e7))
    slow = Links(default=DeviceLink(bytes_per_second=1e10), between=(pair,))
    plan = plan_stages(costs, PlanRequest(devices=workers(1, 1, 1), batch=64, stages=3, micro_batches=4, links=slow))
    order = [stage.devices[0] for stage in plan.stages]
    assert set(order[:2]) != {"worker-0", "worker-1"}


def test_replicas_hold_the_same_stage_and_the_slowest_one_counts() -> None:
    costs = model(*[1.0] * 4)
    plan = plan_stages(costs, PlanRequest(devices=workers(1, 1, 1, 1), batch=64, stages=2, micro_batches=8))
    assert plan.replicas == 2
    assert [stage.devices for stage in plan.stages] == [("worker-0", "worker-2"), ("worker-1", "worker-3")]
    uneven = plan_stages(costs, PlanRequest(devices=workers(1, 2, 1, 2), batch=64, stages=2, micro_batches=8))
    held = {stage.devices: stage.last - stage.first for stage in uneven.stages}
    assert set(held) == {("worker-1", "worker-3"), ("worker-0", "worker-2")} and held["worker-1", "worker-3"] >= 2


def test_auto_counts_the_exchange_and_compares_in_words() -> None:
    """Fewer pipelines exchange less, more train on more samples: with the same batch nothing beats replicas."""
    costs = model(*[1.0] * 8, parameter_bytes=10_000_000)
    request = PlanRequest(devices=workers(1, 1, 1, 1), batch=64)
    free = plan_stages(costs, request)
    assert (free.num_workers, free.replicas) == (1, 4)
    assert free.reason.startswith("one stage: every worker holds the whole model (8 layers)")
    paid = plan_stages(costs, dataclasses.replace(request, exchange=DeviceLink(bytes_per_second=1e8)))
    assert paid.exchange_seconds == pytest.approx(6.4) and paid.step_seconds == pytest.approx(6.424)
    assert "the exchange with the servers takes 6,400.0 ms of a step" in paid.reason
    staged = plan_stages(
        costs, dataclasses.replace(request, stages=4, exchange=DeviceLink(bytes_per_second=1e8))
    )  # one pipeline: its leader sends the gradients of all stages
    assert staged.exchange_seconds == pytest.approx(1.6)
    assert re.search(r"4 stages would train \d+ samples/s, this plan \d+", paid.reason)


def test_auto_micro_batches_weigh_the_bubble_against_their_cost() -> None:
    costs = model(*[1.0] * 4)
    request = PlanRequest(devices=workers(1, 1), batch=64, stages=2)
    assert plan_stages(costs, request).micro_batches == 16
    slow = plan_stages(costs, dataclasses.replace(request, action_seconds=1 * MS))
    assert slow.micro_batches < 16 and "fewer samples/s" in slow.reason


def test_memory_moves_the_cut_and_a_plan_never_exceeds_it() -> None:
    costs = model(*[1.0] * 4)
    layers = [
        dataclasses.replace(layer, parameter_bytes=10_000 if i < 2 else 1000) for i, layer in enumerate(costs.at(8))
    ]
    costs = ModelCosts(measured=(MeasuredBatch(num_samples=8, layers=tuple(layers)),))
    request = PlanRequest(
        devices=workers(1, 1, memory_bytes=70_000), batch=64, stages=2, micro_batches=8, memory=MemoryModel()
    )
    plan = plan_stages(costs, request)
    assert plan.cuts == (0, 1, 4)
    assert all(stage.memory_bytes <= 70_000 for stage in plan.stages)
    free = plan_stages(costs, dataclasses.replace(request, devices=workers(1, 1)))
    assert free.cuts == (0, 2, 4) and max(stage.memory_bytes for stage in free.stages) > 70_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": 0}, "--stages 0: must be 1 or more, or auto"),
        ({"stages": 3}, "--stages 3: there are only 2 workers; use -w 3, or fewer stages"),
        ({"stages": 2, "devices": workers(1, 1, 1)}, "-w 3 cannot be divided by --stages 2"),
        ({"stages": 5, "devices": workers(*[1] * 5)}, "the model has 4 layers that can be cut apart, and 5 stages"),
        (
            {"stages": 3, "devices": workers(1, 1, 1), "schedule": "interleaved"},
            "6 stages (2 on each worker, one layer",
        ),
        ({"micro_batches": 128}, "a batch of 64 cannot be split into 128 micro-batches; use a larger batch"),
        ({"micro_batches": 7}, "7 equal micro-batches; use --micro-batches 4, or a batch of 70"),
        ({"micro_batches": 1}, "1f1b needs as many micro-batches as stages: 1 are fewer than 2"),
        ({"batch": 1}, "a batch of 1 can be split into 1 equal micro-batches, and 1f1b needs"),
        ({"schedule": "zbv"}, "schedule 'zbv': must be one of gpipe, 1f1b, interleaved"),
        ({"cut_before": ("head",)}, "the model has no layer 'head' to cut before; it has blocks.1, blocks.2"),
        ({"cut_before": ("blocks.0",)}, "'blocks.0' is the first layer"),
        ({"cut_before": ("blocks.1", "blocks.2")}, "cut_before names 2 cuts, which make 3 stages, not 2"),
        ({"cut_before": ("blocks.1", "blocks.2"), "stages": None}, "2 workers cannot be divided into pipelines of 3"),
    ],
)
def test_what_cannot_be_planned_says_why_and_what_helps(change: dict[str, object], words: str) -> None:
    request = PlanRequest(devices=workers(1, 1), batch=64, stages=2)
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan_stages(model(1, 1, 1, 1), dataclasses.replace(request, **change))


def test_too_little_memory_names_the_layer_or_the_worker_and_a_number_of_stages() -> None:
    costs = model(*[1.0] * 6, parameter_bytes=1 << 20)
    request = PlanRequest(devices=workers(1, 1, memory_bytes=8 << 20), batch=64, stages=2, micro_batches=8)
    with pytest.raises(
        ConfigError, match=r"2 stages do not fit into memory: .* worker-\d needs 9 MiB and has 8 MiB; use "
    ):
        plan_stages(costs, request)
    with pytest.raises(ConfigError, match=r"use --stages 3 \(with -w 3\)"):
        plan_stages(costs, request)
    small = dataclasses.replace(request, devices=workers(1, 1, memory_bytes=2 << 20))
    with pytest.raises(ConfigError, match=r"layer 'blocks\.0' alone needs 3 MiB .* no worker has more than 2 MiB"):
        plan_stages(costs, small)


def test_auto_leaves_out_the_counts_that_do_not_fit() -> None:
    costs = model(*[1.0] * 8, parameter_bytes=1 << 20)
    request = PlanRequest(devices=workers(1, 1, 1, 1, memory_bytes=16 << 20), batch=64)
    plan = plan_stages(costs, request)
    assert plan.num_workers == 2 and "with 1 per pipeline it does not fit into memory" in plan.reason


def test_a_device_that_was_not_measured_is_marked() -> None:
    """A GPU beside CPUs is planned for by what is said of its speed."""
    gpu = Device(name="worker-1", speed=20.0, kind="cuda", is_measured=False)
    plan = plan_stages(
        model(*[1.0] * 8), PlanRequest(devices=(*workers(1), gpu), batch=64, stages=2, micro_batches=8)
    )
    assert not plan.is_measured and "their speeds are only said" in plan.reason
    held = {stage.devices[0]: stage.last - stage.first for stage in plan.stages}
    assert held == {"worker-0": 1, "worker-1": 7}


def test_a_plan_crosses_json() -> None:
    plan = plan_stages(model(1, 2, 3), PlanRequest(devices=workers(1, 1), batch=64, stages=2))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


@settings(max_examples=10)
@given(
    st.lists(st.floats(0.1, 10.0), min_size=2, max_size=10),
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=3),
    st.sampled_from(["gpipe", "1f1b"]),
)
def test_every_plan_covers_all_layers_once_and_predicts_what_it_says(
    seconds: list[float], speeds: list[float], schedule: str
) -> None:
    costs = model(*seconds)
    request = PlanRequest(devices=workers(*speeds), batch=32, schedule=schedule)
    plan = plan_stages(costs, request)
    assert plan.cuts[0] == 0 and plan.cuts[-1] == len(seconds)
    assert all(a < b for a, b in itertools.pairwise(plan.cuts))
    names = [name for stage in plan.stages for name in stage.devices]
    assert sorted(names) == [device.name for device in request.devices]
    assert 0.0 <= plan.bubble < 1.0
    assert predict(costs, plan, request) == plan
    twice = model(*[2 * each for each in seconds])
    assert predict(twice, plan, request).step_seconds == pytest.approx(2 * plan.step_seconds)
