"""Lines that come by the thousand."""

from __future__ import annotations

from syncline.core.repeats import SECONDS, SHOWN, Repeats


def test_a_few_are_shown_and_the_others_counted() -> None:
    repeats = Repeats("failed connections")
    shown = [line for number in range(4_000) for line in repeats.add(f"line {number}", number / 1_000)]
    assert shown == [f"line {number}" for number in range(SHOWN)] and repeats.num_hidden == 4_000 - SHOWN
    assert repeats.flush(30.0) == []
    assert repeats.flush(60.0) == ["3,997 more failed connections in the last 60 s; the last one: line 3999"]
    assert repeats.flush(200.0) == [] and repeats.num_hidden == 0


def test_the_next_minute_shows_its_first_ones_again() -> None:
    repeats = Repeats("lines")
    for number in range(10):
        repeats.add(f"old {number}", 0.0)
    assert repeats.add("new", SECONDS) == ["7 more lines in the last 60 s; the last one: old 9", "new"]
    assert repeats.add("newer", SECONDS + 1.0) == ["newer"]


def test_few_lines_are_left_as_they_are() -> None:
    repeats = Repeats("lines")
    assert [repeats.add(str(number), 100.0 * number) for number in range(5)] == [[str(n)] for n in range(5)]
    assert repeats.flush(1e6, is_over=True) == []


def test_the_end_tells_what_was_not_shown() -> None:
    repeats = Repeats("lines")
    for number in range(5):
        repeats.add(str(number), 1.0)
    assert repeats.flush(2.0, is_over=True) == ["2 more lines in the last 1 s; the last one: 4"]
