"""The processes of one side of a row: a real job, started as `syncline run` starts it, or some plain processes."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Protocol

import msgspec

from benchmarks.task import Task, to_arguments
from syncline import config as configuration
from syncline.core.wire.control import Standings
from syncline.errors import JobFailed, SynclineError
from syncline.launch.engine import Engine
from syncline.launch.processes import MemberPlan, MemberProcess
from syncline.launch.running import Script, run_job

#: Every wait inside a job of the bench; a row that hangs ends by this.
WAIT_SECONDS = 60.0
STOP_SECONDS = 15.0
WORKER = "benchmarks.worker"
#: The checkout.
ROOT = pathlib.Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Processes that are started meanwhile can import `benchmarks`, whatever their working folder is."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


class Side(Protocol):
    """How to start and stop the processes of one side."""

    num_processes: int  #: that take turns

    def start(self, folder: pathlib.Path, path: str) -> None:
        """Starts them; `path` is where they wait for their turns."""

    def look(self) -> None:
        """Raises when any of them has failed, with the reason."""

    def stop(self) -> None:
        """Waits for them to end, which they do when their turns are over, or ends them."""


class _QuietScreen:
    """Keeps the last lines, for when a job fails."""

    def __init__(self) -> None:
        self.lines: collections.deque[str] = collections.deque(maxlen=20)
        self.reason = ""

    def line(self, member: str, text: str) -> None:
        self.lines.append(f"{member} | {text}")

    def progress(self, standings: Standings) -> None:
        pass

    def verdict(self, text: str) -> None:
        self.reason = text


class JobSide:
    """A job of real processes: coordinator, servers, and workers that run `worker.py`."""

    def __init__(self, task: Task, *, workers: int = 1, side: str = "ours", **settings: Any) -> None:
        self.num_processes = workers
        self.pids: dict[str, int] = {}  # by member
        self._task, self._side = task, side
        servers = {} if settings.get("exchange") == "ring" else {"servers": 1}  # a ring has them in its workers
        self.settings: dict[str, Any] = {"workers": workers, **servers, **settings}
        self._screen = _QuietScreen()
        self._thread: threading.Thread | None = None
        self._ended: int | SynclineError | None = None

    def start(self, folder: pathlib.Path, path: str) -> None:
        named = {"name": self._side, "runs": str(folder)}
        given = {**self.settings, **named, "wait_seconds": WAIT_SECONDS, "max_restarts": 0}
        config = configuration.resolve(configuration.check_known(given, "bench"))
        script = Script(path=WORKER, is_module=True, arguments=to_arguments(self._task, self._side, path))

        def run() -> None:
            try:
                self._ended = run_job(given, config, script, self._screen, start=self._start_member)
            except SynclineError as error:
                self._ended = error
            except Exception as error:  # a bug of ours must end the row, not keep it waiting
                self._ended = JobFailed(f"{type(error).__name__}: {error}")

        self._thread = threading.Thread(target=run, name="bench job", daemon=True)
        self._thread.start()

    def _start_member(self, engine: Engine, plan: MemberPlan) -> MemberProcess:
        process = engine.start(plan)
        self.pids[plan.name] = process.pid
        return process

    def look(self) -> None:
        if isinstance(self._ended, SynclineError):
            raise self._ended
        if self._ended is not None:
            last = "".join(f"\n  {line}" for line in self.lines)
            raise JobFailed(f"{self._screen.reason or 'the job has ended too early'}{last}")

    @property
    def lines(self) -> list[str]:
        """What the job has printed lately."""
        return list(self._screen.lines)

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)


class ProcessSide:
    """Plain processes of a module of this package, numbered from 0; `prefix` is put before their commands."""

    def __init__(
        self,
        module: str,
        task: Task,
        *,
        processes: int = 1,
        side: str = "reference",
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: variables that these processes have besides ours."""
        self.num_processes = processes
        self.environment = environment or {}
        self._module, self._task, self._side, self._prefix = module, task, side, prefix
        self._processes: list[subprocess.Popen[bytes]] = []
        self._outputs: list[IO[bytes]] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def commands(self, folder: pathlib.Path, path: str) -> list[list[str]]:
        """The command line of each process."""
        found = []
        for number in range(self.num_processes):
            task = msgspec.structs.replace(self._task, number=number, num_processes=self.num_processes)
            command = [sys.executable, "-m", f"benchmarks.{self._module}"]
            found.append([*self._prefix, *command, *to_arguments(task, self._side, path)])
        return found

    def start(self, folder: pathlib.Path, path: str) -> None:
        for number, command in enumerate(self.commands(folder, path)):
            output = (folder / f"{self._side}-{number}.log").open("w+b")
            self._outputs.append(output)
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=folder,  # where no syncline.toml changes what is measured
                    env={**os.environ, **self.environment},
                )
            )

    def look(self) -> None:
        for number, (process, output) in enumerate(zip(self._processes, self._outputs, strict=True)):
            if process.poll() is not None:
                output.seek(0)
                last = output.read()[-2000:].decode("utf-8", "replace").strip()
                raise JobFailed(f"{self._side} {number} ended with exit code {process.returncode}: {last}")

    def stop(self) -> None:
        for process in self._processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for output in self._outputs:
            with contextlib.suppress(OSError):
                output.close()


class RunSide(ProcessSide):
    """A job that `syncline run` starts with another Python: workers of a module of this package, and one server."""

    def __init__(
        self, module: str, task: Task, *, python: str, workers: int, side: str, environment: Mapping[str, str]
    ) -> None:
        super().__init__(module, task, processes=workers, side=side, environment=environment)
        self._python = python

    def commands(self, folder: pathlib.Path, path: str) -> list[list[str]]:
        # A member that is forked from one process with torch would have it loaded, whatever its path says.
        job = ["-w", str(self.num_processes), "-s", "1", "--transport", "shm", "--max-restarts", "0", "--no-preload"]
        named = ["--name", self._side, "--runs", str(folder), "-m", f"benchmarks.{self._module}"]
        return [[self._python, "-m", "syncline", "run", *job, *named, *to_arguments(self._task, self._side, path)]]
