"""`syncline top`, driven by textual's pilot: sorting, one member, its log, and a job that ends while one looks."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.patience import PATIENCE

pytest.importorskip("textual")

from textual.pilot import Pilot
from textual.widgets import DataTable, RichLog, Static

from syncline.stats import Event, JobFigures, JobLook, JobVerdict, MemberFigures, StageStats, Wait
from syncline.store.lines import EVENTS
from syncline.top.app import LogScreen, MemberScreen, Top
from syncline.top.looking import Seen, Trouble
from syncline.top.rows import COLUMNS

#: worker-0 is a pipeline.
STAGES = tuple(
    StageStats(stage=k, num_steps=3, busy_seconds=(0.3, 0.1)[k], step_seconds=0.4, layers="[b]", sent_bytes=3072)
    for k in range(2)
)
LAGS = {"worker-0": 0, "worker-2": 7, "worker-10": 3}


class Played:
    """A source of looks that the test makes."""

    def __init__(self, show: Callable[[Seen], None]) -> None:
        self.show, self.is_closed = show, False

    def start(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def look(number: int = 1, gone: tuple[str, ...] = (), **more: Any) -> JobLook:
    members = [
        MemberFigures(
            name=name, role="worker", host="a", state="working", step=100 - lag, lag=lag, num_steps=3,
            compute=0.01 * (lag + 1), data=0.002, stage=0.001, wait=0.03, pull=0.001, cores=0.5,
            samples_per_second=100.0 + lag, memory_bytes=10**8, sent_per_second=1e6, peers={"server-0": 1e6}, pid=7,
            stages=STAGES if name == "worker-0" else (),
        )
        for name, lag in LAGS.items()
        if name not in gone
    ]  # fmt: skip
    members.append(MemberFigures(name="server-0", role="server", state="working", apply=0.002, num_rounds=3))
    known: dict[str, Any] = {"readings": {"loss": 0.25, "[bold]x[/]": 1.0}, "gone": gone, **more}
    figures = JobFigures(
        at=1e9 + number, step=100 + number, seconds=61.0 + number, steps_per_second=2.0, samples_per_second=300.0,
        members=tuple(members), **known,
    )  # fmt: skip
    event = Event(number=number, at=1e9, step=1, kind="note", text="[red]an event[/red]")
    verdict = JobVerdict(kind="straggler", subject="worker-2", text="worker-2 is slow", advice="look at it")
    return JobLook(number=number, figures=figures, verdicts=(verdict,), events=(event,))


def drive(tmp_path: pathlib.Path, test: Callable[[Top, Pilot[None]], Awaitable[None]]) -> Played:
    app = Top("demo", Played, tmp_path)

    async def run() -> None:
        async with app.run_test(size=(150, 40)) as pilot:
            await asyncio.wait_for(test(app, pilot), PATIENCE)

    asyncio.run(run())
    source = app.source
    assert isinstance(source, Played)
    return source


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """A screen is made over several turns of the loop."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, condition
        await pilot.pause(0.01)


def shown(app: Top) -> list[list[str]]:
    table = app.screen_stack[0].query_one("#members", DataTable)
    return [[str(cell) for cell in table.get_row_at(k)] for k in range(table.row_count)]


def names(app: Top) -> list[str]:
    return [row[0] for row in shown(app)]


def text(app: Top, name: str) -> str:
    for screen in reversed(app.screen_stack):
        for widget in screen.query(name):
            assert isinstance(widget, Static)
            return str(widget.render())
    raise AssertionError(name)


def column(name: str) -> int:
    return next(k for k, one in enumerate(COLUMNS) if one.name == name)


def test_it_shows_a_job_and_sorts_by_keys(tmp_path: pathlib.Path) -> None:
    async def test(app: Top, pilot: Pilot[None]) -> None:
        assert "waiting for the first look" in text(app, "#head")
        app.take(look(why="round 7 waits for worker-2"))
        await pilot.pause()
        assert names(app) == ["worker-0", "worker-2", "worker-10", "server-0"]
        assert [row[column("stages busy")] for row in shown(app)] == ["75%, 25%", "", "", ""]
        assert "step 101" in text(app, "#head") and "3 workers, 1 servers" in text(app, "#head")
        assert "loss 0.25" in text(app, "#readings") and "[bold]x[/] 1" in text(app, "#readings")
        assert "round 7 waits" in text(app, "#notices") and "worker-2 is slow: look at it" in text(app, "#notices")
        assert "[red]an event[/red]" in text(app, "#events"), "what users write is no markup"
        for _ in range(column("lag")):
            await pilot.press("s")
        assert names(app)[:3] == ["worker-2", "worker-10", "worker-0"], "the largest lag is on top"
        await pilot.press("r")
        assert names(app)[-2:] == ["worker-10", "worker-2"]
        for _ in range(column("lag")):
            await pilot.press("S")
        assert names(app) == ["server-0", "worker-10", "worker-2", "worker-0"]

    assert drive(tmp_path, test).is_closed


def test_the_cursor_stays_on_its_member(tmp_path: pathlib.Path) -> None:
    """Each look makes the table new, and members change places: the cursor must not jump to another one."""

    async def test(app: Top, pilot: Pilot[None]) -> None:
        app.take(look())
        await pilot.pause()
        await pilot.press("down", "down")
        assert app.chosen == "worker-10"
        app.take(look(2, gone=("worker-0",)))
        await pilot.pause()
        assert app.chosen == "worker-10" and len(app.screen_stack) == 1
        await pilot.press("s", "s", "r", "S")
        assert app.chosen == "worker-10"

    drive(tmp_path, test)


def test_one_member_and_its_log(tmp_path: pathlib.Path) -> None:
    """Enter, then l: the log is followed; Escape goes back. The member dies meanwhile."""
    (tmp_path / "worker-0.log").write_text("\x1b[31mred\x1b[0m line\n[bold]no markup\nhalf")

    async def test(app: Top, pilot: Pilot[None]) -> None:
        app.take(look())
        await pilot.pause()
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, MemberScreen) and app.screen.query("#facts"))
        assert "pid 7" in text(app, "#facts") and "to server-0: 1 MB/s" in text(app, "#facts")
        assert "bubble 50%; stage 1 waits for stage 0\n" in text(app, "#facts")
        assert "stage 1 computes 25% of it: [b]; parameters 0 B, to other stages 1 KiB a step" in text(app, "#facts")
        assert "wait" in text(app, "#phases") and "30 ms" in text(app, "#phases")
        app.take(look(2, gone=("worker-0",)))
        await pilot.pause()
        await until(pilot, lambda: "is not in the job now" in text(app, "#member-title"))
        await pilot.press("l")
        await until(pilot, lambda: isinstance(app.screen, LogScreen) and app.screen.query("#log"))
        log = app.screen.query_one("#log", RichLog)
        await until(pilot, lambda: len(log.lines) == 2)
        assert [line.text for line in log.lines] == ["red line", "[bold]no markup"]
        with open(tmp_path / "worker-0.log", "a") as file:
            file.write(" a line\n")
        await until(pilot, lambda: len(log.lines) == 3)
        assert log.lines[-1].text == "half a line"
        await pilot.press("escape", "escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert ["worker-0", "dead"] in [row[:2] for row in shown(app)]

    drive(tmp_path, test)


def test_a_member_without_a_log(tmp_path: pathlib.Path) -> None:
    async def test(app: Top, pilot: Pilot[None]) -> None:
        app.take(look())
        await pilot.pause()
        await pilot.press("l")
        await until(
            pilot, lambda: app.screen.query("#log-title") and "has written nothing" in text(app, "#log-title")
        )

    drive(tmp_path, test)


def test_a_job_that_ends_and_a_coordinator_that_is_gone(tmp_path: pathlib.Path) -> None:
    """What was seen last stays, and says how it is; keys go on working."""

    async def test(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("s", "r", "enter", "l")  # before the first look there is nothing to look at
        assert len(app.screen_stack) == 1
        app.take(Trouble("no answer from the coordinator for 3 s: refused"))
        await pilot.pause()
        assert "no answer from the coordinator for 3 s" in text(app, "#title")
        app.take(look())
        await pilot.pause()
        assert text(app, "#title") == "demo: running"
        app.take(look(2, verdict="all workers have finished", waits=(Wait("", 1, [], 1.0, "x"),)))
        app.take(Trouble("the job has ended", is_over=True))
        await pilot.pause()
        assert text(app, "#title") == "demo: has ended"
        assert "the job is over: all workers have finished" in text(app, "#notices")
        assert len(names(app)) == 4
        await pilot.press("s", "enter", "escape", "q")

    drive(tmp_path, test)


def test_two_hundred_members(tmp_path: pathlib.Path) -> None:
    async def test(app: Top, pilot: Pilot[None]) -> None:
        members = tuple(
            MemberFigures(name=f"worker-{k}", role="worker", lag=k % 7, step=k, state="working") for k in range(200)
        )
        for number in range(3):
            app.take(JobLook(number=number, figures=JobFigures(at=1e9, members=members)))
            await pilot.pause()
        assert names(app) == [f"worker-{k}" for k in range(200)]
        await pilot.press("ctrl+end")
        assert app.chosen == "worker-199"
        app.take(JobLook(number=9, figures=JobFigures(at=1e9, members=members[100:])))
        await pilot.pause()
        assert app.chosen == "worker-199"

    drive(tmp_path, test)


def test_events_come_from_the_file_up_to_its_damage(tmp_path: pathlib.Path) -> None:
    """Looks that were missed had events too: the file has them all."""
    line = '{"number":%d,"at":1.0,"step":5,"kind":"death","text":"worker-%d died"}\n'
    (tmp_path / EVENTS).write_text(line % (1, 1) + line % (2, 2))

    async def test(app: Top, pilot: Pilot[None]) -> None:
        app.take(look(7))
        await pilot.pause()
        assert "worker-1 died" in text(app, "#events") and "worker-2 died" in text(app, "#events")
        assert "an event" not in text(app, "#events")
        with open(tmp_path / EVENTS, "a") as file:
            file.write("no event\n" + line % (4, 4))
        app.take(look(8))
        await pilot.pause()
        assert "is damaged behind this" in text(app, "#events") and "worker-4" not in text(app, "#events")

    drive(tmp_path, test)
