"""Liveness: the silent are found dead in time, and nobody else is, whoever was late."""

from __future__ import annotations

import pytest

from syncline.config import JobConfig
from syncline.core.liveness import Liveness, beat_seconds

LEAST, MOST, SUSPECT, ASLEEP, TICK = 2.0, 10.0, 0.4, 0.2, 0.1


def liveness() -> Liveness:
    return Liveness(least_seconds=LEAST, most_seconds=MOST, suspect_seconds=SUSPECT, asleep_seconds=ASLEEP)


def beat(watch: Liveness, name: str, start: float, period: float, count: int) -> float:
    """Heard every `period` from `start` on, with questions in between; when it was heard last."""
    now = start
    for _ in range(count):
        now = idle(watch, now, period)
        watch.heard(name, now)
    return now


def idle(watch: Liveness, now: float, seconds: float) -> float:
    """Time passes in ticks, in which nobody dies."""
    end = now + seconds
    while now < end:
        assert watch.dead(now) == []
        now = min(now + TICK, end)
    return now


def dies(watch: Liveness, now: float, tick: float = TICK) -> tuple[float, str]:
    """When somebody is found dead, and why."""
    for k in range(1, 1000):
        if found := watch.dead(now + k * tick):
            assert len(found) == 1
            return now + k * tick, found[0][1]
    raise AssertionError("nobody is ever found dead")


def test_a_regular_member_has_the_least_time_and_then_is_dead() -> None:
    """A process hangs, its machine is gone: no word of it, and its connection stays open."""
    watch = liveness()
    watch.watch("worker-0", 100.0)
    last = beat(watch, "worker-0", 100.0, 0.5, 50)
    assert watch.last_heard("worker-0") == last
    assert watch.deadline("worker-0") == pytest.approx(last + LEAST)
    found, reason = dies(watch, last)
    assert found == pytest.approx(last + LEAST, abs=TICK)
    assert reason.startswith("not heard of for 2.") and " s (deadline 2.0 s); " in reason
    assert reason.endswith("allow more with --deadline-seconds"), "what to do about it"
    assert [name for name, _ in watch.dead(found)] == ["worker-0"]
    watch.forget("worker-0")
    assert watch.dead(found) == []


def test_a_member_that_is_never_heard_of_dies_too() -> None:
    """A process that joins and is killed before its first heartbeat."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    assert watch.last_heard("worker-0") is None
    assert dies(watch, 0.0)[0] == pytest.approx(LEAST, abs=TICK)


def test_who_has_made_no_step_has_the_most_time() -> None:
    """A script loads its framework from a cold disk, and the interpreter's lock is held meanwhile: no heartbeat."""
    watch = liveness()
    watch.watch("worker-0", 0.0, starting=True)
    last = beat(watch, "worker-0", 0.0, 0.25, 40)
    last, _ = dies(watch, last)
    assert last == pytest.approx(10.0 + MOST, abs=TICK)
    watch.heard("worker-0", last)
    last = beat(watch, "worker-0", last, 0.25, 400)
    assert watch.has_stepped("worker-0")
    assert not watch.has_stepped("worker-0"), "no news"
    assert dies(watch, last)[0] == pytest.approx(last + LEAST, abs=TICK)


def test_a_step_of_one_that_nobody_watches_is_no_news() -> None:
    """A late heartbeat of a member that was evicted."""
    assert not liveness().has_stepped("worker-0")


def test_a_member_that_is_often_late_gets_more_time() -> None:
    """A machine that swaps: heard of every 1.8 s, one hiccup more must not be its death."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    last = beat(watch, "worker-0", 0.0, 1.8, 10)
    assert watch.deadline("worker-0") == pytest.approx(last + 4 * 1.8)
    assert "deadline 7.2 s" in dies(watch, last)[1]


def test_nobody_gets_more_than_the_most() -> None:
    """However late it has been: a job must not wait for a dead member longer than it was told."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    now = 0.0
    for period in (1.9, 7.0, 9.0):
        now = beat(watch, "worker-0", now, period, 1)
    assert watch.deadline("worker-0") == pytest.approx(now + MOST)


def test_a_pause_counts_at_once() -> None:
    """Late once, right after a message: the allowance is there with the next one, wherever in a phase that is."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    now = beat(watch, "worker-0", 0.0, 0.45, 1)
    watch.heard("worker-0", now + 0.01)
    now = beat(watch, "worker-0", now + 0.01, 1.5, 1)
    assert watch.deadline("worker-0") == pytest.approx(now + 6.0)


def test_a_burst_does_not_hide_how_a_member_pauses() -> None:
    """Every message counts as a sign of life: a thousand in one second say nothing about the silence between two."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    now = beat(watch, "worker-0", 0.0, 1.5, 4)
    now = beat(watch, "worker-0", now, 0.001, 1000)
    assert watch.deadline("worker-0") == pytest.approx(now + 6.0)


def test_what_is_long_ago_is_forgotten() -> None:
    """It was late once, at the start. Its death much later is found as fast as any other's."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    now = beat(watch, "worker-0", 0.0, 1.9, 1)
    now = beat(watch, "worker-0", now, 0.05, 400)
    assert watch.deadline("worker-0") == pytest.approx(now + LEAST)


def test_a_member_that_is_regular_at_any_rate_has_the_least_time() -> None:
    """Up to a quarter of the deadline apart: nothing to make an allowance for."""
    for period in (0.001, 0.1, 0.3, 0.49):
        watch = liveness()
        watch.watch("worker-0", 0.0)
        last = beat(watch, "worker-0", 0.0, period, 100)
        assert watch.deadline("worker-0") == pytest.approx(last + LEAST)


def test_a_closed_connection_shortens_the_wait() -> None:
    """A killed process closes its connections at once: no need to wait for the whole deadline."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    watch.heard("worker-0", 0.1)
    watch.suspect("worker-0", idle(watch, 0.1, 0.1), "connection reset by peer")
    assert watch.deadline("worker-0") == pytest.approx(0.6)
    idle(watch, 0.2, 0.39)
    found = watch.dead(0.61)
    words = "its connection closed and it did not come back within 0.4 s: connection reset by peer"
    assert found == [("worker-0", words)]


def test_coming_back_clears_the_suspicion() -> None:
    """A switch was restarted: the member connects again in time and lives by its usual deadline."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    watch.suspect("worker-0", 0.1, "closed")
    watch.heard("worker-0", idle(watch, 0.1, 0.2))
    assert watch.deadline("worker-0") == pytest.approx(2.3)
    watch.suspect("worker-0", idle(watch, 0.3, 0.1), "closed again")
    assert watch.deadline("worker-0") == pytest.approx(0.8)


def test_each_connection_that_closes_gives_no_new_time() -> None:
    """A dead process has several connections; they break one after the other."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    for k in range(1, 4):
        assert watch.dead(k * 0.1) == []
        watch.suspect("worker-0", k * 0.1, f"connection {k}")
    assert watch.deadline("worker-0") == pytest.approx(0.5)
    assert dies(watch, 0.3)[1].endswith(": connection 1")


def test_a_process_that_is_known_to_have_ended_is_dead_at_once() -> None:
    """The launcher saw its exit code. What was still on the way from it must not bring it back."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    watch.watch("worker-1", 0.0)
    watch.suspect("worker-0", 0.1, "closed")
    watch.gone("worker-0", 0.15, "killed by SIGKILL")
    watch.gone("worker-0", 0.16, "no such process")
    watch.heard("worker-0", 0.17)
    watch.suspect("worker-0", 0.18, "closed")
    assert watch.dead(0.19) == [("worker-0", "killed by SIGKILL")]
    assert watch.deadline("worker-0") == 0.15
    watch.watch("worker-0", 0.2)
    assert watch.dead(0.21) == []
    watch.gone("worker-1", 0.22, "exited with code 3")
    watch.suspect("worker-1", 0.23, "closed")
    assert watch.dead(0.24) == [("worker-1", "exited with code 3")]


def test_whoever_has_been_forgotten_leaves_nothing_behind() -> None:
    """Members come and go for weeks; late messages of those that left must not make them members again."""
    watch = liveness()
    watch.watch("server-0", 0.0)
    for k in range(100):
        name = f"worker-{k}"
        watch.watch(name, 0.0)
        watch.heard(name, 0.1)
        watch.suspect(name, 0.1, "closed")
        watch.forget(name)
        watch.forget(name)
        watch.heard(name, 0.1)
        watch.suspect(name, 0.1, "closed")
        watch.gone(name, 0.1, "ended")
        assert watch.last_heard(name) is None
    assert list(watch.members) == ["server-0"] and watch.dead(0.15) == []
    watch.forget("server-0")
    assert watch.next_deadline() is None and not watch.members


def test_memory_for_a_member_is_bounded() -> None:
    """A million messages of one worker are not kept."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    beat(watch, "worker-0", 0.0, 0.51, 1000)
    assert len(watch.members["worker-0"].samples) == 32
    assert not hasattr(watch.members["worker-0"], "__dict__")  # nothing else that could grow


def test_after_a_restart_of_the_coordinator_everybody_has_a_whole_deadline() -> None:
    """Members find the new coordinator in a crowd of others: a connection that breaks in it is nobody's death."""
    watch = liveness()
    watch.watch("worker-0", 50.0, full=True)
    watch.suspect("worker-0", 50.1, "reset in the crowd")
    assert watch.deadline("worker-0") == pytest.approx(52.0)
    now = idle(watch, 50.1, 1.8) + 5.0
    assert watch.dead(now) == []  # asleep: a whole deadline from waking on
    found, reason = dies(watch, now, 0.01)
    assert found == pytest.approx(now + LEAST, abs=0.12) and reason.endswith("reset in the crowd")


def test_whoever_has_found_the_new_coordinator_is_one_like_all() -> None:
    """Heard of after the restart, and then its connection closes: that is news again, not the crowd."""
    watch = liveness()
    watch.watch("worker-0", 50.0, full=True)
    watch.heard("worker-0", 50.1)
    watch.suspect("worker-0", 50.15, "closed")
    assert watch.deadline("worker-0") == pytest.approx(50.15 + SUSPECT)


def test_a_restart_keeps_what_is_known_of_a_slow_member() -> None:
    """Its longer deadline is the one it has whole; a new process under its name starts again."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    last = beat(watch, "worker-0", 0.0, 1.8, 10)
    watch.suspect("worker-0", last + 0.1, "closed")
    watch.watch("worker-0", last + 0.2, full=True)
    assert watch.last_heard("worker-0") == last
    assert watch.deadline("worker-0") == pytest.approx(last + 0.2 + 7.2)
    watch.watch("worker-0", last + 0.3)
    assert watch.deadline("worker-0") == pytest.approx(last + 0.3 + LEAST)


@pytest.mark.parametrize("slept", [0.3, 1.9, 5.0, 1000.0])
def test_nobody_dies_of_the_coordinators_own_sleep(slept: float) -> None:
    """SIGSTOP of the coordinator: on waking, all seem silent. They have as much time left as when it fell asleep;
    after a long sleep, who gave up on it has a whole deadline to come back."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    watch.watch("worker-1", 0.0)
    now = idle(watch, 0.0, 1.9)
    watch.suspect("worker-1", now, "closed")
    assert watch.dead(now) == []
    now += slept
    assert watch.dead(now) == []
    assert watch.deadline("worker-0") == pytest.approx(now + 0.1)
    assert watch.deadline("worker-1") == pytest.approx(now + (0.4 if slept < LEAST / 2 else LEAST))
    assert {name for name, _ in watch.dead(now + 0.1)} == {"worker-0"}


def test_what_is_heard_first_after_a_sleep_is_no_long_pause() -> None:
    """Messages that waited in the sockets are read before anybody asks: no gift of time, neither now nor later."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    watch.watch("worker-1", 0.0)
    for k in range(1, 20):
        watch.heard("worker-0", k * 0.1)
        watch.heard("worker-1", k * 0.1)
        assert watch.dead(k * 0.1) == []
    assert watch.dead(2.0) == []
    watch.heard("worker-0", 2.1)
    watch.heard("worker-0", 7.1)
    assert watch.deadline("worker-0") == pytest.approx(9.1)
    assert watch.deadline("worker-1") == pytest.approx(9.0)
    assert watch.dead(7.2) == []


def test_a_coordinator_that_is_always_late_still_finds_the_dead() -> None:
    """Too much work, not sleep: were every late question excused, a dead worker would stop the job for ever."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    watch.watch("worker-1", 0.0)
    for k in range(1, 100):
        now = k * 0.5
        watch.heard("worker-1", now)  # comes before the question and sees the jump first
        if found := watch.dead(now):
            assert [name for name, _ in found] == ["worker-0"]
            return
    raise AssertionError("a dead worker was never found")


def test_the_next_question_is_asked_in_time() -> None:
    """A coordinator that sleeps exactly until the next deadline must not take that for a sleep of its own."""
    watch = liveness()
    assert watch.next_deadline() is None
    watch.watch("worker-0", 0.0)
    now, questions = 0.0, 0
    while not watch.dead(now):
        assert watch.next_deadline() > now
        now = watch.next_deadline()
        questions += 1
    assert now == pytest.approx(LEAST) and questions < 50
    watch.watch("worker-0", now)
    watch.suspect("worker-0", now, "closed")
    idle(watch, now, 0.38)
    assert watch.dead(now + 0.38) == []
    assert watch.next_deadline() == pytest.approx(now + SUSPECT)


def test_a_clock_that_runs_backward_kills_nobody() -> None:
    """It should not happen. If it does, silence is neither made up nor forgotten."""
    watch = liveness()
    watch.watch("worker-0", 1000.0)
    watch.heard("worker-0", 1000.1)
    idle(watch, 1000.1, 0.3)
    assert watch.dead(3.0) == []
    assert watch.last_heard("worker-0") == 3.0
    watch.heard("worker-0", 2.95)
    assert watch.dead(2.9) == []
    assert dies(watch, 2.9)[0] == pytest.approx(2.95 + LEAST, abs=TICK)
    watch.watch("worker-0", 0.0)
    for k in range(100):
        assert watch.dead(-1.0 * k) == []


def test_a_clock_that_ran_backward_still_lets_old_pauses_be_forgotten() -> None:
    """Were its phase left in the future, one pause before the jump would lengthen its deadline for ever."""
    watch = liveness()
    watch.watch("worker-0", 1000.0)
    beat(watch, "worker-0", 1000.0, 1.9, 1)
    assert watch.dead(5.0) == []
    now = beat(watch, "worker-0", 5.0, 0.05, 400)
    assert watch.deadline("worker-0") == pytest.approx(now + LEAST)


def test_readings_of_the_clock_out_of_order() -> None:
    """Two threads read the clock and come in the other order: no time is lost, none is given, nobody looks asleep."""
    watch = liveness()
    watch.watch("worker-0", 0.0)
    watch.heard("worker-0", 0.15)
    watch.heard("worker-0", 0.05)
    assert watch.deadline("worker-0") == pytest.approx(2.15) and watch.last_heard("worker-0") == 0.15
    for k in range(2, 100):
        if watch.dead(k * 0.1) or watch.dead(k * 0.1 - 0.15):
            assert k * 0.1 == pytest.approx(2.15, abs=TICK)
            return
    raise AssertionError("nobody is ever found dead")


def test_after_a_long_sleep_of_ours_members_have_a_deadline_to_find_us_again() -> None:
    """They closed their connections since nobody answered; what lay in them is read first, and clears nothing."""
    liveness = Liveness(least_seconds=2.0, most_seconds=10.0, suspect_seconds=0.3, asleep_seconds=0.1)
    liveness.watch("server-0", 0.0)
    for k in range(100):
        assert liveness.dead(k / 20) == []
        liveness.heard("server-0", k / 20)
    liveness.heard("server-0", 35.0)
    liveness.suspect("server-0", 35.0, "closed")
    for k in range(39):
        assert liveness.dead(35.0 + k / 20) == []
    found = liveness.dead(37.0)
    assert [name for name, _ in found] == ["server-0"]


class Counting(Liveness):
    """Counts how often the deadline of a member is computed."""

    num_computed = 0

    def deadline(self, name: str) -> float:
        self.num_computed += 1
        return super().deadline(name)


def test_two_hundred_members_that_beat_are_not_looked_at_in_every_question() -> None:
    """Twenty questions a second, of each of them, were a twentieth of a core."""
    watch = Counting(least_seconds=LEAST, most_seconds=MOST, suspect_seconds=SUSPECT, asleep_seconds=ASLEEP)
    names = [f"worker-{k}" for k in range(200)]
    for name in names:
        watch.watch(name, 0.0)
    for tick in range(200):  # ten seconds
        for name in names if tick % 5 == 0 else ():
            watch.heard(name, 0.05 * tick)
        assert watch.dead(0.05 * tick) == []
    assert watch.num_computed < 200 * 200 / 10
    for tick in range(200, 300):
        for name in names[1:] if tick % 5 == 0 else ():
            watch.heard(name, 0.05 * tick)
        found = [name for name, _ in watch.dead(0.05 * tick)]
        assert found == (["worker-0"] if tick >= 195 + 40 else []), "silent since 195, for two seconds"


def test_members_of_a_large_job_beat_less_often() -> None:
    """Four times within the deadline at least, and never more often than they were told."""
    usual = JobConfig()
    assert [beat_seconds(usual, n) for n in (1, 8, 100, 160, 200, 10_000)] == [0.25, 0.25, 0.25, 0.4, 0.5, 0.5]
    slow = JobConfig(beat_seconds=1.0)
    assert beat_seconds(slow, 1) == beat_seconds(slow, 10_000) == 1.0
    assert beat_seconds(JobConfig(deadline_seconds=60.0), 1_000) == 2.5
