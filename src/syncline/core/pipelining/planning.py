"""Planning: contiguous stages, replicas of every stage and micro-batches, with the predicted step and the reason."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from syncline.core.pipelining.costs import (
    Device,
    DeviceLink,
    LayerCosts,
    Links,
    MemoryModel,
    ModelCosts,
    parameter_bytes,
)
from syncline.core.pipelining.schedules import (
    INTERLEAVED_STAGES,
    Shape,
    check_micro_batches,
    check_schedule,
    divisors,
    why_not,
)
from syncline.core.pipelining.searching import BestCut, CutTables, Problem, ReplicaGroup, search, worker_orders
from syncline.core.pipelining.simulation import Simulated, simulate
from syncline.core.units import counted, size
from syncline.errors import ConfigError

#: More micro-batches than so many per stage gain next to nothing, and each costs its transfers.
MOST_PER_STAGE = 8
#: Of two plans that differ by less than this, the one with fewer stages and micro-batches is taken.
TIE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a plan is asked for."""

    devices: tuple[Device, ...]  #: one per worker of the job
    batch: int  #: samples of one step of one pipeline
    stages: int | None = None  #: workers of one pipeline; None: what trains most samples per second
    micro_batches: int | None = None  #: None: as many as make the step shortest
    schedule: str = "1f1b"
    links: Links = dataclasses.field(default_factory=Links)
    exchange: DeviceLink = dataclasses.field(
        default_factory=DeviceLink
    )  #: to the servers, for gradients and parameters: the pipelines share it, and each sends its whole model
    memory: MemoryModel = dataclasses.field(default_factory=MemoryModel)
    action_seconds: float = 0.0  #: of every forward and backward of a micro-batch, besides the layers
    cut_before: tuple[str, ...] = ()  #: layers before which the model is cut, where the script says so
    keeps_order: bool = False  #: the k-th device has the k-th stage, also if they are unequal; for one pipeline


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStage:
    """The layers from `first` to `last` (not included), and who holds them."""

    first: int
    last: int
    first_layer: str
    devices: tuple[str, ...]  #: workers; the r-th one belongs to the r-th pipeline
    forward_seconds: float  #: of one micro-batch
    backward_seconds: float
    parameter_bytes: int
    memory_bytes: int  #: of its worker: parameters, gradients, activations, buffers
    utilisation: float  #: of its worker


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a model is spread over workers, with what it is predicted to do."""

    schedule: str
    micro_batches: int
    batch: int  #: samples of one step of one pipeline
    replicas: int  #: pipelines; each holds every stage once
    stages_per_worker: int
    stages: tuple[PlannedStage, ...]
    step_seconds: float  #: with the exchange
    exchange_seconds: float
    bubble: float  #: the part of the workers' time in which they do not compute, without the exchange
    reason: str
    is_measured: bool  #: False: the speed of a device is only said
    is_exact: bool  #: False: there were too many cuts to rule all others out

    @property
    def num_workers(self) -> int:
        """Of one pipeline."""
        return len(self.stages) // self.stages_per_worker

    @property
    def samples_per_second(self) -> float:
        return self.replicas * self.batch / self.step_seconds if self.step_seconds else math.inf

    @property
    def cut_before(self) -> tuple[str, ...]:
        """The layers with which stages begin, but for the first one."""
        return tuple(stage.first_layer for stage in self.stages[1:])

    @property
    def cuts(self) -> tuple[int, ...]:
        return (*(stage.first for stage in self.stages), self.stages[-1].last)

    @property
    def shape(self) -> Shape:
        return _shape(self.schedule, self.num_workers, self.micro_batches)


def _shape(schedule: str, num_workers: int, micro_batches: int) -> Shape:
    own = INTERLEAVED_STAGES if schedule == "interleaved" else 1
    return Shape(schedule=schedule, num_workers=num_workers, num_micro_batches=micro_batches, stages_per_worker=own)


def plan_stages(costs: ModelCosts, request: PlanRequest) -> Plan:
    """The best plan. One that cannot be is a ConfigError, which names the layer or the worker, and what helps."""
    check_schedule(request.schedule)
    _check_counts(costs, request)
    made, refused = [], []
    for num_workers in _stage_counts(request, len(costs.names)):
        made_here = [
            plan
            for micro_batches in _micro_batch_counts(request, num_workers)
            if (plan := _plan_for(costs, request, num_workers, micro_batches)) is not None
        ]
        made += made_here
        if not made_here:
            refused.append(num_workers)
    if not made:
        raise ConfigError(_why_nothing_fits(costs, request, refused))
    best = _best(made)
    return dataclasses.replace(best, reason=_reason(costs, request, best, made, refused))


def predict(costs: ModelCosts, plan: Plan, request: PlanRequest) -> Plan:
    """The same cut on the same workers, with these costs: its times are predicted again, its words stay.

    `request.devices` and `request.links` may have other speeds by now.
    """
    by_name = {device.name: device for device in request.devices}
    groups = [
        ReplicaGroup(devices=tuple(by_name[name] for name in s.devices)) for s in plan.stages[: plan.num_workers]
    ]
    problem = _problem(costs, request, plan.num_workers, plan.micro_batches, groups)
    tables = CutTables(problem, tuple(range(len(groups))))
    found = BestCut(cuts=plan.cuts, order=tables.order, step_seconds=0.0, is_exact=plan.is_exact, num_simulated=1)
    return dataclasses.replace(_as_plan(request, problem, tables, found), reason=plan.reason)


def _check_counts(costs: ModelCosts, request: PlanRequest) -> None:
    layers, workers, stages = len(costs.names), len(request.devices), request.stages
    own = INTERLEAVED_STAGES if request.schedule == "interleaved" else 1
    if not workers:
        raise ConfigError("a plan needs a worker at least")
    if stages is not None:
        if stages < 1:
            raise ConfigError(f"--stages {stages}: must be 1 or more, or auto")
        if stages > workers:
            raise ConfigError(
                f"--stages {stages}: there {'is' if workers == 1 else 'are'} only {counted(workers, 'worker')}; "
                f"use -w {stages}, or fewer stages"
            )
        if workers % stages:
            near = ", ".join(str(number) for number in divisors(workers))
            raise ConfigError(
                f"-w {workers} cannot be divided by --stages {stages}: every pipeline needs a worker for each stage; "
                f"use -w {workers // stages * stages} or -w {-(-workers // stages) * stages}, or --stages {near}"
            )
        if stages * own > layers:
            each = f"{own} on each worker, " if own > 1 else ""
            raise ConfigError(
                f"--stages {stages}: the model has {counted(layers, 'layer')} that can be cut apart, and "
                f"{stages * own} stages ({each}one layer at least) need more; use at most --stages "
                f"{max(1, layers // own)}"
            )
    if unknown := [name for name in request.cut_before if name not in costs.names]:
        raise ConfigError(
            f"cut_before: the model has no layer {unknown[0]!r} to cut before; it has {', '.join(costs.names[1:])}"
        )
    if costs.names[0] in request.cut_before:
        raise ConfigError(f"cut_before: {costs.names[0]!r} is the first layer: there is nothing before it")
    needed = len(request.cut_before) + 1
    if request.cut_before and stages is not None and stages * own != needed:
        raise ConfigError(
            f"cut_before names {counted(needed - 1, 'cut')}, which make {needed} stages, not {stages * own}; name "
            f"{stages * own - 1}, or leave --stages out"
        )


def _stage_counts(request: PlanRequest, num_layers: int) -> list[int]:
    """How many workers a pipeline may have."""
    own = INTERLEAVED_STAGES if request.schedule == "interleaved" else 1
    if request.stages is not None:
        return [request.stages]
    counts = [number for number in divisors(len(request.devices)) if number * own <= num_layers]
    if request.cut_before:
        needed = len(request.cut_before) + 1
        if needed % own or needed // own not in counts:
            raise ConfigError(
                f"cut_before makes {needed} stages, and {counted(len(request.devices), 'worker')} cannot be divided "
                f"into pipelines of {needed} stages ({own} on each worker); use another -w"
            )
        return [needed // own]
    return counts


def _micro_batch_counts(request: PlanRequest, num_workers: int) -> list[int]:
    if request.micro_batches is not None:
        check_micro_batches(_shape(request.schedule, num_workers, request.micro_batches), request.batch)
        return [request.micro_batches]
    counts = [number for number in divisors(request.batch) if number <= MOST_PER_STAGE * num_workers]
    known = [number for number in counts if not why_not(_shape(request.schedule, num_workers, number))]
    if not known and request.stages is not None:
        why = why_not(_shape(request.schedule, num_workers, counts[-1]))
        raise ConfigError(
            f"a batch of {request.batch} can be split into {', '.join(map(str, counts))} equal micro-batches, and "
            f"{why}; use another batch size, fewer stages, or --schedule gpipe"
        )
    return known


def _grouped(devices: Sequence[Device], num_workers: int) -> list[ReplicaGroup]:
    """So many groups of workers; those of one group have much the same speed, since the slowest one counts."""
    replicas = len(devices) // num_workers
    if len({(device.speed, device.memory_bytes) for device in devices}) == 1:
        return [ReplicaGroup(devices=tuple(devices[place::num_workers])) for place in range(num_workers)]
    ranked = sorted(devices, key=lambda device: (-device.speed, -(device.memory_bytes or math.inf)))
    return [
        ReplicaGroup(devices=tuple(ranked[first : first + replicas])) for first in range(0, len(ranked), replicas)
    ]


def _problem(
    costs: ModelCosts, request: PlanRequest, num_workers: int, micro_batches: int, groups: Sequence[ReplicaGroup]
) -> Problem:
    return Problem(
        shape=_shape(request.schedule, num_workers, micro_batches),
        layers=costs.at(request.batch // micro_batches),
        groups=tuple(groups),
        links=request.links,
        memory=request.memory,
        action_seconds=request.action_seconds if num_workers > 1 else 0.0,
        places=tuple(costs.names.index(name) for name in request.cut_before) if request.cut_before else None,
        keeps_order=request.keeps_order,
    )


def _plan_for(costs: ModelCosts, request: PlanRequest, num_workers: int, micro_batches: int) -> Plan | None:
    """The best plan with these counts; None if no cut fits into memory."""
    if request.keeps_order:
        groups = [ReplicaGroup(devices=(device,)) for device in request.devices]
    else:
        groups = _grouped(request.devices, num_workers)
    problem = _problem(costs, request, num_workers, micro_batches, groups)
    found = search(problem)
    return _as_plan(request, problem, CutTables(problem, found.order), found) if found else None


def _as_plan(request: PlanRequest, problem: Problem, tables: CutTables, found: BestCut) -> Plan:
    shape, cuts = problem.shape, np.array([found.cuts], np.int64)
    played = simulate(shape, tables.stage_times(cuts))
    memory = tables.memory(cuts)[0]
    stages = tuple(_planned(problem, tables, found, stage, memory, played) for stage in range(shape.num_stages))
    # Gradients go out, parameters come back, those of all stages through the leader of each pipeline.
    replicas = len(problem.groups[0].devices)
    exchange = request.exchange.seconds(2.0 * replicas * parameter_bytes(problem.layers))
    devices = [device for group in problem.groups for device in group.devices]
    return Plan(
        schedule=shape.schedule,
        micro_batches=shape.num_micro_batches,
        batch=request.batch,
        replicas=replicas,
        stages_per_worker=shape.stages_per_worker,
        stages=stages,
        step_seconds=played.step_seconds + exchange,
        exchange_seconds=exchange,
        bubble=played.bubble,
        reason="",
        is_measured=all(device.is_measured for device in devices),
        is_exact=found.is_exact,
    )


def _planned(
    problem: Problem, tables: CutTables, found: BestCut, stage: int, memory: Sequence[float], played: Simulated
) -> PlannedStage:
    worker = problem.shape.worker_of(stage)
    first, last = found.cuts[stage : stage + 2]
    spans = {s.kind: s.end - s.begin for s in played.spans if s.stage == stage and s.micro_batch == 0}
    parameters, _, _ = tables.stage_memory(stage, np.array([first]), np.array([last]))
    return PlannedStage(
        first=first,
        last=last,
        first_layer=problem.layers[first].name,
        devices=tuple(device.name for device in problem.groups[found.order[worker]].devices),
        forward_seconds=spans["F"],
        backward_seconds=spans["B"],
        parameter_bytes=round(float(parameters[0]) / problem.memory.per_parameter_byte),
        memory_bytes=math.ceil(memory[worker]),
        utilisation=played.utilisation[worker],
    )


def _best(made: Sequence[Plan]) -> Plan:
    """The one that trains most samples per second; of equals the first, which has the fewest stages."""
    best = made[0]
    for plan in made[1:]:
        if plan.samples_per_second > best.samples_per_second * (1.0 + TIE):
            best = plan
    return best


def _reason(costs: ModelCosts, request: PlanRequest, best: Plan, made: Sequence[Plan], refused: Sequence[int]) -> str:
    """Why this plan, in words."""
    work = [stage.forward_seconds + stage.backward_seconds for stage in best.stages]
    slowest = max(range(len(work)), key=work.__getitem__)
    if best.num_workers == 1:
        words = [f"one stage: every worker holds the whole model ({counted(len(costs.names), 'layer')})"]
    else:
        counts = " + ".join(str(stage.last - stage.first) for stage in best.stages)
        words = [
            f"cut before {', '.join(best.cut_before)} ({counts} of {counted(len(costs.names), 'layer')})"
            + (", as cut_before says" if request.cut_before else ""),
            f"the slowest stage is stage {slowest} with {_ms(work[slowest])} for a micro-batch, the fastest has "
            f"{_ms(min(work))}",
            f"{counted(best.micro_batches, 'micro-batch').replace('batchs', 'batches')} leave a bubble of "
            f"{best.bubble:.0%}",
        ]
    if best.exchange_seconds > 0.1 * best.step_seconds:
        words.append(f"the exchange with the servers takes {_ms(best.exchange_seconds)} of a step")
    words += _compared(request, best, made)
    if refused:
        words.append(f"with {' or '.join(map(str, refused))} per pipeline it does not fit into memory")
    if not best.is_measured:
        words.append("not all devices were measured: their speeds are only said")
    if not best.is_exact:
        words.append("there were too many cuts to rule all others out")
    return "; ".join(words)


def _compared(request: PlanRequest, best: Plan, made: Sequence[Plan]) -> Iterator[str]:
    """What other counts would do."""
    if request.micro_batches is None:
        others = [plan for plan in made if plan.num_workers == best.num_workers and plan is not best]
        if others:
            near = _best(others)
            more = best.samples_per_second / near.samples_per_second - 1.0
            yield f"with {near.micro_batches} micro-batches it would train {more:.1%} fewer samples/s"
    if request.stages is None:
        for count, plans in itertools.groupby(made, key=lambda plan: plan.num_workers):
            if count != best.num_workers:
                other = _best(list(plans))
                yield (
                    f"{counted(count, 'stage')} would train {other.samples_per_second:,.0f} samples/s, this plan "
                    f"{best.samples_per_second:,.0f}"
                )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _why_nothing_fits(costs: ModelCosts, request: PlanRequest, refused: Sequence[int]) -> str:
    """Which layer or worker lacks memory, and what helps."""
    num_workers = refused[-1]
    micro_batches = _micro_batch_counts(request, num_workers)[-1]
    problem = _problem(costs, request, num_workers, micro_batches, _grouped(request.devices, num_workers))
    largest = max((group.memory_bytes or math.inf) for group in problem.groups)
    alone = [_alone_bytes(request, layer) for layer in problem.layers]
    worst = max(range(len(alone)), key=alone.__getitem__)
    if alone[worst] > largest:
        return (
            f"layer {problem.layers[worst].name!r} alone needs {size(alone[worst])} (parameters, gradients, one "
            f"micro-batch of {request.batch // micro_batches}), and no worker has more than {size(largest)}; use "
            "workers with more memory, smaller micro-batches, or split this layer"
        )
    worker, needed, limit = _closest(problem)
    remedies = ["workers with more memory"]
    if more := _count_that_fits(costs, request, num_workers):
        remedies.insert(0, f"--stages {more} (with -w {max(more, len(request.devices) // more * more)})")
    if request.micro_batches is not None and request.micro_batches < request.batch:
        remedies.append("more micro-batches")
    remedies.append("activation checkpointing")
    return (
        f"{counted(num_workers, 'stage')} {'does' if num_workers == 1 else 'do'} not fit into memory: with the cut "
        f"that comes closest {worker} needs {size(needed)} and has {size(limit)}; use "
        f"{', '.join(remedies[:-1])} or {remedies[-1]}"
    )


def _alone_bytes(request: PlanRequest, layer: LayerCosts) -> float:
    own = layer.parameter_bytes + sum(parameter.num_bytes for parameter in layer.tied)
    return own * request.memory.per_parameter_byte + layer.kept_bytes + request.memory.fixed_bytes


def _closest(problem: Problem) -> tuple[str, float, float]:
    """Of the cut and the order that exceed the memory least: the worker, what it needs and what it has."""
    best = ("", math.inf, 1.0)
    for order in worker_orders(problem)[0]:
        tables = CutTables(problem, order)
        cuts = np.array([closest_cut(tables)], np.int64)
        needed, limits = tables.memory(cuts)[0], tables.limits
        worker = int(np.argmax(needed / limits))
        if needed[worker] / limits[worker] < best[1] / best[2]:
            device = min(problem.groups[order[worker]].devices, key=lambda d: d.memory_bytes or math.inf)
            best = (device.name, float(needed[worker]), float(limits[worker]))
    return best


def closest_cut(tables: CutTables) -> tuple[int, ...]:
    """The cut whose fullest stage is least full, by dynamic programming."""
    num_stages, layers = tables.problem.shape.num_stages, len(tables.problem.layers)
    full = np.full((num_stages + 1, layers + 1), math.inf)
    full[-1, layers] = 0.0
    choice = np.zeros((num_stages + 1, layers + 1), np.int64)
    for stage in reversed(range(num_stages)):
        for begin in range(layers):
            ends = np.arange(begin + 1, layers + 1)
            worst = np.maximum(tables.fullness(stage, np.full(ends.shape, begin), ends), full[stage + 1, ends])
            place = int(np.argmin(worst))
            full[stage, begin], choice[stage, begin] = worst[place], ends[place]
    cuts = [0]
    for stage in range(num_stages):
        cuts.append(int(choice[stage, cuts[-1]]))
    return tuple(cuts)


def _count_that_fits(costs: ModelCosts, request: PlanRequest, num_workers: int) -> int:
    """The least number of stages that would fit with workers like these; 0: none."""
    device = max(request.devices, key=lambda each: each.memory_bytes or math.inf)
    own = INTERLEAVED_STAGES if request.schedule == "interleaved" else 1
    for count in range(num_workers + 1, min(len(costs.names) // own, 8 * num_workers) + 1):
        devices = tuple(dataclasses.replace(device, name=f"worker-{index}") for index in range(count))
        if request.cut_before:
            return 0
        asked = dataclasses.replace(request, devices=devices, stages=count)
        try:
            counts = _micro_batch_counts(asked, count)
        except ConfigError:
            continue
        if counts and _plan_for(costs, asked, count, counts[-1]) is not None:
            return count
    return 0
