"""The random numbers of stage processes are saved with the leader's, and never drawn twice."""

from __future__ import annotations

import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from syncline.errors import StoreError
from syncline.torch.pipelining.orders import Randomize
from syncline.torch.pipelining.randomness import StageRandomness, randomize, taken
from syncline.worker.checkpoint import rng_state
from syncline.worker.checkpoint.encoding import Encoder, decode, from_json, to_json
from syncline.worker.checkpoint.rng_state import OwnStream
from syncline.worker.checkpoint.script_state import Part


def drawn() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


class Leader:
    """The leader of a pipeline, as far as random numbers go."""

    def __init__(self, *, processes: int = 2, life: int = 0, step: int = 0, rank: int = 0) -> None:
        self.orders = list[tuple[int, Randomize]]()
        self.stream = OwnStream("worker-0", life)
        job = types.SimpleNamespace(
            own_stream=self.stream, life=types.SimpleNamespace(step=step), rank=rank, state=self
        )
        self.randomness = StageRandomness(job, processes, lambda *order: self.orders.append(order))  # type: ignore[arg-type]

    def add_part(self, name: str, part: Part) -> None:
        assert name == "random states of stages" and part.is_own
        self.part = part

    def settled(self) -> list[tuple[int, Randomize]]:
        """What a batch sends before it."""
        self.orders.clear()
        self.randomness.settle()
        return list(self.orders)


def saved_and_read(value: Any) -> Any:
    encoder = Encoder()
    tree = to_json(encoder.encode(value, "it"))
    return decode(from_json(tree), [data for _, _, data in encoder.tensors].__getitem__)


@pytest.fixture(autouse=True)
def _own_numbers() -> Iterator[None]:
    drawn()  # loads all generators: the state of one that is not loaded is not taken
    before = rng_state.take()
    rng_state.forget_seed()
    yield
    rng_state.forget_seed()
    rng_state.put_back(before)


def test_a_restored_stage_goes_on_with_its_numbers() -> None:
    leader = Leader()
    assert leader.settled() == [] and leader.part.take() is None
    leader.randomness.hear(1, taken())
    saved = saved_and_read(leader.part.take())
    wanted = drawn()
    again = Leader(life=3, step=7)
    again.part.put_back(saved)
    ((number, order),) = again.settled()
    assert number == 1 and drawn() != wanted
    randomize(order)
    assert drawn() == wanted
    assert again.settled() == []


def test_a_stage_says_its_states_only_when_they_have_changed() -> None:
    before = taken()
    assert taken() == before
    torch.rand(())
    assert taken() != before


@pytest.mark.parametrize("restores", [True, False])
def test_another_number_of_stages_draws_other_numbers(restores: bool) -> None:
    """Nothing that was saved fits, or nothing was saved: the numbers of the beginning do not come again."""
    two = Leader()
    two.randomness.hear(1, taken())
    saved = saved_and_read(two.part.take())
    begun, found = rng_state.take(), list[float]()
    for step in (5, 6):
        rng_state.put_back(begun)  # every life begins with the seed of the script
        three = Leader(processes=3, step=step)
        if restores:
            three.part.put_back(saved)
        orders = three.settled()
        assert [number for number, _ in orders] == [1, 2]
        for _, order in orders:
            assert order.states is None
            randomize(order)
            found += drawn()
        assert three.settled() == []
    assert len(set(found)) == 12


def test_seed_everything_gives_each_life_and_process_a_stream() -> None:
    """Also a worker that starts again and gets its old states back: they have been used already."""
    found = list[float]()
    for life in (0, 4, 5):
        rng_state.seed_everything(24)
        leader = Leader(processes=3, life=life)
        leader.randomness.hear(1, taken())
        leader.randomness.hear(2, taken())
        if life:
            leader.part.put_back(leader.part.take())
        leader.stream.begin()
        for _, order in leader.settled():
            assert order.states is None
            randomize(order)
            found += drawn()
    assert len(set(found)) == 3 * 2 * 3


def test_a_job_that_resumes_goes_on_after_seed_everything() -> None:
    rng_state.seed_everything(24)
    leader = Leader(step=9)
    leader.randomness.hear(1, taken())
    leader.part.put_back(saved_and_read(leader.part.take()))
    leader.stream.begin()
    ((_, order),) = leader.settled()
    assert order.states is not None and leader.settled() == []


@pytest.mark.parametrize(
    "wrong", [5, [None], [{"tree": b"", "tensors": []}], [{"python": 1, "tree": 2, "tensors": 3}]]
)
def test_what_is_no_state_is_refused(wrong: Any) -> None:
    with pytest.raises(StoreError, match="random states of"):
        Leader().part.put_back(wrong)
