"""A launcher whose processes and coordinator only play their parts."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from tests.patience import PATIENCE

from syncline.core.wire.control import Died, Standings
from syncline.launch import jobfile
from syncline.launch.launcher import Launcher
from syncline.launch.processes import MemberPlan

#: `syncline`, which lets members hear of a failure however slow they are. For jobs in which all end by that.
PATIENT_END = f"""
from syncline.cli.main import main
from syncline.launch import launcher, watching

tell = watching.Watching.tell
watching.Watching.tell = lambda self, died, seconds=0.0: tell(self, died, {PATIENCE} if seconds else 0.0)
launcher.HEAR_SECONDS = {PATIENCE}
main()
"""
#: `syncline`, for a role that is there long before the job file.
FILE_LATE = f"""
from syncline.cli import roles
from syncline.cli.main import main

roles.FILE_SECONDS = {PATIENCE}
main()
"""
FILE = jobfile.new("127.0.0.1", 1, {})
SECONDS = PATIENCE


class Process:
    """Lives until it is told how it ended; `ends`: its output does, at once."""

    def __init__(self, plan: MemberPlan, *, ends: bool = True) -> None:
        self.plan, self.name, self.pid, self.host, self.fate = plan, plan.name, 1 << 30, plan.host, ""
        reader, self._writer = os.pipe()
        self.output = os.fdopen(reader, "rb")
        self.says(f"{plan.name} speaks\n".encode())
        if ends:
            self.close()
        self.code: int | None = None
        self.signals: list[int] = []

    def says(self, words: bytes) -> None:
        os.write(self._writer, words)

    def close(self) -> None:
        os.close(self._writer)

    def poll(self) -> int | None:
        return self.code

    def signal(self, number: int) -> None:
        self.signals.append(number)
        if self.code is None and (number == signal.SIGKILL or self.signals.count(number) == 2):
            self.code = -number

    def close_lifeline(self) -> None:
        pass


class Engine:
    """Starts members by `start`, on this host."""

    def __init__(self, start: Callable[[MemberPlan], Process]) -> None:
        self.start = start

    def watch(self, process: Process) -> int | None:
        return process.poll()

    def stop(self, process: Process, number: int) -> None:
        process.signal(number)

    def scale(self, role: str, where: Mapping[str, str]) -> str:
        return "local"

    def describe(self) -> str:
        return ""


class Coordinator:
    """What the launcher sees of it."""

    def __init__(self, workers: int, servers: int, *, is_heard: bool = True) -> None:
        self.is_heard = is_heard
        self.standings = Standings(
            formed=True,
            missing=[],
            seconds=1.0,
            reports={},
            left=[],
            verdict="",
            culprit="",
            incarnations={},
            pushed=[],
            wanted={"worker": workers, "server": servers},
            retiring=[],
        )
        self.told: list[Died] = []
        self.hears = True
        self.has_answered = True

    def change(self, **values: Any) -> None:
        self.standings = msgspec.structs.replace(self.standings, **values)

    def start(self) -> None:
        pass

    num_looks = 0

    def take(self) -> list[Standings]:
        self.num_looks += 1
        return [self.standings] if self.is_heard else []

    def look_now(self, seconds: float) -> bool:
        return self.is_heard

    def tell(self, died: Died, seconds: float = 0.0) -> bool:
        self.told.append(died)
        return True

    def is_told(self, name: str) -> bool:
        return self.hears

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.end = ""

    def line(self, member: str, text: str) -> None:
        self.lines.append(text)

    def progress(self, standings: Standings) -> None:
        pass

    def verdict(self, text: str) -> None:
        self.end = text


class Play:
    """One job, whose launcher runs in a thread."""

    def __init__(
        self, folder: pathlib.Path, workers: int = 2, servers: int = 1, max_restarts: int = 3, is_heard: bool = True
    ) -> None:
        self.folder, self.screen = folder, Screen()
        self.coordinator = Coordinator(workers, servers, is_heard=is_heard)
        names = [f"server-{k}" for k in range(servers)] + [f"worker-{k}" for k in range(workers)]
        self.lives: dict[str, list[Process]] = {}
        self.launcher = Launcher(
            [self.plan(name) for name in ["coordinator", *names]],
            self.screen,
            self.coordinator,  # type: ignore[arg-type]
            folder=folder,
            grow=self.grow,
            max_restarts=max_restarts,
            engine=Engine(self.start),  # type: ignore[arg-type]
        )
        self.code: int | None = None
        self.thread = threading.Thread(target=self._run, name="play", daemon=True)
        self.thread.start()
        self.wait(lambda: set(self.lives) == {"coordinator", *names})

    def _run(self) -> None:
        self.code = self.launcher.run()

    @staticmethod
    def plan(name: str, host: str = "local") -> MemberPlan:
        return MemberPlan(role=name.rpartition("-")[0] or name, name=name, host=host, file=FILE)

    def grow(self, name: str, where: Mapping[str, str]) -> MemberPlan:
        return self.plan(name, "local")

    def start(self, plan: MemberPlan) -> Process:
        process = Process(plan)
        self.lives.setdefault(plan.name, []).append(process)
        number = len(self.lives[plan.name])
        if plan.role != "coordinator":
            known = self.coordinator.standings.incarnations
            self.coordinator.change(incarnations={**known, plan.name: 10 * number})
        return process

    def end(self, name: str, code: int) -> None:
        """This life has ended; with 0, having left."""
        known = {n: i for n, i in self.coordinator.standings.incarnations.items() if n != name}
        left = [*self.coordinator.standings.left, name] if code == 0 else self.coordinator.standings.left
        self.coordinator.change(incarnations=known, left=left)
        self.lives[name][-1].code = code

    def wait(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < until, (self.screen.lines, self.screen.end)
            time.sleep(0.005)

    def wait_for_life(self, name: str, number: int) -> Process:
        self.wait(lambda: len(self.lives.get(name, [])) >= number)
        return self.lives[name][number - 1]

    def finish(self) -> tuple[int, str]:
        self.thread.join(SECONDS)
        assert self.code is not None, self.screen.lines
        return self.code, self.screen.end

    def close(self) -> None:
        self.launcher._signal = signal.SIGTERM
        self.thread.join(SECONDS)
