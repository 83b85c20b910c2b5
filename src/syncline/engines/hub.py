"""The launcher's side of its agents: who is there, and the members that each of them runs."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

import msgspec

from syncline.core.wire import agents as wire
from syncline.core.wire.message import Done, Message
from syncline.engines.agent import LOST_SECONDS
from syncline.engines.awake import AwakeClock
from syncline.errors import ConfigError, ProtocolError
from syncline.launch.jobfile import JobFile
from syncline.launch.processes import MemberPlan
from syncline.launch.versions import InstalledVersions, differing, torch_told, versions_here
from syncline.net import tcp
from syncline.net.rpc import Endpoint, Request, Stamp
from syncline.net.transport import Buffer, Connection, Peer

_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1 << 20
_WAIT_SECONDS = 0.1
#: Between two looks at agents: this process, or its host, had no processor time.
STOOD_STILL_SECONDS = 2.0
#: After so long of waiting for agents, a line says which are missing.
PATIENT_SECONDS = 10.0


#: A member's plan, for the host on which it comes to run.
Adapt = Callable[[MemberPlan], MemberPlan]


class AgentMember:
    """A member that an agent runs, or will run once it is there."""

    def __init__(self, plan: MemberPlan, number: int, agent: AgentHere | None) -> None:
        self.name, self.role, self.fate, self.pid = plan.name, plan.role, "", 0
        self.host = agent.host if agent is not None else plan.host
        self.number, self._agent = number, agent
        self._lock = threading.Lock()
        read, self._write_fd = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._write_fd, _F_SETPIPE_SZ, _PIPE_BYTES)
        self.output: IO[bytes] = open(read, "rb")  # noqa: SIM115  # its forwarder closes it
        self._ended = threading.Event()
        self._code: int | None = None
        self._num_writing = 0  # threads that write to the pipe: the last of them closes it after the end

    @property
    def waits(self) -> bool:
        """Whether its agent has not come yet."""
        return self._agent is None and self._code is None

    def give_up(self, why: str) -> None:
        """Its agent will not come."""
        self.end(1, why, if_waiting=True)

    def poll(self) -> int | None:
        return self._code

    def signal(self, number: int) -> None:
        if self._agent is None:
            self.end(-int(number), "was ended before it began", if_waiting=True)
        self._mention(wire.SignalMember(self.number, int(number)))  # its agent may have come meanwhile

    def stop(self, seconds: float) -> None:
        self.close_lifeline()
        if not self._ended.wait(seconds):
            self.kill()
        self.output.close()

    def tell(self, word: bytes) -> None:
        self._mention(wire.TellMember(self.number, word))

    def close_lifeline(self) -> None:
        if self._code is None:
            self._mention(wire.TellMember(self.number, ends=True))

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if not self._ended.wait(LOST_SECONDS):
            raise subprocess.TimeoutExpired(["member", self.name], LOST_SECONDS)

    def _mention(self, message: Message) -> None:
        agent = self._agent
        if agent is not None:
            agent.endpoint.mention(message)

    def start_on(self, agent: AgentHere, plan: MemberPlan) -> None:
        """Its agent is there now, and starts it if it is still wanted. What is said to it comes after that."""
        with self._lock:
            if self._code is not None:
                return
            agent.members[self.number] = self
            agent.endpoint.mention(wire.StartMember(self.number, msgspec.json.encode(plan)))
            self.host, self._agent = agent.host, agent

    # -- what its agent says ------------------------------------------------------------------------------

    def wrote(self, data: bytes) -> None:
        with self._lock:
            if self._code is not None and not self._num_writing:
                return  # the pipe is closed; another file may have its number
            self._num_writing += 1
        with contextlib.suppress(OSError):  # its reader is gone
            while data:
                data = data[os.write(self._write_fd, data) :]
        with self._lock:
            self._num_writing -= 1
            closes = self._code is not None and not self._num_writing
        if closes:
            os.close(self._write_fd)

    def end(self, code: int, fate: str = "", *, if_waiting: bool = False) -> None:
        """`if_waiting`: only if it still waits for its agent."""
        with self._lock:
            if self._code is not None or (if_waiting and self._agent is not None):
                return
            self.fate, self._code = fate, code
            closes = not self._num_writing
        self._ended.set()
        if closes:
            os.close(self._write_fd)


class AgentHere:
    """One agent that is there, as the launcher sees it."""

    def __init__(self, endpoint: Endpoint, host: str, number: int) -> None:
        self.endpoint, self.host, self.number = endpoint, host, number
        self.members: dict[int, AgentMember] = {}
        self.heard_at = time.monotonic()
        self.is_busy = False  # its output is being written, which the screen may hold up
        self.is_lost = False

    def count(self, role: str) -> int:
        return sum(member.role == role for member in self.members.values())


class _Awaiting(NamedTuple):
    """A member that waits for its agent."""

    member: AgentMember
    plan: MemberPlan
    adapt: Adapt


class Hub:
    """Accepts agents, and has them start members. A context: at its end all agents end."""

    def __init__(
        self,
        file: JobFile,
        sock: socket.socket,
        say: Callable[[str], None],
        *,
        takes_over: bool = False,
        stop: Callable[[bool], None] | None = None,
    ) -> None:
        """`takes_over`: agents may bring members that an earlier launcher had them start. `stop`: ends the job for a
        caller that has the token; with True, at once.
        """
        self._file, self._say, self._stop = file, say, stop
        self._takes_over = takes_over
        self._found: list[tuple[MemberPlan, AgentMember, AgentHere, bool]] = []  # that agents brought; whether ended
        self._lock = threading.Condition()
        self._agents: dict[int, AgentHere] = {}  # by their numbers
        self._awaited: dict[int, list[_Awaiting]] = {}  # by the numbers of their agents
        self._by_endpoint: dict[Endpoint, AgentHere] = {}
        self._trouble: str = ""
        self._refused: dict[int, str] = {}  # agents with other versions, by their numbers
        self._num_members, self._closed = 0, False
        identity = tcp.Identity(file.job, file.token_bytes, Peer("launcher", "launcher", 0))
        self._stamp = Stamp(file.job)
        self._listener = tcp.Listener(identity, self._accept, sock=sock, log=say)
        threading.Thread(target=self._watch, name="agents", daemon=True).start()

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(1)

    def close(self, code: int) -> None:
        """Ends all agents, each with this exit code."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            agents = list(self._agents.values())
        for agent in agents:
            agent.endpoint.mention(wire.EndAgent(code))
        self._listener.close()
        for agent in agents:
            agent.endpoint.close()

    # -- agents come and go -------------------------------------------------------------------------------

    def gather(self, expected: Mapping[str, int], seconds: float) -> None:
        """Waits for so many agents of each host."""
        clock, said = AwakeClock(), False
        with self._lock:
            while missing := self._missing(expected):
                if self._trouble:
                    raise ConfigError(self._trouble)
                waited = clock.seconds()
                if waited > seconds:
                    raise ConfigError(
                        f"agents did not come within {seconds:g} s: {missing}; look at their output, and whether "
                        f"they reach {self._file.host}:{self._file.port}"
                    )
                if waited > PATIENT_SECONDS and not said:
                    said = True
                    self._say(f"waits for agents: {missing}")
                self._lock.wait(_WAIT_SECONDS)
            if self._trouble:
                raise ConfigError(self._trouble)

    def _missing(self, expected: Mapping[str, int]) -> str:
        there = collections.Counter(agent.host for agent in self._agents.values())
        lacking = {host: number - there[host] for host, number in expected.items() if number > there[host]}
        return ", ".join(f"{number} of {host}" for host, number in lacking.items())

    def hosts(self) -> list[str]:
        """The hosts that have agents."""
        with self._lock:
            return sorted({agent.host for agent in self._agents.values()})

    def _accept(self, connection: Connection) -> None:
        Endpoint(connection, self._stamp, self)

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        if payload_bytes:
            raise ProtocolError(f"{peer} sends a payload")
        return ()

    def handle(self, request: Request) -> None:
        message = request.message
        if isinstance(message, wire.AgentJoin):
            self._join(request, message)
            return
        if isinstance(message, wire.StopJob):
            if self._stop is None:
                raise ConfigError("this job is not detached; Ctrl-C in its terminal ends it")
            self._stop(message.at_once)
            request.reply(Done())
            return
        agent = self._by_endpoint.get(request.endpoint)
        if agent is None:
            raise ProtocolError(f"{request.peer} speaks before it has joined")
        agent.heard_at = time.monotonic()
        if isinstance(message, wire.AgentAlive):
            return
        if isinstance(message, wire.MemberOutput) and (member := agent.members.get(message.number)):
            agent.is_busy = True
            member.wrote(message.data)
            agent.heard_at, agent.is_busy = time.monotonic(), False
        elif isinstance(message, wire.MemberEnded) and (member := agent.members.pop(message.number, None)):
            told = f"cannot be started on {agent.host}: {message.trouble}" if message.trouble else ""
            member.end(message.code, told)

    def _join(self, request: Request, message: wire.AgentJoin) -> None:
        there, here = InstalledVersions(message.python, message.syncline, message.torch), versions_here()
        if trouble := differing(there, here, message.host):
            with self._lock:
                self._refused[message.number] = trouble
                self._trouble = self._trouble or trouble
                self._lock.notify_all()
            raise ConfigError(trouble)
        if told := torch_told(there, here, message.host):
            self._say(told)
        agent = AgentHere(request.endpoint, message.host, message.number)
        with self._lock:
            if self._closed or message.number in self._agents:
                raise ConfigError(f"agent-{message.number} is there already, or the job is over")
            self._agents[message.number] = self._by_endpoint[request.endpoint] = agent
            self._hold(agent, message.members)
            for one in self._awaited.pop(message.number, []):
                one.member.start_on(agent, one.adapt(one.plan))
            self._lock.notify_all()
        request.reply(Done())

    def _hold(self, agent: AgentHere, held: Sequence[wire.HeldMember]) -> None:
        """Members that this agent had before it came. Unless this launcher takes over, it has replaced them."""
        for one in held:
            self._num_members = max(self._num_members, one.number)
            if not self._takes_over:
                agent.endpoint.mention(wire.SignalMember(one.number, int(signal.SIGKILL)))
                continue
            plan = msgspec.json.decode(one.plan, type=MemberPlan)
            member = agent.members[one.number] = AgentMember(plan, one.number, agent)
            self._found.append((plan, member, agent, one.has_ended))

    def take_over(self) -> list[tuple[MemberPlan, AgentMember]]:
        """The members of an earlier launcher: of each name its newest life, as far as agents know. Agents that come
        later bring none."""
        with self._lock:
            found, self._found, self._takes_over = self._found, [], False
        newest: dict[str, tuple[MemberPlan, AgentMember, AgentHere]] = {}
        for plan, member, agent, _ in sorted(found, key=lambda one: not one[3]):
            if plan.name in newest:  # it has ended, or another life has taken its place
                _, older, its_agent = newest[plan.name]
                its_agent.members.pop(older.number, None)
                older.signal(signal.SIGKILL)
                older.end(-signal.SIGKILL)
            newest[plan.name] = (plan, member, agent)
        return [(plan, member) for plan, member, _ in newest.values()]

    @property
    def trouble(self) -> str:
        """Why an agent that is waited for does not come; empty: nothing is known to keep one away."""
        return self._trouble

    def fail(self, trouble: str) -> None:
        """An agent that is waited for does not come, and this is why."""
        with self._lock:
            self._trouble = self._trouble or trouble
            self._lock.notify_all()

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        with self._lock:
            agent = self._by_endpoint.pop(endpoint, None)
            if agent is None:
                return
            agent.is_lost = True
            self._agents.pop(agent.number, None)
            members, closed = list(agent.members.values()), self._closed
            agent.members.clear()
            self._lock.notify_all()
        if not closed:
            self._say(
                f"agent-{agent.number} on {agent.host} is lost ({reason}); "
                + (f"with it {', '.join(sorted(member.name for member in members))}" if members else "it ran nothing")
            )
        for member in members:
            member.end(-signal.SIGKILL, f"was lost with its agent on {agent.host}")

    def _watch(self) -> None:
        """An agent that says nothing is lost, with its host or the way there; its connection may not show it."""
        before = time.monotonic()
        while not self._closed:
            now = time.monotonic()
            if now - before > STOOD_STILL_SECONDS:  # this host has stood still, and heard no agent
                for agent in list(self._agents.values()):
                    agent.heard_at += now - before
            before = now
            for agent in list(self._agents.values()):
                if now - agent.heard_at > LOST_SECONDS and not agent.is_busy:
                    agent.endpoint.close(f"no sign of life for {LOST_SECONDS:g} s")
            time.sleep(_WAIT_SECONDS)

    # -- members ------------------------------------------------------------------------------------------

    def start(self, plan: MemberPlan) -> AgentMember | None:
        """Has the agent of its host with the fewest of its role start it; None: there is none (any more)."""
        with self._lock:
            there = [agent for agent in self._agents.values() if agent.host == plan.host]
            if not there:
                return None
            agent = min(there, key=lambda one: (one.count(plan.role), one.number))
            self._num_members += 1
            member = AgentMember(plan, self._num_members, agent)
            agent.members[member.number] = member
        self._send_start(agent, member, plan)
        return member

    def start_at(self, number: int, plan: MemberPlan, adapt: Adapt) -> AgentMember:
        """Has the agent of this number start it; one that is still to come starts it then. `adapt` gives the plan
        what is known of the agent's host by then.
        """
        with self._lock:
            agent = self._agents.get(number)
            self._num_members += 1
            member = AgentMember(plan, self._num_members, agent)
            if agent is None:
                self._awaited.setdefault(number, []).append(_Awaiting(member, plan, adapt))
                return member
            agent.members[member.number] = member
        self._send_start(agent, member, adapt(plan))
        return member

    def dismiss(self, number: int) -> None:
        """Ends this agent, which runs nothing any more: that is no loss."""
        with self._lock:
            agent = self._agents.pop(number, None)
            if agent is not None:
                del self._by_endpoint[agent.endpoint]
        if agent is not None:
            agent.endpoint.mention(wire.EndAgent(0))

    def refusal(self, number: int) -> str:
        """Why the agent of this number was refused: other versions are on its host. Empty: it was not."""
        with self._lock:
            return self._refused.get(number, "")

    def is_there(self, number: int) -> bool:
        """Whether the agent of this number is."""
        with self._lock:
            return number in self._agents

    def move(self, member: AgentMember, number: int, adapt: Callable[[MemberPlan], MemberPlan] | None = None) -> None:
        """A member that waits for its agent gets another one, which may be there. `adapt`: its plan, for that one."""
        with self._lock:
            for waiting in self._awaited.values():
                one = next((one for one in waiting if one.member is member), None)
                if one is None:
                    continue
                waiting.remove(one)
                plan = adapt(one.plan) if adapt is not None else one.plan
                agent = self._agents.get(number)
                if agent is not None:
                    member.start_on(agent, one.adapt(plan))
                else:
                    self._awaited.setdefault(number, []).append(one._replace(plan=plan))
                return

    def _send_start(self, agent: AgentHere, member: AgentMember, plan: MemberPlan) -> None:
        agent.endpoint.mention(wire.StartMember(member.number, msgspec.json.encode(plan)))

    def counts(self, host: str, role: str) -> list[int]:
        """The numbers of members of this role that the agents of a host have."""
        with self._lock:
            return [agent.count(role) for agent in self._agents.values() if agent.host == host]

    def where(self) -> dict[str, str]:
        """The hosts of members that agents run."""
        with self._lock:
            return {one.name: agent.host for agent in self._agents.values() for one in agent.members.values()}
