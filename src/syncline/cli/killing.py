"""Kills members of a job at a given rate, for `syncline chaos`; only processes that this process started."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from syncline.cli.reckoning import Kill, Look
from syncline.core.wire.control import AskStatus, GivenStatus
from syncline.errors import SynclineError
from syncline.launch.engine import Engine
from syncline.launch.processes import MemberPlan, MemberProcess
from syncline.launch.watching import reach_coordinator
from syncline.net.rpc import Endpoint
from syncline.stats import JobStatus

LOOK_SECONDS = 0.02
ANSWER_SECONDS = 2.0
#: Older observations may be outdated.
FRESH_SECONDS = 0.5
WITNESS = "syncline.cli.witness"
SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}


@dataclasses.dataclass(frozen=True)
class Rate:
    """How often which members are killed, and how."""

    every_seconds: float
    for_seconds: float
    roles: Sequence[str]
    signal: str  # KILL or STOP
    stop_seconds: float  # until a stopped member continues
    seed: int


class Killing:
    """Starts the members of a job, polls it fifty times a second, and kills some of them."""

    def __init__(self, rate: Rate | None, folder: pathlib.Path) -> None:
        """Without a rate nothing is killed. `folder`: where workers record their steps."""
        self._rate, self._folder = rate, folder
        self._rng = random.Random(rate.seed if rate else 0)
        self._processes: dict[str, MemberProcess] = {}
        self._stopped: set[str] = set()  # not continued yet
        self._num_started = 0
        self._plan: MemberPlan | None = None
        self._status: JobStatus | None = None
        self._looked = 0.0
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.kills: list[Kill] = []
        self.looks: list[Look] = []
        self.num_revoked: int | None = None

    # -- the members --------------------------------------------------------------------------------------

    def start_member(self, engine: Engine, plan: MemberPlan) -> MemberProcess:
        """Starts a member for the launcher; workers get a witness."""
        if plan.role == "worker":
            self._num_started += 1
            path = self._folder / f"{plan.name}.{self._num_started:06}"
            script = ["-m", plan.script] if plan.is_module else [plan.script]
            words = [str(path.absolute()), *script, *plan.arguments]
            plan = msgspec.structs.replace(plan, script=WITNESS, is_module=True, arguments=words)
        process = engine.start(plan)
        self._processes[plan.name] = process
        if self._plan is None:
            self._plan = plan
            self._begin(self._look_regularly, "chaos look")
            if self._rate is not None:
                self._begin(self._kill_regularly, "chaos kill")
        return process

    def _begin(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(ANSWER_SECONDS + 1.0)

    # -- looking ------------------------------------------------------------------------------------------

    def _look_regularly(self) -> None:
        endpoint: Endpoint | None = None
        while not self._closed.wait(LOOK_SECONDS):
            assert self._plan is not None
            try:
                endpoint = endpoint or reach_coordinator(self._plan.file, ANSWER_SECONDS)
                answer = endpoint.call(AskStatus()).wait(ANSWER_SECONDS)
            except (SynclineError, OSError):
                if endpoint is not None:
                    endpoint.close()
                endpoint = None
                continue
            if isinstance(answer, GivenStatus):
                self._learn(answer.status)
        if endpoint is not None:
            endpoint.close()

    def _learn(self, status: JobStatus) -> None:
        at_work = {
            m.name: m.incarnation
            for m in status.members
            if m.state == "working" and (m.role != "server" or m.num_primary + m.num_backup)
        }
        there = {m.name: m.incarnation for m in status.members}
        look = Look(time.monotonic(), status.term, at_work, there)
        if not self.looks or self.looks[-1][1:] != look[1:]:
            self.looks.append(look)
        self._status, self._looked = status, look.at
        self.num_revoked = status.num_revoked

    # -- killing ------------------------------------------------------------------------------------------

    def _kill_regularly(self) -> None:
        rate = self._rate
        assert rate is not None
        while not self._is_at_work() and not self._closed.wait(LOOK_SECONDS):
            pass
        began = time.monotonic()
        number = 1
        while number * rate.every_seconds <= rate.for_seconds:
            if self._closed.wait(max(0.0, began + number * rate.every_seconds - time.monotonic())):
                return
            while not self._kill_one(rate):
                if self._closed.wait(LOOK_SECONDS):
                    return
            number += 1

    def _is_at_work(self) -> bool:
        status = self._status
        return status is not None and any(m.role == "worker" and m.step for m in status.members)

    def _kill_one(self, rate: Rate) -> bool:
        """Kills one working member, if there is one; a coordinator that is not back yet is spared."""
        status, now = self._status, time.monotonic()
        if status is None or status.verdict or now - self._looked > FRESH_SECONDS:
            return False
        names = ["coordinator", *(member.name for member in status.members)]
        running = {n for n in names if (p := self._processes.get(n)) is not None and p.poll() is None}
        killed = {(kill.name, kill.incarnation) for kill in self.kills} if rate.signal == "KILL" else set()
        found = candidates(status, running - self._stopped, rate.roles, killed)
        if not found:
            return False
        role = self._rng.choice(list(found))
        name = self._rng.choice(found[role])
        incarnation = next((m.incarnation for m in status.members if m.name == name), 0)
        self.kills.append(Kill(now, role, name, incarnation, status.term))
        process = self._processes[name]
        _send(process, SIGNALS[rate.signal])
        if rate.signal == "STOP":
            self._stopped.add(name)
            self._begin(lambda: self._go_on(process, rate.stop_seconds), f"chaos stop {name}")
        return True

    def _go_on(self, process: MemberProcess, seconds: float) -> None:
        self._closed.wait(seconds)
        _send(process, signal.SIGCONT)
        self._stopped.discard(process.name)


def _send(process: MemberProcess, number: int) -> None:
    """Sends a signal by process id, only while the process lives, so that the id cannot be reused."""
    if process.poll() is None:
        os.kill(process.pid, number)


def candidates(
    status: JobStatus, alive: Collection[str], roles: Sequence[str], killed: Collection[tuple[str, int]]
) -> dict[str, list[str]]:
    """The members that may be killed now, by role. `alive`: processes that run. `killed`: names and incarnations.

    Spares what goes beyond the job's guarantees: all servers of a slice, and a worker and a server in one step. A
    killed incarnation that the job still lists may not have been noticed yet.
    """
    names = ["coordinator", *(member.name for member in status.members)]
    there = sorted({*names} & {*alive})
    found = {role: [name for name in there if name.partition("-")[0] == role] for role in roles}
    hosting = "worker" if status.exchange == "ring" else "server"  # the processes with the slices
    unsettled = {m.name.partition("-")[0] for m in status.members if (m.name, m.incarnation) in killed}
    is_one_down = any(name.startswith(hosting) for name in {*names} - {*alive})
    if is_one_down or unsettled or not _has_backups(status):
        found.pop(hosting, None)
    if hosting in unsettled:
        found.pop("worker", None)
    return {role: each for role, each in found.items() if each}


def _has_backups(status: JobStatus | None) -> bool:
    """True with one replica, which has no backups."""
    if status is None or status.replicas < 2:
        return True
    others = sum(m.role == "server" for m in status.members) - 1 if status.exchange == "ring" else 1
    return others * sum(m.num_primary for m in status.members) == sum(m.num_backup for m in status.members)
