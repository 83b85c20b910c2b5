"""Random states of a script: put back where they were, with or without torch."""

from __future__ import annotations

import random
import sys

import numpy as np
import numpy.random  # it is loaded when it is first used
import pytest
import torch

from syncline.worker.checkpoint import rng_state


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_all_generators_go_on_where_they_were() -> None:
    states = rng_state.take()
    first = drawn()
    assert drawn() != first
    rng_state.put_back(states)
    assert drawn() == first


def test_a_script_without_torch_can_read_what_was_taken_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a ring the server in its process has loaded it; taken up with servers of their own, nobody has."""
    states = rng_state.take()
    assert not any(isinstance(value, torch.Tensor) for value in states.values())
    first = drawn()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        rng_state.put_back(states)
        again = random.random(), float(np.random.rand())
    assert again == first[:2]


def test_states_that_older_jobs_have_saved_as_tensors() -> None:
    states = {"torch": torch.get_rng_state()}
    first = torch.rand(())
    rng_state.put_back(states)
    assert torch.rand(()) == first
