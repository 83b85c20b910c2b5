"""Liveness under any order of events and a clock that jumps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.core.liveness import Liveness

LEAST, MOST, SUSPECT, ASLEEP, TICK = 2.0, 10.0, 0.4, 0.2, 0.1


def liveness() -> Liveness:
    return Liveness(least_seconds=LEAST, most_seconds=MOST, suspect_seconds=SUSPECT, asleep_seconds=ASLEEP)


STEPS = st.lists(
    st.tuples(
        st.one_of(st.floats(0, ASLEEP * 0.99), st.floats(-20, 20)),
        st.sampled_from(["dead", "dead", "dead", "heard", "heard other", "suspect", "watch", "full"]),
    ),
    min_size=20,
    max_size=120,
)


@given(STEPS)
def test_only_silence_while_we_looked_is_deadly(steps: list[tuple[float, str]]) -> None:
    """Any order of events under a clock that jumps: who dies was silent for its time while questions were asked.

    The longest time that counts for one step is `asleep_seconds`, whatever the clock did.
    """
    watch = liveness()
    now, silent, apart = 0.0, 0.0, 0.0
    for name in ("worker-0", "worker-1"):
        watch.watch(name, now)
    for step, event in steps:
        now += step
        counted = min(max(step, 0.0), ASLEEP)
        silent, apart = silent + counted, apart + counted
        if event == "dead":
            found = dict(watch.dead(now))
            assert found.keys() == {name for name in watch.members if now >= watch.deadline(name)}
            if "worker-0" in found:
                limit = SUSPECT if found["worker-0"].startswith("its connection closed") else LEAST
                assert (apart if limit == SUSPECT else silent) >= limit - 1e-6
        elif event == "suspect":
            watch.suspect("worker-0", now, "closed")
        elif event == "heard other":
            watch.heard("worker-1", now)
        else:
            silent = 0.0
            if event == "heard":
                watch.heard("worker-0", now)
            else:
                watch.watch("worker-0", now, full=event == "full")
        if event != "suspect" and watch.members["worker-0"].suspected is None:
            apart = 0.0
        assert watch.next_deadline() is not None


@given(st.lists(st.floats(0.001, 3.0), max_size=60), st.floats(0.02, ASLEEP * 0.9))
def test_the_silent_are_found_within_the_most(periods: list[float], tick: float) -> None:
    """Whatever a member did before, a job waits for its death no longer than it was told, and one question more."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    now = 0.0
    for period in periods:
        end = now + period
        while now < end:
            watch.dead(now)
            now = min(now + TICK, end)
        watch.heard("worker-0", now)
    watch.dead(now)
    allowed = watch.deadline("worker-0") - now
    assert LEAST - 1e-6 <= allowed <= MOST + 1e-6
    assert allowed >= min(4 * max(periods[-8:], default=0), MOST) - 1e-6
    asked = now
    while not watch.dead(asked):
        asked += tick
        assert asked <= now + MOST + ASLEEP
    assert asked - now >= LEAST - 1e-6
