"""The examples in Keras: they differ little from plain Keras, and they train."""

from __future__ import annotations

import difflib
import pathlib
import re

import keras
import numpy as np
import pytest
from tests.launch.conftest import Commands

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"
NAMES = ["keras_lenet", "keras_iris", "keras_mnist_mlp"]
MOST_LINES = 6


def accuracies(output: str) -> list[float]:
    return [float(found) / 100 for found in re.findall(r"test accuracy +(\d+\.\d+)%", output)]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_differs_from_one_process_by_at_most_six_lines(name: str) -> None:
    single = (EXAMPLES / "single" / f"{name}.py").read_text().splitlines()
    many = (EXAMPLES / f"{name}.py").read_text().splitlines()
    found = [line for line in difflib.ndiff(single, many) if line[0] in "+-"]
    added, removed = (sum(line[0] == sign for line in found) for sign in "+-")
    assert max(added, removed) <= MOST_LINES, found


def test_iris(commands: Commands) -> None:
    """At least 0.90 on one process and on two workers."""
    alone = commands.finish(commands.start(str(EXAMPLES / "single" / "keras_iris.py"), program=()))
    assert alone.code == 0 and accuracies(alone.output)[0] >= 0.9, alone.output
    both = commands.run("run", "-w", "2", "-s", "1", str(EXAMPLES / "keras_iris.py"))
    assert both.code == 0 and len(accuracies(both.output)) == 2, both.output
    assert min(accuracies(both.output)) >= 0.9, both.output


def test_lenet_at_a_small_size(commands: Commands) -> None:
    words = [str(EXAMPLES / "keras_lenet.py"), "--epochs", "1", "--samples", "3000"]
    result = commands.run("run", "-w", "2", "-s", "1", *words)
    assert result.code == 0 and len(set(accuracies(result.output))) == 1, result.output
    assert accuracies(result.output)[0] > 0.4, result.output
    model = keras.models.load_model(commands.folder / "lenet.keras")
    assert model.count_params() == 44_426
    assert all(np.isfinite(each).all() for each in model.get_weights())


def test_mlp_at_a_small_size(commands: Commands) -> None:
    words = [str(EXAMPLES / "keras_mnist_mlp.py"), "--epochs", "1", "--samples", "3000"]
    result = commands.run("run", "-w", "2", "-s", "1", *words)
    assert result.code == 0 and accuracies(result.output)[0] > 0.45, result.output
