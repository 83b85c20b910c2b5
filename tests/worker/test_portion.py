"""A worker's portion: what it reads of its leases, and what it says it has given back."""

from __future__ import annotations

from syncline.core.leasing.ranges import Span
from syncline.core.wire.leases import GivenLease
from syncline.worker.data.leases import LeaseAcks, Portion


def portion() -> Portion:
    made = Portion(4)
    for number, start in ((3, 0), (5, 8)):
        made.take(GivenLease(number, Span(start, start + 8)))
    return made


def test_a_lease_that_is_given_twice_is_read_once() -> None:
    made = portion()
    made.take(GivenLease(5, Span(8, 16)))
    assert made.num_left == 16 and made.newest == 5


def test_what_was_given_back_is_said_again() -> None:
    """Whoever heard it first may have died before it was kept."""
    made = portion()
    assert made.cut() is not None
    first = made.give_back(keeps_begun=False)
    assert first == [(3, 4), (5, 0)]
    assert made.give_back(keeps_begun=False) == made.given == first
    made.take(GivenLease(9, Span(4, 8)))
    assert made.cut() is not None and made.give_back(keeps_begun=False) == first
    assert made.leave([]) == dict(first)


def test_what_is_open_is_not_said_to_be_used() -> None:
    """Servers tell of it when it is applied; and it may be late."""
    made, acks = portion(), LeaseAcks()
    for _ in range(3):
        piece = made.cut()
        assert piece is not None
        acks.read(piece)
    first, second, third = acks.take()
    acks.answered([first], is_late=False)
    acks.answered([second], is_late=True)
    assert acks.committed() == [first] and acks.late() == [second] and third[0] == 5
    acks.forget({3, 5})
    assert acks.committed() == [first] and acks.late() == [second]  # who keeps it may die before it does
    acks.forget({7})
    assert not acks.committed() and not acks.late()


def test_what_is_under_way_when_it_is_asked_is_waited_for() -> None:
    """It may be on a slice that was lost, and nowhere else: who asks is to ask again."""
    made, acks = portion(), LeaseAcks()
    for _ in range(2):
        piece = made.cut()
        assert piece is not None
        acks.read(piece)
        if piece.begin == 0:
            (first,) = acks.take()
    assert not acks.are_told()
    (second,) = acks.take()  # since then, and no part of the question
    assert not acks.are_told()
    acks.answered([first], is_late=False)
    assert acks.are_told() and acks.committed() == [first]
    assert not acks.are_told(), "another question"
    acks.answered([second], is_late=True)
    assert acks.are_told()
