"""Spans of several members on one clock: lanes, nesting, clocks that differ and drift, batches that come twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.core import tracing
from syncline.core.tracing import (
    APPLY,
    BACKWARD,
    COMPUTE,
    FORWARD,
    PULL,
    STAGE,
    WAIT,
    Knot,
    MicroBatch,
    PhaseSpan,
    SpanBuffer,
    TracedBatch,
    TracedLife,
    chrome_events,
    lives_of,
)
from syncline.stats import Event

SECOND = 1_000_000


def batch(member: str = "worker-0", spans: list[PhaseSpan] | None = None, **more: Any) -> TracedBatch:
    known: dict[str, Any] = {
        "role": member.partition("-")[0], "incarnation": 1, "number": 1, "received": 1e9, "sent": 0, **more,
    }  # fmt: skip
    return TracedBatch(member=member, spans=spans or [], **known)


def step(number: int, begin: int, *, window: int = 0) -> list[PhaseSpan]:
    """The phases of a step of 100 µs, as a worker notes them: a little is computed between push and wait."""
    ends = {COMPUTE: 40, STAGE: 60, WAIT: 90, PULL: 100}
    late = number - window
    return [
        PhaseSpan(COMPUTE, number, begin, ends[COMPUTE]),
        PhaseSpan(STAGE, number, begin + 40, 20),
        PhaseSpan(COMPUTE, number + 1, begin + 60, 1),
        PhaseSpan(WAIT, late, begin + 61, 29),
        PhaseSpan(PULL, late, begin + 90, 10),
    ]


def whole(events: list[dict[str, Any]], pid: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["pid"] == pid]


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Within a lane each span lies in the one around it, or behind it."""
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for lane in lanes.values():
        around: list[int] = []
        for event in sorted(lane, key=lambda one: (one["ts"], -one["dur"])):
            while around and around[-1] <= event["ts"]:
                around.pop()
            end = event["ts"] + event["dur"]
            assert not around or end <= around[-1], (event, around)
            around.append(end)


def test_a_step_has_its_phases_in_it_and_ends_with_its_parameters() -> None:
    lives = lives_of([batch(spans=[*step(1, 0), *step(2, 100)])])
    events = list(chrome_events(lives))
    check_nesting(events)
    steps = [(e["name"], e["ts"], e["dur"]) for e in whole(events, 1) if e["cat"] == "step"]
    assert steps == [("step 1", 0, 100), ("step 2", 100, 100)]
    phases = [(e["name"], e["args"]["step"]) for e in whole(events, 1) if e["cat"] == "phase"]
    assert phases == [(name, k) for k in (1, 2) for name in ("compute", "stage", "compute", "wait", "pull")]


def test_with_a_window_waits_are_for_earlier_steps_and_steps_do_not_overlap() -> None:
    spans = [span for k in range(1, 6) for span in step(k, 100 * k, window=1)]
    events = list(chrome_events(lives_of([batch(spans=spans)])))
    check_nesting(events)
    steps = [e for e in whole(events, 1) if e["cat"] == "step"]
    assert [e["name"] for e in steps] == [f"step {k}" for k in range(1, 6)]
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(steps))
    assert [e["args"]["step"] for e in whole(events, 1) if e["name"] == "wait"] == [0, 1, 2, 3, 4]


def test_only_some_steps() -> None:
    spans = [span for k in range(1, 6) for span in step(k, 100 * k)]
    lives = lives_of(
        [batch(spans=spans), batch("server-0", [PhaseSpan(APPLY, k, 100 * k + 70, 5) for k in range(1, 6)])]
    )
    events = list(chrome_events(lives, first=2, last=3))
    assert [e["name"] for e in whole(events, 1) if e["cat"] == "step"] == ["step 2", "step 3"]
    assert len(whole(events, 1)) == 2 * 6 and [e["args"]["step"] for e in whole(events, 2)] == [2, 3]


def test_rounds_that_overlap_have_lanes_and_say_whose_push_they_are() -> None:
    spans = [
        PhaseSpan(APPLY, 1, 0, 50, "worker-0"),
        PhaseSpan(APPLY, 1, 10, 20, "worker-1"),
        PhaseSpan(APPLY, 2, 30, 5, "worker-1"),
    ]
    events = list(chrome_events(lives_of([batch("server-0", spans)])))
    check_nesting(events)
    assert [(e["tid"], e["args"]["worker"]) for e in whole(events, 1)] == [
        (1, "worker-0"), (2, "worker-1"), (2, "worker-1")
    ]  # fmt: skip


def test_clocks_of_hosts_are_aligned_by_the_best_round_trip() -> None:
    """worker-1 has been up for an hour longer. Its first answer took long: half of that would be wrong."""
    hour = 3_600 * SECOND
    lives = lives_of(
        [
            batch(spans=step(1, 0), knot=Knot(0, 5_000, 10)),
            batch("worker-1", [], knot=Knot(hour, 5_000 - hour + 40_000, 50_000)),
            batch("worker-1", step(1, hour), number=2, knot=Knot(hour + 100, 5_000 - hour + 3, 10)),
        ]
    )
    assert [life.member for life in lives] == ["worker-0", "worker-1"]
    assert lives[1].error_us == 10
    events = list(chrome_events(lives))
    ones, twos = whole(events, 1), whole(events, 2)
    assert [b["ts"] - a["ts"] for a, b in zip(ones, twos, strict=True)] == [3] * len(ones)


def test_clocks_that_drift_stay_together_and_nothing_comes_to_overlap() -> None:
    """A clock is fast by 200 millionths for ten minutes: with one offset it would be 120 ms off at the end."""
    drift = 200e-6
    spans, knots = [], []
    for second in range(0, 600, 2):
        at = second * SECOND
        spans += step(second + 1, at)
        knots.append(Knot(at, -round(at * drift), 10 + second % 7))
    life = TracedLife(batch())
    for number, (knot, begin) in enumerate(zip(knots, range(0, len(spans), 5), strict=True)):
        life.add(batch(spans=spans[begin : begin + 5], knot=knot, number=number))
    placed = life.aligned()
    assert all(a.end <= b.begin for a, b in itertools.pairwise(placed))
    for span in placed:
        true = spans[0].begin + (span.step - 1) * SECOND * (1 - drift)
        if span.end - span.begin > 1:  # else it is the little that is computed for the next step
            assert abs(span.begin - true) < 6_000, span  # behind the last knot nothing is known of half a minute


def test_without_an_answer_the_time_of_arrival_counts() -> None:
    life = TracedLife(batch(sent=500, received=2.0))
    life.add(batch(spans=step(1, 400), sent=500, received=2.0))
    assert life.error_us is None and life.aligned()[0].begin == 2 * SECOND - 100


def test_a_batch_that_is_sent_again_counts_once_and_lives_are_lanes() -> None:
    """The answer was lost, so the member sent it again; a second life of the name has a lane of its own."""
    lives = lives_of([batch(spans=step(1, 0)), batch(spans=step(1, 0)), batch(spans=step(2, 50), incarnation=2)])
    assert [len(life) for life in lives] == [5, 5]
    events = list(chrome_events(lives))
    check_nesting(events)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {(1, 1): "steps", (1, 2): "steps, life 2"}


def test_events_are_marks_between_the_first_span_and_the_last() -> None:
    lives = lives_of([batch(spans=step(1, 0), knot=Knot(0, 10**9 * SECOND, 1))])
    marks = [Event(number=1, at=1e9 + 5e-5, step=3, kind="death", text="<b>"), Event(number=2, at=1.0, step=0,
             kind="join", text="long before")]  # fmt: skip
    (mark,) = (event for event in chrome_events(lives, marks) if event["ph"] == "i")
    assert (mark["name"], mark["ts"], mark["args"]) == ("death", 50, {"step": 3, "text": "<b>"})


def test_what_a_damaged_line_says_is_left_out() -> None:
    """A phase that does not exist, a length below zero, a time beyond all bounds."""
    bad = [
        PhaseSpan(99, 1, 0, 1),
        PhaseSpan(COMPUTE, 1, 0, -1),
        PhaseSpan(COMPUTE, 1, 1 << 60, 1),
        PhaseSpan(COMPUTE, 1 << 90, 0, 1),
    ]
    (life,) = lives_of([batch(spans=bad)])
    assert len(life) == 1
    list(chrome_events([life]))


def test_a_buffer_is_bounded_and_counts_what_it_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = SpanBuffer()
    for number in range(tracing.MOST_UNSENT + 7):
        spans.add(COMPUTE, number, number * 1e-3, number * 1e-3 + 5e-4)
    assert spans.num_dropped == 7
    taken = spans.take()
    assert len(taken) == tracing.MOST_SPANS and taken[0] == PhaseSpan(COMPUTE, 7, 7_000, 500)
    assert spans.num_dropped == 7


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_laps_that_touch_stay_touching(moments: list[float]) -> None:
    """Rounding must not make a span reach over the next one."""
    moments.sort()
    spans = SpanBuffer()
    for begin, end in itertools.pairwise(moments):
        spans.add(COMPUTE, 1, begin, end)
    taken = spans.take()
    assert all(a.begin + a.length == b.begin for a, b in itertools.pairwise(taken))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(0, 9)), max_size=40))
def test_any_order_of_phases_nests(laps: list[tuple[int, int, int]]) -> None:
    """Whatever a script does, spans of one worker follow each other; steps around them must not cross."""
    at, spans = 0, []
    for phase, number, length in laps:
        spans.append(PhaseSpan(phase if phase < 4 else COMPUTE, number, at, length))
        at += length
    check_nesting(list(chrome_events(lives_of([batch(spans=spans)]))))


def test_stages_of_a_pipeline_have_lanes_of_their_own() -> None:
    """They compute inside the step of their leader and beside each other. A damaged span makes no lane."""
    ran = [
        PhaseSpan(phase, 1, begin, 8, micro_batch=MicroBatch(stage, stage, 0))
        for phase, begin, stage in ((FORWARD, 2, 0), (FORWARD, 11, 1), (BACKWARD, 20, 1), (BACKWARD, 29, 0))
    ]
    damaged = [
        PhaseSpan(FORWARD, 1, 2, 3),
        PhaseSpan(COMPUTE, 1, 2, 3, micro_batch=MicroBatch(0, 0, 0)),
        PhaseSpan(FORWARD, 1, 2, 3, micro_batch=MicroBatch(1 << 40, 0, 0)),
    ]
    events = list(chrome_events(lives_of([batch(spans=[*step(1, 0), *ran, *damaged])])))
    check_nesting(events)
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {1: "steps", 2: "stage 0", 3: "stage 1"}
    found = [(e["name"], e["ts"], lanes[e["tid"]], e["args"]) for e in whole(events, 1) if e["tid"] > 1]
    told = {"step": 1, "micro_batch": 0}
    assert found == [
        ("forward 0", 2, "stage 0", {**told, "part": 0}),
        ("forward 0", 11, "stage 1", {**told, "part": 1}),
        ("backward 0", 20, "stage 1", {**told, "part": 1}),
        ("backward 0", 29, "stage 0", {**told, "part": 0}),
    ]
    assert [e["name"] for e in whole(events, 1) if e["cat"] == "step"] == ["step 1"]
