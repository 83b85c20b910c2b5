"""`job.steps` in rounds: all workers have one lease in common, and make every step of it together."""

from __future__ import annotations

from syncline.core.checkpoint.snapshot import ledger_to_resume
from syncline.core.leasing.leases import LeaseState, Leasing
from syncline.core.leasing.loader import Loader

LOADER = Loader(10, 1, is_steps=True)
A, B, A2 = ("worker-0", 1), ("worker-1", 2), ("worker-0", 3)


def opened(*owners: tuple[str, int], state: LeaseState | None = None, in_rounds: bool = True) -> Leasing:
    leasing = Leasing(state or LeaseState(), in_rounds=in_rounds)
    for owner in owners:
        assert leasing.open(owner, "steps-0", 0, LOADER, 2)
    return leasing


def use(leasing: Leasing, number: int, *steps: int) -> None:
    leasing.used([(number, step, step + 1) for step in steps])


def test_all_begin_with_the_first_step_and_have_the_same_lease() -> None:
    leasing = opened(A, B)
    one, two = (leasing.ask(owner, "steps-0", 0, [A, B], newest=0) for owner in (A, B))
    assert one.lease is not None and one.lease is two.lease
    assert (one.begin, two.begin, len(one.lease.span)) == (0, 0, 10)


def test_what_both_have_used_is_done_once_and_the_loop_ends_with_the_last() -> None:
    leasing = opened(A, B)
    answer = leasing.ask(A, "steps-0", 0, [A, B], newest=0)
    assert answer.lease is not None
    number = answer.lease.number
    for step in range(10):
        use(leasing, number, step)
        use(leasing, number, step)
    epoch = leasing.epoch("steps-0", 0)
    assert epoch is not None and epoch.num_done == 10
    assert leasing.ask(A, "steps-0", 0, [A, B], newest=number).is_finished


def test_one_that_has_it_waits_for_the_others() -> None:
    leasing = opened(A, B)
    answer = leasing.ask(A, "steps-0", 0, [A, B], newest=0)
    assert answer.lease is not None
    again = leasing.ask(A, "steps-0", 0, [A, B], newest=answer.lease.number)
    assert again.lease is None and not again.is_finished and not again.recall


def test_a_worker_that_comes_later_makes_no_step_more_than_the_others() -> None:
    """The step after those that are known to be made may be under way: it begins behind that."""
    leasing = opened(A, B)
    number = leasing.ask(B, "steps-0", 0, [A, B], newest=0).lease.number  # type: ignore[union-attr]
    use(leasing, number, 0, 1, 2, 3)
    leasing.open(A2, "steps-0", 0, LOADER, 2)
    assert leasing.ask(A2, "steps-0", 0, [A2, B], newest=0).begin == 5


def test_also_in_the_first_step_which_may_be_open_and_not_made() -> None:
    """Of three workers one dies in it: the new life enters the round behind it."""
    leasing = opened(A, B)
    leasing.ask(B, "steps-0", 0, [A, B], newest=0)
    leasing.open(A2, "steps-0", 0, LOADER, 2)
    assert leasing.ask(A2, "steps-0", 0, [A2, B], newest=0, is_late=True).begin == 1
    assert leasing.ask(A, "steps-0", 0, [A, B], newest=0).begin == 0


def test_when_all_come_back_no_step_is_left_out() -> None:
    """The first of them begins with the step that is next, and the others beside it."""
    leasing = opened(A, B)
    number = leasing.ask(A, "steps-0", 0, [A, B], newest=0).lease.number  # type: ignore[union-attr]
    leasing.ask(B, "steps-0", 0, [A, B], newest=0)
    use(leasing, number, 0, 1, 2, 3)
    leasing.out(A, failed=True)
    leasing.out(B, failed=True)
    lives = [("worker-0", 5), ("worker-1", 6)]
    for life in lives:
        leasing.open(life, "steps-0", 0, LOADER, 2)
    begins = [leasing.ask(life, "steps-0", 0, lives, newest=0, is_late=True).begin for life in lives]
    assert begins == [4, 5]


def test_the_death_of_one_takes_nothing_from_the_others() -> None:
    leasing = opened(A, B)
    number = leasing.ask(A, "steps-0", 0, [A, B], newest=0).lease.number  # type: ignore[union-attr]
    use(leasing, number, 0)
    leasing.out(B, failed=True)
    epoch = leasing.epoch("steps-0", 0)
    assert epoch is not None and not epoch.todo and epoch.leases[number].num_left == 9


def test_a_late_step_was_made_by_the_others_of_its_round() -> None:
    leasing = opened(A, B)
    number = leasing.ask(A, "steps-0", 0, [A, B], newest=0).lease.number  # type: ignore[union-attr]
    leasing.late([(number, 0, 1)])
    epoch = leasing.epoch("steps-0", 0)
    assert epoch is not None and not epoch.todo and epoch.leases[number].num_left == 10


def test_what_is_held_for_a_later_commit_does_not_hold_up_the_end() -> None:
    """Accumulation: the last steps of a loop may be in no commit."""
    leasing = opened(A)
    number = leasing.ask(A, "steps-0", 0, [A], newest=0).lease.number  # type: ignore[union-attr]
    use(leasing, number, *range(8))
    assert leasing.ask(A, "steps-0", 0, [A], held=[(number, 8, 10)], newest=number).is_finished


def test_outside_of_rounds_each_step_is_one_workers() -> None:
    leasing = opened(A, B, in_rounds=False)
    one, two = (leasing.ask(owner, "steps-0", 0, [A, B], newest=0).lease for owner in (A, B))
    assert one is not None and two is not None and one.span.stop <= two.span.start


def test_a_checkpoint_goes_on_with_what_is_left_in_either_policy() -> None:
    leasing = opened(A)
    number = leasing.ask(A, "steps-0", 0, [A], newest=0).lease.number  # type: ignore[union-attr]
    use(leasing, number, 0, 1, 2)
    for in_rounds in (True, False):
        again = opened(("worker-0", 9), state=ledger_to_resume(leasing.state), in_rounds=in_rounds)
        answer = again.ask(("worker-0", 9), "steps-0", 0, [("worker-0", 9)], newest=0)
        assert answer.lease is not None and answer.lease.span.start + answer.begin == 3


def test_another_number_of_steps_is_named_as_such() -> None:
    assert Loader(7, 1, is_steps=True).describe() == "7 steps"
