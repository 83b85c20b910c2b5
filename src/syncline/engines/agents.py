"""The engine of a job whose members agents start: on the launcher's own host directly, on others through the hub."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from syncline.engines.hub import Hub
from syncline.errors import ConfigError
from syncline.launch.forkserver import ForkServer
from syncline.launch.hosts import quietest
from syncline.launch.processes import LOCAL_HOSTS, MemberPlan, MemberProcess, start_member

_AGAIN_SECONDS = 0.05


class Agents:
    """Members on the hosts of agents. `own_host`: this one's name; empty: only the coordinator runs here."""

    def __init__(
        self,
        hub: Hub,
        title: str,
        *,
        own_host: str = "",
        fork_server: ForkServer | None = None,
        wait_seconds: float = 0.0,
    ) -> None:
        """`wait_seconds`: for an agent to come where all are lost."""
        self._hub, self._title, self._own_host, self._fork_server = hub, title, own_host, fork_server
        self._wait_seconds = wait_seconds
        self._own: dict[MemberProcess, str] = {}  # members that this process has started itself: their roles

    def hosts(self) -> list[str]:
        """Where members can run now."""
        return sorted({*self._hub.hosts(), *([self._own_host] if self._own_host else [])})

    def start(self, plan: MemberPlan) -> MemberProcess:
        """On the host of its plan; where that is lost, on the quietest of the others."""
        if plan.host in LOCAL_HOSTS:
            return start_member(plan, fork_server=self._fork_server)
        until = time.monotonic() + self._wait_seconds
        while True:
            hosts = self.hosts()
            if hosts and plan.host not in hosts:
                place = quietest(plan.role, self._hub.where() | self._where_own(), hosts)
                plan = msgspec.structs.replace(plan, host=place, place=None)
            process = self._start_own(plan) if self._is_own(plan) else self._hub.start(plan)
            if process is not None:
                return process
            if time.monotonic() > until and not hosts:
                raise ConfigError(f"{plan.name} cannot be started: no host of {self._title} is left")
            time.sleep(_AGAIN_SECONDS)

    def _where_own(self) -> dict[str, str]:
        self._own = {process: role for process, role in self._own.items() if process.poll() is None}
        return {process.name: process.host for process in self._own}

    def _is_own(self, plan: MemberPlan) -> bool:
        """Whether this process starts it: it has a place too, beside those of the other agents on its host."""
        if plan.host != self._own_host:
            return False
        self._where_own()
        mine = sum(role == plan.role for role in self._own.values())
        others = self._hub.counts(plan.host, plan.role)
        return not others or mine <= min(others)

    def _start_own(self, plan: MemberPlan) -> MemberProcess:
        if self._fork_server is not None and plan.loads_torch:
            self._fork_server.start()
        process = start_member(plan, fork_server=self._fork_server)
        self._own[process] = plan.role
        return process

    def watch(self, process: MemberProcess) -> int | None:
        return process.poll()

    def stop(self, process: MemberProcess, number: int) -> None:
        process.signal(number)

    def scale(self, role: str, where: Mapping[str, str]) -> str:
        hosts = self.hosts()
        return quietest(role, where, hosts) if hosts else next(iter(where.values()), "")

    def describe(self) -> str:
        return f"{self._title}: {', '.join(self.hosts())}"
