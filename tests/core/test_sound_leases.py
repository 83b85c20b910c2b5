"""The ledger of a manifest: what cannot be is refused before any of it is counted with."""

from __future__ import annotations

import random

import msgspec
import pytest

from syncline.core.checkpoint.soundness import check_leases, overlap
from syncline.core.leasing.leases import SHARD_POSITIONS, LeaseState, Leasing
from syncline.core.leasing.ledger import Epoch, Lease, SuspectBatch
from syncline.core.leasing.loader import Loader
from syncline.core.leasing.ranges import Span, comb
from syncline.errors import StoreError


def state(epoch: Epoch, loader: Loader | None = None, **facts: object) -> LeaseState:
    loader = loader or Loader(100, 5)
    return LeaseState(9, {"train": loader}, {"train": {2: epoch}}, {"train": [(0, 2)]}, **facts)  # type: ignore[arg-type]


def lease(number: int, span: Span, end: int | None = None, done: list[tuple[int, int]] | None = None) -> Lease:
    return Lease(number, "worker-0", 1, span, len(span) if end is None else end, done or [])


def test_what_a_job_has_come_through_is_sound() -> None:
    """In rounds and out of them: dealt out, used in part, late, given back, and left by one that died."""
    for in_rounds in (False, True):
        leasing = Leasing(LeaseState(), in_rounds=in_rounds)
        workers = [("worker-0", 1), ("worker-1", 1), ("worker-2", 2)]
        draw = random.Random(in_rounds)
        for owner in workers:
            leasing.open(owner, "train", 0, Loader(1000, 7), len(workers))
        for turn in range(60):
            owner = draw.choice(workers)
            found = leasing.ask(owner, "train", 0, workers[: draw.randrange(1, 4)]).lease
            if found is not None and draw.random() < 0.7:
                begin = draw.randrange(found.end)
                draw.choice((leasing.used, leasing.late))([(found.number, begin, min(begin + 5, found.end))])
            if turn % 7 == 0:
                leasing.out(owner, failed=True)
            check_leases(msgspec.json.decode(msgspec.json.encode(leasing.state), type=LeaseState))


def test_shards_have_room_kept_free() -> None:
    epoch = Epoch(0, 5, [Span(SHARD_POSITIONS, 2 * SHARD_POSITIONS)], {3: lease(3, Span(0, SHARD_POSITIONS))})
    check_leases(state(epoch, Loader(0, 5, num_shards=2)))
    with pytest.raises(StoreError, match="positions"):
        check_leases(state(epoch, Loader(0, 5, num_shards=1)))


WRONG = {
    "batches of 0": Epoch(100, 0, [Span(0, 100)]),
    "101 samples": Epoch(101, 5, [Span(0, 100)]),
    "to 101 of 100": Epoch(100, 5, [Span(0, 101)]),
    "doubts.* to 200": Epoch(100, 5, [Span(0, 10)], suspect_batches=[SuspectBatch(Span(100, 200), [])]),
    "there twice": Epoch(100, 5, [Span(0, 50), Span(49, 60)]),
    "twice": Epoch(100, 5, [comb(0, 5, 10, 4), comb(3, 5, 10, 4)]),
    "from 10 on are": Epoch(100, 5, [Span(10, 20)], {3: lease(3, Span(0, 20), 11)}),
    "its number": Epoch(100, 5, [], {9: lease(9, Span(0, 20))}),
    "number cannot": Epoch(100, 5, [], {3: lease(4, Span(0, 20))}),
    "behind its span": Epoch(100, 5, [], {3: lease(3, Span(0, 20), 21)}),
    "places that are done": Epoch(100, 5, [], {3: lease(3, Span(0, 20), 20, [(5, 9), (2, 4)])}),
    "what is done of it": Epoch(100, 5, [], num_done=-1),
    "has a width": Epoch(100, 5, [Span(0, 20, 0, 3)]),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_is_refused(words: str) -> None:
    with pytest.raises(StoreError, match=words.replace("doubts.*", "")):
        check_leases(state(WRONG[words]))


def test_a_ledger_is_refused_for_what_stands_beside_its_epochs() -> None:
    sound = Epoch(100, 5, [Span(0, 100)])
    check_leases(state(sound))
    with pytest.raises(StoreError, match="of no loader"):
        check_leases(LeaseState(epochs={"train": {0: sound}}))
    with pytest.raises(StoreError, match="batches of 0"):
        check_leases(LeaseState(loaders={"train": Loader(10, 0)}))
    with pytest.raises(StoreError, match="so many epochs"):
        check_leases(LeaseState(finished={"train": [(0, 1 << 60)]}))
    with pytest.raises(StoreError, match="out of order"):
        check_leases(LeaseState(finished={"train": [(4, 5), (0, 2)]}))
    with pytest.raises(StoreError, match="the seed of 'train' cannot be -1"):
        check_leases(LeaseState(seeds={"train": -1}))
    with pytest.raises(StoreError, match="next lease"):
        check_leases(LeaseState(next_lease=0))
    with pytest.raises(StoreError, match="a lease is there twice"):
        one = Epoch(100, 5, [], {3: lease(3, Span(0, 20))})
        check_leases(LeaseState(9, {"train": Loader(100, 5)}, {"train": {0: one, 1: one}}))


def test_combs_overlap_where_a_position_is_in_both() -> None:
    draw = random.Random(1)

    def any_span() -> Span:
        period = draw.randrange(2, 14)
        return comb(draw.randrange(40), draw.randrange(1, 9), period, draw.randrange(1, period + 1))

    for _ in range(3000):
        one, other = any_span(), any_span()
        both = set(one.positions().tolist()) & set(other.positions().tolist())
        assert overlap(one, other) is bool(both), (one, other)


def test_spans_of_any_length_are_compared_at_once() -> None:
    """Nothing counts the teeth: a manifest of a few bytes may tell of any number of them."""
    long = comb(0, 1 << 40, 1 << 20, 1000)
    assert not overlap(long, comb(1000, 1 << 40, 1 << 20, 1000))
    assert overlap(long, comb(1000, 1 << 40, (1 << 20) + 1, 1000))
