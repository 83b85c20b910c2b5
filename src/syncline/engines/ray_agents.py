"""The engine of jobs on Ray: an actor in each member's room holds an agent, which starts the member.

Secrets go to an actor as the argument of a call, which Ray keeps nowhere: not as an argument of its start, which is
in the cluster's tables, nor in a runtime environment or a command line.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from syncline.engines.agent import Agent, AgentPlan
from syncline.engines.hub import Hub
from syncline.engines.ray_cluster import Room, find, host_names, ray_module, release, reserve, told
from syncline.errors import SynclineError
from syncline.launch.jobfile import JobFile
from syncline.launch.processes import MemberPlan, MemberProcess, start_member

#: For Ray to find room for one more member before the job goes on without waiting; the host's name until then.
GROW_SECONDS, UNKNOWN_HOST = 1.0, "(Ray is looking for one)"
#: An actor that Ray could not start, because its host is gone, is asked for again after this long.
AGAIN_SECONDS = 1.0
#: After so long without an actor, a line says who waits.
PATIENT_SECONDS = 10.0
#: At the end, for agents to end by themselves.
END_SECONDS = 5.0
_LOOK_SECONDS = 0.1


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
    """A member's room and the actor in it."""

    name: str
    room: Room
    number: int = 0  # of its newest agent
    actor: Any = None
    sees_folder: bool = False
    asked_at: float = 0.0
    again_at: float | None = None  # when Ray is asked for another actor
    is_told: bool = False  # that it waits


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
        say: Callable[[str], None],
    ) -> None:
        """`rooms`: of the members that the job starts with. `mark`: a file that hosts with a shared disk see."""
        self._hub, self._file, self._mark, self._seconds, self._say = hub, file, mark, seconds, say
        self._held = {name: _Held(name, room) for name, room in rooms.items()}
        self._bundles = {room.role: room.bundle for room in rooms.values()}
        self._more: list[Room] = []  # for members that are about to start
        self._num_agents, self._trouble = 0, ""
        self._holder = ray_module().remote(Holder)
        self._looks: dict[Any, tuple[_Held, int]] = {}  # by Ray's reference to the answer: whose, and agent's number
        self._runs: dict[Any, tuple[_Held, int]] = {}
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ray actors", daemon=True)
        self._watcher.start()

    # -- the five verbs -----------------------------------------------------------------------------------

    def start(self, plan: MemberPlan) -> MemberProcess:
        """In the member's own room. Its agent may be there already; if not, the member starts when it comes."""
        if plan.role == "coordinator":
            return start_member(plan)
        with self._lock:
            held = self._held.get(plan.name)
            if held is None:
                room = next((one for one in self._more if one.role == plan.role), None) or self._another(plan.role)
                self._more = [one for one in self._more if one is not room]
                held = self._held[plan.name] = _Held(plan.name, room)
            if held.actor is None or not self._hub.is_there(held.number):
                held.is_told = False
                self._begin(held)
            return self._hub.start_at(held.number, plan, lambda plan: self._placed(plan, held))

    def watch(self, process: MemberProcess) -> int | None:
        return process.poll()

    def stop(self, process: MemberProcess, number: int) -> None:
        process.signal(number)

    def scale(self, role: str, where: Mapping[str, str]) -> str:
        room = self._another(role)
        self._more.append(room)
        return room.host if find([room], GROW_SECONDS) else UNKNOWN_HOST

    def describe(self) -> str:
        return f"Ray: {', '.join(sorted({held.room.host for held in self._held.values()}))}"

    # -- actors -------------------------------------------------------------------------------------------

    def _another(self, role: str) -> Room:
        (room,) = reserve(role, [self._bundles[role]], "PACK")
        return room

    @staticmethod
    def _placed(plan: MemberPlan, held: _Held) -> MemberPlan:
        """The plan for where it is. A host that does not see the launcher's folder has a copy, made by Ray."""
        folder = plan.folder if held.sees_folder else ""
        place = plan.place if plan.host == held.room.host else None
        return msgspec.structs.replace(plan, host=held.room.host, folder=folder, place=place)

    def _begin(self, held: _Held) -> None:
        """Another actor in this room, with another agent."""
        ray = ray_module()
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        if held.actor is not None:
            ray.kill(held.actor)  # its agent is lost; it may be out of reach only, and would keep the room
        where = strategies.PlacementGroupSchedulingStrategy(
            placement_group=held.room.group, placement_group_bundle_index=held.room.index
        )
        bundle = held.room.bundle
        self._num_agents += 1
        held.number, held.asked_at, held.again_at = self._num_agents, time.monotonic(), None
        held.actor = self._holder.options(
            num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), scheduling_strategy=where,
            max_restarts=0, max_task_retries=0,
        ).remote()  # fmt: skip
        self._looks[held.actor.look.remote(str(self._mark))] = (held, held.number)

    def _watch(self) -> None:
        ray = ray_module()
        while not self._is_over.wait(_LOOK_SECONDS):
            try:
                with self._lock:
                    refs = [*self._looks, *self._runs]
                    done: Sequence[Any] = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else ()
                    for ref in done:
                        self._hear(ref)
                    self._look_after_waiting(time.monotonic())
            except Exception as error:  # the cluster's head is away
                if (trouble := _last(error)) != self._trouble:
                    self._trouble = trouble
                    self._say(f"Ray does not answer: {trouble}; members that run go on")
                time.sleep(AGAIN_SECONDS)

    def _hear(self, ref: Any) -> None:
        """An actor has answered, or will never answer."""
        ray, errors = ray_module(), importlib.import_module("ray.exceptions")
        is_look = ref in self._looks
        held, number = self._looks.pop(ref) if is_look else self._runs.pop(ref)
        if number != held.number:
            return  # of an actor that has been replaced
        try:
            answer = ray.get(ref)
        except (errors.RayTaskError, errors.RuntimeEnvSetupError) as error:  # it would happen again
            self._hub.give_up(number, f"cannot be started on Ray: {_last(error)}")
        except errors.RayError:  # its process or its host is gone
            held.again_at = time.monotonic() + AGAIN_SECONDS
        else:
            if is_look:
                self._come(held, *answer)
            else:
                self._hub.give_up(number, f"cannot be started on Ray: {answer or 'its agent has ended'}")

    def _come(self, held: _Held, key: str, sees_folder: bool) -> None:
        """The actor is there: it gets its plan."""
        held.room.host, held.sees_folder = host_names().get(key, key[:6]), sees_folder
        plan = AgentPlan(file=self._file, host=held.room.host, number=held.number, preload=False)
        self._runs[held.actor.hold.remote(msgspec.json.encode(plan), self._seconds)] = (held, held.number)

    def _look_after_waiting(self, now: float) -> None:
        """Members whose agents are not there: Ray is asked again, and the user told."""
        for held in self._held.values():
            if not self._hub.is_awaited(held.number):
                continue
            if held.again_at is not None and now > held.again_at:
                before = held.number
                self._begin(held)
                self._hub.await_instead(before, held.number)
            elif not held.is_told and now - held.asked_at > PATIENT_SECONDS:
                held.is_told = True
                self._say(f"{held.name} waits for Ray to start it ({told(held.room.bundle)}); see ray status")

    def close(self) -> None:
        """After the hub: agents have ended, or are ended, and Ray has its room back."""
        until = time.monotonic() + END_SECONDS
        ray = ray_module()
        with self._lock:
            refs = list(self._runs)
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=max(0.0, until - time.monotonic()))
        self._is_over.set()
        self._watcher.join(END_SECONDS)
        release([held.room for held in self._held.values()] + self._more)


def _last(error: Exception) -> str:
    """The last line of Ray's long words: the error itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
