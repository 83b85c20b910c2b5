"""What a closed gate lets pass."""

from __future__ import annotations

from syncline.core.checkpoint.snapshot import SnapshotBarrier, barrier_of, behind_to_tell, clocks_to_tell, on_all

A, B = ("worker-0", 1), ("worker-1", 2)


def test_nothing_passes_in_the_first_turn() -> None:
    barrier = SnapshotBarrier(1)
    assert not barrier.lets_pass("commit", A, 1, is_whole=True)
    assert not barrier.lets_pass("clip", A, 1, is_whole=True)
    assert not barrier.lets_pass("rest", A, 0, is_whole=True)
    assert not barrier.lets_pass("leave", A, 0, is_whole=True)


def test_commits_pass_up_to_what_others_have_and_of_that_life_only() -> None:
    barrier = barrier_of(1, 1, [(*A, 5)])
    for kind in ("commit", "clip"):
        assert barrier.lets_pass(kind, A, 5, is_whole=False) and barrier.lets_pass(kind, A, 4, is_whole=False)
        assert not barrier.lets_pass(kind, A, 6, is_whole=False)
        assert not barrier.lets_pass(kind, B, 1, is_whole=False)
        assert not barrier.lets_pass(kind, ("worker-0", 2), 1, is_whole=False)


def test_rests_and_leaves_pass_while_anything_is_lacking() -> None:
    barrier = barrier_of(1, 1, [(*A, 5)])
    assert barrier.lets_pass("rest", B, 0, is_whole=False) and barrier.lets_pass("leave", B, 0, is_whole=False)
    assert not barrier.lets_pass("rest", B, 0, is_whole=True) and not barrier.lets_pass("leave", B, 0, is_whole=True)


def test_what_is_lacking_of_through() -> None:
    barrier = barrier_of(1, 1, [(*A, 5), (*B, 3)])
    assert barrier.lacking({A: 4}, {A, B}) == {A: 5, B: 3}
    assert barrier.lacking({A: 5, B: 2}, {A, B}) == {B: 3}
    assert barrier.lacking({A: 5, B: 2}, {A}) == {}, "who has left brings nothing more"
    assert barrier.lacking({A: 6, B: 3}, {A, B}) == {}


def test_only_what_is_newer_takes_its_place() -> None:
    barrier = SnapshotBarrier(2, 1)
    assert barrier.is_replaced_by(2, 2) and barrier.is_replaced_by(3, 0)
    assert not barrier.is_replaced_by(2, 1) and not barrier.is_replaced_by(2, 0) and not barrier.is_replaced_by(1, 7)


def test_who_has_left_here_and_not_elsewhere_is_told_as_it_was_named() -> None:
    assert clocks_to_tell(SnapshotBarrier(1), {A: 4, B: 3}, {A}) == [(*A, 4)]
    assert clocks_to_tell(barrier_of(1, 1, [(*B, 3)]), {A: 4, B: 3}, {A}) == [(*A, 4), (*B, 3)]
    assert clocks_to_tell(barrier_of(1, 1, [(*B, 3)]), {A: 4}, {A}) == [(*A, 4), (*B, 3)], "its slices came later"


def test_what_all_slices_have_and_who_is_behind() -> None:
    slices = [({A: 5, B: 3}, False), ({A: 4}, False)]
    assert on_all(slices, ()) == {A: 4, B: 0}
    assert behind_to_tell({A: 5, B: 3}, {A: 4, B: 0}) == [(*A, 4), (*B, 0)]
    assert behind_to_tell({A: 5, B: 3}, {A: 5, B: 3}) == []


def test_of_who_rests_slices_that_have_nothing_of_it_or_stand_in_for_others_get_nothing_more() -> None:
    assert on_all([({A: 5, B: 3}, False), ({A: 5}, False)], {B}) == {A: 5, B: 3}
    assert on_all([({A: 5, B: 3}, False), ({A: 5, B: 1}, True)], {B}) == {A: 5, B: 3}
    assert on_all([({A: 5, B: 3}, False), ({A: 5, B: 1}, False)], {B}) == {A: 5, B: 1}, "that is another matter"
    assert on_all([({B: 1}, True)], {B}) == {B: 1}
