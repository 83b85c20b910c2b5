"""The engine of jobs on Ray: an actor in each member's room holds an agent, which starts the member.

Ray may not answer, while its head is away. So only the watcher's thread asks it, and holds no lock meanwhile: the
launcher, which must always hear Ctrl-C and SIGTERM, says what it wants and never waits for Ray.

Secrets go to an actor as the argument of a call, which Ray keeps nowhere: not as an argument of its start, which is
in the cluster's tables, nor in a runtime environment or a command line.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from syncline.core.units import counted
from syncline.core.wire.control import Scale
from syncline.core.wire.message import Done
from syncline.engines.agent import Agent, AgentPlan
from syncline.engines.hub import AgentMember, Hub
from syncline.engines.ray_cluster import (
    Room,
    find,
    host_key_of,
    host_names,
    last_line,
    num_on,
    ray_module,
    release,
    reserve,
    told,
)
from syncline.errors import ConfigError, SynclineError
from syncline.launch.jobfile import JobFile
from syncline.launch.processes import MemberPlan, MemberProcess, start_member
from syncline.launch.watching import ask

#: For Ray to find room for one more member before the job goes on without waiting; the host's name until then.
GROW_SECONDS, UNKNOWN_HOST = 1.0, "(Ray is looking for one)"
#: An actor that Ray could not start, because its host is gone, is asked for again after this long.
AGAIN_SECONDS = 1.0
#: After so long without an actor, a line says who waits.
PATIENT_SECONDS = 10.0
#: At the end, for agents to end by themselves.
END_SECONDS = 5.0
#: Between two looks at the cluster's hosts, where the job may grow.
GROW_LOOK_SECONDS = 2.0
_LOOK_SECONDS = 0.1
_MOST_NAMES = 4
#: Exit codes of members that do not come back.
_LEFT = (0, -signal.SIGTERM)


class _Growth:
    """More workers when hosts join the cluster."""

    def __init__(self, most: int, bundle: Mapping[str, float]) -> None:
        self._most, self._bundle = most, bundle
        self._known: set[str] = set(host_names()) if most else set()
        self._room, self._looked_at = 0, 0.0
        self.job: JobFile | None = None  # to ask

    def look(self, workers: int, waiting: int, now: float) -> str:
        """Asks the job for as many more as new hosts have room for; what to say of it."""
        if not self._most or self.job is None or now - self._looked_at < GROW_LOOK_SECONDS:
            return ""
        self._looked_at = now
        here = set(host_names())
        self._room += sum(num_on(host, self._bundle) for host in here - self._known)
        self._known = here
        wanted = min(self._most, workers + max(0, self._room - waiting))
        if not self._room or wanted <= workers:
            self._room = 0
            return ""
        try:
            ask(self.job, Scale(wanted, None), Done)
        except SynclineError:
            return ""  # it has not begun, or is ending: another look
        self._room = 0
        return f"hosts have joined the Ray cluster: {counted(wanted, 'worker')} from now on"


class Holder:
    """The actor. Its calls run one after the other in the main thread of a process of its own."""

    def look(self, mark: str) -> tuple[str, bool]:
        """Ray's id of this host, and whether it sees this file of the launcher's."""
        return str(ray_module().get_runtime_context().get_node_id()), pathlib.Path(mark).exists()

    def hold(self, plan: bytes, seconds: float) -> str:
        """Is an agent until the job is over; why not, where it cannot be one."""
        try:
            Agent(msgspec.json.decode(plan, type=AgentPlan)).run(seconds)
        except SynclineError as error:
            return str(error)
        return ""


@dataclasses.dataclass(eq=False)
class _Held:
    """Room, the actor in it, and the member that it is for."""

    room: Room
    name: str = ""  # empty: of a member that is about to start
    process: AgentMember | None = None
    has_left: bool = False  # the member: another one may have the room
    number: int = 0  # of the newest agent
    actor: Any = None
    is_ordered: bool = False  # that the watcher asks Ray for an actor
    sees_folder: bool = False
    asked_at: float = 0.0
    again_at: float | None = None  # when Ray is asked for another actor
    is_told: bool = False  # that the member waits


class RayAgents:
    """Members on the hosts of a Ray cluster; the coordinator is here."""

    def __init__(
        self,
        hub: Hub,
        file: JobFile,
        rooms: Mapping[str, Room],
        *,
        mark: pathlib.Path,
        seconds: float,
        most_workers: int,
        say: Callable[[str], None],
    ) -> None:
        """`rooms`: of the members that the job starts with. `mark`: a file that hosts with a shared disk see.
        `most_workers`: as many as the job may grow to when hosts join the cluster; 0: it does not.
        """
        self._hub, self._file, self._mark, self._seconds, self._say = hub, file, mark, seconds, say
        self._held = [_Held(room, name) for name, room in rooms.items()]
        self._unwanted: list[Room] = []  # to be given back to Ray
        self._release_at = 0.0  # not before: Ray has not taken it
        self._left: list[Room] = []  # of groups that other members use, on hosts that cannot start members
        self._avoided: set[str] = set()  # Ray's ids of these hosts
        self._bundles = {room.role: room.bundle for room in rooms.values()}
        self._num_agents, self._trouble = 0, ""
        self._holder = ray_module().remote(Holder)
        self._looks: dict[Any, tuple[_Held, int]] = {}  # by Ray's reference to the answer: whose, and agent's number
        self._runs: dict[Any, tuple[_Held, int]] = {}
        self._lock = threading.Condition()
        self._has_begun = self._has_refused = False  # all members had an agent; the start was refused
        self._growth = _Growth(most_workers, self._bundles.get("worker", {}))
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ray actors", daemon=True)
        self._watcher.start()

    # -- the five verbs -----------------------------------------------------------------------------------

    def start(self, plan: MemberPlan) -> MemberProcess:
        """In the member's own room. Its agent may be there already; if not, the member starts when it comes."""
        self._growth.job = plan.file
        if plan.role == "coordinator":
            return start_member(plan)
        with self._lock:
            held = self._room_for(plan)
            held.name, held.has_left = plan.name, False
            if not self._hub.is_there(held.number):
                held.is_told = False
                self._order(held)
            held.process = self._hub.start_at(held.number, plan, lambda plan: self._placed(plan, held))
            return held.process

    def watch(self, process: MemberProcess) -> int | None:
        """Raises a ConfigError, once, if a host of the start has other versions: it would be refused again."""
        if (trouble := self._hub.trouble) and not self._has_begun and not self._has_refused:
            self._has_refused = True
            raise ConfigError(trouble)
        code = process.poll()
        if code in _LEFT:
            with self._lock:
                for held in self._held:
                    if held.process is process and not held.has_left:
                        held.has_left = True
                        self._give_back(held)
                        break
        return code

    def stop(self, process: MemberProcess, number: int) -> None:
        process.signal(number)

    def scale(self, role: str, where: Mapping[str, str]) -> str:
        with self._lock:
            held = next((one for one in self._held if one.room.role == role and one.has_left), None)
            if held is not None:
                held.name, held.has_left = "", False
                return held.room.host
            held = self._add(role)
            self._lock.wait_for(lambda: held.room.host, GROW_SECONDS)
            return held.room.host or UNKNOWN_HOST

    def describe(self) -> str:
        return f"Ray: {', '.join(sorted({held.room.host for held in self._held}))}"

    # -- room ---------------------------------------------------------------------------------------------

    def _room_for(self, plan: MemberPlan) -> _Held:
        """The member's own; else what was asked for last."""
        own = next((one for one in self._held if one.name == plan.name), None)
        spare = next((one for one in self._held if not one.name and one.room.role == plan.role), None)
        if own is not None and spare is not None:
            spare.has_left = True
            self._give_back(spare)
        return own or spare or self._add(plan.role)

    def _add(self, role: str) -> _Held:
        """Room that the watcher asks Ray for."""
        held = _Held(Room(role, None, 0, self._bundles[role], is_single=True), asked_at=time.monotonic())
        self._held.append(held)
        return held

    def _give_back(self, held: _Held) -> None:
        """Room of its own goes back to Ray; room in a common group stays, for the next member."""
        if held.room.is_single:
            self._held.remove(held)
            self._hub.dismiss(held.number)
            self._unwanted.append(held.room)

    # -- actors -------------------------------------------------------------------------------------------

    @staticmethod
    def _placed(plan: MemberPlan, held: _Held) -> MemberPlan:
        """The plan for where it is. A host that does not see the launcher's folder has a copy, made by Ray."""
        folder = plan.folder if held.sees_folder else ""
        place = plan.place if plan.host == held.room.host else None
        return msgspec.structs.replace(plan, host=held.room.host, folder=folder, place=place)

    def _order(self, held: _Held) -> None:
        """Under the lock: another actor in this room, with another agent."""
        self._num_agents += 1
        held.number, held.asked_at, held.again_at = self._num_agents, time.monotonic(), None
        held.is_ordered = True

    def _reserve(self) -> None:
        """Room that members need beside those of the start; and back to Ray what is not needed any more."""
        with self._lock:
            unwanted: list[Room] = []
            if time.monotonic() >= self._release_at:
                unwanted, self._unwanted = self._unwanted, []
            fresh = [held for held in self._held if held.room.group is None]
            lost = [held for held in self._held if not held.room.host and held not in fresh]
        if kept := release([room for room in unwanted if room.group is not None]):
            with self._lock:
                self._unwanted += kept
                self._release_at = time.monotonic() + AGAIN_SECONDS
        for held in fresh:
            (room,) = reserve(held.room.role, [held.room.bundle], "PACK", self._avoided)
            with self._lock:
                held.room.group = room.group
                if held not in self._held:  # it was given back meanwhile
                    self._unwanted.append(held.room)
        now = time.monotonic()
        for held in (*fresh, *(held for held in lost if now - held.asked_at < 2 * GROW_SECONDS)):
            if find([held.room]):
                with self._lock:
                    self._lock.notify_all()

    def _begin_ordered(self) -> None:
        with self._lock:
            ordered = [(held, held.number) for held in self._held if held.is_ordered and held.room.group is not None]
        for held, number in ordered:
            self._begin(held, number)

    def _begin(self, held: _Held, number: int) -> None:
        ray = ray_module()
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        if held.actor is not None:
            ray.kill(held.actor)  # its agent is lost; it may be out of reach only, and would keep the room
        where = strategies.PlacementGroupSchedulingStrategy(
            placement_group=held.room.group, placement_group_bundle_index=held.room.index
        )
        bundle = held.room.bundle
        actor = self._holder.options(
            num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), scheduling_strategy=where,
            max_restarts=0, max_task_retries=0,
        ).remote()  # fmt: skip
        look = actor.look.remote(str(self._mark))
        with self._lock:
            held.actor, self._looks[look] = actor, (held, number)
            is_wanted = held in self._held
            held.is_ordered = held.number != number  # it was ordered again meanwhile
        if not is_wanted:
            ray.kill(actor)

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            try:
                self._reserve()
                self._begin_ordered()
                self._hear_all()
                with self._lock:
                    self._look_after_waiting(time.monotonic())
                    processes = [held.process for held in self._held]
                self._has_begun |= all(process is not None and not process.waits for process in processes)
                self._grow()
            except Exception as error:  # the cluster's head is away
                if (trouble := last_line(error)) != self._trouble:
                    self._trouble = trouble
                    self._say(f"Ray does not answer: {trouble}; members that run go on")
                time.sleep(AGAIN_SECONDS)

    def _hear_all(self) -> None:
        ray = ray_module()
        with self._lock:
            refs = [*self._looks, *self._runs]
        done: Sequence[Any] = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else ()
        for ref in done:
            self._hear(ref)

    def _hear(self, ref: Any) -> None:
        """An actor has answered, or will never answer."""
        ray, errors = ray_module(), importlib.import_module("ray.exceptions")
        with self._lock:
            is_look = ref in self._looks
            held, number = self._looks[ref] if is_look else self._runs[ref]
            is_old = number != held.number  # of an actor that has been replaced
        again_at: float | None = None
        why, answer, is_unfit = "", None, False
        try:
            answer = ray.get(ref) if not is_old else None
        except (errors.RayTaskError, errors.RuntimeEnvSetupError) as error:  # it would happen again
            why = last_line(error)
        except errors.RayError as error:  # its process or its host is gone
            if getattr(error, "actor_init_failed", False):  # no syncline there: it would happen again
                why, is_unfit = last_line(error), True
            again_at = time.monotonic() + AGAIN_SECONDS
        else:
            if not is_look and not is_old:
                why = str(answer or "its agent has ended")
        if answer is not None and is_look:
            self._come(held, number, *answer)
        if refusal := self._hub.refusal(number):
            why, is_unfit = refusal, True
        if is_unfit and self._has_begun:
            self._move_away(held, number, why)
        with self._lock:
            (self._looks if is_look else self._runs).pop(ref)
            if number != held.number:
                return
            if why:
                _give_up(held, why)
            held.again_at = again_at or held.again_at

    def _come(self, held: _Held, number: int, key: str, sees_folder: bool) -> None:
        """The actor is there: it gets its plan."""
        host = host_names().get(key, key[:6])
        with self._lock:
            if number != held.number:
                return
            held.room.host, held.sees_folder, actor = host, sees_folder, held.actor
        plan = AgentPlan(file=self._file, host=host, number=number, preload=False)
        run = actor.hold.remote(msgspec.json.encode(plan), self._seconds)
        with self._lock:
            self._runs[run] = (held, number)

    def _move_away(self, held: _Held, number: int, why: str) -> None:
        """A host that has joined the cluster cannot start members, and never will: its member waits for another one.
        Before the job has begun, this ends it instead.
        """
        key = host_key_of(held.room)
        host = host_names().get(key, held.room.host)
        with self._lock:
            process = held.process
            if number != held.number or not key or process is None or not process.waits:
                return
            is_known, actor = key in self._avoided, held.actor
            self._avoided.add(key)
            (self._unwanted if held.room.is_single else self._left).append(held.room)
            held.room = Room(held.room.role, None, 0, held.room.bundle, is_single=True)
            held.actor, held.is_told = None, False
            self._order(held)
            self._hub.move(process, held.number)
        if not is_known:
            self._say(f"host {host} of the Ray cluster cannot start members: {why}. The job does without it")
        self._say(f"{held.name} waits for room on another host")
        if actor is not None:
            ray_module().kill(actor)

    def _look_after_waiting(self, now: float) -> None:
        """Members whose agents are not there: Ray is asked again, and the user told."""
        late = []
        for held in self._held:
            if held.process is None or not held.process.waits:
                continue
            if held.again_at is not None and now > held.again_at:
                self._order(held)
                self._hub.move(held.process, held.number)
            elif not held.is_told and now - held.asked_at > PATIENT_SECONDS:
                held.is_told = True
                late.append(held)
        if len(late) == 1:
            self._say(f"{late[0].name} waits for Ray to start it ({told(late[0].room.bundle)}); see ray status")
        elif late:
            names = ", ".join(held.name for held in late[:_MOST_NAMES])
            more = f" and {len(late) - _MOST_NAMES} more" if len(late) > _MOST_NAMES else ""
            self._say(f"{names}{more} wait for Ray to start them; see ray status")

    def _grow(self) -> None:
        """Hosts have joined the cluster: members that lost theirs have room there first, then there may be more."""
        with self._lock:
            there = [held for held in self._held if held.name and not held.has_left]
            waiting = sum(held.process is not None and held.process.waits for held in there)
        workers = sum(held.room.role == "worker" for held in there)
        if told := self._growth.look(workers, waiting, time.monotonic()):
            self._say(told)

    def close(self) -> None:
        """After the hub: agents have ended, or are ended, and Ray has its room back. Not for longer than that takes
        where Ray answers."""
        self._is_over.set()
        ending = threading.Thread(target=self._end, name="end on Ray", daemon=True)
        ending.start()
        ending.join(2 * END_SECONDS)

    def _end(self) -> None:
        self._watcher.join(END_SECONDS)
        ray = ray_module()
        with self._lock:
            rooms = [*(held.room for held in self._held), *self._unwanted, *self._left]
            refs = list(self._runs)
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=END_SECONDS)
        release([room for room in rooms if room.group is not None])


def _give_up(held: _Held, why: str) -> None:
    if held.process is not None:
        held.process.give_up(f"cannot be started on Ray: {why}")
