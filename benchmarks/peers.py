"""References with torch: what a user would otherwise use."""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.memory import return_what_is_freed
from benchmarks.models import backward_step, make, settling, training_step
from benchmarks.task import Task, read_arguments
from benchmarks.turns import Operation, Player, take_turns
from syncline.config import num_cores
from syncline.launch.compiler import leave_out_the_compiler

GLOO_SECONDS = 60


def _join_gloo(task: Task, path: str) -> None:
    # torch exports it without saying so in its types.
    store = dist.FileStore(os.path.join(os.path.dirname(path), "gloo"), task.num_processes)  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=GLOO_SECONDS)
    dist.init_process_group("gloo", store=store, rank=task.number, world_size=task.num_processes, timeout=timeout)


def _parameter(task: Task) -> torch.Tensor:
    parameter = torch.zeros(task.num_bytes // 4)
    parameter.grad = torch.ones(task.num_bytes // 4)
    return parameter


def all_reduce(task: Task, path: str) -> Operation:
    """gloo's all-reduce of the gradients, then a fused SGD step in every process."""
    torch.set_num_threads(max(1, num_cores() // task.num_processes))
    _join_gloo(task, path)
    parameter = _parameter(task)
    optimizer = torch.optim.SGD([parameter], lr=1e-3 / task.num_processes, fused=True)
    gradient = parameter.grad
    assert gradient is not None

    def operation() -> None:
        dist.all_reduce(gradient)
        optimizer.step()

    return operation


def all_reduce_only(task: Task, path: str) -> Operation:
    """gloo's all-reduce, in place."""
    torch.set_num_threads(max(1, num_cores() // task.num_processes))
    _join_gloo(task, path)
    numbers = torch.ones(task.num_bytes // 4).zero_()
    return lambda: dist.all_reduce(numbers)


def fused_adam(task: Task, path: str) -> Operation:
    """A fused Adam step in this process, with all its cores, and two copies: gradients in, parameters out."""
    parameter = _parameter(task)
    optimizer = torch.optim.Adam([parameter], lr=1e-3, fused=True)
    given, out = torch.ones_like(parameter), torch.zeros_like(parameter)

    def operation() -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(given)
        optimizer.step()
        out.copy_(parameter)

    return operation


def train(task: Task, path: str) -> Operation:
    """The plain torch loop; several processes know nothing of each other."""
    return training_step(make(task, seed=task.number))


def backward(task: Task, path: str) -> Operation:
    """The plain torch loop without the optimizer's step: parameters, gradients, activations. Nor has it torch's
    compiler, which an optimizer would load: a worker has not either."""
    leave_out_the_compiler()
    return_what_is_freed()
    return backward_step(make(task, seed=task.number))


def train_ddp(task: Task, path: str) -> Operation:
    """The plain loop under DistributedDataParallel on gloo."""
    _join_gloo(task, path)
    made = make(task, seed=task.number)
    return training_step(dataclasses.replace(made, model=DistributedDataParallel(made.model)))


def train_ddp_nccl(task: Task, path: str) -> Operation:
    """The same on nccl, every rank on a GPU of its own."""
    device = torch.device("cuda", task.number)
    torch.cuda.set_device(device)
    store = dist.FileStore(os.path.join(os.path.dirname(path), "nccl"), task.num_processes)  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=GLOO_SECONDS)
    dist.init_process_group(
        "nccl", store=store, rank=task.number, world_size=task.num_processes, timeout=timeout, device_id=device
    )
    made = make(msgspec.structs.replace(task, device=str(device)), seed=task.number)
    model = DistributedDataParallel(made.model, device_ids=[device.index])
    return training_step(dataclasses.replace(made, model=model))


def torch_pipeline_step(task: Task, path: str) -> Operation:
    """torch's own pipelining, on gloo."""
    from benchmarks.stages import torch_pipeline_step

    _join_gloo(task, path)
    return torch_pipeline_step(task.number)


PEERS = {
    "torch_pipeline_step": torch_pipeline_step,
    "all_reduce": all_reduce,
    "all_reduce_only": all_reduce_only,
    "fused_adam": fused_adam,
    "train": train,
    "backward": backward,
    "train_ddp": train_ddp,
    "train_ddp_nccl": train_ddp_nccl,
}


def main(arguments: list[str]) -> None:
    task, path = read_arguments(arguments)
    operation = PEERS[task.kind](task, path)
    player = Player(task.side, task.number)
    take_turns(path, player, operation, settle=settling(task.device), num_uncounted=task.num_uncounted)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may wait for ranks that have ended already


if __name__ == "__main__":
    main(sys.argv[1:])
