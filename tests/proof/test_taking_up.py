"""`make proof`: a job that was killed goes on with other numbers of servers and workers, to the same end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.launch.conftest import commands
from tests.launch.saved import EPOCHS, NUM_SAMPLES, SCRIPT, break_off, expected, once_each, result

__all__ = ["commands"]

WORDS = ("run", "--checkpoint", "saves", "--save-every", "4steps")
GRADIENT = "gradient = (3 * x + np.arange(8) * batch.sum()) % 101 - random.randrange(50)"
RULE = 'syncline.Rule("SGD", lr=1.0, momentum=1.0), reduce="sum"'
#: Whoever reads which sample in which round: the end is the same.
SUMS = SCRIPT.replace(GRADIENT, "gradient = np.arange(8.0) * batch.sum()").replace(
    RULE, 'syncline.Rule("SGD", lr=1.0), reduce="sum"'
)
ADAM = SCRIPT.replace(GRADIENT, "gradient = x - np.sin(np.arange(8) * batch.mean())").replace(
    RULE, 'syncline.Rule("Adam", lr=0.05), reduce="mean"'
)
assert GRADIENT not in SUMS + ADAM and RULE not in SUMS + ADAM


def broken_off(commands: Any, text: str) -> str:
    """The script of a job that was killed with two checkpoints made, on two servers and two workers."""
    script: str = commands.script(text)
    process = commands.start(*WORDS, "-w", "2", "-s", "2", script, "0.15")
    break_off(commands, process, commands.folder / "saves", count=2)
    return script


def resumed_from(commands: Any, script: str, *words: str) -> tuple[list[float], list[list[float]], int]:
    again = commands.run(*WORDS, *words, script, "0.01")
    assert again.code == 0 and "resumes from" in again.output, again.output
    found = result(again.output)
    assert once_each(found[1]), again.output
    return found


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("servers", ["1", "3", "5"])
def test_on_other_servers_bit_by_bit(commands: Any, servers: str) -> None:
    assert resumed_from(commands, broken_off(commands, SCRIPT), "-w", "2", "-s", servers) == expected()


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", ["1", "4"])
@pytest.mark.parametrize("policy", ["sync", "bounded:2", "async"])
def test_on_other_workers_every_gradient_counts_once(commands: Any, workers: str, policy: str) -> None:
    x, _, _ = resumed_from(commands, broken_off(commands, SUMS), "-w", workers, "-s", "2", "--policy", policy)
    assert x == (-np.arange(8.0) * sum(range(NUM_SAMPLES)) * EPOCHS).tolist()


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("servers", ["1", "2", "3"])
def test_adam_goes_on_as_if_nothing_had_been(commands: Any, servers: str) -> None:
    script = broken_off(commands, ADAM)
    plain = commands.run("run", "-w", "2", "-s", "2", "--name", "plain", script, "0.0")
    assert plain.code == 0, plain.output
    x, _, _ = resumed_from(commands, script, "-w", "2", "-s", servers)
    difference = float(np.max(np.abs(np.array(x) - result(plain.output)[0])))
    print(f"Adam on {servers} servers instead of two: {difference:.1e} from the unbroken run (reach 1e-6)")
    assert difference <= 1e-6
