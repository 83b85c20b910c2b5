"""Lines that come by the thousand."""

from __future__ import annotations

from syncline.core.repeats import (
    MOST_COUNTED,
    SECONDS,
    SHOWN,
    SHOWN_IN_A_MINUTE,
    SHOWN_IN_A_ROW,
    Repeats,
    SameLines,
)


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


def fed(same: SameLines, lines: list[str], now: float = 1.0) -> list[str]:
    return [shown for line in lines for shown in same.add(line, now)]


def test_a_line_that_comes_thousands_of_times_in_a_row_is_told_when_another_one_comes() -> None:
    shown = fed(SameLines("worker-1"), ["begin", *["\x1b[31moh no\x1b[0m"] * 5_000, "end"])
    told = "syncline: worker-1 printed this line 4,990 more times, which its log has: oh no"
    assert shown == ["begin", *["\x1b[31moh no\x1b[0m"] * SHOWN_IN_A_ROW, told, "end"]


def test_a_line_that_never_ends_is_told_each_minute() -> None:
    same = SameLines("worker-1")
    shown = [line for second in range(180) for line in fed(same, ["x"] * 10, float(second))]
    told = "syncline: worker-1 printed this line 590 more times, which its log has: x"
    assert shown == [*["x"] * SHOWN_IN_A_ROW, told] * 2 + ["x"] * SHOWN_IN_A_ROW
    assert same.flush(180.0, is_over=True) == [told]


def test_lines_that_take_turns_are_told_after_a_minute() -> None:
    """As a warning of two lines. Two in a row are no flood."""
    same = SameLines("worker-1")
    shown = fed(same, ["warning", "its place", "its place"] * 1_000)
    assert [shown.count(line) for line in ("warning", "its place")] == [SHOWN_IN_A_MINUTE] * 2 and len(shown) == 200
    assert same.flush(SECONDS) == []
    assert sorted(same.flush(SECONDS + 1.0)) == [
        "syncline: worker-1 printed this line 1,900 more times, which its log has: its place",
        "syncline: worker-1 printed this line 900 more times, which its log has: warning",
    ]
    assert fed(same, ["warning"], 90.0) == ["warning"], "the next minute begins"


def test_the_rows_and_the_rules_of_a_table_are_left_as_they_are() -> None:
    table = [line for row in range(90) for line in ("+-----+", f"| {row:3} |", "")]
    assert fed(SameLines("worker-0"), table) == table


def test_no_line_is_lost_without_a_word() -> None:
    """Of many different lines the oldest are forgotten; how often they came is told before."""
    same, lines = SameLines("worker-2"), [*["often", "-"] * 200, *map(str, range(2 * MOST_COUNTED)), *["x"] * 15]
    shown = [*fed(same, lines), *same.flush(2.0, is_over=True)]
    assert [line for line in shown if line.startswith("syncline: ")] == [
        "syncline: worker-2 printed this line 100 more times, which its log has: often",
        "syncline: worker-2 printed this line 100 more times, which its log has: -",
        "syncline: worker-2 printed this line 5 more times, which its log has: x",
    ]
    assert same.flush(3.0, is_over=True) == []
    assert fed(same, [""] * 12, 4.0) == [""] * SHOWN_IN_A_ROW
    assert same.flush(5.0, is_over=True)[0].endswith("2 more times, which its log has: an empty line")
