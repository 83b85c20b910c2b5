"""Proof of pipelines: the same numbers as one process, for every schedule, model, rule and exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.launch.conftest import commands
from tests.launch.pipelines import trains_as_one_process_does

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
