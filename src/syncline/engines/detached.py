"""A detached job: a launcher and an agent on each of its hosts, in sessions of their own.

Agents hold the members. When the launcher dies they go on, and the agent on the launcher's own host starts another
one, which takes over. When an agent dies, the launcher starts another one. `detached.json` in the job's folder (mode
0600) has what a launcher needs to know to take over; where both are gone, `syncline attach` starts one with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from syncline import config as configuration
from syncline.config import JobConfig
from syncline.core.wire.agents import StopJob
from syncline.core.wire.message import Done
from syncline.engines.agent import AgentPlan
from syncline.engines.host_agents import HeldHosts, HostAgents
from syncline.engines.hub import Hub
from syncline.errors import ConfigError, SynclineError
from syncline.launch import jobfile
from syncline.launch.folder import DETACHED, EXIT_CODE, clear, locked
from syncline.launch.hosts import hosts_of
from syncline.launch.jobfile import JobFile
from syncline.launch.lives import Screen
from syncline.launch.running import FoundMembers, Premises, Script, advertised, launch, listen, page_socket
from syncline.launch.watching import ask
from syncline.net import tcp

#: What the job shows, in its folder.
OUTPUT = "output.log"
#: Locked by the launcher that runs.
LAUNCHER = "launcher"
#: The host of the agent that runs the coordinator and starts launchers.
OWN_HOST = "local"
#: For the agents of an earlier launcher to come; for the one that has started this launcher, and so lives.
TAKE_OVER_SECONDS, STARTER_SECONDS = 5.0, 60.0
SECOND_SIGNAL_SECONDS = 0.3

ScreenOf = Callable[[JobConfig], contextlib.AbstractContextManager[Screen]]


class LauncherThere(ConfigError):
    """This job has a launcher."""


class DetachedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the launchers of a job have in common."""

    file: JobFile
    agents: JobFile  #: where agents meet the launcher
    bound: str  #: the address at which both listen
    script: Script
    folder: str  #: working folder
    page: str = ""  #: address and port of the web page
    begun_at: float = 0.0  #: wall clock
    machine: str = ""  #: the launcher's own host, by its name


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Open descriptors that a launcher and the agent of its host share: they outlive either of them."""

    lock: int  #: of the job's folder
    job: int  #: the coordinator's socket
    agents: int  #: the launcher's
    page: int = -1

    @property
    def numbers(self) -> list[int]:
        return [number for number in (self.lock, self.job, self.agents, self.page) if number >= 0]


@dataclasses.dataclass(frozen=True)
class StartCommands:
    """How a launcher that takes over is started: this, then the job's folder and `Kept` as JSON; and an agent."""

    launcher: list[str]
    agent: list[str]


def read(folder: pathlib.Path) -> DetachedJob:
    path = folder / DETACHED
    try:
        return msgspec.json.decode(jobfile.read_own(path), type=DetachedJob)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not what a detached job writes: {error}") from None


def begin(
    given: dict[str, Any], script: Script, screen_of: ScreenOf, commands: StartCommands, started: Callable[[], None]
) -> int:
    """The first launcher of a job; the exit code. `started`: is called once agents are on all hosts."""
    config = configuration.resolve(given)
    folder = pathlib.Path(config.runs).absolute() / config.name
    close_folder(folder)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(locked(folder, config.name))
        stack.enter_context(_alone(folder))
        clear(folder)
        sock = stack.enter_context(listen(config))
        bound = str(sock.getsockname()[0])
        agents = stack.enter_context(tcp.bind(bound, 0))
        page = page_socket(config)
        if page is not None:
            stack.enter_context(page)
        address = advertised(sock, config)
        job = DetachedJob(
            file=jobfile.new(address, sock.getsockname()[1], given),
            agents=jobfile.new(address, agents.getsockname()[1], {"start_seconds": config.start_seconds}),
            bound=bound,
            script=script,
            folder=os.getcwd(),
            page="{}:{}".format(*page.getsockname()[:2]) if page is not None else "",
            begun_at=time.time(),
            machine=socket.gethostname(),
        )
        jobfile.write(folder / DETACHED, job)
        stack.callback((folder / DETACHED).unlink, missing_ok=True)  # of a job that has not begun there is nothing
        held = _Held(folder, lock, sock, agents, page)
        return _Leading(job, config, held, commands).run(screen_of, started, takes_over=False)


def take_over(
    folder: pathlib.Path, kept: Kept | None, screen_of: ScreenOf, commands: StartCommands, started: Callable[[], None]
) -> int:
    """Another launcher of a job whose launcher is gone. `kept`: of the agent that starts this one, if one does."""
    job = read(folder)
    os.chdir(job.folder)
    config = configuration.resolve(job.file.given)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone(folder))
        lock = stack.enter_context(locked(folder, config.name, kept.lock if kept is not None else None))

        def listening(number: int | None, host: str, port: int) -> socket.socket:
            sock = socket.socket(fileno=number) if number is not None else tcp.bind(host, port)
            return stack.enter_context(sock)

        sock = listening(kept.job if kept is not None else None, job.bound, job.file.port)
        agents = listening(kept.agents if kept is not None else None, job.bound, job.agents.port)
        page = None
        if job.page:
            host, _, port = job.page.rpartition(":")
            page = listening(kept.page if kept is not None else None, host, int(port))
        held = _Held(folder, lock, sock, agents, page)
        starter_seconds = STARTER_SECONDS if kept is not None else 0.0
        return _Leading(job, config, held, commands).run(
            screen_of, started, takes_over=True, starter_seconds=starter_seconds
        )


def close_folder(folder: pathlib.Path) -> None:
    """The job's folder, with its tokens, is entered by its user only."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be used: {error.strerror or error}; use --runs DIR") from None


def stop(job: DetachedJob, seconds: float, *, at_once: bool = False) -> None:
    """Tells the launcher to end the job, and to save it first where it knows where to."""
    ask(job.agents, StopJob(at_once), Done, seconds)


@dataclasses.dataclass(frozen=True)
class _Held:
    folder: pathlib.Path
    lock: int
    sock: socket.socket
    agents: socket.socket
    page: socket.socket | None

    def kept(self) -> Kept:
        page = self.page.fileno() if self.page is not None else -1
        return Kept(lock=self.lock, job=self.sock.fileno(), agents=self.agents.fileno(), page=page)


class _Leading:
    """One launcher of a detached job, from its agents to the verdict."""

    def __init__(self, job: DetachedJob, config: JobConfig, held: _Held, commands: StartCommands) -> None:
        self._job, self._config, self._held, self._commands = job, config, held, commands
        self._was_told = False  # to end

    def run(
        self, screen_of: ScreenOf, started: Callable[[], None], *, takes_over: bool, starter_seconds: float = 0.0
    ) -> int:
        folder, code = self._held.folder, 1
        with contextlib.ExitStack() as stack:
            stack.enter_context(_shown_in(folder / OUTPUT))
            screen = stack.enter_context(screen_of(self._config))

            def say(text: str) -> None:
                screen.line("launcher", f"syncline: {text}")

            hub = stack.enter_context(
                Hub(self._job.agents, self._held.agents, say, takes_over=takes_over, stop=self._stop)
            )
            hosts = hosts_of(self._config) or [OWN_HOST]
            plans = self._agent_plans(hosts)
            agents = HostAgents(hub, plans, self._commands.agent, self._config.remote, say)
            stack.callback(agents.close)
            expected = {plan.host: 1 for plan in plans}
            found = None
            if takes_over:
                for some, seconds in (({OWN_HOST: 1}, starter_seconds), (expected, TAKE_OVER_SECONDS)):
                    with contextlib.suppress(ConfigError):  # those that do not come are started
                        hub.gather(some, seconds)
                members = hub.take_over()
                names = ", ".join(sorted(plan.name for plan, _ in members))
                say(f"another launcher takes over; it has found {names or 'no member'}")
                found = FoundMembers(members, max(0.0, time.time() - self._job.begun_at))
            else:
                agents.start_all()
                hub.gather(expected, self._config.start_seconds)
            agents.watch()
            started()
            held, config = self._held, self._config
            premises = Premises(config, self._job.script, folder, self._job.file, held.sock, held.page)
            try:
                code = launch(premises, screen, HeldHosts(hub, agents, hosts), found=found)
            except SynclineError as error:
                screen.verdict(f"the job has failed: {error}")
            finally:
                agents.close()
                hub.close(code)
                (folder / EXIT_CODE).write_text(str(code))
                (folder / DETACHED).unlink(missing_ok=True)
        return code

    def _agent_plans(self, hosts: list[str]) -> list[AgentPlan]:
        folder, kept = self._held.folder, self._held.kept()
        names = [OWN_HOST, *(host for host in hosts if host != OWN_HOST)]
        common: dict[str, Any] = {"file": self._job.agents, "preload": self._config.preload, "stays": True}
        own = AgentPlan(
            host=OWN_HOST, number=0, folder=self._job.folder, log=str(folder / "agent-0.log"), kept=kept.numbers,
            launcher=[*self._commands.launcher, str(folder), msgspec.json.encode(kept).decode()], **common,
        )  # fmt: skip
        others = [
            AgentPlan(host=host, number=number, log=str(folder / f"agent-{number}.log"), **common)
            for number, host in enumerate(names[1:], start=1)
        ]
        return [own, *others]

    def _stop(self, at_once: bool) -> None:
        if signal.getsignal(signal.SIGTERM) in (
            signal.SIG_DFL,
            None,
        ):  # the launcher does not hear it yet, or any more
            raise ConfigError("the job is starting or ending; try again")
        # A second signal breaks off the save, and a question may come twice.
        is_first, self._was_told = not self._was_told, True
        if is_first:
            os.kill(os.getpid(), signal.SIGTERM)
        if at_once:
            time.sleep(SECOND_SIGNAL_SECONDS if is_first else 0.0)  # two at the same time are one
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
    """One launcher of a job runs at a time. The lock of the folder does not say so: agents hold it too."""
    with open(os.open(folder / LAUNCHER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LauncherThere(f"the launcher of {folder.name} runs") from None
        yield


@contextlib.contextmanager
def _shown_in(path: pathlib.Path) -> Iterator[None]:
    """Standard output and error go to this file."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    before = [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(out, number)
    os.close(out)
    try:
        yield
    except SynclineError:
        raise
    except Exception:
        traceback.print_exc()  # only its log shows it
        raise
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for number, old in zip((1, 2), before, strict=True):
            os.dup2(old, number)
            os.close(old)
