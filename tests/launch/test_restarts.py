"""Who is started again, how often and after which pause."""

from __future__ import annotations

import pytest

from syncline.launch.restarts import Restarts, is_of_the_script, ordinal, pause_seconds, why_not_again


def test_pauses_double_and_are_bounded() -> None:
    assert [pause_seconds(n) for n in range(1, 8)] == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert pause_seconds(10_000) == 5.0


def test_deaths_without_a_push_in_between_are_counted() -> None:
    """A member that works between its deaths may die as often as it likes; one that does not may not."""
    restarts = Restarts(2)
    for _ in range(50):
        assert restarts.died("worker-1", True, 0.0).starts_again
    assert restarts.died("worker-1", False, 0.0).number == 2
    last = restarts.died("worker-1", False, 0.0)
    assert not last.starts_again
    assert last.describe("worker-1", "was killed by SIGKILL") == (
        "worker-1 was killed by SIGKILL, for the 3rd time without a push in between"
    )
    assert restarts.died("worker-2", False, 0.0).number == 1


def test_none_at_all() -> None:
    first = Restarts(0).died("server-0", True, 0.0)
    assert not first.starts_again and first.describe("server-0", "was evicted") == "server-0 was evicted"


def test_the_coordinators_deaths_count_within_a_minute() -> None:
    restarts = Restarts(2)
    assert all(restarts.died("coordinator", False, 40.0 * k).starts_again for k in range(20))
    assert restarts.died("coordinator", False, 809.0).number == 2
    assert not restarts.died("coordinator", False, 810.0).starts_again


def test_what_is_said_of_it() -> None:
    restarts = Restarts(3)
    restarts.died("worker-1", True, 0.0)
    said = restarts.died("worker-1", False, 0.0).describe("worker-1", "was killed by SIGKILL")
    assert said == "worker-1 was killed by SIGKILL; starts again in 0.5 s (2 of 3)"
    assert restarts.died("coordinator", False, 0.0).describe("coordinator", "is gone").endswith("at once (1 of 3)")


@pytest.mark.parametrize(
    ("number", "text"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (13, "13th"), (22, "22nd")]
)
def test_how_often_in_words(number: int, text: str) -> None:
    assert ordinal(number) == text


def test_whose_fault_an_end_is() -> None:
    assert is_of_the_script(1) and is_of_the_script(7)
    assert not any(is_of_the_script(code) for code in (0, 75, -9, -15))


def test_a_life_that_pushed_is_known_later_and_is_no_death_without_a_push() -> None:
    """A worker that dies within a beat of its first push counted as one that had made none: "for the 4th time"."""
    restarts = Restarts(3)
    for life in range(1, 20):
        again = restarts.died("worker-1", False, 0.0, settled=5 * (life - 1))
        assert again.starts_again and again.number <= 2, life
    assert restarts.has_pushed("worker-1", 5 * 19) and not restarts.has_pushed("worker-1", 5 * 18)


def test_lives_that_push_nothing_are_counted_on() -> None:
    restarts = Restarts(2)
    assert [restarts.died("worker-1", False, 0.0, settled=7).starts_again for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("has_position", "others_have_finished", "words"),
    [
        (True, False, ()),
        (False, False, ("is not restarted", "goes on without it", "job.steps(n)", "job.resume_at()")),
        (True, True, ("have finished their work", "not restarted")),
        (False, True, ("have finished their work",)),
    ],
)
def test_who_is_not_started_again_and_why(has_position: bool, others_have_finished: bool, words: tuple[str]) -> None:
    told = why_not_again(
        "worker-1", "was killed", has_position=has_position, others_have_finished=others_have_finished
    )
    assert bool(told) == bool(words) and all(word in told for word in words)
