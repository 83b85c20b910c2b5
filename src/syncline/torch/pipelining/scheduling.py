"""The scheduler of a running pipeline: it plans at the first batch, and looks every minute whether another cut pays.

Each pipeline plans for itself, with its own host's times. Where a model is cut changes no number but for the order in
which gradients of tied weights are added up; the number of micro-batches, which may, is the job's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from syncline.core.pipelining.costs import Device, Links
from syncline.core.pipelining.planning import Plan, PlanRequest, plan_stages
from syncline.core.pipelining.replanning import Replanner, StageMeasured
from syncline.core.units import counted
from syncline.net.shm import bytes_for_each
from syncline.torch.pipelining.cutting import Layers
from syncline.torch.pipelining.engine import LossFunction
from syncline.torch.pipelining.plan_only import ACTION_SECONDS, LOOPBACK, exchange_of
from syncline.worker.job import Job

if TYPE_CHECKING:
    from syncline.torch.pipelining.leading import StageLeader


class StageScheduler:
    """Decides where the model of one pipeline is cut. Belongs to the script's thread of its leader."""

    def __init__(self, job: Job, layers: Layers, loss_fn: LossFunction, leader: StageLeader) -> None:
        self._job, self._layers, self._loss_fn, self._leader = job, layers, loss_fn, leader
        self._replanner: Replanner | None = None
        self._has_planned = False

    @property
    def plan(self) -> Plan | None:
        """What the model is cut by; None: by no plan."""
        return self._replanner.plan if self._replanner is not None else None

    def look(self, inputs: Sequence[torch.Tensor], target: torch.Tensor, count: int) -> None:
        """Before a step: plans at the first one, and cuts elsewhere if that pays by now."""
        if not self._has_planned:
            self._has_planned = True
            self._begin(inputs, target, count)
        elif self._replanner is not None:
            decision = self._replanner.look(time.monotonic(), self._measured(self._replanner.plan))
            if decision is not None:
                self._say(decision.reason)
                self._cut(decision.plan)

    def _begin(self, inputs: Sequence[torch.Tensor], target: torch.Tensor, count: int) -> None:
        names = self._layers.names
        if len(names) == len(self._leader.firsts):
            return  # there is one way to cut it
        if self._layers.cut_before:
            self._say(f"cut before {', '.join(self._layers.cut_before)}, as cut_before says")
            return
        try:
            plan = self._plan(inputs, target, count)
        except Exception as error:  # of the model too: if it is wrong, the step itself says so, and where
            text = str(error).splitlines()
            self._say(
                f"no plan could be made ({type(error).__name__}: {text[0] if text else ''}); the model stays cut "
                "into parts of equal numbers of parameters"
            )
            return
        self._say(f"{plan.reason}; a step is predicted to take {plan.step_seconds * 1e3:,.1f} ms")
        if list(plan.cuts[:-1]) != list(self._leader.firsts):
            self._cut(plan)

    def _cut(self, plan: Plan) -> None:
        if not self._leader.cut(plan.cuts[:-1]):
            self._replanner = None
            self._say("the model stays cut as it is: the script has given parameters other memory (.data = …)")

    def _plan(self, inputs: Sequence[torch.Tensor], target: torch.Tensor, count: int) -> Plan:
        from syncline.torch.pipelining.profile import profile_model

        assert self._job.stages is not None
        costs = profile_model(
            self._layers.model,
            self._loss_fn,
            inputs,
            target,
            stages=self._layers.given,
            micro_batches=count,
            computes=False,
        )
        size, memory = self._job.stages.num_processes, self._bytes_for_each()
        request = PlanRequest(
            devices=tuple(Device(name=f"process {number}", memory_bytes=memory) for number in range(size)),
            batch=inputs[0].shape[0],
            stages=size,
            micro_batches=count,
            schedule=self._job.config.schedule,
            links=Links(default=LOOPBACK),
            exchange=exchange_of(self._job.world_size, num_hosts=self._job.num_hosts),
            action_seconds=ACTION_SECONDS,
            keeps_order=True,
        )
        plan = plan_stages(costs, request)
        self._replanner = Replanner(costs, request, plan)
        return plan

    def _bytes_for_each(self) -> int:
        """What each process may take. By now all pipelines of this host have their parameters and gradients."""
        assert self._job.stages is not None
        pipelines = self._job.num_local_workers
        return bytes_for_each(pipelines * self._job.stages.num_processes, pipelines * self._leader.shared_bytes)

    def _measured(self, plan: Plan) -> list[StageMeasured]:
        micro_batches = self._leader.num_samples * plan.micro_batches / plan.batch
        return [
            StageMeasured(worker=f"process {number}", num_micro_batches=micro_batches, busy_seconds=seconds)
            for number, seconds in enumerate(self._leader.busy_seconds)
        ]

    def _say(self, reason: str) -> None:
        parts = counted(len(self._leader.firsts), "part")
        self._job.notice(f"the pipeline of {self._job.name}, in {parts}: {reason}", is_own=True)
