"""`syncline plan-stages`: a script's Pipeline is profiled and planned, and the script ends there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from syncline.core.pipelining.costs import Device, DeviceLink, Links, ModelCosts
from syncline.core.pipelining.planning import Plan, PlanRequest, plan_stages

#: gloo between two processes of a host, and what torch.distributed.pipelining does around each forward and backward.
LOOPBACK, ACTION_SECONDS = DeviceLink(bytes_per_second=1.5e9, latency_seconds=2e-4), 3e-4
#: Gradients to a server and parameters back, with what the rule takes: on one host as seen with one server and 32 MiB
#: of parameters, between hosts as on a network of 1 Gbit/s.
_EXCHANGE_HERE = DeviceLink(bytes_per_second=2e9, latency_seconds=1e-3)
_EXCHANGE_FAR = DeviceLink(bytes_per_second=1.25e8, latency_seconds=2e-3)


def exchange_of(num_pipelines: int, *, num_hosts: int = 1) -> DeviceLink:
    """The part of each pipeline in the job's way to its servers, by estimate: all pipelines share it."""
    way = _EXCHANGE_HERE if num_hosts == 1 else _EXCHANGE_FAR
    return dataclasses.replace(way, bytes_per_second=way.bytes_per_second / num_pipelines)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanQuestion:
    """What `syncline plan-stages` wants to know."""

    workers: int
    stages: int | None = None  #: None: auto
    micro_batches: int | None = None
    schedule: str = "1f1b"
    threads: int = 0  #: of each worker
    memory_bytes: int = 0  #: of each worker; 0: not limited

    def request(self, batch: int, kind: str, cut_before: Sequence[str]) -> PlanRequest:
        devices = tuple(
            Device(name=f"worker-{index}", memory_bytes=self.memory_bytes, kind=kind) for index in range(self.workers)
        )
        return PlanRequest(
            devices=devices,
            batch=batch,
            stages=self.stages,
            micro_batches=self.micro_batches,
            schedule=self.schedule,
            links=Links(default=LOOPBACK),
            exchange=exchange_of(1),
            action_seconds=ACTION_SECONDS,
            cut_before=tuple(cut_before),
        )


class PlanMade(SystemExit):
    """The plan of the script's Pipeline; it ends the script."""

    def __init__(self, plan: Plan, costs: ModelCosts) -> None:
        super().__init__(0)
        self.plan, self.costs = plan, costs


_question: PlanQuestion | None = None


def ask(question: PlanQuestion | None) -> None:
    """The next Pipeline of this process answers instead of training; None: no more."""
    global _question
    _question = question


def answer_if_asked(
    model: torch.nn.Module | None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    example: Sequence[torch.Tensor],
    target: Any = None,
    *,
    cut_before: Sequence[str] = (),
    stages: Sequence[torch.nn.Module] = (),
) -> None:
    """Does nothing in a run. Under `syncline plan-stages`: profiles, plans, and raises PlanMade."""
    if _question is None:
        return
    from syncline.torch.pipelining.profile import profile_model  # loads torch's tracing, which no run needs

    costs = profile_model(
        model, loss_fn, example, target, cut_before=cut_before, stages=stages, threads=_question.threads
    )
    kind = example[0].device.type
    raise PlanMade(plan_stages(costs, _question.request(example[0].shape[0], kind, cut_before)), costs)
