"""The processes of a job's members, one life of each at a time: how they start, what they write, how they end."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Protocol

from syncline.core.wire.control import Standings
from syncline.launch.forwarding import Forwarder
from syncline.launch.oom import OomKills
from syncline.launch.processes import MemberPlan, MemberProcess, describe_exit

#: What a server says when it was told to end: true where the job goes on without it, and there only.
LEAVES = "leaves: its slices go to other servers"
#: Between the first word to end (finish your step and leave) and the second (end at once).
SECOND_WORD_SECONDS = 0.05
#: For what a member that has ended had written to be passed on: before its end is told, and before our own.
TOLD_SECONDS, LAST_SECONDS = 0.2, 30.0


class Screen(Protocol):
    """Where the job's output and progress are shown."""

    def line(self, member: str, text: str) -> None:
        """One line that a member wrote."""

    def progress(self, standings: Standings) -> None:
        """How the job stands."""

    def verdict(self, text: str) -> None:
        """How the job ended."""


@dataclasses.dataclass
class Life:
    """One process of a member; the next one has another incarnation."""

    plan: MemberPlan
    process: MemberProcess
    forwarder: Forwarder
    has_pushed: bool = False  # or has a slice: this life was of use
    has_position: bool = True  # its last commit had one: a new life can go on behind it
    incarnation: int = 0
    had_left: bool = False  # the life before had left the job, and may still be on its list
    missing_since: float | None = None  # the coordinator does not count it any more
    is_ended_here: bool = False  # it was evicted, did not hear of it, and the launcher has killed it
    oom_kills_at_start: int = 0  # by the kernel's counters
    is_out_of_memory: bool = False  # by them it has ended so

    def describe_end(self, code: int) -> str:
        """How it ended, in words: a kill of our own is none of the machine's."""
        if self.is_ended_here:
            return "was evicted, and ended by the launcher"
        return describe_exit(code, is_out_of_memory=self.is_out_of_memory)


class Lives:
    """All processes that the launcher has started. `start` is the seam for other engines."""

    def __init__(
        self,
        screen: Screen,
        folder: pathlib.Path,
        start: Callable[[MemberPlan], MemberProcess],
        unread: Callable[[], None],
    ) -> None:
        self._screen, self._folder, self._start = screen, folder, start
        self._unread = unread  # hears that nobody reads our own output any more
        self._current: dict[str, Life] = {}
        self._oom_kills = OomKills()
        self._unheard: list[Life] = []  # ended, and not all that they wrote is passed on
        self._log_failed = False
        self._all_end = False  # they were told to

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
        """Starts a member; `why` it starts again stands in its log, between its lives."""
        if why:
            self._keep(plan.name, f"--- {plan.name} starts again: {why} ---\n".encode())
        process = self._start(plan)
        forwarder = Forwarder(plan.name, process.output, functools.partial(self._forward, plan.name))
        kills = self._oom_kills.at_start(process.pid)
        self._current[plan.name] = life = Life(plan, process, forwarder, oom_kills_at_start=kills)
        return life

    def take_ended(self) -> list[tuple[Life, int]]:
        """The lives that have ended since the last call, with their exit codes; they are ours no longer."""
        ended = [(life, code) for life in self.values() if (code := life.process.poll()) is not None]
        for life, code in ended:
            if code == -signal.SIGKILL:
                life.is_out_of_memory = self._oom_kills.explains(life.process.pid, life.oom_kills_at_start)
            del self._current[life.plan.name]
            life.process.close_lifeline()
            if not life.forwarder.wait(TOLD_SECONDS):  # its last words come before what is said of its end
                self._unheard.append(life)
        return ended

    def _forward(self, name: str, raw: bytes) -> None:
        """A line of a member: into its log, and onto the screen. Whatever fails there, the member is read on."""
        if self._all_end and raw.endswith(f"{LEAVES}\n".encode()):
            return
        self._keep(name, raw)
        if b"JobFailed: " in raw:
            return  # it says what our own verdict will say
        try:
            self._screen.line(name, raw.decode("utf-8", "replace").rstrip("\n"))
        except BrokenPipeError:
            self._unread()
        except (OSError, ValueError):
            return  # a screen that is full, or lacks a letter: the log has it

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
        return [life for life in self.values() if life.process.poll() is None]

    def kill_all(self) -> None:
        for life in self.values():
            life.process.signal(signal.SIGKILL)

    def stop(self, seconds: float, *, asks: bool, hear_seconds: float = 0.0) -> None:
        """Waits for all to end by themselves, then ends them. `asks`: tells them first, twice: the first word lets
        a member finish what it is at. Before that they have a moment to hear of the verdict, and to say so."""
        if asks:
            self._wait(hear_seconds)
            self._all_end = True
            self._say_end()
            self._wait(SECOND_WORD_SECONDS)
            self._say_end()
        self._wait(seconds)
        for life in self.alive():
            life.process.close_lifeline()
            life.process.kill()
        deadline = time.monotonic() + LAST_SECONDS
        for life in (*self._unheard, *self.values()):
            life.process.close_lifeline()
            life.forwarder.wait(max(0.0, deadline - time.monotonic()))

    def tell(self, word: bytes) -> None:
        """To all that live, over their lifelines."""
        for life in self.alive():
            life.process.tell(word)

    def _say_end(self) -> None:
        for life in self.alive():
            life.process.signal(signal.SIGTERM)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
