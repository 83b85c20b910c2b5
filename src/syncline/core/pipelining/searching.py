"""Searching: the cut, and the order of workers, with the least predicted time of a step.

The answer is exact. A dynamic program over the layers gives, for every place and every number of stages that are
left, the shortest trip of one micro-batch and the smallest bottleneck that the rest can have. With these, cuts are
built stage by stage, all of one depth at once, and a beginning is given up only if no end can make it better than the
best cut that is known. What is left is simulated. Only if too many beginnings are alive at once (`MOST_BEGINNINGS`),
the worst are given up too, and the answer says so (`is_exact`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline.core.pipelining.costs import Device, LayerCosts, Links, MemoryModel, parameter_bytes
from syncline.core.pipelining.schedules import Shape, most_in_flight
from syncline.core.pipelining.simulation import StageTimes, Times, step_seconds

Cuts = NDArray[np.int64]
#: Beginnings of cuts that are looked at together; the first look is narrow, and finds a good cut quickly.
MOST_BEGINNINGS, FIRST_LOOK = 50_000, 64
#: The bounds of interleaved schedules are wide: more would be alive, and would not help.
MOST_INTERLEAVED = 4_000
#: Orders of unequal workers: all of them for six workers.
MOST_ORDERS = 720
#: Simulated at once: the arrays then stay in the caches of a core.
TOGETHER = 2048


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaGroup:
    """The workers that hold the same stages, one per replica of the pipeline. The slowest one counts."""

    devices: tuple[Device, ...]

    @property
    def speed(self) -> float:
        return min(device.speed for device in self.devices)

    @property
    def memory_bytes(self) -> int:
        """0: not limited."""
        return min((device.memory_bytes for device in self.devices if device.memory_bytes), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The layers to cut, and the workers that hold the stages."""

    shape: Shape
    layers: tuple[LayerCosts, ...]  #: for one micro-batch
    groups: tuple[ReplicaGroup, ...]  #: as many as a pipeline has workers, in any order
    links: Links
    memory: MemoryModel
    action_seconds: float = 0.0  #: of every forward and backward, besides the layers
    places: tuple[int, ...] | None = None  #: a cut may be made before these layers only; None: before every one
    keeps_order: bool = False  #: groups stay as they are


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BestCut:
    """A cut: `cuts` are the first layers of all stages, and the number of layers at the end."""

    cuts: tuple[int, ...]
    order: tuple[int, ...]  #: which group is at each place of the pipeline
    step_seconds: float
    is_exact: bool
    num_simulated: int


def search(problem: Problem) -> BestCut | None:
    """The best cut that fits into the workers' memory; None if there is none."""
    best: BestCut | None = None
    is_exact, num_simulated = True, 0
    orders, has_all = worker_orders(problem)
    tables = [CutTables(problem, order) for order in orders]
    most = MOST_INTERLEAVED if problem.shape.schedule == "interleaved" else MOST_BEGINNINGS
    for width in (FIRST_LOOK, most):
        truncated = [table for table in tables if not table.explore(width, best.step_seconds if best else math.inf)]
        for table in tables:
            num_simulated += table.num_simulated
            if table.best_cuts and (best is None or table.best_seconds < best.step_seconds):
                best = BestCut(
                    cuts=table.best_cuts,
                    order=table.order,
                    step_seconds=table.best_seconds,
                    is_exact=True,
                    num_simulated=0,
                )
        is_exact = has_all and not truncated
        if not (tables := truncated):
            break
    return dataclasses.replace(best, is_exact=is_exact, num_simulated=num_simulated) if best else None


def worker_orders(problem: Problem) -> tuple[list[tuple[int, ...]], bool]:
    """The orders in which the groups may stand, one of those that cost the same; and whether these are all."""
    if problem.keeps_order:
        return [tuple(range(len(problem.groups)))], True
    named = {name for each in problem.links.between for name in (each.one, each.two)}
    kinds: list[tuple[Any, ...]] = [
        (group.speed, group.memory_bytes, *(device.name for device in group.devices if device.name in named))
        for group in problem.groups
    ]
    found = list(itertools.islice(_distinct_orders(kinds), MOST_ORDERS + 1))
    return found[:MOST_ORDERS], len(found) <= MOST_ORDERS


def _distinct_orders(kinds: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, ...]]:
    """All orders of the indices, one of those that differ by equal kinds only; their own order comes first."""
    if not kinds:
        yield ()
        return
    indices, seen = range(len(kinds)), set()
    for first in indices:
        if kinds[first] not in seen:
            seen.add(kinds[first])
            left = [index for index in indices if index != first]
            for rest in _distinct_orders([kinds[index] for index in left]):
                yield (first, *(left[index] for index in rest))


class CutTables:
    """Everything about one order of workers: costs of every possible stage, bounds, and the best cut so far."""

    def __init__(self, problem: Problem, order: tuple[int, ...]) -> None:
        self.problem, self.order = problem, order
        self.best_cuts: tuple[int, ...] = ()
        self.best_seconds = math.inf
        self.num_simulated = 0
        shape, layers = problem.shape, problem.layers
        self._num_layers = len(layers)
        self._forward = _sums(layer.forward_seconds for layer in layers)
        self._backward = _sums(layer.backward_seconds for layer in layers)
        self._kept = _sums(layer.kept_bytes for layer in layers)
        self._crosses = np.array([0, *(layer.output_bytes for layer in layers)], np.float64)  # by the cut's place
        self._crosses[-1] = 0.0
        self._parameters = _parameter_table(layers)
        self._speeds = [problem.groups[order[shape.worker_of(stage)]].speed for stage in range(shape.num_stages)]
        self._wires = [self._wire(stage) for stage in range(shape.num_stages - 1)]
        allowed = range(1, self._num_layers) if problem.places is None else problem.places
        self._allowed = np.zeros(self._num_layers + 1, bool)
        self._allowed[[place for place in allowed if 0 < place < self._num_layers]] = True
        self._in_flight = most_in_flight(shape)
        self._rest_trip, self._rest_bottleneck = self._rests()

    def _wire(self, stage: int) -> tuple[float, float]:
        """Latency and seconds per byte from this stage to the next one, of the slowest replica."""
        shape, groups = self.problem.shape, self.problem.groups
        above, below = (shape.worker_of(each) for each in (stage, stage + 1))
        if above == below:
            return 0.0, 0.0
        pairs = zip(groups[self.order[above]].devices, groups[self.order[below]].devices, strict=True)
        links = [self.problem.links.of(one.name, two.name) for one, two in pairs]
        return max(link.latency_seconds for link in links), max(1.0 / link.bytes_per_second for link in links)

    def _crossing(self, stage: int, place: Cuts) -> Times:
        """The time of a transfer through the cut behind this stage, which is at this place."""
        if not 0 <= stage < self.problem.shape.num_stages - 1:
            return np.zeros(place.shape)
        latency, per_byte = self._wires[stage]
        return latency + self._crosses[place] * per_byte

    def _computing(self, stage: int, begin: Cuts, end: Cuts) -> tuple[Times, Times]:
        """Forward and backward of the stage with these layers."""
        speed, extra = self._speeds[stage], self.problem.action_seconds
        forward = (self._forward[end] - self._forward[begin]) / speed + extra
        return forward, (self._backward[end] - self._backward[begin]) / speed + extra

    def stage_memory(self, stage: int, begin: Cuts, end: Cuts) -> tuple[Times, Times, Times]:
        """Bytes of a stage: parameters; activations, for each micro-batch in flight; buffers to receive."""
        parameters = self._parameters[begin, end] * self.problem.memory.per_parameter_byte
        kept = self._kept[end] - self._kept[begin]
        received = self._crosses[begin] + self._crosses[end]
        return parameters, kept, received * self.problem.shape.num_micro_batches

    def memory(self, cuts: Cuts) -> Times:
        """The most bytes that each worker of the pipeline holds: a row per cut, a column per worker."""
        shape = self.problem.shape
        columns = []
        for worker in range(shape.num_workers):
            own = range(worker, shape.num_stages, shape.num_workers)
            parts = [self.stage_memory(stage, cuts[:, stage], cuts[:, stage + 1]) for stage in own]
            still = sum((parameters + received for parameters, _, received in parts), np.zeros(len(cuts)))
            peaks = [
                sum((held * kept for held, (_, kept, _) in zip(together, parts, strict=True)), np.zeros(len(cuts)))
                for together in self._in_flight[worker]
            ]
            columns.append(still + np.max(np.stack(peaks), axis=0) + self.problem.memory.fixed_bytes)
        return np.stack(columns, axis=1)

    def fits(self, cuts: Cuts) -> NDArray[np.bool_]:
        return np.asarray(np.all(self.memory(cuts) <= self.limits, axis=1), bool)

    @property
    def limits(self) -> Times:
        """Of each worker of the pipeline, in bytes."""
        groups = self.problem.groups
        return np.array([groups[index].memory_bytes or math.inf for index in self.order], np.float64)

    def stage_times(self, cuts: Cuts) -> StageTimes:
        stages = range(self.problem.shape.num_stages)
        computing = [self._computing(stage, cuts[:, stage], cuts[:, stage + 1]) for stage in stages]
        crossing = [self._crossing(stage, cuts[:, stage + 1]) for stage in stages[:-1]]
        empty = np.zeros((len(cuts), 0))
        through = np.stack(crossing, axis=1) if crossing else empty
        return StageTimes(
            forward=np.stack([forward for forward, _ in computing], axis=1),
            backward=np.stack([backward for _, backward in computing], axis=1),
            down=through,
            up=through,
        )

    def _at_least(self, stage: int, forward: Times, backward: Times, above: Times, below: Times) -> Times:
        """What a stage adds, at least, to the trip of one micro-batch, by all the other micro-batches: two columns.

        The largest of all stages count, each column for itself. Where a worker waits for what it receives before it
        computes, that time is its own. Of an interleaved schedule it is an estimate: a stage is one of several.
        """
        shape = self.problem.shape
        others = shape.num_micro_batches - 1
        if shape.schedule == "interleaved":
            work = others * shape.stages_per_worker * (forward + backward)
            return np.stack([work, np.zeros(work.shape)], axis=-1)
        forward, backward = forward + above, backward + below
        if shape.schedule == "gpipe":
            return np.stack([others * forward, others * backward], axis=-1)
        # Before the last forward, or after the first backward.
        between = max(0, shape.num_micro_batches - (shape.num_stages - stage))
        most = np.maximum(others * backward + between * forward, others * forward + between * backward)
        return np.stack([most, np.zeros(most.shape)], axis=-1)

    def _rests(self) -> tuple[Times, Times]:
        """For the stages from the k-th on, which begin at layer j: the shortest trip, the smallest bottlenecks."""
        shape, layers = self.problem.shape, self._num_layers
        trip = np.full((shape.num_stages + 1, layers + 1), math.inf)
        bottleneck = np.full((shape.num_stages + 1, layers + 1, 2), math.inf)
        trip[-1, layers], bottleneck[-1, layers] = 0.0, 0.0
        for stage in reversed(range(shape.num_stages)):
            for begin in range(layers):
                ends = np.arange(begin + 1, layers + 1)
                start = np.full(ends.shape, begin)
                forward, backward = self._computing(stage, start, ends)
                above, below = self._crossing(stage - 1, start), self._crossing(stage, ends)
                added = self._at_least(stage, forward, backward, above, below)
                trip[stage, begin] = np.min(forward + backward + 2.0 * below + trip[stage + 1, ends])
                bottleneck[stage, begin] = np.min(np.maximum(added, bottleneck[stage + 1, ends]), axis=0)
        return trip, bottleneck

    def explore(self, width: int, known_seconds: float) -> bool:
        """Looks for a cut that is better than `known_seconds`; False if beginnings were given up for their number."""
        self.num_simulated = 0
        limit = min(known_seconds, self.best_seconds)
        ways = _Ways(self.problem.shape.num_workers)
        is_whole = True
        for stage in range(self.problem.shape.num_stages):
            ways = self._extended(ways, stage)
            # A bound may be above the time itself by what additions in another order round.
            chosen = np.flatnonzero(ways.bound < limit * (1.0 + 1e-9))
            if len(chosen) > width:
                is_whole = False
                chosen = chosen[np.argsort(ways.estimate[chosen], kind="stable")[:width]]
            ways = ways.only(chosen)
        self._simulate_all(ways, limit, math.inf if is_whole else TOGETHER)
        if not is_whole:
            self._shift()
        return is_whole

    def _extended(self, ways: _Ways, stage: int) -> _Ways:
        """All beginnings with one stage more, with their bounds; those that do not fit into memory are left out."""
        shape = self.problem.shape
        row, ends = self._ends(ways.cuts[:, -1], stage)
        begin = ways.cuts[row, -1]
        fits = (self.fullness(stage, begin, ends) <= 1.0) & np.isfinite(self._rest_trip[stage + 1, ends])
        row, begin, ends = row[fits], begin[fits], ends[fits]
        old = ways.only(row)
        forward, backward = self._computing(stage, begin, ends)
        above, below = self._crossing(stage - 1, begin), self._crossing(stage, ends)
        trip = old.trip + forward + backward + 2.0 * below
        whole = trip + self._rest_trip[stage + 1, ends]
        worst = np.maximum(old.worst, self._at_least(stage, forward, backward, above, below))
        estimate = whole + np.sum(np.maximum(worst, self._rest_bottleneck[stage + 1, ends]), axis=1)
        loads = old.loads
        loads[:, shape.worker_of(stage)] += shape.num_micro_batches * (forward + backward)
        bound = np.maximum(np.maximum(old.bound, whole), np.max(loads, axis=1, initial=0.0))
        if shape.schedule != "interleaved":
            alone = self._alone(stage, old.trip, whole, forward + backward, above + below)
            bound = np.maximum(bound, np.maximum(alone, estimate))
        cuts = np.concatenate([old.cuts, ends[:, None]], axis=1)
        return _Ways(shape.num_workers, cuts, trip, worst, loads, bound, np.maximum(bound, estimate))

    def _ends(self, begins: Cuts, stage: int) -> tuple[Cuts, Cuts]:
        """Every place at which a stage may end that begins at these places: which row it continues, and the place."""
        if stage == self.problem.shape.num_stages - 1:
            return np.arange(len(begins)), np.full(len(begins), self._num_layers)
        places = np.flatnonzero(self._allowed)
        row, index = np.nonzero(places[None, :] > begins[:, None])
        return row, places[index]

    def _alone(self, stage: int, before: Times, whole: Times, computing: Times, receiving: Times) -> Times:
        """Bounds by one stage: its own work after the way to it; and as many micro-batches on the way at once as it
        lets be.
        """
        shape = self.problem.shape
        # The way to the stage contains its first receive.
        work = before + shape.num_micro_batches * computing + (shape.num_micro_batches - 1) * receiving
        if shape.schedule == "gpipe":
            return work
        trips = math.ceil(shape.num_micro_batches / (shape.num_stages - stage))
        return np.maximum(work, before + trips * (whole - before))

    def fullness(self, stage: int, begin: Cuts, end: Cuts) -> Times:
        """The part of its worker's memory that a stage needs, other stages of this worker not counted."""
        parameters, kept, received = self.stage_memory(stage, begin, end)
        worker, place = self.problem.shape.worker_of(stage), stage // self.problem.shape.num_workers
        in_flight = max(together[place] for together in self._in_flight[worker])
        needed = parameters + received + in_flight * kept + self.problem.memory.fixed_bytes
        return np.asarray(needed / self.limits[worker], np.float64)

    def _simulate_all(self, ways: _Ways, limit: float, most: float) -> None:
        """The best of these cuts; those with the smallest bounds come first, and end it early."""
        order = np.argsort(ways.estimate, kind="stable")
        cuts, bound = ways.cuts[order], ways.bound[order]
        for first in range(0, len(cuts), TOGETHER):
            if first >= most:
                break
            limit = min(limit, self.best_seconds)
            some = slice(first, first + TOGETHER)
            self._try(cuts[some][bound[some] <= limit * (1.0 + 1e-9)])

    def _try(self, cuts: Cuts) -> bool:
        """Simulates these cuts; whether one is the best now."""
        cuts = cuts[self.fits(cuts)]
        if not len(cuts):
            return False
        seconds = step_seconds(self.problem.shape, self.stage_times(cuts))
        self.num_simulated += len(cuts)
        least = int(np.argmin(seconds))
        if not seconds[least] < self.best_seconds:
            return False
        self.best_seconds, self.best_cuts = float(seconds[least]), tuple(int(cut) for cut in cuts[least])
        return True

    def _shift(self) -> None:
        """Moves single cuts of the best by a layer or two, as long as it helps."""
        while self.best_cuts:
            moved = [
                (*self.best_cuts[:index], place + by, *self.best_cuts[index + 1 :])
                for index, place in enumerate(self.best_cuts[1:-1], 1)
                for by in (-2, -1, 1, 2)
                if self.best_cuts[index - 1] < place + by < self.best_cuts[index + 1] and self._allowed[place + by]
            ]
            if not moved or not self._try(np.array(moved, np.int64)):
                break


@dataclasses.dataclass(slots=True)
class _Ways:
    """Beginnings of cuts, a row each, with what is known of them."""

    num_workers: int
    cuts: Cuts = dataclasses.field(default_factory=lambda: np.zeros((1, 1), np.int64))
    trip: Times = dataclasses.field(default_factory=lambda: np.zeros(1))  #: of one micro-batch, so far
    worst: Times = dataclasses.field(default_factory=lambda: np.zeros((1, 2)))  #: what the slowest stages add
    loads: Times = dataclasses.field(default_factory=lambda: np.zeros((1, 0)))  #: of each worker, in a step
    bound: Times = dataclasses.field(default_factory=lambda: np.zeros(1))  #: no end makes the step shorter
    estimate: Times = dataclasses.field(default_factory=lambda: np.zeros(1))  #: of the step; at least the bound

    def __post_init__(self) -> None:
        if not self.loads.size:
            self.loads = np.zeros((len(self.cuts), self.num_workers))

    def only(self, rows: NDArray[np.int64]) -> _Ways:
        """A copy with these rows."""
        parts = (part[rows] for part in (self.trip, self.worst, self.loads, self.bound, self.estimate))
        return _Ways(self.num_workers, self.cuts[rows], *parts)


def _sums(values: Iterator[float]) -> Times:
    return np.concatenate([[0.0], np.cumsum(np.fromiter(values, np.float64))])


def _parameter_table(layers: Sequence[LayerCosts]) -> Times:
    """Bytes of the parameters of layers[i:j]; tied ones count once."""
    own = _sums(float(layer.parameter_bytes) for layer in layers)
    table = own[None, :] - own[:, None]
    if any(layer.tied for layer in layers):
        for begin in range(len(layers)):
            for end in range(begin + 1, len(layers) + 1):
                table[begin, end] = parameter_bytes(layers[begin:end])
    return table
