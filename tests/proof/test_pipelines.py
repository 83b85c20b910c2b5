"""Proof of pipelines: the same numbers as one process, for every schedule, model, rule and exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.launch.conftest import commands
from tests.launch.pipeline_ways import WAYS
from tests.launch.pipelines import IntegerJob, trains_as_one_process_does, trains_in_this_way

from syncline.core.rule import OPTIONS

__all__ = ["commands"]
pytestmark = pytest.mark.proof

#: Muon takes matrices only, and a model has vectors too.
RULES = [name for name in OPTIONS if hasattr(torch.optim, name) and name != "Muon"]


@pytest.mark.parametrize("model", ["plain", "lenet", "resnet", "tied"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stages", [2, 4])
def test_every_schedule_trains_as_one_process_does(
    commands: Any, stages: int, replicas: int, schedule: str, model: str
) -> None:
    """MLP, LeNet, ResNet-18 with BatchNorm, a transformer with tied embeddings."""
    if (stages, schedule, model) == (4, "interleaved", "lenet"):
        pytest.skip("LeNet has five layers, and four processes of two parts need eight")
    workers = stages * replicas
    largest = trains_as_one_process_does(commands, workers, stages, schedule, model, "float64", "SGD")
    print(f"{model}, {schedule}, {stages} stages, {replicas} replicas: {largest:.2g}")


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_trains_as_in_one_process(commands: Any, rule: str) -> None:
    largest = trains_as_one_process_does(commands, 4, 2, "1f1b", "tied", "float64", rule)
    print(f"{rule}: {largest:.2g}")


@pytest.mark.parametrize("model", ["plain", "lenet", "resnet", "tied"])
def test_floats_of_32_bits(commands: Any, model: str) -> None:
    largest = trains_as_one_process_does(commands, 4, 2, "1f1b", model, "float32", "SGD")
    print(f"{model}, float32: {largest:.2g}")


@pytest.mark.parametrize("more", [("-s", "2", "--replicas", "2"), ("--exchange", "ring"), ("--transport", "tcp")])
def test_every_exchange(commands: Any, more: tuple[str, ...]) -> None:
    trains_as_one_process_does(commands, 4, 2, "1f1b", "tied", "float64", "Adam", *more)


#: Rounding differs where a kernel of bfloat16 sums in another order.
LIMITS = {"autocast": 1e-3, "scaler": 1e-5}


@pytest.mark.parametrize("way", WAYS)
def test_what_scripts_do_besides(commands: Any, way: str) -> None:
    trains_in_this_way(commands, way, limit=LIMITS.get(way, 1e-10))


@pytest.mark.parametrize("policy", ["bounded:2", "async"])
def test_every_policy(commands: Any, policy: str) -> None:
    """One pipeline is one worker, and waits for each of its commits: its steps are those of one process."""
    trains_in_this_way(commands, "", "--policy", policy)


@pytest.mark.parametrize("policy", ["bounded:2", "async"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_sample_of_two_pipelines_counts_once(commands: Any, policy: str, is_tied: bool) -> None:
    IntegerJob(commands, 2, 2, 512, 2, "--policy", policy, is_tied=is_tied).check()


@pytest.mark.parametrize(("codec", "limit"), [("bf16", 0.02), ("fp16", 0.02), ("int8", 0.1), ("topk:0.5", 0.5)])
def test_every_codec(commands: Any, codec: str, limit: float) -> None:
    """What is encoded comes near to what it would be without."""
    trains_in_this_way(commands, "", "--transport", "tcp", "--codec", codec, limit=limit)
