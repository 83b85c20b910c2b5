"""Pipelines of stages: what `--stages` makes of the other settings, and how a batch is cut into micro-batches.

A pipeline is one worker of the job. `-w 4 --stages 2` starts four processes, which are two workers of two processes
each. Everything above this file counts pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from syncline.config import JobConfig
from syncline.errors import ConfigError

SCHEDULES = ("gpipe", "1f1b", "interleaved")
#: Micro-batches per stage where nothing was said: the pipeline stands still for one part in five with two stages.
MICRO_BATCHES_PER_STAGE = 4


def check_stages(config: JobConfig) -> None:
    """Raises ConfigError for what a pipeline cannot be, or not be combined with."""
    if config.schedule not in SCHEDULES:
        raise ConfigError(f"schedule = {config.schedule!r}: must be one of {', '.join(SCHEDULES)}")
    if config.stages == 1:
        return
    if config.stages == 0:
        raise ConfigError("--stages auto is planned by syncline run; give a number here")
    if config.steps_locally:
        raise ConfigError(
            "--stages and --sync-every cannot be combined: local steps need the whole model in one process"
        )
    if config.device.startswith("cuda"):
        raise ConfigError(f"--stages and --device {config.device} cannot be combined: stages compute on CPUs")
    if config.server_device != "cpu" or config.sums == "nccl":
        raise ConfigError("--stages needs servers on CPUs: leave out --server-device and --sums nccl")


def check_divisible(said: Mapping[str, Any], stages: int) -> None:
    """Numbers of workers are numbers of processes: each must make whole pipelines."""
    for name in ("workers", "least_workers", "most_workers"):
        if int(said.get(name, 0)) % stages:
            flag = "-w" if name == "workers" else name
            raise ConfigError(
                f"{flag} {said[name]} is not divisible by --stages {stages}: every pipeline has {stages} workers; "
                f"use -w {max(1, int(said[name]) // stages) * stages}"
            )


def num_micro_batches(num_samples: int, wanted: int) -> int:
    """How many micro-batches of equal size a batch is cut into: `wanted`, or the most below that divides it."""
    return next(count for count in range(min(wanted, num_samples), 0, -1) if num_samples % count == 0)


def wanted_micro_batches(config: JobConfig) -> int:
    """The number of micro-batches that was set, or what follows from the number of stages."""
    if config.micro_batches != "auto":
        return config.micro_batches
    return 1 if config.stages == 1 else MICRO_BATCHES_PER_STAGE * config.stages


def num_parts(config: JobConfig) -> int:
    """Into how many parts the model is cut: with the interleaved schedule every process has two."""
    if config.stages == 1:
        return 1
    return config.stages * (2 if config.schedule == "interleaved" else 1)
