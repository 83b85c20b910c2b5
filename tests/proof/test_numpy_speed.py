"""What an update costs on a server without torch: `pytest -m proof -rP tests/proof/test_numpy_speed.py`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from syncline.core.rule import RuleSpec
from syncline.server.numpy_rules import DEFAULTS, NumpyRule
from syncline.server.torch_rules import TorchRule

NUM_ITEMS = 1_000_000
#: What users are told (`NUMPY_COST`, docs/guides/numpy.md) is 1.6 to 3.5; other processors may differ by about this.
MOST_TIMES = 5.0


def shortest(*steps: Callable[[], object]) -> list[float]:
    """The shortest time of each, by turns: another process disturbs all alike."""
    found = [float("inf")] * len(steps)
    for _ in range(60):
        for place, step in enumerate(steps):
            began = time.perf_counter()
            step()
            found[place] = min(found[place], time.perf_counter() - began)
    return found


@pytest.mark.proof
@pytest.mark.alone
def test_updates_by_numpy_against_torch() -> None:
    """With one thread each, as in the pool of a server."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in DEFAULTS:
            spec = RuleSpec(name, {"lr": 0.01, **({"momentum": 0.9} if name.endswith("SGD") else {})})
            gradient = np.random.default_rng(0).standard_normal(NUM_ITEMS).astype(np.float32)
            one = TorchRule(spec, {0: torch.zeros(NUM_ITEMS)})
            other = NumpyRule(spec, {0: np.zeros(NUM_ITEMS, np.float32)})
            by_torch, by_numpy = shortest(
                functools.partial(one.step, {0: torch.from_numpy(gradient)}, {}),
                functools.partial(other.step, {0: gradient}, {}),
            )
            times = f"torch {1e3 * by_torch:6.2f} ms  NumPy {1e3 * by_numpy:6.2f} ms"
            print(f"{name:13} {times}  {by_numpy / by_torch:.1f}x")
            assert by_numpy < MOST_TIMES * by_torch, name
    finally:
        torch.set_num_threads(before)
