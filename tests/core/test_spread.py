"""Which slices of a ring go to all servers: what takes fewer bytes, by the replica sets alone."""

from __future__ import annotations

import pytest

from syncline.config import JobConfig
from syncline.core.codecs.named import codecs_of
from syncline.core.layout import Parameter
from syncline.core.registry import Registry
from syncline.core.replica_sets import ReplicaSet
from syncline.core.ring import Spread
from syncline.core.rule import RuleSpec


def spread(number: int, hosts: str, **settings: str) -> set[int]:
    """Of a ring of so many servers, one letter each for its host; slice 0 has one number, slice 1 some thousands."""
    config = JobConfig(exchange=settings.pop("exchange", "ring"), **settings)  # type: ignore[arg-type]
    registry = Registry(["server-0"], 1 << 16)
    for ordinal, (name, size) in enumerate((("tiny", 1), ("large", 4096))):
        rules = [RuleSpec("SGD", {"lr": 0.1})]
        registry.register("worker-0", True, ordinal, [Parameter(name, "float32", (size,), 0)], rules, "mean")
    names = [f"server-{k}" for k in range(number)]
    parts = [(segment, part) for segment in registry.layout.segments for part in segment.slices]
    replica_sets = {part.id: ReplicaSet(part.id, names[0], tuple(names[1:])) for _, part in parts}
    return set(Spread(config, codecs_of(config)).of(parts, replica_sets, dict(zip(names, hosts, strict=True))))


@pytest.mark.parametrize(
    ("codec", "most"), [("none", 2), ("bf16", 3), ("int8", 4), ("topk:0.01", 50)]
)  # fmt: skip
def test_as_long_as_all_pushes_are_fewer_bytes_than_a_sum(codec: str, most: int) -> None:
    assert 1 in spread(most, "ab" + "a" * (most - 2), codec=codec)
    assert 1 not in spread(most + 1, "ab" + "a" * (most - 1), codec=codec)


def test_it_is_chosen_for_each_slice_by_itself() -> None:
    """One number of few is not one in a hundred."""
    assert spread(10, "ab" * 5, codec="topk:0.01") == {1}


def test_an_encoded_sum_is_the_measure_where_there_is_one() -> None:
    assert spread(2, "ab", pull_codec="bf16") == set()
    assert spread(2, "ab", codec="bf16", pull_codec="bf16") == {0, 1}


def test_between_hosts_only_and_in_a_ring_only() -> None:
    assert spread(2, "aa") == set() and spread(2, "ab") == {0, 1} == spread(2, "aa", transport="tcp")
    assert spread(2, "ab", exchange="servers") == set()
    assert spread(1, "a", transport="tcp") == set(), "there is nobody else"
