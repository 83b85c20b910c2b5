"""The live view: the members of a job as a table that keys sort, one member, and its log."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, RichLog, Sparkline, Static

from syncline.core.metrics import told
from syncline.stats import Event, JobLook, JobVerdict, MemberFigures
from syncline.store.lines import EVENTS
from syncline.top.logs import EventTail, LogTail
from syncline.top.looking import Seen, Trouble
from syncline.top.rows import COLUMNS, DEAD, arranged, facts, headline, members_of, notices, phase_lines

#: Seconds of history in the lines.
MOST_SECONDS = 120
LOG_SECONDS = 0.5
MOST_LOG_LINES = 5_000
MOST_EVENTS = 200


class LookSource(Protocol):
    """Where looks come from."""

    def start(self) -> None: ...
    def close(self) -> None: ...


class Top(App[None]):
    """All of it. `make_source` gets what each look goes to; logs and events are in `folder`."""

    TITLE = "syncline top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #title { height: 1; padding: 0 1; background: $primary; color: $text; text-style: bold; }
    #head, #readings { height: 1; padding: 0 1; }
    #notices { padding: 0 1; color: $warning; height: auto; max-height: 8; }
    #speed { height: 2; margin: 0 1; }
    DataTable { height: 1fr; }
    #events { height: 6; padding: 0 1; border-top: solid $primary; }
    .part { padding: 0 1; height: auto; } .label { padding: 1 1 0 1; color: $text-muted; }
    MemberScreen Sparkline { height: 2; margin: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort(1)", "Sort by next"),
        Binding("S", "sort(-1)", "by previous", key_display="S"),
        Binding("r", "reverse", "Reverse"),
        Binding("enter", "look", "Member", priority=False),
        Binding("l", "log", "Log"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(
        self,
        name: str,
        make_source: Callable[[Callable[[Seen], None]], LookSource],
        folder: pathlib.Path,
    ) -> None:
        super().__init__()
        self._job_name, self._folder, self._event_tail = name, folder, EventTail(folder / EVENTS)
        self.source = make_source(self.post_seen)
        self.look: JobLook | None = None
        self.trouble: Trouble | None = None
        self.sort_column, self.is_reversed = 0, False
        self._shown: list[str] = []  # members, by their rows
        self._speeds: collections.deque[float] = collections.deque(maxlen=MOST_SECONDS)
        self.history: dict[str, collections.deque[MemberFigures]] = {}
        self._events: collections.deque[Event] = collections.deque(maxlen=MOST_EVENTS)
        self._last_event = 0

    def compose(self) -> ComposeResult:
        yield Static(Text(self._job_name), id="title")
        yield Static(Text("waiting for the first look"), id="head")
        yield Static("", id="readings")
        yield Static("", id="notices")
        yield Sparkline([], id="speed")
        yield DataTable(id="members", cursor_type="row", zebra_stripes=True)
        yield Static("", id="events")
        yield Footer()

    def on_mount(self) -> None:
        self._name_columns()
        self.query_one("#members", DataTable).focus()
        self.source.start()

    def on_unmount(self) -> None:
        self.source.close()

    # -- looks --------------------------------------------------------------------------------------------

    def post_seen(self, seen: Seen) -> None:
        """From the thread that looks."""
        if self.is_running:
            self.call_later(self.take, seen)

    def take(self, seen: Seen) -> None:
        """Shows a look, or why there is none."""
        if isinstance(seen, Trouble):
            over = self.look is not None and bool(self.look.figures.verdict)
            self.trouble = None if over else seen
        else:
            self.look, self.trouble = seen, None
            self._remember(seen)
        self._draw()
        for screen in self.screen_stack:
            if isinstance(screen, MemberScreen):
                screen.draw()

    def _remember(self, look: JobLook) -> None:
        self._speeds.append(look.figures.samples_per_second or look.figures.steps_per_second)
        for member in look.figures.members:
            self.history.setdefault(member.name, collections.deque(maxlen=MOST_SECONDS)).append(member)
        found = self._event_tail.read()
        # Without the file, on another machine: those of the looks that were seen.
        for event in look.events if found is None else found:
            if event.number > self._last_event:
                self._last_event = event.number
                self._events.append(event)

    def _draw(self) -> None:
        base = self.screen_stack[0]
        state = self.trouble.text if self.trouble is not None else "running"
        if self.look is not None and self.look.figures.verdict:
            state = "has ended"
        base.query_one("#title", Static).update(Text(f"{self._job_name}: {state}"))
        if self.look is None:
            return
        base.query_one("#head", Static).update(Text(headline(self.look)))
        base.query_one("#readings", Static).update(Text(told(self.look.figures.readings)))
        base.query_one("#notices", Static).update(Text("\n".join(notices(self.look))))
        base.query_one("#speed", Sparkline).data = list(self._speeds)
        lines = [f"step {event.step:,}  {event.kind:10} {event.text}" for event in list(self._events)[-5:]]
        lines += [self._event_tail.damage] if self._event_tail.damage else []
        base.query_one("#events", Static).update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"))
        self._draw_table()

    # -- the table ----------------------------------------------------------------------------------------

    def _name_columns(self) -> None:
        table = self.screen_stack[0].query_one("#members", DataTable)
        table.clear(columns=True)
        for number, column in enumerate(COLUMNS):
            arrow = "" if number != self.sort_column else " ▲" if self.is_reversed != column.is_text else " ▼"
            table.add_column(Text(column.name + arrow, style="bold" if arrow else ""), key=column.name)

    def _draw_table(self) -> None:
        table = self.screen_stack[0].query_one("#members", DataTable)
        chosen, offset = self.chosen, table.scroll_offset
        members = arranged(members_of(self.look), self.sort_column, is_reversed=self.is_reversed) if self.look else []
        blamed = {verdict.subject for verdict in self.look.verdicts} if self.look else set[str]()
        table.clear()
        self._shown = [member.name for member in members]
        for member in members:
            style = "red" if member.state == DEAD else "yellow" if member.name in blamed else ""
            table.add_row(
                *(
                    Text(column.text(member), style=style, justify="left" if column.is_text else "right")
                    for column in COLUMNS
                )
            )
        if chosen in self._shown:
            table.move_cursor(row=self._shown.index(chosen), animate=False, scroll=False)
        table.scroll_to(offset.x, offset.y, animate=False)

    @property
    def chosen(self) -> str:
        """The member that the cursor is on."""
        row = self.screen_stack[0].query_one("#members", DataTable).cursor_row
        return self._shown[row] if 0 <= row < len(self._shown) else ""

    def action_sort(self, way: int) -> None:
        chosen = self.chosen
        self.sort_column = (self.sort_column + way) % len(COLUMNS)
        self._arrange(chosen)

    def action_reverse(self) -> None:
        chosen = self.chosen
        self.is_reversed = not self.is_reversed
        self._arrange(chosen)

    def _arrange(self, chosen: str) -> None:
        self._name_columns()
        self._draw_table()
        if chosen in self._shown:
            table = self.screen_stack[0].query_one("#members", DataTable)
            table.move_cursor(row=self._shown.index(chosen), animate=False)

    # -- one member ---------------------------------------------------------------------------------------

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        self.action_look()

    def action_look(self) -> None:
        if self.chosen and len(self.screen_stack) == 1:
            self.push_screen(MemberScreen(self.chosen))

    def action_log(self) -> None:
        top = self.screen_stack[-1]
        name = top.member if isinstance(top, MemberScreen) else self.chosen
        if name and not isinstance(top, LogScreen):
            self.push_screen(LogScreen(name, LogTail(self._folder / f"{name}.log")))

    def verdicts_on(self, name: str) -> list[JobVerdict]:
        return [verdict for verdict in self.look.verdicts if verdict.subject == name] if self.look else []


class MemberScreen(Screen[None]):
    """One member: where its step goes, its last minutes, whom it speaks to."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "Back")]

    def __init__(self, member: str) -> None:
        super().__init__()
        self.member = member

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(Text(self.member), classes="part", id="member-title")
            yield Static("", classes="part", id="facts")
            yield Static("where a step goes", classes="label")
            yield Static("", classes="part", id="phases")
            yield Static("a step", classes="label", id="step-label")
            yield Sparkline([], id="step-line")
            yield Static("busy cores", classes="label", id="cores-label")
            yield Sparkline([], id="cores-line")
            yield Static("memory", classes="label", id="memory-label")
            yield Sparkline([], id="memory-line")
        yield Footer()

    def on_mount(self) -> None:
        self.draw()

    def draw(self) -> None:
        app: Any = self.app
        history = list(app.history.get(self.member, ()))
        is_there = app.look is not None and any(one.name == self.member for one in app.look.figures.members)
        title = Text(f"{self.member}{'' if is_there else ': is not in the job now; its last figures'}", style="bold")
        self.query_one("#member-title", Static).update(title)
        if not history:
            return
        now = history[-1]
        lines = [*facts(now), *(verdict.text for verdict in app.verdicts_on(self.member))]
        self.query_one("#facts", Static).update(Text("\n".join(lines)))
        self.query_one("#phases", Static).update(Text("\n".join(phase_lines(now)), no_wrap=True))
        steps = [one.compute + one.stage + one.wait + one.pull or one.apply for one in history]
        for name, values in (
            ("step", steps),
            ("cores", [one.cores for one in history]),
            ("memory", [float(one.memory_bytes) for one in history]),
        ):
            self.query_one(f"#{name}-line", Sparkline).data = values


class LogScreen(Screen[None]):
    """What a member has written, as it comes."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "Back")]

    def __init__(self, member: str, tail: LogTail) -> None:
        super().__init__()
        self.member, self._tail = member, tail

    def compose(self) -> ComposeResult:
        yield Static(Text(f"{self.member}: {self._tail.path}", style="bold"), classes="part", id="log-title")
        yield RichLog(id="log", wrap=True, markup=False, highlight=False, max_lines=MOST_LOG_LINES)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#log", RichLog).focus()
        self.read()
        self.set_interval(LOG_SECONDS, self.read)

    def read(self) -> None:
        lines = self._tail.read()
        title = self.query_one("#log-title", Static)
        if lines is None:
            title.update(Text(f"{self.member} has written nothing: there is no {self._tail.path}", style="bold"))
            return
        title.update(Text(f"{self.member}: {self._tail.path}", style="bold"))
        for line in lines:
            self.query_one("#log", RichLog).write(Text(line))
