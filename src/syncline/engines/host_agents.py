"""One agent on each host of a job. The launcher starts them: here directly, elsewhere by a prefix like ssh."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from syncline import config as configuration
from syncline.engines.agent import AgentPlan
from syncline.engines.awake import AwakeClock
from syncline.engines.hub import AgentMember, Hub
from syncline.launch.hosts import quietest
from syncline.launch.processes import MemberPlan, MemberProcess, command_on

#: An agent that is away for so long is started again; then after pauses, up to the longest.
AWAY_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 30.0
#: For the command that starts an agent to return.
START_SECONDS = 120.0
#: For the agent of a member's host to come, unless its start has failed; then the member starts elsewhere, or not at
#: all.
ELSEWHERE_SECONDS, PATIENT_SECONDS = 20.0, 120.0
_LOOK_SECONDS = 0.1
_MOST_WORDS = 2000


class HostAgents:
    """Starts the agents, and again those that are lost."""

    def __init__(
        self, hub: Hub, plans: Sequence[AgentPlan], command: list[str], remote: str, say: Callable[[str], None]
    ) -> None:
        """`command`: starts an agent, which reads its plan from standard input."""
        self._hub, self._plans, self._command, self._remote, self._say = hub, plans, command, remote, say
        self._is_over = threading.Event()
        self._pauses = {plan.host: AWAY_SECONDS for plan in plans}
        self._told: set[str] = set()
        self._starting: set[str] = set()  # hosts whose agents are being started
        self._failed: set[str] = set()  # hosts whose agents could not be started, when that was last tried

    def start_all(self) -> None:
        """The first time: an agent that does not start ends the start of the job."""
        for plan in self._plans:
            threading.Thread(target=self._start, args=(plan, self._hub.fail), daemon=True).start()

    def watch(self) -> None:
        threading.Thread(target=self._watch, name="host agents", daemon=True).start()

    def close(self) -> None:
        self._is_over.set()

    def number_of(self, host: str) -> int:
        """The number of this host's agent."""
        return next(plan.number for plan in self._plans if plan.host == host)

    def has_failed(self, host: str) -> bool:
        """Whether the agent of this host could not be started."""
        return host in self._failed

    def _watch(self) -> None:
        now = time.monotonic()
        seen = {plan.host: now for plan in self._plans}  # there, or started
        while not self._is_over.wait(_LOOK_SECONDS):
            here, now = self._hub.hosts(), time.monotonic()
            for plan in self._plans:
                if plan.host in self._starting:
                    seen[plan.host] = now
                elif plan.host in here:
                    self._failed.discard(plan.host)
                    seen[plan.host], self._pauses[plan.host] = now, AWAY_SECONDS
                elif now - seen[plan.host] > self._pauses[plan.host]:
                    seen[plan.host] = now
                    self._pauses[plan.host] = min(2 * self._pauses[plan.host], LONGEST_PAUSE_SECONDS)
                    self._starting.add(plan.host)
                    self._say(f"{plan.name} on {plan.host} is started again")
                    threading.Thread(target=self._start, args=(plan, self._tell_once), daemon=True).start()

    def _tell_once(self, trouble: str) -> None:
        if trouble not in self._told:
            self._told.add(trouble)
            self._say(trouble)

    def _start(self, plan: AgentPlan, failed: Callable[[str], None]) -> None:
        """Returns when the agent has left the process that started it."""
        try:
            if trouble := self._trouble_of_start(plan):
                self._failed.add(plan.host)
                failed(trouble)
        finally:
            self._starting.discard(plan.host)

    def _trouble_of_start(self, plan: AgentPlan) -> str:
        """Why it did not start; empty: it did."""
        command = command_on(plan.host, self._remote, self._command)
        with tempfile.TemporaryFile() as said:  # a pipe would not end before whatever ssh leaves behind
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT,
                    start_new_session=True, pass_fds=plan.kept,
                    env=configuration.inherited_environment({"PYTHONUNBUFFERED": "1"}),
                )  # fmt: skip
            except OSError as error:
                return f"host {plan.host}: {shlex.join(command)} cannot be started: {error}"
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(msgspec.json.encode(plan) + b"\n")
            how = "ended with exit code {}"
            try:
                process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                how = f"did not end within {START_SECONDS:g} s"
            if not process.returncode:
                return ""
            said.seek(0)
            words = " ".join(said.read()[-_MOST_WORDS:].decode("utf-8", "replace").split())
        return f"host {plan.host}: {shlex.join(command)} {how.format(process.returncode)}: {words}"


class HeldHosts:
    """The engine of a detached job: agents hold all members, on their hosts."""

    def __init__(self, hub: Hub, agents: HostAgents, hosts: Sequence[str]) -> None:
        """`hosts`: for servers and workers."""
        self._hub, self._agents, self._hosts = hub, agents, list(hosts)
        self._waiting: dict[AgentMember, AwakeClock] = {}

    def start(self, plan: MemberPlan) -> MemberProcess:
        """Starts a member on the host of its plan. While the agent of that host is away, the member waits for it.
        If the agent does not come back, the member starts on the quietest other host. The launcher never waits
        here, since it has signals to hear.
        """
        process = self._hub.start(plan)
        if process is None:
            process = self._hub.start_at(self._agents.number_of(plan.host), plan, lambda plan: plan)
            self._waiting[process] = AwakeClock()
        return process

    def _look_after_waiting(self) -> None:
        for member, clock in list(self._waiting.items()):
            waited, others = clock.seconds(), self._here()
            is_hopeless = self._agents.has_failed(member.host) or waited > ELSEWHERE_SECONDS
            if member.waits and is_hopeless and others and member.role != "coordinator":
                self._move(member, quietest(member.role, self._hub.where(), others))
            elif member.waits and waited > PATIENT_SECONDS:
                member.give_up(f"cannot be started: there is no agent on {member.host}")
            if not member.waits:
                del self._waiting[member]

    def _move(self, member: AgentMember, host: str) -> None:
        def adapt(plan: MemberPlan) -> MemberPlan:
            return msgspec.structs.replace(plan, host=host, place=None)

        self._hub.move(member, self._agents.number_of(host), adapt)

    def _here(self) -> list[str]:
        here = self._hub.hosts()
        return [host for host in self._hosts if host in here]

    def watch(self, process: MemberProcess) -> int | None:
        self._look_after_waiting()
        return process.poll()

    def stop(self, process: MemberProcess, number: int) -> None:
        process.signal(number)

    def scale(self, role: str, where: Mapping[str, str]) -> str:
        return quietest(role, where, self._here() or self._hosts)

    def describe(self) -> str:
        return "" if self._hosts == ["local"] else ", ".join(sorted(self._hosts))
