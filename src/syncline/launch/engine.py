"""Engines: where members run. The launcher decides what runs, when it starts again and how it ends.

An engine has five verbs. `Processes` starts members on this host, `Prefixes` also on others, by a command like ssh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from syncline.launch.forkserver import ForkServer
from syncline.launch.hosts import quietest
from syncline.launch.processes import MemberPlan, MemberProcess, start_member


class Engine(Protocol):
    """The seam between the launcher and the place where members run."""

    def start(self, plan: MemberPlan) -> MemberProcess:
        """Starts a member and hands it its plan; nothing secret is on a command line."""

    def watch(self, process: MemberProcess) -> int | None:
        """The exit code of a member that has ended, negative for a signal; None while it runs."""

    def stop(self, process: MemberProcess, number: int) -> None:
        """Sends this signal: SIGTERM asks a member to end, SIGKILL ends it."""

    def scale(self, role: str, where: Mapping[str, str]) -> str:
        """The host for one more member of this role. `where`: the hosts of current members."""

    def describe(self) -> str:
        """Where members run, for the first line of a job; empty: on this host only."""


class Processes:
    """Members as processes of this host."""

    def __init__(self, fork_server: ForkServer | None = None) -> None:
        self._fork_server = fork_server

    def start(self, plan: MemberPlan) -> MemberProcess:
        return start_member(plan, fork_server=self._fork_server)

    def watch(self, process: MemberProcess) -> int | None:
        return process.poll()

    def stop(self, process: MemberProcess, number: int) -> None:
        process.signal(number)

    def scale(self, role: str, where: Mapping[str, str]) -> str:
        return "local"

    def describe(self) -> str:
        return ""


class Prefixes(Processes):
    """Members on several hosts, each started by a command prefix: `ssh {host}`."""

    def __init__(self, hosts: Sequence[str], remote: str, fork_server: ForkServer | None = None) -> None:
        super().__init__(fork_server)
        self._hosts, self._remote = hosts, remote

    def start(self, plan: MemberPlan) -> MemberProcess:
        return start_member(plan, self._remote, self._fork_server)

    def scale(self, role: str, where: Mapping[str, str]) -> str:
        return quietest(role, where, self._hosts)

    def describe(self) -> str:
        return ", ".join(sorted(self._hosts))


class Attended:
    """An engine with another way to start members, for a program that looks at them or kills them."""

    def __init__(self, engine: Engine, start: Callable[[Engine, MemberPlan], MemberProcess]) -> None:
        self._engine, self._start = engine, start

    def start(self, plan: MemberPlan) -> MemberProcess:
        return self._start(self._engine, plan)

    def watch(self, process: MemberProcess) -> int | None:
        return self._engine.watch(process)

    def stop(self, process: MemberProcess, number: int) -> None:
        self._engine.stop(process, number)

    def scale(self, role: str, where: Mapping[str, str]) -> str:
        return self._engine.scale(role, where)

    def describe(self) -> str:
        return self._engine.describe()
