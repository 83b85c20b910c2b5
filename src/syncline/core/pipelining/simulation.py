"""Simulation: one step of a pipeline played through, action by action; for one cut, or for thousands at once.

A transfer begins when both ends have begun it, as those of gloo and nccl do, and those of one direction of a link
come one after another. All times are arrays with one entry per cut: which action comes when is the same for all of
them, only the times differ.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.core.pipelining.schedules import Action, Shape, Transfer, actions

Times = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """What every stage and every cut costs for one micro-batch: a row per pipeline, a column per stage or cut."""

    forward: Times
    backward: Times
    down: Times  #: transfer of activations through a cut; the last column is one less than stages
    up: Times  #: transfer of gradients

    @classmethod
    def of_one(
        cls, forward: Sequence[float], backward: Sequence[float], down: Sequence[float], up: Sequence[float]
    ) -> StageTimes:
        """Those of a single pipeline."""
        rows = (np.asarray(each, np.float64).reshape(1, -1) for each in (forward, backward, down, up))
        return cls(**dict(zip(("forward", "backward", "down", "up"), rows, strict=True)))


class ActionTime(NamedTuple):
    """A computation in the timeline of a step."""

    worker: int
    kind: str  # F, B
    stage: int
    micro_batch: int
    begin: float
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """A step of one pipeline."""

    step_seconds: float
    busy_seconds: tuple[float, ...]  #: of each worker, computing
    spans: tuple[ActionTime, ...]

    @property
    def utilisation(self) -> tuple[float, ...]:
        """The part of the step in which each worker computes."""
        return tuple(busy / self.step_seconds if self.step_seconds else 1.0 for busy in self.busy_seconds)

    @property
    def bubble(self) -> float:
        """The part of all workers' time in which they do not compute."""
        return 1.0 - sum(self.utilisation) / len(self.busy_seconds)


def step_seconds(shape: Shape, times: StageTimes) -> Times:
    """The time of a step, for every row."""
    return _play(shape, times, None)


def simulate(shape: Shape, times: StageTimes) -> Simulated:
    """The step of the only row, with its timeline."""
    assert len(times.forward) == 1
    spans: list[ActionTime] = []
    seconds = float(_play(shape, times, spans)[0])
    busy = [0.0] * shape.num_workers
    for span in spans:
        busy[span.worker] += span.end - span.begin
    return Simulated(step_seconds=seconds, busy_seconds=tuple(busy), spans=tuple(spans))


def _play(shape: Shape, times: StageTimes, spans: list[ActionTime] | None) -> Times:
    rows = len(times.forward)
    clocks = [np.zeros(rows) for _ in range(shape.num_workers)]
    begun: dict[Transfer, Times] = {}  # when both ends have begun it
    ended: dict[Transfer, Times] = {}
    link_free: dict[tuple[int, int], Times] = {}
    for worker, action in _order(shape):
        clock = clocks[worker]
        if action.kind == "WAIT":
            for transfer in action.waits:
                clock = np.maximum(clock, ended[transfer])
            clocks[worker] = clock
        elif action.kind in ("F", "B"):
            durations = times.forward if action.kind == "F" else times.backward
            clocks[worker] = clock + durations[:, action.stage]
            if spans is not None:
                begin, end = float(clock[0]), float(clocks[worker][0])
                spans.append(ActionTime(worker, action.kind, action.stage, action.micro_batch, begin, end))
        elif (transfer := action.transfer) not in begun:
            begun[transfer] = clock
        else:
            start = np.maximum(begun[transfer], clock)
            link = _link(shape, transfer)
            if link in link_free:
                start = np.maximum(start, link_free[link])
            durations = times.down if transfer.kind == "F" else times.up
            ended[transfer] = link_free[link] = start + durations[:, transfer.cut]
    return np.asarray(np.max(np.stack(clocks), axis=0), np.float64)


def _link(shape: Shape, transfer: Transfer) -> tuple[int, int]:
    """The sender and the receiver."""
    above, below = shape.worker_of(transfer.cut), shape.worker_of(transfer.cut + 1)
    return (above, below) if transfer.kind == "F" else (below, above)


@functools.lru_cache(maxsize=256)
def _order(shape: Shape) -> tuple[tuple[int, Action], ...]:
    """All workers' actions in an order in which each has all that it needs.

    The second end of a transfer comes after that of the one before it on the same link.
    """
    programs = actions(shape)
    at = [0] * len(programs)
    found: list[tuple[int, Action]] = []
    begun: dict[Transfer, int] = {}
    while any(place < len(program) for place, program in zip(at, programs, strict=True)):
        before = len(found)
        for worker, program in enumerate(programs):
            while at[worker] < len(program):
                action = program[at[worker]]
                if any(begun.get(transfer, 0) < 2 for transfer in action.waits):
                    break
                if action.kind not in ("F", "B", "WAIT"):
                    begun[action.transfer] = begun.get(action.transfer, 0) + 1
                found.append((worker, action))
                at[worker] += 1
        assert len(found) > before, f"{shape}: every worker waits"
    return tuple(found)
