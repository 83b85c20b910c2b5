"""Agents of a detached job, one for each host, and the engine that has them start members. Real processes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
from collections.abc import Iterator

import pytest
from tests.engines.clusters import lives
from tests.engines.test_agents import FILE, Agency, wait_until
from tests.patience import PATIENCE

from syncline.engines import host_agents
from syncline.engines.agent import AgentPlan
from syncline.engines.host_agents import HeldHosts, HostAgents
from syncline.errors import ConfigError
from syncline.launch.processes import MemberPlan


class Hosts:
    """Agents `a` and `b` of a hub, started by a prefix; `remote` may leave a file with a process id."""

    def __init__(self, agency: Agency, folder: pathlib.Path) -> None:
        self.agency, self.folder = agency, folder
        self._made: list[HostAgents] = []

    def agents(self, remote: str, log: str = "") -> HostAgents:
        plans = [
            AgentPlan(file=self.agency.file, host=host, number=number, preload=False, stays=True, log=log)
            for number, host in enumerate("ab")
        ]
        command = [sys.executable, "-m", "syncline.engines.agent"]
        self._made.append(HostAgents(self.agency.hub, plans, command, remote, self.agency.said.append))
        return self._made[-1]

    def started(self) -> list[int]:
        return [int(path.read_text()) for path in self.folder.glob("pid-*") if path.read_text()]

    def close(self) -> None:
        for agents in self._made:
            agents.close()
        self.agency.close()
        for pid in self.started():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def hosts(tmp_path: pathlib.Path) -> Iterator[Hosts]:
    made = Hosts(Agency(), tmp_path)
    try:
        yield made
    finally:
        made.close()


def server(host: str) -> MemberPlan:
    return MemberPlan(role="server", name="server-0", host=host, file=FILE)


def test_a_launcher_does_not_wait_for_a_lost_agent(hosts: Hosts) -> None:
    """It has signals to hear meanwhile: the member waits, and may be ended before it has begun."""
    engine = HeldHosts(hosts.agency.hub, hosts.agents("env HOST={host}"), ["a", "b"])
    member = engine.start(server("b"))
    assert engine.watch(member) is None and member.host == "b"
    engine.stop(member, signal.SIGTERM)
    assert engine.watch(member) == -signal.SIGTERM
    member.output.close()


def test_a_member_whose_agent_does_not_come_back_starts_elsewhere_or_not_at_all(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_agents, "ELSEWHERE_SECONDS", -1.0)
    engine = HeldHosts(hosts.agency.hub, hosts.agents("env HOST={host}"), ["a", "b"])
    member = engine.start(server("b"))
    assert engine.watch(member) is None and member.host == "b"  # there is no other one either
    hosts.agency.agent("a")
    hosts.agency.hub.gather({"a": 1}, PATIENCE)
    assert engine.watch(member) is None and member.host == "a"
    engine.stop(member, signal.SIGKILL)
    wait_until(lambda: engine.watch(member) == -signal.SIGKILL)
    member.output.close()
    monkeypatch.setattr(host_agents, "PATIENT_SECONDS", -1.0)
    coordinator = engine.start(MemberPlan(role="coordinator", name="coordinator", host="b", file=FILE))
    assert engine.watch(coordinator) == 1
    assert coordinator.fate == "cannot be started: there is no agent on b"
    coordinator.output.close()


def test_an_agent_is_started_again_although_its_prefix_has_left_a_process(hosts: Hosts) -> None:
    """As ssh does with a shared connection: that process keeps the output of the command open."""
    leaves = f'sleep 600 & echo $! > {hosts.folder}/pid-$0-$$; exec "$@"'
    agents = hosts.agents(f"sh -c '{leaves}' {{host}}")
    agents.start_all()
    hosts.agency.hub.gather({"a": 1, "b": 1}, PATIENCE)
    wait_until(lambda: len(hosts.started()) == 2)
    assert all(map(lives, hosts.started()))
    agents.watch()
    hosts.agency.hub.dismiss(1)
    wait_until(lambda: any("agent-1 on b is started again" in line for line in hosts.agency.said))
    hosts.agency.hub.gather({"a": 1, "b": 1}, PATIENCE)


def test_an_agent_that_cannot_write_its_log_says_so_before_it_leaves(hosts: Hosts) -> None:
    agents = hosts.agents("env HOST={host}", log=str(hosts.folder))
    agents.start_all()
    with pytest.raises(ConfigError, match=r"agent-\d cannot write its log .*: Is a directory"):
        hosts.agency.hub.gather({"a": 1, "b": 1}, PATIENCE)
