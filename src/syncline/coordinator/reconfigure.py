"""How a coordinator takes its job from one generation to the next, and slices to where they should be."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from syncline import faults
from syncline.coordinator.restore import restore
from syncline.core.members import Member
from syncline.core.reconfigure import Planner, Reconfiguration
from syncline.core.replica_sets import Plan, by_source
from syncline.core.wire.control import Enter, Host, LetGo, Prepared, Retire, SeedTo
from syncline.core.wire.leases import AskLeaseAcks
from syncline.core.wire.message import Done, Message
from syncline.errors import ConnectionLost, FencedError, ProtocolError, StoreError, SynclineError
from syncline.net.rpc import Call, Request

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator

#: How often a wait looks whether something else has become more urgent.
_LOOK_SECONDS = 0.01
#: Until a change that could not be finished is tried again.
_AGAIN_SECONDS = 0.02
#: Until a plan that had to make way is taken up again.
_LATER_SECONDS = 0.2
_LOUD_SECONDS = 1.0
#: Holds last 150 ms: servers that answer further apart than this are asked once more.
_APART_SECONDS, _MOST_TIMES = 0.1, 5


class Changing:
    """One change at a time, in a thread of its own. What is decided is the core's; here it is kept and said."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._wakes = threading.Condition(coordinator.lock)
        self._deciding = Planner(coordinator.membership)
        self._asking: dict[str, Request] = {}  # workers that enter, servers that retire
        self._trouble = ("", 0.0)  # why a change is tried again, and since when
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def moves(self) -> bool:
        """Primaries are about to change: nobody is told of replica sets now."""
        return self._deciding.moves

    def start(self, *, resume: bool) -> None:
        """Under the lock. `resume`: an earlier coordinator may have died within a change."""
        if self._thread is None:
            if resume:
                self._deciding.resume()
            self._thread = threading.Thread(target=self._run, name="changes", daemon=True)
            self._thread.start()

    def close(self) -> None:
        with self._wakes:
            self._closed = True
            self._wakes.notify_all()

    def wake(self) -> None:
        with self._wakes:
            self._wakes.notify_all()

    # -- what happens -------------------------------------------------------------------------------------

    def member_is_out(self, member: Member) -> None:
        """Under the lock."""
        self._asking.pop(member.name, None)
        self._deciding.is_out(member)
        # Also what nobody has only because a plan was taken back with it.
        self._c.registering.slices_are_lost(self._c.membership.state.lost)
        self._wakes.notify_all()

    def member_has_left(self, name: str) -> None:
        """Under the lock: it asks for nothing any more."""
        self._asking.pop(name, None)
        self._deciding.has_left(name)

    def member_is_in(self, member: Member) -> None:
        """Under the lock, with its joining: no plan may count on a server that knows nothing yet."""
        self._deciding.is_in(member)
        self._wakes.notify_all()

    def enter(self, request: Request, message: Enter) -> None:
        """A worker is about to push that takes part in no rounds."""
        with self._wakes:
            place = self._deciding.enter(request.peer.name, request.peer.incarnation, message.entry, message.phase)
            if place is None:
                self._asking[request.peer.name] = request
                self._wakes.notify_all()
        if place is not None:
            request.reply(place)  # it asks again

    def retire(self, request: Request, message: Retire) -> None:
        """A server wants to leave: answered when nothing is left on it."""
        with self._wakes:
            self._deciding.retire(request.peer.name)
            self._c.retiring.add(request.peer.name)
            self._asking[request.peer.name] = request
            self._wakes.notify_all()

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = 0.0
        while True:
            try:
                if not self._wait_for_work(pause):
                    return
                pause = self._step()
            except FencedError as error:
                self._c.ending.superseded(str(error))
                return
            except StoreError as error:
                self._c.event(f"{error}; the change waits")
                pause = 1.0
            except SynclineError as error:
                pause = _AGAIN_SECONDS  # a server is gone, or held no longer: begun again, with what is known by then
                self._say_reason(str(error))
            except Exception as error:  # a bug of ours must end in a verdict, not in silence
                self._c.fail("coordinator", f"it has a bug: {type(error).__name__}: {error}")
                raise
            else:
                self._trouble = ("", 0.0)

    def _wait_for_work(self, pause: float) -> bool:
        """After the pause, or until there may be something to do; whether this goes on."""
        with self._wakes:
            if pause:
                self._wakes.wait(pause)
            elif not self._closed and not self._has_work():
                self._wakes.wait(self._c.saving.seconds_left(time.monotonic()))
            return not self._closed and self._c.membership.outcome is None

    def _say_reason(self, reason: str) -> None:
        """A change that is tried again and again says why, once a second."""
        known, since = self._trouble
        if not known:
            self._trouble = (reason, time.monotonic())
        elif time.monotonic() - since >= _LOUD_SECONDS:
            self._trouble = (reason, time.monotonic())
            self._c.event(f"generation {self._c.membership.generation} could not be installed yet: {reason}")

    def _has_work(self) -> bool:
        waits = bool(self._deciding.strangers or self._deciding.retiring or self._c.handing.gone())
        waits = waits or self._c.registering.has_uploaded
        waits = waits or self._c.saving.has_work(time.monotonic())
        return self._deciding.is_urgent or waits or not self._plan().is_empty

    def _plan(self) -> Plan:
        """Under the lock."""
        return self._deciding.plan(self._c.registry.sizes, self._c.registering.slices_with_values())

    def _step(self) -> float:
        with self._c.lock:
            if any(name not in self._c.endpoints for name in self._c.membership.servers()):
                return _AGAIN_SECONDS  # it comes back, or is evicted: either is known soon
        self._introduce()
        with self._c.lock:
            urgent = self._deciding.is_urgent
            wanted = self._plan()
        if urgent:
            return self._change(None)
        later = self._hand_back()
        if not wanted.is_empty:
            return self._carry_out(wanted)
        self._let_go()
        self._c.saving.step(self)
        return _LATER_SECONDS if self._deciding.retiring else later

    def _hand_back(self) -> float:
        """Leases of those who are out and fenced go to others; slice 0's server says what of them counts."""
        with self._c.lock:
            if self._deciding.is_urgent:
                return 0.0  # slice 0 may have another primary, or none: first all servers must know of that
            gone, replica_set = self._c.handing.gone(), self._c.membership.state.replica_sets.get(0)
        if gone:
            answers = (
                self._ask_all({replica_set.primary: AskLeaseAcks()})
                if replica_set is not None and replica_set.primary
                else {}
            )
            if not self._c.handing.out(gone, answers.values()):
                return _AGAIN_SECONDS
        return 0.0

    def _introduce(self) -> None:
        """A server that has come hears of every segment."""
        with self._c.lock:
            members, segments = self._c.membership.state.members, list(self._c.registry.layout.segments)
            lives = {name: members[name].incarnation for name in self._deciding.strangers if name in members}
        for name, incarnation in lives.items():
            for segment in segments:
                self._ask_all({name: Host(segment, [])})
            with self._c.lock:
                if name in members and members[name].incarnation == incarnation:
                    self._deciding.strangers.discard(name)

    def _let_go(self) -> None:
        """Servers on which nothing is left may end; segments whose slices have all their replica sets are ready."""
        self._c.registering.replica_sets_are_right()
        with self._c.lock:
            free = self._deciding.relieved()
            requests = [self._asking.pop(name) for name in free]
            for name in free:
                self._deciding.has_left(name)
                self._c.membership.leave(name)
                self._c.liveness.forget(name)
                self._c.retiring.discard(name)
                self._c.beats.pop(name, None)
                self._c.advanced.pop(name, None)
                self._c.registry.servers = self._c.membership.servers()
                self._c.event(f"{name} has handed over its slices and leaves")
            if free:
                self._c.try_keep()  # else it is kept with whatever comes next: nothing is left on them
        for request in requests:
            request.reply(Done())
        if requests:
            self._c.joining.tell()

    # -- one change ---------------------------------------------------------------------------------------

    def _change(self, wanted: Plan | None) -> float:
        with self._c.lock:
            change = self._deciding.begin(wanted, self._c.registry.sizes)
            if change is None:
                return _LATER_SECONDS
            self._c.keep()
            faults.reach("change.kept")
        restore(self._c, self)
        self._prepare(change)
        faults.reach("change.prepared")
        if wanted is not None and change.num_orphans:
            with self._c.lock:
                self._deciding.take_back()
                self._c.registering.slices_are_lost(self._c.membership.state.lost)
                self._c.keep()
                endpoints = [self._c.endpoints[name] for name in change.servers if name in self._c.endpoints]
            for endpoint in endpoints:
                endpoint.mention(LetGo(change.generation))
            self._c.registering.try_again()  # what has waited for where slices are
            self._c.joining.tell()
            return _LATER_SECONDS
        self._install(change)
        faults.reach("change.installed")
        self._finish(change)
        return 0.0

    def _prepare(self, change: Reconfiguration) -> None:
        """All servers hold at the same time when this returns: the answers of one question, close together."""
        for _ in range(_MOST_TIMES):
            began = time.monotonic()
            for server, answer in self._ask_all(dict.fromkeys(change.servers, change.prepare())).items():
                if not isinstance(answer, Prepared):
                    raise ProtocolError(f"{server} answered {type(answer).__name__} to Prepare")
                change.prepared(server, answer)
            if time.monotonic() - began < _APART_SECONDS:
                return

    def _install(self, change: Reconfiguration) -> None:
        with self._c.lock:
            install, lost = self._deciding.install(change)
        for _, text in lost:
            self._c.event(
                f"a worker and a server were lost in one step, which is outside of what is promised: {text}"
            )
        self._ask_all(dict.fromkeys(change.servers, install), fails_soon=True)

    def _finish(self, change: Reconfiguration) -> None:
        """Every server has the generation: rounds, barriers and places are others' from now on."""
        with self._c.lock:
            self._deciding.settle(change)
            change.boundaries = {name: (beat.boundary, beat.stride) for name, (beat, _) in self._c.beats.items()}
            try:
                self._c.keep()
            except StoreError:
                self._deciding.reopen()  # nobody is answered before it is kept
                raise
            places = self._deciding.finish(change)
            requests = [(self._asking.pop(name), place) for name, place in places.items()]
        for request, place in requests:
            request.reply(place)
        self._c.meeting.release()
        self._c.registering.try_again()
        self._c.joining.tell()
        self._c.joining.answer_lives()

    # -- plans --------------------------------------------------------------------------------------------

    def _carry_out(self, wanted: Plan) -> float:
        """Seeds first, as long as they take, unless something more urgent comes up; then the replica sets."""
        with self._c.lock:
            members = dict(self._c.membership.state.members)
        jobs: dict[str, list[Message]] = {}
        # In a ring every backup is supplied within the change that names it.
        seeds = () if self._c.config.is_ring else wanted.seeds
        for (source, target), slices in by_source(seeds).items():
            if target not in members or source not in members:
                return _AGAIN_SECONDS  # it is out by now
            jobs.setdefault(source, []).append(SeedTo(slices, members[target]))
        while jobs:
            now = {source: messages.pop(0) for source, messages in jobs.items()}
            jobs = {source: messages for source, messages in jobs.items() if messages}
            if not self._ask_all(now, gives_way=True):
                return _AGAIN_SECONDS
        faults.reach("seed.done")
        moved = self._change(wanted)
        if not moved and wanted.reason:
            self._c.event(f"seats: {wanted.reason}")
        return moved

    # -- asking -------------------------------------------------------------------------------------------

    def _ask_all(
        self, messages: Mapping[str, Message], *, gives_way: bool = False, until: float | None = None,
        fails_soon: bool = False,
    ) -> dict[str, Message]:  # fmt: skip
        """The servers' answers. Raises when one is out, or its connection is; `gives_way`: nothing, when that is so,
        or when anything urgent comes up. Nothing, too, when one has not answered until then. `fails_soon`: it raises
        what one has refused though others have not answered; they may wait for that one."""
        calls: dict[str, Call] = {}
        for name, message in messages.items():
            with self._c.lock:
                endpoint = self._c.endpoints.get(name)
            if endpoint is None:
                raise ConnectionLost(f"{name} is not there")
            calls[name] = endpoint.call(message)
        for call in calls.values():
            while not call.arrives(_LOOK_SECONDS):
                refused = [other for other in calls.values() if fails_soon and other.is_done and other.answer is None]
                if refused:
                    refused[0].wait(0)
                with self._c.lock:
                    if self._closed:
                        raise ConnectionLost("the coordinator is closing")
                    if gives_way and self._deciding.is_urgent:
                        return {}
                    if until is not None and time.monotonic() > until:
                        return {}
                    gone = [other for other in messages if other not in self._c.membership.state.members]
                    if gone:  # also one that another of them waits for
                        raise ConnectionLost(f"{', '.join(gone)} is out")
        return {name: call.wait(0) for name, call in calls.items()}

    def ask_servers(
        self, messages: Mapping[str, Message], *, gives_way: bool = False, until: float | None = None
    ) -> dict[str, Message]:
        return self._ask_all(messages, gives_way=gives_way, until=until)
