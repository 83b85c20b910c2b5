"""Agents on loopback: processes of their own, which start members for a hub. No cluster is needed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.patience import PATIENCE

from syncline.engines import hub
from syncline.engines.agent import AgentPlan
from syncline.engines.agents import Agents
from syncline.engines.hub import AgentMember, Hub
from syncline.errors import ConfigError
from syncline.launch import jobfile
from syncline.launch.processes import MemberPlan, MemberProcess
from syncline.launch.versions import InstalledVersions, differing, versions_here
from syncline.net import tcp

#: A server whose coordinator is not there: it waits for it.
FILE = jobfile.new("127.0.0.1", 9, {"start_seconds": PATIENCE})


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


class Agency:
    """A hub and agents of it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._sock = tcp.bind("127.0.0.1", 0)
        self.file = jobfile.new("127.0.0.1", self._sock.getsockname()[1], {"start_seconds": PATIENCE})
        self.hub = Hub(self.file, self._sock, self.said.append)
        self.engine = Agents(self.hub, "tests")
        self.processes: list[subprocess.Popen[bytes]] = []

    def agent(
        self, host: str, file: jobfile.JobFile | None = None, *, preload: bool = False
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "syncline.engines.agent"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        plan = AgentPlan(file=file or self.file, host=host, number=len(self.processes), preload=preload)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(plan) + b"\n")
        process.stdin.flush()
        self.processes.append(process)
        return process

    def member(self, name: str, host: str) -> MemberProcess:
        return self.engine.start(MemberPlan(role="server", name=name, host=host, file=FILE))

    def close(self) -> None:
        self.hub.close(3)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=PATIENCE)
            process.kill()
            process.wait()
        self._sock.close()


@pytest.fixture
def agency() -> Iterator[Agency]:
    made = Agency()
    try:
        yield made
    finally:
        made.close()


def test_members_start_on_the_host_of_their_agent_and_go_elsewhere_when_it_is_lost(agency: Agency) -> None:
    """An agent that is killed takes its members with it; the next start of one of them is on another host."""
    first = agency.agent("a")
    agency.agent("b")
    agency.hub.gather({"a": 1, "b": 1}, PATIENCE)
    assert agency.engine.hosts() == ["a", "b"] and agency.engine.describe() == "tests: a, b"
    one, other = agency.member("server-0", "a"), agency.member("server-1", "b")
    assert (one.host, other.host) == ("a", "b")
    agency.engine.stop(other, signal.SIGKILL)
    wait_until(lambda: agency.engine.watch(other) is not None)
    assert agency.engine.watch(other) == -signal.SIGKILL and not other.fate
    assert agency.engine.watch(one) is None
    first.kill()
    wait_until(lambda: agency.engine.watch(one) is not None)
    assert one.fate == "was lost with its agent on a"
    wait_until(lambda: agency.engine.hosts() == ["b"])
    assert any("agent-0 on a is lost" in line and "server-0" in line for line in agency.said), agency.said
    again = agency.member("server-0", "a")
    assert again.host == "b" and agency.engine.scale("server", {}) == "b"
    agency.engine.stop(again, signal.SIGKILL)
    wait_until(lambda: agency.engine.watch(again) is not None)


def test_agents_end_with_the_code_of_the_job_and_end_what_they_have_started(agency: Agency) -> None:
    agent = agency.agent("a")
    agency.hub.gather({"a": 1}, PATIENCE)
    member = agency.member("server-0", "a")
    agency.hub.close(3)
    assert agent.wait(PATIENCE) == 3
    wait_until(lambda: agency.engine.watch(member) is not None)


@pytest.mark.engines  # loads torch
def test_an_agent_whose_start_takes_long_is_not_lost(agency: Agency, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start waits for the fork server, which may load torch for long: here it is stopped."""
    monkeypatch.setattr(hub, "LOST_SECONDS", 3.0)
    agency.agent("a", preload=True)
    agency.hub.gather({"a": 1}, PATIENCE)
    plan = MemberPlan(role="server", name="server-0", host="a", file=FILE, loads_torch=True)
    member = agency.engine.start(plan)
    (server,) = wait_for_one(lambda: preloaded_of(agency.processes[0].pid))
    os.kill(server, signal.SIGSTOP)
    time.sleep(4.0)
    os.kill(server, signal.SIGCONT)
    assert agency.engine.watch(member) is None and agency.engine.hosts() == ["a"], agency.said
    agency.engine.stop(member, signal.SIGKILL)
    wait_until(lambda: agency.engine.watch(member) is not None)


def preloaded_of(parent: int) -> list[int]:
    """The fork servers of this process."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found += [int(entry.name)] if b"preloaded" in (entry / "cmdline").read_bytes() else []
        except OSError:
            continue
    return found


def wait_for_one(look: Callable[[], list[int]]) -> list[int]:
    wait_until(lambda: len(look()) == 1)
    return look()


def test_what_a_member_writes_arrives_before_its_end(agency: Agency) -> None:
    agency.agent("a")
    agency.hub.gather({"a": 1}, PATIENCE)
    file = msgspec.structs.replace(FILE, given={"no such setting": 1})
    member = agency.engine.start(MemberPlan(role="server", name="server-0", host="a", file=file))
    assert b"no such setting" in member.output.read()
    wait_until(lambda: agency.engine.watch(member) is not None)
    assert agency.engine.watch(member) == 1


def test_a_member_waits_for_its_agent_and_gets_what_is_known_by_then(agency: Agency) -> None:
    """Ray says only when an actor is there where it is."""
    file = msgspec.structs.replace(FILE, given={"no such setting": 1})
    plan = MemberPlan(role="server", name="server-0", host="?", file=FILE)
    member = agency.hub.start_at(0, plan, lambda plan: msgspec.structs.replace(plan, host="a", file=file))
    assert member.waits and not agency.hub.is_there(0) and member.poll() is None and member.host == "?"
    agency.agent("a")
    assert b"no such setting" in member.output.read()
    wait_until(lambda: member.poll() is not None)
    assert (member.poll(), member.host) == (1, "a")
    assert agency.hub.is_there(0) and not member.waits


def test_an_agent_that_does_not_come_may_be_replaced_or_given_up(agency: Agency) -> None:
    """Several members may wait for one agent, and only one of them moves; to an agent that comes, and one there."""
    plan = MemberPlan(role="server", name="server-0", host="?", file=FILE)
    moved, last, lost = (agency.hub.start_at(5, plan, lambda plan: plan) for _ in range(3))
    agency.hub.move(moved, 0)
    agency.agent("a")
    wait_until(lambda: not moved.waits)
    agency.hub.move(last, 0, lambda plan: msgspec.structs.replace(plan, host="a"))
    for member in (moved, last):
        assert not member.waits and member.host == "a" and member.poll() is None
        member.signal(signal.SIGKILL)
        wait_until(lambda member=member: member.poll() == -signal.SIGKILL)
        member.output.close()
    assert lost.waits
    lost.give_up("cannot be started: no room")
    moved.give_up("too late")
    assert (lost.poll(), lost.fate, lost.output.read()) == (1, "cannot be started: no room", b"")
    assert moved.poll() == -signal.SIGKILL
    lost.output.close()


def test_an_agent_that_is_dismissed_is_no_loss(agency: Agency) -> None:
    """Room on Ray that is given back ends its agent."""
    agent = agency.agent("a")
    agency.hub.gather({"a": 1}, PATIENCE)
    agency.hub.dismiss(0)
    assert agent.wait(PATIENCE) == 0
    assert agency.hub.hosts() == [] and agency.said == []
    agency.hub.dismiss(0)  # it is gone


def test_a_member_that_was_ended_while_it_waited_does_not_start(agency: Agency) -> None:
    plan = MemberPlan(role="server", name="server-0", host="?", file=FILE)
    member = agency.hub.start_at(0, plan, lambda plan: plan)
    member.signal(signal.SIGKILL)
    assert member.poll() == -signal.SIGKILL and member.fate == "was ended before it began"
    agency.agent("a")
    agency.hub.gather({"a": 1}, PATIENCE)
    assert agency.hub.where() == {}


def test_a_member_that_is_ended_as_its_agent_comes_ends(agency: Agency) -> None:
    """What is said to a member never overtakes its start, however soon it is said."""
    plan = MemberPlan(role="server", name="server-0", host="?", file=FILE)
    placed = threading.Event()

    def adapt(plan: MemberPlan) -> MemberPlan:
        placed.set()
        time.sleep(0.05)
        return plan

    member = agency.hub.start_at(0, plan, adapt)
    agency.agent("a")
    assert placed.wait(PATIENCE)
    member.signal(signal.SIGKILL)
    wait_until(lambda: member.poll() == -signal.SIGKILL)


def test_an_agent_with_another_token_is_refused(agency: Agency) -> None:
    stranger = msgspec.structs.replace(agency.file, token="00" * 32)
    process = agency.agent("a", stranger)
    assert process.wait(PATIENCE) == 1 and process.stderr is not None
    assert b"does not prove the token" in process.stderr.read()
    assert agency.hub.hosts() == []


def test_agents_that_do_not_come_are_named_by_host(agency: Agency) -> None:
    agency.agent("a")
    with pytest.raises(ConfigError, match=r"agents did not come within 0\.5 s: .*2 of b"):
        agency.hub.gather({"a": 0, "b": 2}, 0.5)


def test_versions_that_differ_are_named() -> None:
    here = versions_here()
    assert differing(here, here, "a") == ""
    other = msgspec.structs.replace(here, syncline="9.9")
    assert differing(other, here, "a") == f"host a has syncline 9.9, this host {here.syncline}: install one version"
    assert "host a has Python 3.9.1" in differing(InstalledVersions("3.9.1", here.syncline, ""), here, "a")
    patch = f"{here.python.rpartition('.')[0]}.99"
    assert differing(msgspec.structs.replace(here, python=patch, torch="0"), here, "a") == ""


def test_the_end_of_a_member_leaves_its_pipe_to_who_writes_to_it(tmp_path: pathlib.Path) -> None:
    """One thread writes a member's output to its pipe, which is full, while another one ends the member. The number
    of a descriptor that was closed then is given to the next file: what comes next would be written there."""
    member = AgentMember(MemberPlan(role="server", name="server-0", host="a", file=FILE), 1, None)
    pipe = member.output.fileno()
    sent = bytes(3 << 20)
    writer = threading.Thread(target=lambda: [member.wrote(data) for data in (sent, b"late")])
    writer.start()
    wait_until(lambda: _unread(pipe) == fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ))
    member.end(0)
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(open(tmp_path / f"{number}", "wb")) for number in range(8)]
        received = member.output.read()
        writer.join()
        assert [os.fstat(other.fileno()).st_size for other in others] == [0] * 8
    assert received == sent
    member.output.close()


def _unread(descriptor: int) -> int:
    """The bytes in this pipe."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
