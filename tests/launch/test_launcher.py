"""The launcher, with processes and a coordinator that only play their parts."""

from __future__ import annotations

import pathlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.launch.played import Engine, Play, Process
from tests.patience import PATIENCE

from syncline.core.wire.control import Died, Report, Standings
from syncline.launch.lives import Lives
from syncline.launch.oom import OomKills


@pytest.fixture
def play(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Play]]:
    monkeypatch.setattr("syncline.launch.launcher.CLOSE_SECONDS", 0.1)
    made: list[Play] = []

    def make(**settings: Any) -> Play:
        made.append(Play(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_killed_worker_comes_back_under_its_name(play: Callable[..., Play]) -> None:
    job = play()
    job.end("worker-1", -9)
    job.wait_for_life("worker-1", 2)
    assert job.coordinator.told == [Died("worker-1", "was killed by SIGKILL")]
    said = "syncline: worker-1 was killed by SIGKILL; starts again in 0.25 s (1 of 3)"
    assert said in job.screen.lines
    for name in ("worker-0", "worker-1"):
        job.end(name, 0)
    assert job.finish()[0] == 0
    log = (job.folder / "worker-1.log").read_text()
    again = "--- worker-1 starts again: was killed by SIGKILL ---"
    assert log == f"worker-1 speaks\n{again}\nworker-1 speaks\n"


def test_after_too_many_deaths_the_verdict_names_it(play: Callable[..., Play]) -> None:
    job = play(max_restarts=1)
    job.end("server-0", -9)
    job.wait_for_life("server-0", 2)
    job.end("server-0", -11)
    code, verdict = job.finish()
    assert code == 128 + 11
    assert "the job has failed: server-0 was killed by SIGSEGV, for the 2nd time without a push in between" in verdict
    assert job.coordinator.told[-1] == Died("server-0", "was killed by SIGSEGV", comes_back=False)


def test_a_push_in_between_forgives(play: Callable[..., Play]) -> None:
    """And a push of the life before does not count for the next one."""
    job = play(max_restarts=1)
    for number in range(1, 4):
        job.coordinator.change(pushed=["worker-1"])
        job.wait(lambda: bool(life.has_pushed) if (life := job.launcher._lives.get("worker-1")) else False)
        job.end("worker-1", -9)
        job.coordinator.change(pushed=[])
        job.wait_for_life("worker-1", number + 1)
    job.end("worker-1", -9)
    job.wait(lambda: job.launcher._failure is not None or len(job.lives["worker-1"]) == 5)
    assert len(job.lives["worker-1"]) == 4
    assert job.finish()[0] == 137


def test_an_evicted_process_is_started_again(play: Callable[..., Play]) -> None:
    job = play(workers=1)
    job.end("worker-0", 75)
    job.wait_for_life("worker-0", 2)
    assert "syncline: worker-0 was evicted; starts again in 0.25 s (1 of 3)" in job.screen.lines


def test_a_script_that_ends_with_the_number_of_an_eviction_was_not_evicted(play: Callable[..., Play]) -> None:
    job = play(workers=1)
    job.wait(lambda: bool(life.incarnation) if (life := job.launcher._lives.get("worker-0")) else False)
    job.lives["worker-0"][0].code = 75
    code, verdict = job.finish()
    assert code == 1 and "worker-0 ended with exit code 1" in verdict


@pytest.mark.parametrize(("code", "max_restarts", "verdict"), [(1, 3, 0), (None, 3, 0), (1, 0, 1), (77, 0, 1)])
def test_the_job_ends_well_without_one_that_was_evicted(
    play: Callable[..., Play], code: int | None, max_restarts: int, verdict: int
) -> None:
    """It slept through the end of the job: it finds nobody any more, or never wakes up. Where nobody starts again its
    own error is the job's: its connection may have closed before the launcher saw its end."""
    job = play(max_restarts=max_restarts)
    job.wait(lambda: all(life.incarnation for life in job.launcher._lives.values() if life.plan.role == "worker"))
    stands, goes_on, take = threading.Event(), threading.Event(), job.coordinator.take

    def take_later() -> list[Standings]:
        stands.set()
        assert goes_on.wait(PATIENCE)
        return take()

    job.coordinator.take = take_later  # the launcher sees all that follows at once
    assert stands.wait(PATIENCE)
    known = {n: i for n, i in job.coordinator.standings.incarnations.items() if n != "worker-1"}
    job.coordinator.change(incarnations=known)
    job.end("worker-0", 0)
    job.coordinator.change(verdict="all workers have finished")
    job.lives["worker-1"][0].code = code
    goes_on.set()
    assert job.finish()[0] == verdict


def test_a_mistake_of_the_script_is_not_tried_again(
    play: Callable[..., Play], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers end by themselves before a step was made: the verdict is that of the first, and at once."""
    for pause in ("FIRST_PAUSE_SECONDS", "LONGEST_PAUSE_SECONDS"):  # the second is to end within it
        monkeypatch.setattr(f"syncline.launch.restarts.{pause}", PATIENCE)
    job = play()
    job.end("worker-1", 3)
    job.wait(lambda: len(job.coordinator.told) == 1)
    job.end("worker-0", 1)
    code, verdict = job.finish()
    assert code == 3 and "worker-1 ended with exit code 3" in verdict
    assert not any("starts again" in line for line in job.screen.lines), "nobody did"


def test_a_mistake_of_one_script_is_said_when_it_starts_again(play: Callable[..., Play]) -> None:
    job = play()
    job.end("worker-1", 3)
    job.wait_for_life("worker-1", 2)
    assert "syncline: worker-1 ended with exit code 3; starts again at once (1 of 3)" in job.screen.lines


def test_after_a_step_the_same_mistake_is(play: Callable[..., Play]) -> None:
    job = play(workers=1)
    job.coordinator.change(reports={"worker-0": Report(4, 0, 0.0, 0, 0, 0)})
    job.wait(lambda: job.launcher._has_stepped)
    job.end("worker-0", 1)
    job.wait_for_life("worker-0", 2)
    assert job.coordinator.told == [Died("worker-0", "ended with exit code 1")], "and it is said to come back"


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_script_that_never_joins(
    play: Callable[..., Play], monkeypatch: pytest.MonkeyPatch, is_heard: bool
) -> None:
    """Also one that ends before the coordinator could be looked at, on a busy machine: that is no good end."""
    monkeypatch.setattr("syncline.launch.launcher.UNSURE_SECONDS", 0.2)
    job = play(workers=1, is_heard=is_heard)
    job.lives["worker-0"][0].code = 0
    code, verdict = job.finish()
    assert code == 1 and "does the script call syncline.init()?" in verdict


def test_a_job_that_has_ended_before_it_was_looked_at_has_ended_well(play: Callable[..., Play]) -> None:
    job = play(workers=1, is_heard=False)
    job.end("worker-0", 0)
    job.end("coordinator", 0)
    job.end("server-0", 0)
    assert job.finish()[0] == 0


def test_the_coordinator_comes_back_at_once_and_takes_the_job_up(play: Callable[..., Play]) -> None:
    job = play(max_restarts=2)
    assert not job.lives["coordinator"][0].plan.resumes
    for number in (2, 3):
        job.end("coordinator", -9)
        assert job.wait_for_life("coordinator", number).plan.resumes
    assert job.coordinator.told == []
    job.end("coordinator", -9)
    code, verdict = job.finish()
    assert code == 137 and "coordinator was killed by SIGKILL, for the 3rd time within a minute" in verdict


def test_nobody_starts_before_the_coordinator_has_heard_of_the_death(play: Callable[..., Play]) -> None:
    """The old life would still be a member, and the new one refused."""
    job = play()
    job.coordinator.hears = False
    job.end("worker-0", -9)
    job.wait(lambda: bool(job.coordinator.told))
    time.sleep(0.5)
    assert len(job.lives["worker-0"]) == 1
    job.coordinator.hears = True
    job.wait_for_life("worker-0", 2)


def test_more_are_wanted_then_fewer_then_more(play: Callable[..., Play]) -> None:
    job = play()
    job.coordinator.change(wanted={"worker": 4, "server": 2})
    job.wait_for_life("worker-3", 1)
    job.wait_for_life("server-1", 1)
    job.coordinator.change(wanted={"worker": 1, "server": 2}, retiring=["worker-2", "worker-3"])
    job.end("worker-3", 0)
    job.wait(lambda: "worker-3" in job.launcher._finished)
    job.coordinator.change(wanted={"worker": 4, "server": 2})
    job.wait_for_life("worker-3", 2)
    job.wait_for_life("worker-4", 1)  # worker-2 is on its way out, and its name is not free
    assert len(job.lives["worker-2"]) == 1
    for name in ("worker-0", "worker-1", "worker-2", "worker-3", "worker-4"):
        job.end(name, 0)
    assert job.finish()[0] == 0


def test_one_that_dies_while_it_retires_is_not_started_again(play: Callable[..., Play]) -> None:
    job = play()
    job.coordinator.change(wanted={"worker": 1, "server": 1}, retiring=["worker-1"])
    job.end("worker-1", -9)
    job.wait(lambda: "worker-1" in job.launcher._finished)
    job.end("worker-0", 0)
    assert job.finish()[0] == 0 and len(job.lives["worker-1"]) == 1


def test_workers_from_elsewhere_keep_the_job_going(play: Callable[..., Play]) -> None:
    """They joined with the job file; the servers must not go away under them."""
    job = play(workers=1)
    job.coordinator.change(incarnations={**job.coordinator.standings.incarnations, "worker-1": 99})
    job.end("worker-0", 0)
    time.sleep(0.5)
    assert job.code is None
    job.coordinator.change(incarnations={"server-0": 10}, left=["worker-0", "worker-1"])
    assert job.finish()[0] == 0


@pytest.mark.parametrize("code", [-9, 1])
def test_nothing_is_restarted_once_the_job_is_over(play: Callable[..., Play], code: int) -> None:
    """Nor is it a failure: a server that comes back just then finds no job, and says so with 1."""
    (job := play()).end("worker-0", 0)
    job.coordinator.change(verdict="all workers have finished", left=["worker-0", "worker-1"])
    job.wait(lambda: job.launcher._has_ended)
    job.end("server-0", code)
    job.end("worker-1", 0)
    assert job.finish()[0] == 0
    assert len(job.lives["server-0"]) == 1


def test_a_failure_that_the_coordinator_knows_of(play: Callable[..., Play]) -> None:
    job = play()
    job.coordinator.change(verdict="worker-1 was wrong", culprit="worker-1")
    code, verdict = job.finish()
    assert code == 1 and verdict.startswith("the job has failed: worker-1 was wrong")


def test_the_word_to_end_comes_twice(play: Callable[..., Play]) -> None:
    """The first lets a member finish its step, the second ends it at once."""
    job = play()
    job.launcher._signal = signal.SIGINT
    assert job.finish()[0] == 130
    assert all(lives[0].signals[:2] == [signal.SIGTERM] * 2 for lives in job.lives.values())


def test_who_dies_while_the_job_ends_is_not_said_to_start_again(play: Callable[..., Play]) -> None:
    """Ctrl-C comes while a death is being looked at."""
    job = play()

    def look_now(seconds: float) -> bool:
        job.launcher._signal = signal.SIGINT
        return True

    job.coordinator.look_now = look_now  # type: ignore[method-assign]
    job.end("worker-1", -9)
    assert job.finish()[0] == 130
    assert not any("starts again" in line for line in job.screen.lines)


def test_when_all_end_no_server_is_said_to_hand_over(play: Callable[..., Play]) -> None:
    """A server that leaves says where its slices go; at the end of the job they go nowhere."""
    job = play()
    server = Process(job.plan("server-1"), ends=False)
    lives = Lives(job.screen, job.folder, Engine(lambda plan: server), lambda: None)  # type: ignore[arg-type]
    lives.begin(server.plan)
    line = b"syncline: server-1: leaves: its slices go to other servers\n"
    server.says(line)
    job.wait(lambda: any("leaves" in said for said in job.screen.lines))
    server.signal = lambda number: (server.says(line), server.close(), setattr(server, "code", 0))  # type: ignore
    lives.stop(1.0, asks=True)
    assert sum("leaves" in said for said in job.screen.lines) == 1


def test_a_line_that_the_screen_cannot_show_ends_no_forwarding(play: Callable[..., Play]) -> None:
    """A terminal without this letter, a disk that is full: the member would wait for ever at its full pipe."""
    job = play()
    server = Process(job.plan("server-1"), ends=False)
    show = job.screen.line

    def line(name: str, text: str) -> None:
        if "ü" in text:
            text.encode("ascii")
        show(name, text)

    job.screen.line = line  # type: ignore[method-assign]
    lives = Lives(job.screen, job.folder, Engine(lambda plan: server), lambda: None)  # type: ignore[arg-type]
    lives.begin(server.plan)
    server.says("für\n".encode())
    server.says(b"after it\n")
    job.wait(lambda: any("after it" in said for said in job.screen.lines))
    assert "für" in (job.folder / "server-1.log").read_text()
    server.signal = lambda number: (server.close(), setattr(server, "code", 0))  # type: ignore
    lives.stop(1.0, asks=True)


def test_who_was_evicted_and_hears_nothing_is_ended(
    play: Callable[..., Play], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped, or hangs, would never come back by itself."""
    monkeypatch.setattr("syncline.launch.launcher.FENCED_SECONDS", 0.2)
    job = play()
    job.wait(lambda: all(life.incarnation for life in job.launcher._lives.values() if life.plan.role == "worker"))
    known = {n: i for n, i in job.coordinator.standings.incarnations.items() if n != "worker-1"}
    job.coordinator.change(incarnations=known)
    job.wait_for_life("worker-1", 2)
    assert any(
        "worker-1 was evicted 0.2 s ago and has not ended; the launcher ends it now" in x for x in job.screen.lines
    )


def test_who_was_ended_by_the_launcher_was_not_out_of_memory(
    play: Callable[..., Play], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was evicted in every life before its first push is not restarted without end."""
    monkeypatch.setattr("syncline.launch.launcher.FENCED_SECONDS", 0.05)
    job = play(workers=1, max_restarts=2)
    for number in range(1, 4):
        job.wait(lambda: bool(life.incarnation) if (life := job.launcher._lives.get("worker-0")) else False)
        job.coordinator.change(incarnations={"server-0": 10})
        if number < 3:
            job.wait_for_life("worker-0", number + 1)
    _, verdict = job.finish()
    assert "worker-0 was evicted, and ended by the launcher, for the 3rd time without a push in between" in verdict
    assert not any("out of memory" in line for line in job.screen.lines)


def test_the_table_of_a_good_end_counts_steps_and_deaths(play: Callable[..., Play]) -> None:
    job = play()
    job.coordinator.change(step=30, reports={"worker-1": Report(30, 90, 3.0, 0, 0, 0)}, policy="sync")
    job.wait(lambda: job.launcher._has_stepped)
    job.end("worker-1", -9)
    job.wait_for_life("worker-1", 2)
    job.coordinator.change(step=40, reports={"worker-1": Report(10, 30, 1.0, 0, 0, 0)})
    job.wait(lambda: bool(life.incarnation) if (life := job.launcher._lives.get("worker-1")) else False)
    for name in ("worker-0", "worker-1"):
        job.end(name, 0)
    job.coordinator.change(verdict="all workers have finished")
    code, table = job.finish()
    assert code == 0 and table.startswith("the job has finished: all 2 workers ended well\n  time ")
    assert "\n  steps        40 (sync), about 120 samples read, " in table
    assert re.search(r"worker-1 was killed by SIGKILL at step 30, back after [\d.]+ s", table)
    assert table.endswith(f"\n  logs         {job.folder}")


def test_the_table_of_a_failure_has_what_was_last_known(play: Callable[..., Play]) -> None:
    job = play(max_restarts=0)
    job.coordinator.change(step=30, policy="async", readings={"loss": 0.5})
    job.end("worker-1", 3)
    code, table = job.finish()
    assert code == 3 and table.startswith("the job has failed: worker-1 ended with exit code 3 (log: ")
    assert "\n  steps        30 (async); as last reported\n  metrics      loss 0.5\n" in table
    assert "deaths" not in table, "the verdict names it"


def test_the_table_of_an_interrupted_job(play: Callable[..., Play]) -> None:
    job = play()
    job.coordinator.change(step=12, policy="sync")
    job.launcher._signal = signal.SIGINT
    code, table = job.finish()
    assert code == 130 and table.startswith("interrupted by SIGINT; all members have ended\n  time ")
    assert "\n  steps        12 (sync); as last reported\n" in table


def test_the_table_of_a_job_that_did_not_start(play: Callable[..., Play]) -> None:
    job = play(is_heard=False)
    job.coordinator.change(
        formed=False, missing=["worker-1"], verdict="worker-1 did not come up within 3 s", culprit="worker-1"
    )
    job.coordinator.is_heard = True
    code, table = job.finish()
    assert code == 1 and table.startswith("the job has failed: worker-1 did not come up within 3 s")
    assert "; the job did not start\n" in table and "steps" not in table


def test_a_worker_that_was_told_to_go_did_not_end_well(play: Callable[..., Play]) -> None:
    job = play()
    job.end("worker-1", -signal.SIGTERM)
    job.wait(lambda: "worker-1" in job.launcher._finished)
    job.end("worker-0", 0)
    code, table = job.finish()
    assert code == 0 and table.startswith("the job has finished: 1 of 2 workers ended well\n")
    assert "deaths       worker-1 was killed by SIGTERM, not restarted\n" in table


def test_out_of_memory_is_said_only_where_the_kernel_says_so(
    play: Callable[..., Play], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([3, 4])
    monkeypatch.setattr(OomKills, "at_start", lambda kills, pid: 3)
    monkeypatch.setattr(OomKills, "explains", lambda kills, pid, at_start: next(counts) > at_start)
    job = play()
    job.end("worker-1", -9)
    job.wait_for_life("worker-1", 2)
    job.end("worker-1", -9)
    job.wait_for_life("worker-1", 3)
    assert [died.reason for died in job.coordinator.told] == [
        "was killed by SIGKILL",
        "was killed by SIGKILL (out of memory)",
    ]
    for name in ("worker-0", "worker-1"):
        job.end(name, 0)
    assert job.finish()[0] == 0
