"""The processes of a job's members, one life of each at a time: start, output, end."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from syncline.core.wire.control import Standings
from syncline.launch.engine import Engine
from syncline.launch.forwarding import Forwarder
from syncline.launch.oom import OomKills
from syncline.launch.processes import MemberPlan, MemberProcess, describe_exit

#: What a server prints on SIGTERM; only true if the job continues without it.
LEAVES = "leaves: its slices go to other servers"
#: Between the first SIGTERM (finish the step and leave) and the second (end at once).
SECOND_WORD_SECONDS = 0.05
#: Time to forward the output of an ended member: before its end is reported, and before our own.
TOLD_SECONDS, LAST_SECONDS = 0.2, 30.0


class Screen(Protocol):
    """Shows the job's output and progress."""

    def line(self, member: str, text: str) -> None:
        """One line that a member wrote."""

    def progress(self, standings: Standings) -> None:
        """The job's standings."""

    def verdict(self, text: str) -> None:
        """The job's outcome."""


@dataclasses.dataclass
class Life:
    """One process of a member; the next one has another incarnation."""

    plan: MemberPlan
    process: MemberProcess
    forwarder: Forwarder
    has_pushed: bool = False  # or has a slice: this life was useful
    has_position: bool = True  # of its last commit: a new life can continue after it
    incarnation: int = 0
    had_left: bool = False  # the life before had left the job and may still be listed
    missing_since: float | None = None  # the coordinator no longer counts it
    is_ended_here: bool = False  # evicted without noticing, and killed by the launcher
    oom_kills_at_start: int = 0  # by the kernel's counters
    is_out_of_memory: bool = False  # as these tell

    def describe_end(self, code: int) -> str:
        """Describes the end; a kill by the launcher is not blamed on the machine."""
        if self.is_ended_here:
            return "was evicted, and ended by the launcher"
        if self.process.fate:
            return self.process.fate
        return describe_exit(code, is_out_of_memory=self.is_out_of_memory)


class Lives:
    """All processes that the launcher has had its engine start."""

    def __init__(
        self,
        screen: Screen,
        folder: pathlib.Path,
        engine: Engine,
        unread: Callable[[], None],
    ) -> None:
        self._screen, self._folder, self._engine = screen, folder, engine
        self._unread = unread  # called when our own output is closed
        self._current: dict[str, Life] = {}
        self._oom_kills = OomKills()
        self._unheard: list[Life] = []  # ended, with output not yet forwarded
        self._log_failed = False
        self._all_end = False  # they were told to end

    def __contains__(self, name: str) -> bool:
        return name in self._current

    def names(self, role: str) -> list[str]:
        return [name for name, life in self._current.items() if life.plan.role == role]

    def get(self, name: str) -> Life | None:
        return self._current.get(name)

    def values(self) -> list[Life]:
        return list(self._current.values())

    # -- one life -----------------------------------------------------------------------------------------

    def begin(self, plan: MemberPlan, why: str = "") -> Life:
        """Starts a member; the reason of a restart, `why`, goes to its log."""
        if why:
            self._keep(plan.name, f"--- {plan.name} starts again: {why} ---\n".encode())
        return self.adopt(plan, self._engine.start(plan))

    def adopt(self, plan: MemberPlan, process: MemberProcess) -> Life:
        """A member that runs already, or has ended and nothing was done about it yet."""
        if process.host != plan.host:
            plan = msgspec.structs.replace(plan, host=process.host)
        forwarder = Forwarder(plan.name, process.output, functools.partial(self._forward, plan.name))
        kills = self._oom_kills.at_start(process.pid)
        self._current[plan.name] = life = Life(plan, process, forwarder, oom_kills_at_start=kills)
        return life

    def take_ended(self) -> list[tuple[Life, int]]:
        """The lives that have ended since the last call, with their exit codes."""
        ended = [(life, code) for life in self.values() if (code := self._engine.watch(life.process)) is not None]
        for life, code in ended:
            if code == -signal.SIGKILL:
                life.is_out_of_memory = self._oom_kills.explains(life.process.pid, life.oom_kills_at_start)
            del self._current[life.plan.name]
            life.process.close_lifeline()
            if not life.forwarder.wait(TOLD_SECONDS):  # its output comes before the report of its end
                self._unheard.append(life)
        return ended

    def _forward(self, name: str, raw: bytes) -> None:
        """Writes a member's line to its log and the screen. Errors there do not stop the reading."""
        if self._all_end and raw.endswith(f"{LEAVES}\n".encode()):
            return
        self._keep(name, raw)
        if b"JobFailed: " in raw:
            return  # our own outcome says the same
        try:
            self._screen.line(name, raw.decode("utf-8", "replace").rstrip("\n"))
        except BrokenPipeError:
            self._unread()
        except (OSError, ValueError):
            return  # a full screen, or an encoding error: the log has it

    def _keep(self, name: str, raw: bytes) -> None:
        try:
            with open(self._folder / f"{name}.log", "ab") as log:
                log.write(raw)
        except OSError as error:
            if not self._log_failed:
                self._log_failed = True
                self._screen.verdict(f"logs cannot be kept in {self._folder}: {error.strerror or error}")

    # -- all of them --------------------------------------------------------------------------------------

    def alive(self) -> list[Life]:
        """Not by the engine's `watch`, which may say that the job cannot begin: this is also asked while it ends."""
        return [life for life in self.values() if life.process.poll() is None]

    def kill_all(self) -> None:
        for life in self.values():
            self.kill(life)

    def kill(self, life: Life) -> None:
        self._engine.stop(life.process, signal.SIGKILL)

    def stop(self, seconds: float, *, asks: bool, hear_seconds: float = 0.0) -> None:
        """Waits for all to end, then ends them. `asks`: sends SIGTERM first, twice: the first lets a member finish
        its step. Before that they have a moment to learn of the outcome and report it.
        """
        if asks:
            self._wait(hear_seconds)
            self._all_end = True
            self._say_end()
            self._wait(SECOND_WORD_SECONDS)
            self._say_end()
        self._wait(seconds)
        for life in self.alive():
            life.process.close_lifeline()
            self.kill(life)
        self._wait(LAST_SECONDS)
        deadline = time.monotonic() + LAST_SECONDS
        for life in (*self._unheard, *self.values()):
            life.process.close_lifeline()
            life.forwarder.wait(max(0.0, deadline - time.monotonic()))

    def tell(self, word: bytes) -> None:
        """Sends a message to all live members over their lifelines."""
        for life in self.alive():
            life.process.tell(word)

    def _say_end(self) -> None:
        for life in self.alive():
            self._engine.stop(life.process, signal.SIGTERM)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
