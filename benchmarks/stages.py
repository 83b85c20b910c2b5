"""Training in stages: a model cut in two, in a pipeline of ours and by torch's own pipelining."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.match import play
from benchmarks.row import Effort, Reach, Row, Samples
from benchmarks.sides import JobSide, ProcessSide
from benchmarks.task import Task
from benchmarks.turns import Operation

if TYPE_CHECKING:
    import torch

STAGES, MICRO_BATCHES, WIDTH, BATCH = 2, 8, 1024, 512


def _halves() -> list[torch.nn.Module]:
    from torch import nn

    return [
        nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4))) for _ in range(STAGES)
    ]


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    return torch.ones(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)


def pipeline_step() -> Operation:
    """Ours: the leader of a pipeline of two processes."""
    import torch

    import syncline
    from syncline.torch import DistributedOptimizer, Pipeline

    torch.set_num_threads(1)
    syncline.init()
    pipe = Pipeline(stages=_halves(), loss_fn=torch.nn.functional.mse_loss)
    optimizer = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=1e-3, momentum=0.9), model=pipe)
    x, y = _batch()

    def step() -> None:
        pipe.step(x, y)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_pipeline_step(rank: int) -> Operation:
    """torch's, in one of its ranks: the schedule, and a step of its own stage's optimizer."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    half = _halves()[rank]
    stage = PipelineStage(half, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(half.parameters(), lr=1e-3, momentum=0.9, fused=True)
    x, y = _batch()

    def step() -> None:
        if rank:
            schedule.step(target=y, losses=[])
        else:
            schedule.step(x)
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline(name: str, *, reach: Reach) -> Row:
    def measure(effort: Effort) -> Samples:
        torchs = ProcessSide("peers", Task(kind="torch_pipeline_step"), processes=STAGES)
        ours = JobSide(
            Task(kind="pipeline_step"), workers=1, stages=STAGES, micro_batches=MICRO_BATCHES, transport="shm"
        )
        return play(ours, torchs, effort)

    return Row(
        name=name,
        what=f"an MLP of 8 layers in {STAGES} stages, 1f1b, {MICRO_BATCHES} micro-batches, 1 server: samples/s",
        reference="torch.distributed.pipelining alone, on the same cut",
        reach=reach,
        measure=measure,
        num_cores=STAGES,
    )
