"""Starting members as processes, here or on other hosts, so that none outlives its launcher.

A member's whole instruction, token included, goes over its standard input, which then stays open as a lifeline:
when the launcher is gone, however it went, the pipe closes and the member ends itself.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shlex
import signal
import subprocess
import sys
from typing import IO, Protocol

import msgspec

from syncline import config as configuration
from syncline.errors import ConfigError
from syncline.launch import lifeline
from syncline.launch.forkserver import ForkedProcess, ForkServer
from syncline.launch.jobfile import JobFile
from syncline.launch.restarts import EVICTED

LOCAL_HOSTS = frozenset({"local", "localhost", "127.0.0.1", "::1"})


class MemberPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One member to start: who it is and what it runs."""

    role: str
    name: str
    host: str
    file: JobFile
    script: str = ""  #: path of the script, or the module's name; servers see what is beside it
    is_module: bool = False
    arguments: list[str] = []
    folder: str = ""  #: working folder
    environment: dict[str, str] = {}
    num_local_workers: int = 0  #: on this host: they share its cores
    place: tuple[int, int, int] | None = None  #: with cores of its own: its number among servers and workers here
    tells_cores: bool = False  #: where there are too few cores for that, this one says so
    listen_fd: int | None = None  #: coordinator: the socket that is bound already
    page_fd: int | None = None  #: coordinator: the socket of the web page
    page_code: str = ""  #: coordinator: opens the page once
    resumes: bool = False  #: coordinator: the job has begun before, and its journal is there
    comes_back: bool = False  #: what started it starts it again when SIGTERM has made it leave
    starts_again: bool = False  #: an earlier process of this name has died
    loads_torch: bool = False  #: it will; with the fork server it has it already


class MemberProcess(Protocol):
    """A started member, wherever it runs."""

    name: str
    host: str  #: where it runs, which may be another host than the one that was asked for
    output: IO[bytes]  #: its standard output and error, in the order they were written
    pid: int  #: 0: it is not a process of this host
    fate: str  #: how it ended, in words, where its exit code does not say it

    def poll(self) -> int | None:
        """How it ended; None: it lives."""

    def signal(self, number: int) -> None:
        """To the member and what it started itself."""

    def stop(self, seconds: float) -> None:
        """Asks it to end, then makes it."""

    def tell(self, word: bytes) -> None:
        """Says something about the job's end over its lifeline."""

    def close_lifeline(self) -> None:
        """Lets it end by itself."""

    def kill(self) -> None:
        """Ends it at once, and waits for that."""


class LocalProcess:
    """A member as a child process: of this host, or a command like ssh that runs it on another one."""

    def __init__(self, name: str, host: str, process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        self.name, self.host, self._process, self.fate = name, host, process, ""
        assert process.stdout is not None
        self.output: IO[bytes] = process.stdout
        self.pid = process.pid

    def poll(self) -> int | None:
        """How it ended; None: it lives. What a member that died had started itself is ended with it."""
        if self._process.returncode is None:
            self._end_orphans()
        return self._process.poll()

    def _end_orphans(self) -> None:
        if not hasattr(os, "waitid"):  # macOS, with an older Python
            return
        with contextlib.suppress(ChildProcessError, ProcessLookupError, PermissionError):
            # Looked at and not collected yet: until then no other group gets its number.
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None and (end.si_code != os.CLD_EXITED or end.si_status != 0):
                os.killpg(self.pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """To the member and what it started itself."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            self._process.send_signal(number)

    def stop(self, seconds: float) -> None:
        """Asks it to end, then makes it."""
        self.close_lifeline()
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        self.output.close()

    def tell(self, word: bytes) -> None:
        """Says something about the job's end over its lifeline."""
        if self._process.stdin is not None:
            lifeline.tell(self._process.stdin, word)

    def close_lifeline(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except OSError:
                return

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()


def command_for(plan: MemberPlan, remote: str) -> list[str]:
    """The command line that starts a member; nothing secret is on it."""
    return command_on(plan.host, remote, [sys.executable, "-m", "syncline.launch.member", plan.name])


def command_on(host: str, remote: str, command: list[str]) -> list[str]:
    """The command line that starts this command on a host: behind the prefix, unless it is this host."""
    if not remote or host in LOCAL_HOSTS:
        return command
    try:
        prefix = [word.format(host=host) for word in shlex.split(remote)]
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f'--remote {remote!r}: {error}; e.g. "ssh {{host}}"') from None
    # ssh gives its words to a shell on the other side; other prefixes start the command as it is.
    through_shell = any("ssh" in pathlib.PurePath(word).name for word in prefix)
    return prefix + ([shlex.quote(word) for word in command] if through_shell else command)


def start_member(plan: MemberPlan, remote: str = "", fork_server: ForkServer | None = None) -> LocalProcess:
    """Starts a member and hands it its plan; without `remote`, here. The fork server, if there is one, starts those
    here that load torch.
    """
    # When it starts again, what a test wants to happen has happened.
    extra = {"SYNCLINE_FAULT": ""} if plan.starts_again else {}
    process: subprocess.Popen[bytes] | ForkedProcess | None = None
    if fork_server is not None and plan.loads_torch and (not remote or plan.host in LOCAL_HOSTS):
        process = fork_server.fork(plan.name, extra)
    if process is None:
        command = command_for(plan, remote)
        kept = tuple(descriptor for descriptor in (plan.listen_fd, plan.page_fd) if descriptor is not None)
        try:
            process = _start(command, kept, extra)
        except OSError as error:
            raise ConfigError(
                f"{plan.name} on {plan.host} cannot be started: {shlex.join(command)}: {error}"
            ) from None
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(plan) + b"\n")
        process.stdin.flush()
    except OSError:
        pass  # it has ended already; its exit code and output will say why
    return LocalProcess(plan.name, plan.host, process)


def _start(command: list[str], kept: tuple[int, ...], extra: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=kept,
        env=configuration.inherited_environment({"PYTHONUNBUFFERED": "1", **extra}),
    )


def describe_exit(code: int, *, is_out_of_memory: bool = False) -> str:
    """How a process ended, in words. `is_out_of_memory`: the kernel's counters say that this was why."""
    if code == EVICTED:
        return "was evicted"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory)" if is_out_of_memory else "")


def exit_code(code: int) -> int:
    """An exit code as a shell gives it."""
    return code if code >= 0 else 128 - code
