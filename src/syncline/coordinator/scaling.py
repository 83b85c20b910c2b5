"""How many members a job has, and how fast its workers go: `syncline scale`, `-w auto` and `syncline pace`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from syncline.coordinator.job import JobContext
from syncline.coordinator.leases import LeaseService
from syncline.core.sizing import Sizing
from syncline.core.stages import check_divisible
from syncline.core.units import counted
from syncline.core.wire.control import Retire, Scale
from syncline.core.wire.message import Done
from syncline.core.wire.pace import MOST_DELAY_SECONDS, Pace, Paced, told_paused, told_seconds
from syncline.errors import ConfigError, StoreError
from syncline.net.rpc import Endpoint, Request


class ScaleService:
    """The wanted number of members of each role.

    The launcher starts missing members; surplus ones are asked to retire.
    """

    def __init__(self, job: JobContext) -> None:
        self._job = job

    def handle_scale(self, request: Request, message: Scale) -> None:
        workers, stages = message.workers, self._job.config.stages
        if workers is not None and stages > 1:  # people count processes, as in syncline run -w
            check_divisible({"workers": workers}, stages)
            workers //= stages
        asked = {"worker": workers, "server": message.servers}
        self.scale({role: count for role, count in asked.items() if count is not None})
        request.reply(Done())

    def scale(self, wanted: Mapping[str, int]) -> None:
        """Sets the wanted number of members of these roles."""
        with self._job.lock:
            if self._job.config.is_ring and "server" in wanted:
                raise ConfigError(
                    "this job is a ring: each worker's process has a server in it; give the number of workers with -w"
                )
            for role, count in wanted.items():
                self._set_wanted(role, count)
            self._job.membership.state.num_scalings += 1
            self._job.keep()

    def _set_wanted(self, role: str, count: int) -> None:
        config = self._job.config
        if count < 1:
            raise ConfigError(f"{count} {role}s: there must be at least one")
        if role == "server" and count < max(1, config.replicas):
            raise ConfigError(f"{counted(count, 'server')} cannot have {config.replicas} replicas of each slice")
        if role == "worker" and config.most_workers and count > config.most_workers:
            most = config.most_workers * config.stages
            raise ConfigError(f"{counted(count * config.stages, 'worker')}: the job was started with -w …:{most}")
        self._job.membership.state.wanted[role] = count
        if config.is_ring:
            self._job.membership.state.wanted["server"] = count  # each server leaves with its worker
        live = [name for name in self._job.membership.named(role) if name not in self._job.retiring]
        surplus = live[count:]
        going = f"; {', '.join(surplus)} {'retires' if len(surplus) == 1 else 'retire'}" if surplus else ""
        self._job.event(f"the job scales to {counted(count, role)}{going}", "scale")
        for name in surplus:
            self._job.retiring.add(name)
            endpoint = self._job.endpoints.get(name)
            if endpoint is not None:
                endpoint.mention(Retire())


class WorkerSizing:
    """`-w auto:1:8`: adds and retires workers by what they contribute. All of it runs under the job's lock."""

    def __init__(self, job: JobContext, leases: LeaseService, scaling: ScaleService) -> None:
        self._job, self._leases, self._scaling = job, leases, scaling
        self._sizing: Sizing | None = None

    def tick(self, now: float) -> None:
        """Runs periodically."""
        config, state = self._job.config, self._job.membership.state
        if not config.auto_workers:
            return
        if self._sizing is None:
            self._sizing = Sizing(max(1, config.least_workers), config.most_workers)
        at_work = [
            name for name in state.entered if name in self._job.heartbeats and self._job.heartbeats[name][0].step
        ]
        found = self._sizing.look(
            now, state.wanted["worker"], len(at_work), self._leases.num_samples, self._waiting_share(at_work)
        )
        if found is not None:
            self._job.event(found.reason, "scale")
            self._scaling.scale({"worker": found.count})

    def _waiting_share(self, names: list[str]) -> float:
        """The share of their steps in which these workers waited for servers or for each other."""
        times = [self._job.reports[name].times for name in names if name in self._job.reports]
        waited = sum(one.wait for one in times)
        total = sum(one.compute + one.stage + one.wait + one.pull for one in times)
        return waited / total if total else 0.0


def remind_to_retire(job: JobContext, name: str) -> None:
    """Asks a member that has reconnected to retire, if it is surplus: it may have missed the first message."""
    with job.lock:
        member = job.membership.state.members.get(name)
        if member is None or (job.config.is_ring and member.role == "server"):
            return
        surplus = job.membership.named(member.role)[job.membership.state.wanted[member.role] :]
        if name in job.retiring or (name in surplus and job.membership.formed):
            job.retiring.add(name)
            endpoint = job.endpoints.get(name)
            if endpoint is not None:
                endpoint.mention(Retire())


class PaceService:
    """Workers that are slowed or paused by hand, under the job's lock.

    A pace is kept in the journal, and told to each life of the worker.
    """

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._told: dict[str, tuple[Endpoint, Pace]] = {}  # which pace a worker has heard, over which connection

    @property
    def paces(self) -> dict[str, Paced]:
        return self._job.membership.state.paces

    # -- setting a pace -----------------------------------------------------------------------------------

    def handle_pace(self, request: Request, message: Pace) -> None:
        self.set_pace(message)
        request.reply(Done())

    def set_pace(self, pace: Pace) -> None:
        """Sets the pace of one worker. It is kept before the worker is told."""
        with self._job.lock:
            name, before = pace.worker, self.paces.get(pace.worker)
            self._check(pace)
            if pace.is_paused or pace.delay_seconds:
                since = before.since if before is not None and before.is_paused and pace.is_paused else time.time()
                self.paces[name] = Paced(pace.delay_seconds, pace.is_paused, since)
            else:
                self.paces.pop(name, None)
            try:
                self._job.keep()
            except StoreError:
                self.paces.pop(name, None)
                if before is not None:
                    self.paces[name] = before
                raise
            if before is not None and before.is_paused and not pace.is_paused:
                self._job.advanced[name] = time.monotonic()  # it was paused until now
            self._job.event(f"{name} {_event(pace)}", "scale")
            self.announce()

    def _check(self, pace: Pace) -> None:
        state, name = self._job.membership.state, pace.worker
        seconds = pace.delay_seconds
        if not (math.isfinite(seconds) and 0 <= seconds <= MOST_DELAY_SECONDS):
            most = told_seconds(MOST_DELAY_SECONDS)
            raise ConfigError(f"a delay of {seconds:g} s: it must be from 0 to {most}; to hold a worker, --pause")
        if name in self.paces or state.awaited.get(name) == "worker":
            return
        member = state.members.get(name)
        if member is None or member.role != "worker":
            what = f"{name} is no worker" if member is not None else f"there is no {name!r} in this job"
            workers = ", ".join(self._job.membership.workers()) or "none"
            raise ConfigError(f"{what}; its workers are: {workers}")

    def announce(self) -> None:
        """Tells its pace to each worker that has not heard it over its current connection."""
        with self._job.lock:
            state = self._job.membership.state
            names = set(self.paces) | set(self._told) if state.formed else set()
            for name in names:
                endpoint, known = self._job.endpoints.get(name), self._told.get(name)
                if endpoint is None:
                    self._told.pop(name, None)
                    continue
                paced = self.paces.get(name)
                pace = Pace(name, paced.delay_seconds, paced.is_paused) if paced is not None else Pace(name)
                if known is None or known[0] is not endpoint or known[1] != pace:
                    endpoint.mention(pace)
                    self._told[name] = (endpoint, pace)
                if paced is None:
                    del self._told[name]

    def member_left(self, name: str) -> None:
        """Under the lock: the worker has finished, or has retired. The next one of its name starts without a pace."""
        self.paces.pop(name, None)
        self._told.pop(name, None)

    # -- for other parts ----------------------------------------------------------------------------------

    def patience(self, name: str) -> float:
        """How much longer than usual others wait for this worker."""
        pace = self.paces.get(name)
        return 0.0 if pace is None else math.inf if pace.is_paused else pace.delay_seconds

    def state_of(self, name: str) -> str:
        pace = self.paces.get(name)
        return pace.state if pace is not None else ""

    def describe(self, name: str) -> str:
        pace = self.paces.get(name)
        return f"it {pace.told(time.time())}" if pace is not None else ""

    def add_to(self, why: str) -> str:
        """Adds paused workers that `why` does not name, even if no member waits for them."""
        unnamed = {name: pace for name, pace in self.paces.items() if f"{name} " not in why}
        held = told_paused(unnamed, time.time())
        return f"{why}; {held}" if held else why


def _event(pace: Pace) -> str:
    if pace.is_paused:
        return "is paused by hand before its next step"
    if pace.delay_seconds:
        return f"is slowed by hand: {told_seconds(pace.delay_seconds)} before each step"
    return "goes on at its own pace"
