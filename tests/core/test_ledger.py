"""The ledger of an epoch: whatever happens, every sample is to do, leased or done, once."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from syncline.core.leasing.ledger import Epoch, Lease, SuspectBatch
from syncline.core.leasing.ranges import Span, merged, without

A, B, C = ("worker-0", 1), ("worker-1", 2), ("worker-2", 3)


def epoch(num_samples: int = 100, batch: int = 4) -> Epoch:
    return Epoch(num_samples, batch, [Span(0, num_samples)])


def positions(lease: Lease) -> list[int]:
    return lease.span.positions().tolist()


def test_what_was_quarantined_is_read_from_older_checkpoints() -> None:
    """Under the name that they have for it: an unknown one would be dropped without a word."""
    one = epoch()
    one.quarantined.append(SuspectBatch(Span(4, 8), ["worker-0", "worker-1", "worker-2"]))
    written = msgspec.json.decode(msgspec.json.encode(one))
    assert "aside" in written and "quarantined" not in written
    assert msgspec.convert(written, Epoch).quarantined == one.quarantined


def test_leases_follow_each_other() -> None:
    one = epoch()
    first, second = one.lease(1, A, 12), one.lease(2, B, 12)
    assert first is not None and second is not None
    assert positions(first) == list(range(12)) and positions(second) == list(range(12, 24))
    assert one.used(1, 0, 4) == 4 and one.used(1, 0, 4) == 0
    assert one.used(1, 2, 12) == 8 and 1 not in one.leases
    assert one.used(1, 0, 12) == 0, "a number that is gone means nothing any more"
    assert one.used(99, 0, 12) == 0


def test_global_batches_are_dealt_out_in_the_order_of_the_samples() -> None:
    one = epoch(22, 4)
    leases = one.deal(7, [(A, 4), (B, 2), (C, 2)], 10)
    assert [lease.number for lease in leases] == [7, 8, 9]
    assert positions(leases[0]) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert positions(leases[1]) == [4, 5, 12, 13] and positions(leases[2]) == [6, 7, 14, 15]
    last = one.deal(10, [(A, 4), (B, 2), (C, 2)], 10)
    assert [positions(lease) for lease in last] == [[16, 17, 18], [19], [20, 21]]
    assert not one.todo


def test_the_dead_leave_what_they_have_not_committed() -> None:
    one = epoch(16, 4)
    one.deal(1, [(A, 4), (B, 4)], 10)
    one.used(1, 0, 4)
    assert one.out(A, failed=False) == 4
    assert one.todo == [Span(8, 12)]
    one.used(2, 0, 8)
    lease = one.lease(3, B, 100)
    assert lease is not None and positions(lease) == [8, 9, 10, 11]
    one.used(3, 0, 4)
    assert one.is_finished and one.num_done == 16


def test_what_is_given_back_by_all_is_dealt_out_as_if_nothing_had_been() -> None:
    one = epoch(80, 4)
    one.deal(1, [(A, 4), (B, 4)], 100)
    one.give_back(1, 8)  # two batches, one of which is not committed yet
    one.give_back(2, 4)
    assert one.todo == [Span(12, 16), Span(16, 80)] or one.todo == [Span(12, 80)]
    one.used(1, 0, 8)
    one.used(2, 0, 4)
    assert not one.leases and one.num_done == 12


def test_places_that_were_used_are_not_given_back() -> None:
    one = epoch(20, 4)
    one.lease(1, A, 20)
    one.used(1, 0, 12)
    assert one.give_back(1, 4) == 8, "the commit was first"
    assert not one.leases and one.todo == [Span(12, 20)]


def test_what_was_committed_late_is_to_do_again() -> None:
    one = epoch(16, 4)
    one.deal(1, [(A, 4), (B, 4)], 10)
    one.used(1, 0, 4)
    assert one.late(1, 4, 8) == 4 and one.todo == [Span(8, 12)] and 1 not in one.leases
    assert one.late(1, 4, 8) == 0, "the lease is through: said again it means nothing"
    assert one.late(2, 0, 4) == 4 and one.late(2, 0, 6) == 2, "what of it was late before is to do already"
    one.used(2, 6, 8)
    assert one.num_done == 6 and sorted(p for span in one.todo for p in span.positions().tolist()) == [
        4, 5, 6, 7, 8, 9, 10, 11, 12, 13,
    ]  # fmt: skip
    assert one.late(9, 0, 4) == 0


def test_a_batch_at_which_three_workers_fail_is_set_aside() -> None:
    one = epoch(24, 4)
    for number, owner in enumerate([A, B, B, C]):
        lease = one.lease(number + 1, owner, 12)
        assert lease is not None
        lease.is_told = True
        if number == 0:
            one.used(1, 0, 4)
        else:
            assert positions(lease) == [4, 5, 6, 7], "it is handed out alone, and first"
        one.out(owner, failed=True)
    assert [(suspect.span, suspect.workers) for suspect in one.quarantined] == [
        (Span(4, 8), ["worker-0", "worker-1", "worker-2"])
    ]
    assert one.num_todo == 16 and not one.suspect_batches


def test_a_lease_that_its_worker_never_heard_of_is_under_no_suspicion() -> None:
    one = epoch(24, 4)
    one.deal(1, [(A, 4), (B, 4)], 3)
    one.out(B, failed=True)
    assert not one.suspect_batches


def test_a_shard_that_ends() -> None:
    one = Epoch(0, 4, [Span(0, 1 << 32), Span(1 << 32, 2 << 32)])
    one.lease(1, A, 1 << 32)
    one.used(1, 0, 8)
    one.shorten(10, 1 << 32)
    assert one.leases[1].num_left == 2 and one.todo == [Span(1 << 32, 2 << 32)]
    one.used(1, 8, 10)
    assert not one.leases


def test_a_ledger_survives_the_journal() -> None:
    one = epoch(80, 4)
    one.deal(1, [(A, 4), (B, 4)], 4)
    one.used(1, 0, 4)
    one.out(B, failed=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Epoch) == one


def test_a_billion_samples_cost_little() -> None:
    one = epoch(10**9, 32)
    for number in range(200):
        one.deal(1 + 4 * number, [(("worker-0", 1), 32), (("worker-1", 1), 32), (("worker-2", 1), 64)], 1000)
        if number % 10 == 0:
            one.used(1 + 4 * number, 0, 32 * number)
            one.out(("worker-0", 1), failed=True)
    assert len(msgspec.msgpack.encode(one)) < 30_000


@pytest.mark.parametrize(
    ("places", "expected"),
    [([(0, 0)], []), ([(4, 6), (0, 4)], [(0, 6)]), ([(0, 2), (1, 3), (5, 6)], [(0, 3), (5, 6)])],
)
def test_merged(places: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert merged(places) == expected


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))), st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_without_is_the_difference(places: list[tuple[int, int]], gone: tuple[int, int]) -> None:
    gone = (min(gone), max(gone))
    here = {k for begin, end in merged(places) for k in range(begin, end)}
    assert {k for begin, end in without(merged(places), gone) for k in range(begin, end)} == here - set(range(*gone))


class Epochs(RuleBasedStateMachine):
    """Workers that lease, commit, give back and die in any order; after each event all samples are accounted for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_samples = 97
        self.one = epoch(self.num_samples, 4)
        self.next, self.done = 1, set[int]()
        self.cursors: dict[int, int] = {}

    @rule(owner=st.sampled_from([A, B, C]), most=st.integers(1, 40))
    def lease(self, owner: tuple[str, int], most: int) -> None:
        if self.one.lease(self.next, owner, most) is not None:
            self.one.leases[self.next].is_told = True
            self.next += 1

    @rule(parts=st.lists(st.integers(1, 5), min_size=1, max_size=3), rounds=st.integers(1, 5))
    def deal(self, parts: list[int], rounds: int) -> None:
        self.one.deal(self.next, list(zip([A, B, C], parts, strict=False)), rounds)
        self.next += 3

    @rule(data=st.data(), size=st.integers(1, 9))
    def commit(self, data: st.DataObject, size: int) -> None:
        if not self.one.leases:
            return
        lease = self.one.leases[data.draw(st.sampled_from(sorted(self.one.leases)))]
        begin = self.cursors.get(lease.number, 0)
        end = min(begin + size, lease.end)
        self.cursors[lease.number] = end
        fresh = set(lease.span.positions(begin, end).tolist())
        assert not fresh & self.done
        assert self.one.used(lease.number, begin, end) == len(fresh)
        self.done |= fresh

    @rule(data=st.data(), size=st.integers(1, 9))
    def commit_late(self, data: st.DataObject, size: int) -> None:
        """Said twice, as servers do until it is confirmed."""
        if not self.one.leases:
            return
        lease = self.one.leases[data.draw(st.sampled_from(sorted(self.one.leases)))]
        begin = self.cursors.get(lease.number, 0)
        end = self.cursors[lease.number] = min(begin + size, lease.end)
        assert self.one.late(lease.number, begin, end) == end - begin
        assert self.one.late(lease.number, begin, end) == 0

    @rule(data=st.data(), ahead=st.integers(0, 9))
    def give_back(self, data: st.DataObject, ahead: int) -> None:
        if self.one.leases:
            number = data.draw(st.sampled_from(sorted(self.one.leases)))
            self.one.give_back(number, self.cursors.get(number, 0) + ahead)

    @rule(owner=st.sampled_from([A, B, C]), failed=st.booleans())
    def die(self, owner: tuple[str, int], failed: bool) -> None:
        self.one.out(owner, failed=failed)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        found = sorted(self.done)
        for span in [*self.one.todo, *(s.span for s in self.one.quarantined)]:
            found += span.positions().tolist()
        for lease in self.one.leases.values():
            found += [p for span in lease.rest() for p in span.positions().tolist()]
        assert sorted(found) == list(range(self.num_samples))
        assert self.one.num_done == len(self.done)


TestEpochs = Epochs.TestCase
TestEpochs.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_of_odd_pieces_every_worker_gets_one() -> None:
    """Cut by all of them, pieces of a batch would become rounds of a sample or two."""
    epoch = Epoch(200, 16, [Span(k * 40, k * 40 + 16) for k in range(5)])
    parts = [(("worker-0", 1), 16), (("worker-1", 2), 16), (("worker-2", 3), 16)]
    first = epoch.deal(1, parts, 8)
    assert [(lease.worker, len(lease.span)) for lease in first] == [
        ("worker-0", 16),
        ("worker-1", 16),
        ("worker-2", 16),
    ]
    second = epoch.deal(4, parts, 8)
    assert [len(lease.span) for lease in second] == [16, 16] and not epoch.todo
    assert sorted(p for lease in first + second for p in lease.span.positions().tolist()) == [
        position for k in range(5) for position in range(k * 40, k * 40 + 16)
    ]
