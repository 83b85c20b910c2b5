"""What is kept of readings, and figures from totals."""

from __future__ import annotations

import itertools
import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from syncline.core.observing import JobTotals, MemberTotals, Observer
from syncline.core.series import Curve, Point, merge_points, merged, most_points, point, slot_of
from syncline.stats import (
    MemberCounts,
    MemberStats,
    MemberStatus,
    ProcessStats,
    ServerStats,
    StageStats,
    StepTimes,
    Wait,
    WireStats,
)


@given(st.lists(st.floats(allow_nan=True, width=32), min_size=1, max_size=60), st.integers(1, 5))
def test_no_reading_is_lost_by_merging(values: list[float], halvings: int) -> None:
    """However often points are halved: every reading is counted once, and the extremes are those of all."""
    curve, kept = Curve(), list[Point]()
    for k, value in enumerate(values):
        made = curve.add(point(k, float(k), value))
        if made is not None:
            kept.append(made)
        if len(kept) > 8 and curve.stride < 2**halvings:
            kept = curve.halve(kept)
    rest = curve.flush()
    kept += [rest] if rest is not None else []
    assert sum(one.count for one in kept) == len(values)
    finite = [value for value in values if math.isfinite(value)]
    known = [one for one in kept if math.isfinite(one.value)]
    if finite and known:
        assert min(one.low for one in known) == min(finite) and max(one.high for one in known) == max(finite)
    assert [one.step for one in kept] == sorted(one.step for one in kept)


def test_what_is_not_finite_does_not_spoil_a_mean() -> None:
    assert merge_points([point(1, 1.0, 2.0), point(2, 2.0, math.nan)]).value == 2.0
    assert math.isnan(merge_points([point(1, 1.0, math.nan)]).value)
    assert merged([{"a": 1.0, "b": math.nan}, {"a": 3.0}, {"c": 5.0}]) == {"a": 2.0, "c": 5.0}
    assert (slot_of(1234.9, 10.0), slot_of(1230.0, 10.0)) == (1230.0, 1230.0)


def test_many_metrics_have_few_points_each() -> None:
    assert most_points(1) == most_points(75) == 4_000
    assert most_points(1_000) == 300 and most_points(100_000) == 200


def totals(at: float, *members: MemberTotals, step: int = 0, waits: tuple[Wait, ...] = ()) -> JobTotals:
    return JobTotals(at=at, step=step, seconds=at, members=members, waits=waits, why="x waits")


def member(name: str, incarnation: int = 1, **known: object) -> MemberTotals:
    status = MemberStatus(
        name=name, role=name[:6], incarnation=incarnation, host="h", since=1, heard_seconds=0.1,
        deadline_seconds=2.0, rtt_seconds=0.001, state="working",
    )  # fmt: skip
    return MemberTotals(status=status, **known)  # type: ignore[arg-type]


def test_rates_are_of_the_time_since_the_last_look() -> None:
    def of(seconds: float, steps: int, sent: int, shared: int) -> MemberTotals:
        stats = MemberStats(
            process=ProcessStats(cpu_seconds=seconds, memory_bytes=10),
            wire=WireStats(bytes_sent=sent),
            peers={"server-0": (sent, 0)},
        )
        times = StepTimes(num_steps=steps, compute=0.1 * steps, data=0.05 * steps, wait=0.2 * steps)
        return member("worker-0", stats=stats, times=times, samples=32 * steps, shared_bytes=shared)

    hosts = [member(f"server-{k}", stats=MemberStats(server=ServerStats(parameter_bytes=100))) for k in range(2)]
    observer = Observer()
    observer.look(totals(10.0, *hosts, of(100.0, 1000, 1 << 30, 0), step=1000))
    look = observer.look(totals(12.0, *hosts, of(103.0, 1010, (1 << 30) + 500, 400), step=1010))
    own = look.members[2]
    assert (look.steps_per_second, look.samples_per_second, own.cores, own.num_steps) == (5.0, 160.0, 1.5, 10)
    assert math.isclose(own.compute, 0.1) and math.isclose(own.data, 0.05) and math.isclose(own.wait, 0.2)
    assert (own.sent_per_second, own.peers) == (450.0, {"server-0": 350.0, "server-1": 100.0})
    assert own.counts == MemberCounts((1 << 30) + 900, 0, 103.0, 32 * 1010), "totals: a scrape makes its own rates"


def test_what_is_told_more_rarely_than_it_is_looked_at_has_smooth_rates() -> None:
    """Every third look sees the totals of the second again: no member is idle in it, nor twice as busy afterwards."""

    def of(second: int) -> MemberTotals:
        stats = MemberStats(
            process=ProcessStats(cpu_seconds=1.5 * second),
            wire=WireStats(bytes_sent=100 * second, bytes_received=10 * second),
            peers={"server-0": (100 * second, 0)},
        )
        return member("worker-0", stats=stats)

    observer = Observer()
    looks = [observer.look(totals(float(at), of(at - at % 3 // 2))).members[0] for at in range(1, 12)]
    assert {(own.cores, own.sent_per_second, own.peers["server-0"]) for own in looks[2:]} == {(1.5, 100.0, 100.0)}
    silent = [observer.look(totals(float(at), of(10))).members[0] for at in (20, 24)]
    assert [own.cores for own in silent] == [1.5, 0.0], "it hangs, or cannot be reached"
    assert silent[1].sent_per_second == 0.0 and not silent[1].peers
    assert observer.look(totals(30.0, of(20))).members[0].cores == 0.75, "of all the time since it was last heard"
    gone = observer.look(totals(40.0))
    assert gone.members == () and observer.look(totals(41.0, of(400))).members[0].cores == 0.0, "seen first again"


def test_another_life_begins_at_zero_and_what_is_seen_first_is_no_rate() -> None:
    """A coordinator that comes back sees totals of hours; a worker that comes back has less than before."""
    observer = Observer()
    first = observer.look(totals(10.0, member("worker-0", samples=10**9)))
    assert first.samples_per_second == 0.0
    again = observer.look(totals(11.0, member("worker-0", incarnation=2, samples=5)))
    assert again.samples_per_second == 0.0
    assert observer.look(totals(12.0, member("worker-0", incarnation=2, samples=9))).samples_per_second == 4.0


def test_a_pipeline_is_told_by_its_newest_steps() -> None:
    """Hours of steps do not hide that a stage is slow now. Without a step, or cut elsewhere: all that is known."""

    def of(steps: int, busy: float, layers: str = "a") -> tuple[StageStats, ...]:
        stats = StageStats(
            stage=0,
            num_steps=steps,
            busy_seconds=busy,
            step_seconds=float(steps),
            layers=layers,
            sent_bytes=8 * steps,
        )
        known = member("worker-0", times=StepTimes(num_steps=steps))
        status = msgspec.structs.replace(known.status, stages=[stats])
        at = next(clock)
        return observer.look(totals(at, msgspec.structs.replace(known, status=status))).members[0].stages

    observer, clock = Observer(), itertools.count(1.0)
    assert of(1000, 900.0)[0].utilisation == 0.9
    (now,) = of(1010, 905.0)
    assert (now.num_steps, now.utilisation, now.sent_bytes) == (10, 0.5, 80)
    assert of(1010, 905.0)[0].num_steps == 1010
    assert of(1020, 1000.0, "b")[0].num_steps == 1020


def test_staleness_adds_up_over_servers_and_their_lives() -> None:
    def of(name: str, incarnation: int, *counts: int) -> MemberTotals:
        return member(name, incarnation, stats=MemberStats(server=ServerStats(staleness_counts=counts)))

    observer = Observer()
    observer.look(totals(1.0, of("server-0", 1, 5, 1), of("server-1", 2, 3)))
    assert observer.look(totals(2.0, of("server-0", 3, 2), of("server-1", 2, 4))).staleness_counts == (11, 1)


def test_only_long_waits_are_told() -> None:
    short, long = Wait("", 1, ["worker-0"], 0.02, "round"), Wait("", 1, ["worker-0"], 1.5, "round")
    assert Observer().look(totals(1.0, waits=(short,))).why == ""
    assert Observer().look(totals(1.0, waits=(short, long))).why == "x waits"
