"""The live line of `syncline run`: samples, epoch, time left, shares; also through the death of a coordinator, which
forgets when it began and who reported."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pty
import re
import sys
import threading
from typing import TextIO

import msgspec
import pytest

from syncline.cli.screen import MOST_PLAIN_SECONDS, TerminalScreen
from syncline.core.wire.control import Report, Standings
from syncline.stats import EpochProgress, JobVerdict


class Clock:
    """Time as the test has it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def standings(
    seconds: float, samples: dict[str, int], epochs: list[EpochProgress] | None = None, step: int = 7
) -> Standings:
    workers = samples or {"worker-0": 0, "worker-1": 0}
    return Standings(
        formed=True, missing=[], seconds=seconds,
        reports={name: Report(3, count, seconds, 0, 0, 0) for name, count in samples.items()},
        left=[], verdict="", culprit="", incarnations=dict.fromkeys(workers, 1), pushed=[], wanted={}, retiring=[],
        epochs=epochs or [], step=step,
    )  # fmt: skip


def line_after(seconds: float, samples: dict[str, int], epochs: list[EpochProgress] | None = None) -> str:
    """The second line: samples are counted from the first one on."""
    clock = Clock()
    screen = TerminalScreen("async", clock)
    screen.describe(standings(0.0, dict.fromkeys(samples, 0)))
    clock.now += seconds
    return screen.describe(standings(seconds, samples, epochs))


def test_the_line_has_samples_epoch_time_left_and_shares() -> None:
    epoch = EpochProgress(loader="loader-0", epoch=1, num_samples=1000, num_done=380, num_passed_over=20)
    assert line_after(10.0, {"worker-0": 300, "worker-1": 100}, [epoch]) == (
        "async, 2 workers · 10 s · step 7 · epoch 2 (40 %), 15 s left · 40 samples/s · worker-0 75 %, worker-1 25 %"
    )


def test_of_many_that_are_missing_at_the_start_some_are_named() -> None:
    told = msgspec.structs.replace(standings(1.0, {}), formed=False, missing=[f"worker-{k}" for k in range(64)])
    assert TerminalScreen("async", Clock()).describe(told) == (
        "starting: waiting for worker-0, worker-1, worker-2, worker-3, worker-4, worker-5 and 58 more"
    )


def test_of_many_workers_the_least_and_the_largest_share() -> None:
    assert line_after(1.0, {f"worker-{k}": 10 + k for k in range(5)}).endswith("shares 17 to 23 %")


def test_of_shards_it_says_how_many_samples_were_done() -> None:
    epoch = EpochProgress(loader="loader-0", epoch=0, num_samples=0, num_done=1234)
    assert "epoch 1 (1,234 samples)" in line_after(1.0, {"worker-0": 9}, [epoch])


def test_who_has_left_has_no_share() -> None:
    clock = Clock()
    screen = TerminalScreen("async", clock)
    shown = []
    for seconds, there in ((0.0, 3), (1.0, 3), (2.0, 2), (3.0, 2)):
        clock.now = 1000.0 + seconds
        now = standings(seconds, {f"worker-{k}": 100 + int(100 * seconds) for k in range(3)})
        left = {f"worker-{k}": 1 for k in range(there)}
        shown.append(screen.describe(msgspec.structs.replace(now, incarnations=left)))
    assert shown[1].endswith("300 samples/s · worker-0 33 %, worker-1 33 %, worker-2 33 %")
    assert "worker-2" not in shown[2] and shown[3].endswith("200 samples/s · worker-0 50 %, worker-1 50 %")


def test_the_step_is_the_jobs_and_never_goes_back() -> None:
    """A coordinator that comes back hears of it with the servers' next beats."""
    screen = TerminalScreen("async", Clock())
    lines = [screen.describe(standings(1.0, {"worker-0": 1}, step=step)) for step in (12, 1300, 0)]
    assert [line.split(" · ")[2] for line in lines] == ["step 12", "step 1,300", "step 1,300"]


def test_a_coordinator_that_comes_back_does_not_set_the_line_back() -> None:
    clock = Clock()
    screen = TerminalScreen("sync", clock)
    shown = []
    for now, seconds, samples in (
        (0.0, 5.0, {"worker-0": 1000, "worker-1": 1000}),
        (2.0, 7.0, {"worker-0": 1200, "worker-1": 1200}),
        (4.0, 0.5, {}),  # another one
        (6.0, 2.5, {"worker-0": 1600}),
        (8.0, 4.5, {"worker-0": 1800, "worker-1": 1800}),
        (10.0, 6.5, {"worker-0": 2100, "worker-1": 2100}),
        (12.0, 8.5, {"worker-0": 2200, "worker-1": 50}),  # another life of it
        (14.0, 10.5, {"worker-0": 2300, "worker-1": 150}),
    ):
        clock.now = 1000.0 + now
        parts = screen.describe(standings(seconds, samples)).split(" · ")
        shown.append([part for part in parts if part.endswith((" s", "samples/s"))])
    assert shown == [
        ["5 s"], ["7 s", "200 samples/s"], ["9 s"], ["11 s"], ["13 s"], ["15 s", "300 samples/s"],
        ["17 s"], ["19 s", "100 samples/s"],
    ]  # fmt: skip


def test_the_line_has_the_newest_readings_and_what_has_stopped_it() -> None:
    found = msgspec.structs.replace(
        standings(3.0, {}), readings={"loss": 0.31416, "a": 1.0, "b": 2.0, "c": 3.0}, stop="--max-steps 7: step 7"
    )
    assert (
        TerminalScreen("async", Clock())
        .describe(found)
        .endswith("step 7 · a 1, b 2, c 3 and 1 more · stopped by --max-steps 7: step 7")
    )


def shown(screen: TerminalScreen, clock: Clock, now: Standings, capsys: pytest.CaptureFixture[str]) -> str:
    """What a plain screen prints when its last line is long ago."""
    clock.now += MOST_PLAIN_SECONDS
    screen.progress(now)
    return capsys.readouterr().out


def test_no_line_of_progress_after_the_workers_have_left(capsys: pytest.CaptureFixture[str]) -> None:
    """It would be the last one, and half true: `sync, 0 workers · 7 s · step 40`."""
    clock = Clock()
    screen, now = TerminalScreen("sync", clock), standings(7.0, {"worker-0": 1, "worker-1": 1}, step=40)
    assert "sync, 2 workers · 7 s · step 40" in shown(screen, clock, now, capsys)
    now = msgspec.structs.replace(now, left=["worker-0"], incarnations={"server-0": 1, "worker-1": 1})
    assert "sync, 1 worker · 67 s · step 40" in shown(screen, clock, now, capsys)
    now = msgspec.structs.replace(now, left=["worker-0", "worker-1"], incarnations={"server-0": 1})
    assert shown(screen, clock, now, capsys) == ""
    now = msgspec.structs.replace(now, incarnations={"worker-0": 1}, verdict="worker-0 was wrong", left=[])
    assert shown(screen, clock, now, capsys) == ""


def test_where_the_only_worker_starts_again_the_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    now = msgspec.structs.replace(standings(7.0, {}, step=40), incarnations={"server-0": 1})
    expected = "sync, waiting for a worker to start again · 7 s · step 40\n"
    clock = Clock()
    assert shown(TerminalScreen("sync", clock), clock, now, capsys) == expected


def test_the_policy_is_the_one_that_counts() -> None:
    """A script may say it in `init`; the command line did not."""
    now = msgspec.structs.replace(standings(7.0, {}), policy="bounded:2")
    assert TerminalScreen("sync", Clock()).describe(now).startswith("bounded:2, 2 workers")


def test_the_table_goes_where_all_lines_go(capsys: pytest.CaptureFixture[str]) -> None:
    TerminalScreen("sync").verdict("the job has finished\n  time 1 s")
    assert capsys.readouterr() == ("syncline: the job has finished\n  time 1 s\n", "")


def test_a_table_that_nobody_reads_on_standard_output_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(text: str) -> None:
        raise BrokenPipeError

    screen = TerminalScreen("sync")
    monkeypatch.setattr("sys.stdout.write", closed)
    screen.verdict("interrupted by SIGPIPE")
    monkeypatch.undo()
    assert capsys.readouterr().err == "syncline: interrupted by SIGPIPE\n"


def test_a_plain_line_does_not_stand_in_the_middle_of_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The chief prints its results when training is over, and measures the accuracy between two of its lines."""
    clock = Clock()
    screen = TerminalScreen("sync", clock)

    def look(seconds: float, step: int) -> str:
        clock.now += seconds
        screen.progress(standings(clock.now - 1000.0, {"worker-0": step}, step=step))
        return capsys.readouterr().out

    assert not look(9.0, 40) and "step 41" in look(2.0, 41), "while training goes on, every ten seconds"
    assert not look(9.0, 50)
    screen.line("worker-0", "samples/s      4,000")
    assert capsys.readouterr().out == "samples/s      4,000\n"
    assert not look(1.0, 60), "its step is heard of a little later"
    assert not look(9.0, 60), "no step was made since the last look"
    screen.line("worker-0", "test accuracy  87.20%")
    capsys.readouterr()
    assert not look(5.0, 60)
    assert "step 60" in look(60.0, 60), "a job that stands still is not forgotten"


class Terminal:
    """A pseudo terminal of 60 columns, and what was written to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.master, self.slave = pty.openpty()
        self.written = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        monkeypatch.setenv("COLUMNS", "60")
        monkeypatch.setenv("TERM", "xterm")

    def open(self) -> TextIO:
        return os.fdopen(os.dup(self.slave), "w")

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self.master, 4096):
                self.written += data

    def close(self) -> str:
        os.close(self.slave)
        self._reader.join(5)
        os.close(self.master)
        return self.written.decode()


def test_a_live_line_is_never_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal breaks a wider one into two, and the first would stay between the lines of members."""
    terminal = Terminal(monkeypatch)
    with terminal.open() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        with TerminalScreen("sync", Clock()) as screen:
            long = msgspec.structs.replace(standings(3.0, {"worker-0": 1}), readings={"a" * 40: 1.0, "b" * 40: 2.0})
            screen.progress(long)
            screen.line("worker-0", "policy  sync")
            screen.verdict("the job has finished")
    written = terminal.close()
    live = [part for part in re.split(r"\x1b\[[0-9;?]*[a-zA-Z]|[\r\n]", written) if "sync, 1 worker" in part]
    assert live and max(map(len, live)) <= 60 and "policy  sync" in written, written
    table = written.index("syncline: the job has finished")
    assert "sync, 1 worker" not in written[table:], "the table is the last that is shown"


def test_lines_go_to_a_pipe_although_there_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`syncline run … | tee log`: all lines are in the log, and no live line stands between them on the terminal."""
    terminal = Terminal(monkeypatch)
    end, pipe = os.pipe()
    with terminal.open() as stream, os.fdopen(pipe, "w") as out, os.fdopen(end) as log:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", out)
        with TerminalScreen("sync", Clock()) as screen:
            screen.progress(standings(3.0, {"worker-0": 1}))
            screen.line("worker-0", "policy  sync")
        out.close()
        assert log.read() == "policy  sync\n"
    assert "sync, 1 worker" not in terminal.close()


def test_lines_go_to_a_file_while_the_terminal_has_the_live_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """`syncline run … > log`."""
    terminal = Terminal(monkeypatch)
    with terminal.open() as stream, open(tmp_path / "log", "w") as out:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", out)
        with TerminalScreen("sync", Clock()) as screen:
            screen.progress(standings(3.0, {"worker-0": 1}))
            screen.line("worker-0", "policy  sync")
    assert (tmp_path / "log").read_text() == "policy  sync\n" and "sync, 1 worker" in terminal.close()


def test_of_job_steps_the_line_says_steps() -> None:
    epoch = EpochProgress(loader="steps-0", epoch=0, num_samples=1000, num_done=400, is_steps=True)
    assert line_after(10.0, {"worker-0": 300, "worker-1": 100}, [epoch]) == (
        "async, 2 workers · 10 s · step 7 · 40 % of 1,000 steps"
    )


def test_a_member_that_repeats_itself_does_not_flood_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each member for itself; what the launcher says counts each time."""
    terminal = Terminal(monkeypatch)
    with terminal.open() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        with TerminalScreen("sync", clock := Clock()) as screen:
            for _ in range(2_000):
                screen.line("worker-1", "the same again")
                screen.line("worker-0", "as always")
                screen.line("server-0", "syncline: server-0: refuses a push")
            for _ in range(5):
                screen.line("launcher", "syncline: worker-1 starts again")
            clock.now += 61.0
            screen.progress(standings(61.0, {"worker-0": 1}))
            screen.line("worker-1", "the same again")
            for _ in range(11):
                screen.line("worker-0", "at last")
            screen.verdict("the job has finished")
    written = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.close())
    lines = [line for line in re.split(r"[\r\n]+", written) if line]
    assert [lines.count(one) for one in ("worker-1 | the same again", "as always", "at last")] == [11, 10, 10]
    assert lines.count("syncline: server-0: refuses a push") == 10
    assert lines.count("syncline: worker-1 starts again") == 5
    assert re.findall(r"syncline: (\S+) printed this line (\S+) more", written) == [
        ("worker-1", "1,990"), ("worker-0", "1,990"), ("server-0", "1,990"), ("worker-0", "1"),
    ], lines  # fmt: skip
    assert written.index("1 more time") < written.index("the job has finished")


def test_files_and_pipes_have_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalScreen("sync", Clock()) as screen:
        for _ in range(1_000):
            screen.line("worker-1", "the same again")
    assert capsys.readouterr().out == "worker-1 | the same again\n" * 1_000


STRAGGLER = JobVerdict(kind="straggler", subject="worker-1", text="worker-1 is slow", advice="see its host")


def test_a_verdict_is_told_once_and_stands_below_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    slow = msgspec.structs.replace(
        standings(3.0, {"worker-0": 1}), verdicts=[STRAGGLER], long_wait="step 3 has waited 2 s for worker-1", lag=40
    )
    with terminal.open() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        with TerminalScreen("sync", Clock()) as screen:
            for _ in range(3):
                screen.progress(slow)
            block = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", "".join(screen.describe(slow)))
    written = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.close())
    assert written.count("syncline: worker-1 is slow: see its host") == 1
    assert "waits: step 3 has waited 2 s for worker-1" in written and "lag 40" in block


def test_quiet_leaves_out_progress_and_the_first_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Deaths, verdicts and the end are told."""
    with TerminalScreen("sync", clock := Clock(), quiet=True) as screen:
        screen.line("launcher", "syncline: logs are in runs/x/")
        for seconds in (1.0, 100.0):
            clock.now += seconds
            screen.progress(standings(seconds, {"worker-0": 1}))
        screen.progress(msgspec.structs.replace(standings(101.0, {"worker-0": 1}), verdicts=[STRAGGLER]))
        screen.line("launcher", "syncline: worker-1 was killed by SIGKILL")
        screen.line("worker-1", "hello")
        screen.verdict("the job has finished")
    assert capsys.readouterr().out.splitlines() == [
        "syncline: worker-1 is slow: see its host",
        "syncline: worker-1 was killed by SIGKILL",
        "worker-1 | hello",
        "syncline: the job has finished",
    ]


def test_every_line_of_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalScreen("sync", clock := Clock(), as_json=True) as screen:
        screen.line("launcher", "syncline: logs are in runs/x/")
        screen.line("worker-0", 'odd "quotes" \x1b[1m and ü')
        clock.now += 100.0
        screen.progress(standings(100.0, {"worker-0": 1}))
        screen.verdict("the job has finished\n  steps  7")
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(one.pop("at") > 1e9 for one in told)
    assert told[0] == {"member": "launcher", "text": "syncline: logs are in runs/x/"}
    assert told[1] == {"member": "worker-0", "text": 'odd "quotes" \x1b[1m and ü'}
    assert told[2]["progress"]["step"] == 7 and told[2]["progress"]["workers"] == 1
    assert told[3] == {"verdict": "the job has finished\n  steps  7"}
