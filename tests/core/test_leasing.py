"""Leasing: whole jobs of workers that ask, commit, die and come back, played by hand."""

from __future__ import annotations

import random

import pytest

from syncline.core.checkpoint.snapshot import ledger_to_resume
from syncline.core.leasing.leases import SHARD_POSITIONS, LeaseState, Leasing
from syncline.core.leasing.ledger import Lease
from syncline.core.leasing.loader import Loader
from syncline.core.slice_state import Identity
from syncline.core.wire.leases import GivenLease
from syncline.errors import ConfigError
from syncline.worker.data.leases import Portion


class Worker:
    """Reads its leases batch by batch, commits some batches later."""

    def __init__(self, owner: Identity, batch: int) -> None:
        self.owner, self.batch = owner, batch
        self.leases: list[tuple[Lease, int, int]] = []  # with places: read from, to be read to
        self.open: list[tuple[int, int, int]] = []

    def take(self, lease: Lease) -> None:
        self.leases.append((lease, 0, lease.end))

    def read(self, width: int) -> bool:
        while self.leases:
            lease, begin, end = self.leases.pop(0)
            if begin >= end:
                continue
            upto = min(begin + width, end)
            self.leases.insert(0, (lease, upto, end))
            self.open.append((lease.number, begin, upto))
            return True
        return False

    def give_back(self) -> list[tuple[int, int]]:
        given = [(lease.number, begin) for lease, begin, _ in self.leases]
        self.leases = []
        return given


class Play:
    """An epoch of one loader."""

    def __init__(
        self,
        seed: int,
        *,
        in_rounds: bool,
        num_samples: int,
        num_workers: int,
        is_auto: bool = False,
        is_global: bool = False,
    ) -> None:
        self.chance = random.Random(seed)
        self.leasing = Leasing(LeaseState(), in_rounds=in_rounds)
        self.loader = Loader(num_samples, 4, is_auto=is_auto, is_global=is_global)
        self.workers = [Worker((f"worker-{k}", k + 1), 4) for k in range(num_workers)]
        self.next_incarnation = num_workers + 1
        self.counted: list[int] = []
        self.spans = {}
        self.finished: set[Identity] = set()
        for worker in self.workers:
            self.leasing.open(worker.owner, "a", 0, self.loader, num_workers)

    @property
    def participants(self) -> list[Identity]:
        return [worker.owner for worker in self.workers]

    def step(self, worker: Worker) -> None:
        action = self.chance.random()
        if action < 0.1 and worker.open:
            self.commit(worker)
        elif action < 0.13:
            self.die(worker)
        elif action < 0.16 and self.leasing.epoch("a", 0) is not None:
            self.recall(self.leasing.recut("a", 0, self.participants))
        elif action < 0.2:
            self.leasing.measured(worker.owner[0], 4, self.chance.uniform(0.001, 0.1))
        elif not worker.read(self.chance.choice([4, 4, 4, 3])):
            self.commit(worker)
            self.ask(worker)

    def ask(self, worker: Worker) -> None:
        answer = self.leasing.ask(worker.owner, "a", 0, self.participants, worker.open)
        if answer.lease is not None:
            self.spans[answer.lease.number] = answer.lease.span
            worker.take(answer.lease)
        elif answer.is_finished:
            self.finished.add(worker.owner)
        self.recall(answer.recall)

    def recall(self, owners: tuple[Identity, ...]) -> None:
        for worker in self.workers:
            if worker.owner in owners:
                self.leasing.gave_back(worker.owner, "a", 0, worker.give_back())

    def commit(self, worker: Worker) -> None:
        acks, worker.open = worker.open, []
        for number, begin, end in acks:
            self.counted += self.spans[number].positions(begin, end).tolist()
        assert self.leasing.used(acks) == sum(end - begin for _, begin, end in acks)

    def die(self, worker: Worker) -> None:
        self.leasing.out(worker.owner, failed=False)
        self.workers.remove(worker)
        again = Worker((worker.owner[0], self.next_incarnation), 4)
        self.next_incarnation += 1
        self.leasing.open(again.owner, "a", 0, self.loader, len(self.workers) + 1)
        self.workers.append(again)

    def run(self) -> None:
        for _ in range(20_000):
            idle = [worker for worker in self.workers if worker.owner not in self.finished]
            if not idle:
                return
            self.step(self.chance.choice(idle))
        raise AssertionError(f"not finished: {self.leasing.epoch('a', 0)}")


@pytest.mark.parametrize("in_rounds", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_every_sample_counts_once_whoever_dies(seed: int, in_rounds: bool) -> None:
    play = Play(seed, in_rounds=in_rounds, num_samples=237, num_workers=1 + seed % 4, is_auto=seed % 2 == 0)
    play.run()
    assert sorted(play.counted) == list(range(237))
    assert not play.leasing.open(("worker-0", 99), "a", 0, play.loader, 1), "it is finished"
    play.leasing.forget_finished()
    assert play.leasing.epoch("a", 0) is None


def leases(leasing: Leasing, owners: list[Identity]) -> dict[str, list[int]]:
    found = {}
    for owner in owners:
        answer = leasing.ask(owner, "a", 0, owners)
        assert answer.lease is not None
        found[owner[0]] = answer.lease.span.positions().tolist()
    return found


A, B, C = ("worker-0", 1), ("worker-1", 2), ("worker-2", 3)


def test_in_rounds_the_parts_do_not_depend_on_who_asks_first() -> None:
    found = []
    for order in ([A, B, C], [C, A, B]):
        leasing = Leasing(LeaseState(), in_rounds=True)
        for owner in order:
            leasing.open(owner, "a", 0, Loader(1000, 4), 3)
        answers = {o: leasing.ask(o, "a", 0, [A, B, C]).lease for o in order}
        found.append({o: lease.span for o, lease in answers.items() if lease is not None})
    assert found[0] == found[1] and len(found[0]) == 3
    assert found[0][B].positions(0, 8).tolist() == [4, 5, 6, 7, 16, 17, 18, 19]


def test_parts_of_a_global_batch_follow_the_speeds() -> None:
    leasing = Leasing(LeaseState(), in_rounds=True)
    loader = Loader(100_000, 32, is_auto=True)
    for owner in (A, B):
        leasing.open(owner, "a", 0, loader, 2)
    first = {o: leasing.ask(o, "a", 0, [A, B]).lease for o in (A, B)}
    assert all(lease is not None and lease.span.width == 32 for lease in first.values())
    leasing.measured("worker-0", 300, 1.0)
    leasing.measured("worker-1", 100, 1.0)
    assert set(leasing.recut("a", 0, [A, B])) == {A, B}
    assert leasing.ask(A, "a", 0, [A, B]).lease is None, "until both have answered"
    for owner, lease in first.items():
        assert lease is not None
        leasing.gave_back(owner, "a", 0, [(lease.number, 64)])
    after = {o: leasing.ask(o, "a", 0, [A, B]).lease for o in (A, B)}
    assert [lease.span.width for lease in after.values() if lease is not None] == [48, 16]
    assert after[A] is not None and after[A].span.start == 128
    assert leasing.recut("a", 0, [A, B]) == ()


def test_the_slow_one_gives_back_what_it_has_not_begun() -> None:
    leasing = Leasing(LeaseState(), in_rounds=False)
    for owner in (A, B):
        leasing.open(owner, "a", 0, Loader(400, 4), 2)
        leasing.measured(owner[0], 100, 1.0)
    mine = leasing.ask(A, "a", 0, [A, B]).lease
    assert mine is not None and mine.end == 100
    while (lease := leasing.ask(B, "a", 0, [A, B]).lease) is not None:
        leasing.used([(lease.number, 0, lease.end)])
    answer = leasing.ask(B, "a", 0, [A, B])
    assert answer.recall == () and not answer.is_finished, "it was asked already"
    assert leasing.gave_back(A, "a", 0, [(mine.number, 8)]) == 92
    assert leasing.ask(B, "a", 0, [A, B]).lease is not None


def test_an_epoch_ends_though_somebody_holds_what_it_has_read() -> None:
    """Gradients are being accumulated: the samples count with the next commit, in the epoch that follows."""
    leasing = Leasing(LeaseState(), in_rounds=False)
    leasing.open(A, "a", 0, Loader(8, 4), 1)
    lease = leasing.ask(A, "a", 0, [A]).lease
    assert lease is not None
    leasing.used([(lease.number, 0, lease.end)])
    lease = leasing.ask(A, "a", 0, [A]).lease
    assert lease is not None and lease.end == 4
    leasing.used([(lease.number, 0, 2)])
    assert not leasing.ask(A, "a", 0, [A], []).is_finished
    answer = leasing.ask(A, "a", 0, [A], [(lease.number, lease.first_left, lease.end)])
    assert answer.is_finished
    assert leasing.used([(lease.number, 0, lease.end)]) == 2
    assert [(name, number) for name, number, _ in leasing.forget_finished()] == [("a", 0)]


def test_a_worker_that_never_comes_to_the_epoch_stops_nobody_for_ever() -> None:
    leasing = Leasing(LeaseState(), in_rounds=True)
    leasing.open(A, "a", 0, Loader(16, 4), 2)
    lease = leasing.ask(A, "a", 0, [A, B]).lease
    assert lease is not None
    leasing.used([(lease.number, 0, lease.end)])
    assert leasing.ask(A, "a", 0, [A, B]) == leasing.ask(A, "a", 0, [A, B])
    assert leasing.reclaim("a", 0) == 8
    assert leasing.ask(A, "a", 0, [A, B]).lease is not None


@pytest.mark.parametrize(
    "other", [Loader(12, 4, drop_last=True), Loader(12, 4, is_auto=True), Loader(0, 4, num_shards=12)]
)
def test_loaders_that_differ_read_differently(other: Loader) -> None:
    assert other.describe() != Loader(12, 4).describe()


def test_loaders_that_differ_are_refused_with_both_named() -> None:
    leasing = Leasing(LeaseState(), in_rounds=True)
    leasing.open(A, "a", 0, Loader(16, 4), 2)
    with pytest.raises(ConfigError, match=r"worker-1 has 17 samples in batches of 4 in 'a', worker-0 has 16 samples"):
        leasing.open(B, "a", 0, Loader(17, 4), 2)


def opened(loader: Loader, *owners: Identity, in_rounds: bool = True) -> Leasing:
    leasing = Leasing(LeaseState(), in_rounds=in_rounds)
    for owner in owners:
        leasing.open(owner, "a", 0, loader, len(owners))
    return leasing


def test_parts_by_speed_are_steps_also_when_one_global_batch_is_left() -> None:
    """A range of several positions says by itself nothing of how much of it is one step."""
    leasing = opened(Loader(64, 32, is_auto=True), A, B)
    leasing.measured("worker-0", 300, 1.0)
    leasing.measured("worker-1", 100, 1.0)
    found = [leasing.ask(one, "a", 0, [A, B]).lease for one in (A, B)]
    assert [(lease.end, lease.step) for lease in found if lease is not None] == [(48, 48), (16, 16)]


def test_teeth_of_two_that_died_are_no_larger_steps_for_the_third() -> None:
    leasing = opened(Loader(120, 4), A, B, C)
    for owner in (A, B, C):
        assert leasing.ask(owner, "a", 0, [A, B, C]).lease is not None
    for owner in (B, C):
        leasing.out(owner, failed=False)
    while (lease := leasing.ask(A, "a", 0, [A]).lease) is not None:
        assert lease.step == 4


def test_who_did_not_answer_a_recall_is_asked_anew() -> None:
    leasing = opened(Loader(400, 4), A, B, in_rounds=False)
    while leasing.ask(A, "a", 0, [A, B]).lease is not None:
        pass
    assert leasing.ask(B, "a", 0, [A, B]).recall == (A,)
    assert leasing.ask(B, "a", 0, [A, B]).recall == ()
    leasing.not_recalled(A, "a", 0)
    assert leasing.ask(B, "a", 0, [A, B]).recall == (A,)


def test_what_was_given_back_and_not_heard_of_is_said_with_the_next_question() -> None:
    leasing = opened(Loader(8, 4), A, B, in_rounds=False)
    mine = [leasing.ask(A, "a", 0, [A, B]).lease for _ in range(2)]
    assert all(lease is not None for lease in mine)
    given = [(lease.number, 1) for lease in mine if lease is not None]
    answer = leasing.ask(A, "a", 0, [A, B], given=given)
    assert answer.lease is not None and leasing.ask(A, "a", 0, [A, B], given=given).lease is not None
    epoch = leasing.epoch("a", 0)
    assert epoch is not None and sum(lease.num_left for lease in epoch.leases.values()) == 8


def test_what_was_held_beyond_the_end_of_an_epoch_by_one_that_died_is_passed_over() -> None:
    leasing = opened(Loader(4, 4), A, B, in_rounds=False)
    lease = leasing.ask(A, "a", 0, [A, B]).lease
    assert lease is not None
    assert leasing.ask(A, "a", 0, [A, B], [(lease.number, 0, 4)]).is_finished
    assert leasing.out(A, failed=True) == 0
    assert [epoch.num_passed_over for *_, epoch in leasing.forget_finished()] == [4]


def test_parts_are_not_cut_anew_for_one_that_does_not_read_this_epoch() -> None:
    leasing = opened(Loader(400, 4), A, B)
    leasing.leave(B, "a", 0, [])
    assert leasing.ask(A, "a", 0, [A, B]).lease is not None
    assert leasing.recut("a", 0, [A, B]) == ()


@pytest.mark.parametrize("in_rounds", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_with_drop_last_no_batch_is_smaller_whoever_comes_and_goes(in_rounds: bool, seed: int) -> None:
    """What somebody leaves behind is too little for a global batch of those who stay: it goes out by whole ones."""
    draw, data = random.Random(seed), Loader(4 * 37 + 3, 4, drop_last=True)
    leasing = Leasing(LeaseState(), in_rounds=in_rounds)
    here = {(f"worker-{k}", k + 1): Portion(4) for k in range(3)}
    for owner in here:
        leasing.open(owner, "a", 0, data, len(here))
    epoch = leasing.epoch("a", 0)
    assert epoch is not None
    sizes: list[int] = []
    while not epoch.is_finished:
        owner = draw.choice(sorted(here))
        portion = here[owner]
        luck = draw.random()
        if luck < 0.05 and len(here) > 1:
            leasing.leave(owner, "a", 0, portion.leave([]).items(), portion.newest)
            del here[owner]
        elif luck < 0.1:
            new = (f"worker-{len(sizes)}", 100 + len(sizes))
            here.setdefault(new, Portion(4))
        elif (piece := portion.cut()) is not None:
            sizes.append(len(piece))
            leasing.used([(piece.lease, piece.begin, piece.end)])
        else:
            answer = leasing.ask(owner, "a", 0, sorted(here), newest=portion.newest, given=portion.given)
            for other in answer.recall:
                leasing.gave_back(other, "a", 0, here[other].give_back(keeps_begun=False), here[other].newest)
            if answer.lease is not None:
                portion.take(GivenLease(answer.lease.number, answer.lease.span, step=answer.lease.step))
    assert set(sizes) == {4} and sum(sizes) == (144 if in_rounds else 148)


def test_a_loader_that_is_not_as_it_is_known_is_told_where_the_other_description_is_from() -> None:
    """Others are workers that have opened it; a checkpoint and an earlier life of the same worker are none."""
    one, two, three = (("worker-0", 1), ("worker-1", 2), ("worker-2", 3))
    leasing = Leasing(LeaseState(), in_rounds=True)
    leasing.open(one, "a", 0, Loader(64, 4), 3)
    with pytest.raises(
        ConfigError, match=r"worker-1 has 65 samples .* in 'a', worker-0 has 64 samples .* or by name="
    ):
        leasing.open(two, "a", 0, Loader(65, 4), 3)
    leasing.open(three, "a", 0, Loader(64, 4), 3)
    with pytest.raises(ConfigError, match=r"in 'a', worker-0 and 1 more have 64 samples"):
        leasing.open(two, "a", 0, Loader(65, 4), 3)
    again = Leasing(LeaseState(loaders={"a": Loader(64, 4)}), in_rounds=True)
    with pytest.raises(ConfigError, match=r"earlier in this job the same loader had 64 .* name= of its own") as told:
        again.open(one, "a", 1, Loader(64, 8), 1)
    assert "other" not in str(told.value).replace("another", "")
    taken = ledger_to_resume(leasing.state)
    with pytest.raises(ConfigError, match=r"worker-0 has 64 .* of 8 in 'a', and the checkpoint .* has 64 .*--fresh"):
        Leasing(taken, in_rounds=True).open(one, "a", 0, Loader(64, 8), 1)


SHARDS = Loader(0, 4, num_shards=7)
THREE: list[Identity] = [("worker-0", 1), ("worker-1", 2), ("worker-2", 3)]


def dealt(leasing: Leasing, asks: list[Identity], participants: list[Identity]) -> dict[str, list[int]]:
    """Who gets which shards when they ask in this order, each with nothing left to read."""
    found: dict[str, list[int]] = {}
    for owner in asks:
        answer = leasing.ask(owner, "a", 0, participants)
        assert not answer.recall
        if answer.lease is not None:
            assert answer.lease.span.start % SHARD_POSITIONS == 0 and len(answer.lease.span) == SHARD_POSITIONS
            found.setdefault(owner[0], []).append(answer.lease.span.start // SHARD_POSITIONS)
    return found


def exact() -> Leasing:
    leasing = Leasing(LeaseState(), in_rounds=True, is_exact=True)
    for owner in THREE:
        leasing.open(owner, "a", 0, SHARDS, 3)
    return leasing


@pytest.mark.parametrize("seed", range(20))
def test_in_exact_rounds_shards_are_dealt_by_rank_whoever_asks_first(seed: int) -> None:
    asks = [owner for owner in THREE for _ in range(5)]
    random.Random(seed).shuffle(asks)
    expected = {"worker-0": [0, 3, 6], "worker-1": [1, 4], "worker-2": [2, 5]}
    assert dealt(exact(), asks, THREE) == expected


def test_the_shards_of_a_dead_worker_go_to_the_others_and_a_late_one_may_ask_for_some() -> None:
    leasing = exact()
    dealt(leasing, [*THREE, *THREE, *THREE], THREE)
    leasing.out(THREE[2], failed=False)
    assert dealt(leasing, [THREE[1], THREE[0]], THREE[:2]) == {"worker-0": [2], "worker-1": [5]}
    late = ("worker-2", 9)
    leasing.open(late, "a", 0, SHARDS, 3)
    (other,) = leasing.ask(late, "a", 0, [*THREE[:2], late]).recall  # it was not there when the shards were dealt
    *_, last = sorted(lease.number for lease in leasing.epoch("a", 0).of(other))  # type: ignore[union-attr]
    leasing.gave_back(other, "a", 0, [(last, 0)])
    assert leasing.ask(late, "a", 0, [*THREE[:2], late]).lease is not None, "what it has asked for is its own"
