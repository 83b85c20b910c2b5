"""A global batch of a fixed size: cut into parts by who takes part, and cut again when they change."""

from __future__ import annotations

import pytest
from tests.core.test_leasing import A, B, C, Play, opened

from syncline.core.leasing.leases import LeaseState, Leasing
from syncline.core.leasing.loader import Loader
from syncline.core.leasing.shares import equal_parts
from syncline.core.slice_state import Identity
from syncline.core.wire.leases import GivenLease
from syncline.worker.data.leases import BatchRange, Portion


@pytest.mark.parametrize("in_rounds", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_every_sample_counts_once_whoever_dies(seed: int, in_rounds: bool) -> None:
    play = Play(
        seed, in_rounds=in_rounds, num_samples=237, num_workers=1 + seed % 4, is_auto=seed % 2 == 0, is_global=True
    )
    play.run()
    assert sorted(play.counted) == list(range(237))


def test_equal_parts_differ_by_at_most_one() -> None:
    assert equal_parts(10, 3) == [4, 3, 3] and equal_parts(2, 3) == [1, 1, 0] and equal_parts(12, 4) == [3] * 4
    assert equal_parts(12, 0) == [], "the last worker has left"


class Rounds:
    """Workers in step with each other: each round every worker that has a batch reads one, and commits it."""

    def __init__(self, num_samples: int, batch: int, *owners: Identity, is_auto: bool = False) -> None:
        self.data = Loader(num_samples, batch, is_auto=is_auto, is_global=True)
        self.leasing = opened(self.data, *owners)
        self.here = {owner: Portion(1) for owner in owners}
        self.entered = list(owners)
        self.seen: list[int] = []

    def join(self, owner: Identity) -> None:
        self.leasing.open(owner, "a", 0, self.data, len(self.here) + 1)
        self.here[owner] = Portion(1)

    def die(self, owner: Identity) -> None:
        del self.here[owner]
        self.entered.remove(owner)
        self.leasing.out(owner, failed=False)

    def _give_back(self, owners: tuple[Identity, ...]) -> None:
        for one in owners:
            self.leasing.gave_back(one, "a", 0, self.here[one].give_back(keeps_begun=False))

    def _cut(self, owner: Identity) -> BatchRange | None:
        portion = self.here[owner]
        while (piece := portion.cut()) is None:
            answer = self.leasing.ask(owner, "a", 0, self.entered, newest=portion.newest, given=portion.given)
            self._give_back(answer.recall)
            if answer.lease is not None:
                portion.take(
                    GivenLease(
                        answer.lease.number,
                        answer.lease.span,
                        step=answer.lease.step,
                        origin=answer.lease.origin,
                        wide=answer.lease.wide,
                    )
                )
            elif not answer.recall:
                return None
        return piece

    def round(self, *, looks: bool = True) -> list[int]:
        """How many samples each worker reads in it."""
        if looks:
            self._give_back(self.leasing.recut("a", 0, self.entered))
        pieces = {owner: self._cut(owner) for owner in self.here}
        for owner, piece in pieces.items():
            if piece is not None:
                self.leasing.used([(piece.lease, piece.begin, piece.end)])
                self.seen += piece.span.positions(piece.begin, piece.end).tolist()
                if owner not in self.entered:
                    self.entered.append(owner)
        return [len(piece) for piece in pieces.values() if piece is not None]


def test_every_round_has_the_global_batch_and_the_last_one_the_rest() -> None:
    rounds = Rounds(105, 10, A, B, C)
    assert [rounds.round() for _ in range(10)] == [[4, 3, 3]] * 10
    assert sum(rounds.round()) == 5 and rounds.round() == []
    assert rounds.seen[:10] == list(range(10)), "as one worker with a batch of 10 would read them"
    assert sorted(rounds.seen) == list(range(105))


def test_when_a_worker_dies_the_others_read_its_part() -> None:
    rounds = Rounds(600, 30, A, B, C)
    for _ in range(4):
        assert rounds.round() == [10, 10, 10]
    rounds.die(C)
    found = [rounds.round() for _ in range(16)]
    assert found == [[15, 15]] * 16
    assert sorted(rounds.seen) == list(range(600))


def test_rounds_before_the_parts_are_cut_again_are_smaller_and_nothing_is_lost() -> None:
    rounds = Rounds(600, 30, A, B, C)
    rounds.round()
    rounds.die(C)
    assert [rounds.round(looks=False) for _ in range(3)] == [[10, 10]] * 3
    found = [sum(rounds.round()) for _ in range(30)]
    assert max(found) == 30 and sum(size not in (0, 30) for size in found) <= 3, found
    assert sorted(rounds.seen) == list(range(600))


@pytest.mark.parametrize("is_auto", [False, True])
def test_when_a_worker_joins_the_parts_of_the_others_become_smaller(is_auto: bool) -> None:
    """Before it is answered the others give back, else they would go on with their parts for a minute."""
    rounds = Rounds(600, 30, A, B, is_auto=is_auto)
    for _ in range(3):
        assert rounds.round() == [15, 15]
    rounds.join(C)
    found = [rounds.round(looks=k % 2 == 0) for k in range(17)]
    assert found[0] == [15, 15, 10], "the others had begun this round when it came"
    assert found[1:16] == [[10, 10, 10]] * 15, found
    assert sorted(rounds.seen) == list(range(600))


def test_parts_by_speed_add_up_to_the_global_batch() -> None:
    rounds = Rounds(10_000, 40, A, B, is_auto=True)
    assert rounds.round() == [20, 20]
    rounds.leasing.measured("worker-0", 300, 1.0)
    rounds.leasing.measured("worker-1", 100, 1.0)
    assert rounds.round() == [30, 10]


def test_more_workers_than_samples_in_a_global_batch_wait_and_hold_nobody_up() -> None:
    rounds = Rounds(20, 2, A, B, C)
    assert [rounds.round() for _ in range(4)] == [[1, 1]] * 4
    answer = rounds.leasing.ask(C, "a", 0, [A, B, C])
    assert answer.lease is None and not answer.is_coming and not answer.is_finished and not answer.recall
    rounds.die(A)
    assert [rounds.round() for _ in range(6)] == [[1, 1]] * 6
    assert sorted(rounds.seen) == list(range(20))


def test_outside_of_rounds_a_batch_is_a_part_of_the_global_batch() -> None:
    leasing = opened(Loader(1000, 10, is_global=True), A, B, C, in_rounds=False)
    lease = leasing.ask(A, "a", 0, [A, B, C]).lease
    assert lease is not None and lease.step == 4 and len(lease.span) % 4 == 0
    after = leasing.ask(B, "a", 0, [A, B]).lease
    assert after is not None and after.step == 5, "fewer take part by now"


def test_a_ledger_is_the_same_for_any_number_of_workers() -> None:
    """A job that is taken up by another number of workers keeps the global batch."""
    rounds = Rounds(300, 12, A, B)
    for _ in range(3):
        rounds.round()
    state = rounds.leasing.state
    for owner in (A, B):
        rounds.leasing.out(owner, failed=False)
    again = Rounds(300, 12, A, B, C)
    again.leasing = Leasing(LeaseState(state.next_lease, state.loaders, state.epochs), in_rounds=True)
    for owner in (A, B, C):
        assert again.leasing.open(owner, "a", 0, again.data, 3)
    assert [again.round() for _ in range(22)] == [[4, 4, 4]] * 22
    assert sorted(rounds.seen + again.seen) == list(range(300))


def test_drop_last_leaves_out_the_partial_global_batch() -> None:
    data = Loader(105, 10, drop_last=True, is_global=True)
    for in_rounds in (True, False):
        epoch = opened(data, A, B, C, in_rounds=in_rounds).epoch("a", 0)
        assert epoch is not None and epoch.num_samples == 100


def test_it_is_told_apart_from_a_workers_own_batch() -> None:
    assert Loader(12, 4, is_global=True).describe() == "12 samples in global batches of 4"
