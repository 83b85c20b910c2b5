"""The launcher: starts the roles, forwards their output and signals, exits with the job's verdict."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from syncline.core.messages import Died, Standings, Watch
from syncline.errors import SynclineError
from syncline.launch.jobfile import JobFile
from syncline.launch.membership import connect_service
from syncline.launch.processes import MemberProcess, Plan, describe_exit, exit_code, start_member
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.transport import Peer

POLL_SECONDS = 0.05
WATCH_SECONDS = 0.25
#: From the first word to end until nothing is left.
STOP_SECONDS = 2.0


class Screen(Protocol):
    """Where the job's output and progress are shown."""

    def line(self, member: str, text: str) -> None:
        """One line that a member wrote."""

    def progress(self, standings: Standings) -> None:
        """How the job stands."""

    def verdict(self, text: str) -> None:
        """How the job ended."""


class Launcher:
    """Runs one job to its end. Members are started by `start`, the seam for other engines."""

    def __init__(
        self,
        file: JobFile,
        plans: Sequence[Plan],
        screen: Screen,
        *,
        folder: pathlib.Path,
        remote: str = "",
        start: Callable[[Plan, str], MemberProcess] = start_member,
    ) -> None:
        self._file, self._plans, self._screen, self._folder = file, plans, screen, folder
        self._remote, self._start = remote, start
        self._processes: dict[str, MemberProcess] = {}
        self._ended: dict[str, int] = {}
        self._forwarders: list[threading.Thread] = []
        self._log_failed = False
        self._signal: int | None = None
        self._endpoint: Endpoint | None = None
        self._failure: tuple[str, str, int] | None = None  # member, reason, exit code

    def run(self) -> int:
        """Starts everything and returns the exit code for the job."""
        with self._signals():
            try:
                self._start_all()
                self._watch()
            finally:
                self._stop_all()
        return self._conclude()

    def _start_all(self) -> None:
        for plan in self._plans:
            if self._signal is not None:
                return
            process = self._start(plan, self._remote)
            self._processes[plan.name] = process
            thread = threading.Thread(target=self._forward, args=(process,), name=f"log {plan.name}", daemon=True)
            thread.start()
            self._forwarders.append(thread)

    def _forward(self, process: MemberProcess) -> None:
        """A member's output: into its log, and onto the screen. Whatever fails there, the member is read on."""
        with contextlib.suppress(ValueError, OSError):  # the pipe is closed at the end
            for raw in iter(process.output.readline, b""):
                self._keep(process.name, raw)
                if b"JobFailed: " in raw:
                    continue  # it says what our own verdict will say
                try:
                    self._screen.line(process.name, raw.decode("utf-8", "replace").rstrip("\n"))
                except BrokenPipeError:
                    self._signal = self._signal or signal.SIGPIPE  # nobody reads us any more

    def _keep(self, name: str, raw: bytes) -> None:
        try:
            with open(self._folder / f"{name}.log", "ab") as log:
                log.write(raw)
        except OSError as error:
            if not self._log_failed:
                self._log_failed = True
                self._screen.verdict(f"logs cannot be kept in {self._folder}: {error.strerror or error}")

    # -- while it runs ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        next_look = 0.0
        while self._signal is None and self._failure is None:
            self._reap()
            if self._workers_done() or (self._failure is None and self._all_gone()):
                return
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + WATCH_SECONDS
                standings = self._look()
                if standings is not None:
                    self._screen.progress(standings)
                    if standings.verdict and standings.culprit:
                        self._note_verdict(standings)
            time.sleep(POLL_SECONDS)

    def _reap(self) -> None:
        for name, process in self._processes.items():
            code = process.poll()
            if code is None or name in self._ended:
                continue
            self._ended[name] = code
            if name.startswith("worker-") and code == 0 and self._has_left(name):
                continue
            if name.startswith("worker-") and code == 0:
                reason = "ended without having joined the job; does the script call syncline.init()?"
                self._fail(name, reason, 1)
            elif code != 0:  # a server or the coordinator ends well only when the job is over
                self._fail(name, describe_exit(code), exit_code(code) or 1)

    def _workers_done(self) -> bool:
        workers = [plan.name for plan in self._plans if plan.role == "worker"]
        return all(self._ended.get(name) == 0 for name in workers)

    def _all_gone(self) -> bool:
        return len(self._ended) == len(self._processes)

    def _has_left(self, name: str) -> bool:
        standings = self._look()
        return standings is None or name in standings.left

    def _look(self) -> Standings | None:
        try:
            if self._endpoint is None:
                stamp = Stamp(self._file.job)
                self._endpoint = connect_service(self._file, Peer("launcher", "launcher", 0), stamp, None)
            answer = self._endpoint.call(Watch()).wait(1.0)
            return answer if isinstance(answer, Standings) else None
        except SynclineError:
            return None

    def _fail(self, name: str, reason: str, code: int) -> None:
        """The first death is the verdict; everyone is told who died, and how."""
        if self._failure is None:
            self._failure = (name, f"{name} {reason}", code)
            if self._endpoint is not None:
                with contextlib.suppress(SynclineError):
                    self._endpoint.call(Died(name, reason)).wait(1.0)

    def _note_verdict(self, standings: Standings) -> None:
        """The coordinator knows of a failure before a process has ended: give that process a moment."""
        for _ in range(10):
            time.sleep(POLL_SECONDS)
            self._reap()
            if self._failure is not None:
                return
        self._failure = (standings.culprit, standings.verdict, 1)

    # -- the end ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the job in order; a second one ends it at once."""

        def handler(number: int, frame: object) -> None:
            if self._signal is not None:
                for process in self._processes.values():
                    process.signal(signal.SIGKILL)
            self._signal = number

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, old in previous.items():
                signal.signal(number, old)

    def _stop_all(self) -> None:
        went_well = self._signal is None and self._failure is None and self._workers_done()
        if not went_well:
            for process in self._alive():
                process.signal(signal.SIGTERM)
        self._wait_for_end(STOP_SECONDS + (3.0 if went_well else 0.0))
        for process in self._alive():
            process.close_lifeline()
            process.kill()
        for process in self._processes.values():
            process.close_lifeline()
        deadline = time.monotonic() + 1.0
        for thread in self._forwarders:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        for process, thread in zip(self._processes.values(), self._forwarders, strict=False):
            # Something that a script has left behind may hold the pipe open: its reader is let go with us.
            if not thread.is_alive():
                process.output.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def _alive(self) -> list[MemberProcess]:
        return [process for process in self._processes.values() if process.poll() is None]

    def _wait_for_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _conclude(self) -> int:
        if self._signal is not None:
            self._screen.verdict(f"interrupted by {signal.Signals(self._signal).name}; all members have ended")
            return 128 + self._signal
        if self._failure is not None:
            name, reason, code = self._failure
            log = self._folder / f"{name}.log"
            where = f" (log: {log})" if log.exists() else ""
            self._screen.verdict(f"the job has failed: {reason}{where}")
            return code
        return 0
