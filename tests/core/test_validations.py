"""Validations, the pure part: every sample counts once, whoever dies, asks twice or comes late."""

from __future__ import annotations

import random

import msgspec
import pytest

from syncline.core.slice_state import Identity
from syncline.core.validation import Validating, ValidationState, of_candidates
from syncline.core.wire.validation import AskValidationShard, GivenValidationShard
from syncline.errors import ConfigError


def begun(num_workers: int = 3, candidates: tuple[str, ...] = ("weights",)) -> tuple[Validating, list[Identity]]:
    core = Validating(ValidationState())
    owners = [(f"worker-{rank}", rank + 1) for rank in range(num_workers)]
    called = core.come(7, {"": 7})
    core.begin(called.turn, called.step, owners, candidates)
    for owner in owners:
        core.pulled(called.turn, owner, 7)
    return core, owners


def ask(core: Validating, owner: Identity, done: GivenValidationShard | None = None) -> GivenValidationShard:
    sums = {"x": float(sum(range(done.begin, done.end)))} if done is not None else {}
    number = done.validation_shard if done is not None else 0
    return core.ask(owner, AskValidationShard(1, "", "weights", 100, 7, number, sums))


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_counts_once_whoever_dies_or_asks_twice(seed: int) -> None:
    """The state goes through the journal at every turn, as when the coordinator dies and comes back."""
    chance = random.Random(seed)
    core, owners = begun()
    given: dict[Identity, GivenValidationShard] = {}
    for _ in range(1000):
        core = Validating(msgspec.msgpack.decode(msgspec.msgpack.encode(core.state), type=ValidationState))
        now = core.state.now
        assert now is not None
        if now.is_finished:
            break
        owner = chance.choice(owners)
        if chance.random() < 0.1 and len(now.inside) > 1 and now.is_in(owner):
            now.out(owner)
            given.pop(owner, None)
        elif not now.is_in(owner):
            assert ask(core, owner) == GivenValidationShard(0)
        else:
            answer = ask(core, owner, given.get(owner))
            if chance.random() < 0.8:  # else the answer got lost, and the same is said again
                given[owner] = answer
    over = core.end()
    assert over is not None
    assert over.values() == {"x": sum(range(100)) / 100}
    assert core.state.metrics == ["x"]
    assert core.state.steps == {"": 7}


def test_a_shard_is_large_first_and_made_of_whole_batches() -> None:
    core, owners = begun(2)
    sizes, done = [], None
    while (done := ask(core, owners[0], done)).validation_shard:
        sizes.append(done.end - done.begin)
    assert sizes == sorted(sizes, reverse=True)
    assert all(size % 7 == 0 for size in sizes[:-1])
    assert (sizes[0], sum(sizes)) == (28, 100)


def test_what_is_called_and_what_is_not() -> None:
    core = Validating(ValidationState(floor=10))
    assert core.come(10, {"": 10}).turn == 0  # a job that was taken up there
    assert core.come(20, {"": 20}, epoch=1).turn == 1
    assert core.come(21, {"other": 20}).turn == 1
    assert core.state.due == ["", "other"]
    core.begin(1, 20, [("worker-0", 1)], ["weights"])
    assert core.come(25, {"": 25}, epoch=1).turn == 0  # behind the same epoch
    assert core.come(25, {"": 25}, epoch=2).turn == 2


def test_a_validation_that_nobody_can_end_is_called_anew() -> None:
    core, owners = begun(2)
    now = core.state.now
    assert now is not None
    ask(core, owners[0])
    for owner in owners:
        assert core.give_up() is None
        now.out(owner)
    assert core.give_up() is now
    assert (core.state.now, core.called().turn, core.state.due) == (None, 2, [""])


def test_data_and_metrics_must_be_the_same_everywhere() -> None:
    core, owners = begun(2)
    first = ask(core, owners[0])
    with pytest.raises(ConfigError, match="50 samples in batches of 7 here, 100 in"):
        core.ask(owners[1], AskValidationShard(1, "", "weights", 50, 7))
    second = ask(core, owners[1])
    ask(core, owners[0], first)
    with pytest.raises(ConfigError, match="some batches have x, y"):
        core.ask(owners[1], AskValidationShard(1, "", "weights", 100, 7, second.validation_shard, {"y": 1.0}))


def test_candidates_of_a_metric() -> None:
    values = {"loss": 3.0, "average:loss": 2.0, "worker-1:loss": 1.0, "worker-1:accuracy": 0.5}
    assert of_candidates(values, "loss") == {"weights": 3.0, "average": 2.0, "worker-1": 1.0}
    assert of_candidates(values, "accuracy") == {"worker-1": 0.5}
