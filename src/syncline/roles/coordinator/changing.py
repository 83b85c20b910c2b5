"""How a coordinator takes its job from one generation to the next, and slices to where they should be."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from syncline import faults
from syncline.core.changes import Change
from syncline.core.control import Enter, Entered, Host, Prepared, Retire, SeedTo
from syncline.core.members import Member
from syncline.core.message import Done, Message
from syncline.core.seats import Plan, Seat, by_source, plan, rehome, without
from syncline.errors import ConfigError, ConnectionLost, FencedError, ProtocolError, StoreError, SynclineError
from syncline.net.rpc import Call, Request
from syncline.roles.coordinator.restoring import restore

if TYPE_CHECKING:
    from syncline.roles.coordinator.coordinator import Coordinator

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
    """One change at a time, in a thread of its own. Deaths and entries come before plans."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._wakes = threading.Condition(coordinator.lock)
        self._entering: dict[str, Request] = {}
        self._answered: dict[str, tuple[int, Entered]] = {}  # who has entered, with its incarnation
        self._retiring: dict[str, Request] = {}  # servers that want to leave
        self._strangers: set[str] = set()  # servers that do not know the layout yet
        self.moves = False  # primaries are about to change: nobody is told of seats now
        self._server_is_out = False  # since the change under way was begun
        self._servers_out: list[str] = []  # since the last change was made
        self._trouble = ("", 0.0)  # why a change is tried again, and since when
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, *, resume: bool) -> None:
        """Under the lock. `resume`: an earlier coordinator may have died within a change."""
        state = self._c.membership.state
        if resume and state.is_changing:
            self.moves = True
        if self._thread is None:
            self._strangers.update(self._c.membership.servers() if resume else ())
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
        self._entering.pop(member.name, None)
        self._retiring.pop(member.name, None)
        self._strangers.discard(member.name)
        if member.role == "server" and self._c.membership.formed:
            self.moves = self._server_is_out = True  # also where it was a backup only: who lost it waits for our word
            self._servers_out.append(member.name)
        self._wakes.notify_all()

    def member_has_left(self, name: str) -> None:
        """Under the lock: it asks for nothing any more."""
        self._entering.pop(name, None)
        self._retiring.pop(name, None)

    def member_is_in(self, member: Member) -> None:
        with self._wakes:
            if member.role == "server":
                self._strangers.add(member.name)
            self._wakes.notify_all()
        self._c.joining.tell()

    def enter(self, request: Request, message: Enter) -> None:
        """A worker that joined late is about to push."""
        with self._wakes:
            incarnation, answer = self._answered.get(request.peer.name, (0, None))
            if answer is not None and incarnation == request.peer.incarnation:
                request.reply(answer)  # it asks again
                return
            self._entering[request.peer.name] = request
            self._wakes.notify_all()

    def retire(self, request: Request, message: Retire) -> None:
        """A server wants to leave: answered when nothing is left on it."""
        with self._wakes:
            staying = [s for s in self._c.membership.servers() if s not in self._retiring and s != request.peer.name]
            if not staying and self._c.membership.state.seats:
                raise ConfigError(f"{request.peer.name} is the last server: its slices cannot go anywhere")
            self._c.retiring.add(request.peer.name)
            self._retiring[request.peer.name] = request
            self._wakes.notify_all()

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = 0.0
        while True:
            with self._wakes:
                if pause:
                    self._wakes.wait(pause)
                elif not self._closed and not self._has_work():
                    self._wakes.wait(1.0)
                if self._closed or self._c.membership.outcome is not None:
                    return
            try:
                pause = self._step()
            except FencedError as error:
                self._c.ending.superseded(str(error))
                return
            except StoreError as error:
                self._c.event(f"{error}; the change waits")
                pause = 1.0
            except SynclineError as error:
                pause = _AGAIN_SECONDS  # a server is gone, or held no longer: begun anew, with what is known by then
                self._say_reason(str(error))
            except Exception as error:  # a bug of ours must end in a verdict, not in silence
                self._c.fail("coordinator", f"it has a bug: {type(error).__name__}: {error}")
                raise
            else:
                self._trouble = ("", 0.0)

    def _say_reason(self, reason: str) -> None:
        """A change that is tried again and again says why, once a second."""
        known, since = self._trouble
        if not known:
            self._trouble = (reason, time.monotonic())
        elif time.monotonic() - since >= _LOUD_SECONDS:
            self._trouble = (reason, time.monotonic())
            self._c.event(f"generation {self._c.membership.generation} could not be installed yet: {reason}")

    def _has_work(self) -> bool:
        return (
            self._is_urgent()
            or bool(self._strangers or self._retiring or self._c.registering.has_uploaded)
            or not self._plan().is_empty
        )

    def _is_urgent(self) -> bool:
        state = self._c.membership.state
        has_servers = bool(self._c.membership.servers())
        return has_servers and bool(state.fencing or self._entering or self.moves or state.lost or state.is_changing)

    def _step(self) -> float:
        with self._c.lock:
            if any(name not in self._c.endpoints for name in self._c.membership.servers()):
                return _AGAIN_SECONDS  # it comes back, or is evicted: either is known soon
        self._introduce()
        with self._c.lock:
            urgent = self._is_urgent()
            wanted = self._plan()
        if urgent:
            return self._change(None)
        if not wanted.is_empty:
            return self._carry_out(wanted)
        self._let_go()
        return _LATER_SECONDS if self._retiring else 0.0

    def _introduce(self) -> None:
        """A server that has come hears of every segment."""
        with self._c.lock:
            names, segments = set(self._strangers), list(self._c.registry.layout.segments)
        for name in names:
            for segment in segments:
                self._ask_all({name: Host(segment, [])})
            with self._c.lock:
                self._strangers.discard(name)

    def _let_go(self) -> None:
        """Servers on which nothing is left may end; segments whose slices have all their seats are ready."""
        self._c.registering.seats_are_right()
        with self._c.lock:
            seated = {
                name for seat in self._c.membership.state.seats.values() for name in (seat.primary, seat.backup)
            }
            free = [name for name in self._retiring if name not in seated]
            requests = [self._retiring.pop(name) for name in free]
            for name in free:
                self._c.membership.leave(name)
                self._c.liveness.forget(name)
                self._c.retiring.discard(name)
                self._c.beats.pop(name, None)
                self._c.advanced.pop(name, None)
                self._c.registry.servers = self._c.membership.servers()
                self._c.event(f"{name} has handed over its slices and leaves")
            if free:
                self._c.keep()
        for request in requests:
            request.reply(Done())
        if requests:
            self._c.joining.tell()

    def _plan(self) -> Plan:
        """Under the lock: what to do about the seats of slices that have values."""
        state, registry = self._c.membership.state, self._c.registry
        with_values = self._c.registering.slices_with_values()
        seats = [seat for number, seat in state.seats.items() if number in with_values]
        hosts = {name: state.members[name].host for name in self._c.membership.servers()}
        known = {name: host for name, host in hosts.items() if name not in self._strangers}
        replicas = max(1, state.config.replicas)
        return plan(seats, registry.sizes, known, replicas=replicas, leaving=set(self._retiring) & set(known))

    # -- one change ---------------------------------------------------------------------------------------

    def _change(self, wanted: Plan | None) -> float:
        change, before = self._begin(wanted)
        if change is None:
            return _LATER_SECONDS
        restore(self._c, self)
        self._prepare(change)
        faults.reach("change.prepared")
        if wanted is not None and change.num_orphans:
            self._take_back(before)
            return _LATER_SECONDS
        self._say_what_is_lost(change)
        with self._c.lock:
            install = change.install(self._c.membership.ordered())
        self._ask_all(dict.fromkeys(change.servers, install))
        faults.reach("change.installed")
        self._finish(change)
        return 0.0

    def _prepare(self, change: Change) -> None:
        """All servers hold at the same time when this returns: the answers of one question, close together."""
        for _ in range(_MOST_TIMES):
            began = time.monotonic()
            for server, answer in self._ask_all(dict.fromkeys(change.servers, change.prepare())).items():
                if not isinstance(answer, Prepared):
                    raise ProtocolError(f"{server} answered {type(answer).__name__} to Prepare")
                change.prepared(server, answer)
            if time.monotonic() - began < _APART_SECONDS:
                return

    def _begin(self, wanted: Plan | None) -> tuple[Change | None, dict[int, Seat]]:
        """Decides on the next generation, and keeps it."""
        with self._c.lock:
            state, membership = self._c.membership.state, self._c.membership
            before = dict(state.seats)
            if wanted is not None:
                if self._is_urgent():
                    return None, before
                state.seats.update((seat.slice, seat) for seat in wanted.seats)
                if any(before[seat.slice].primary != seat.primary for seat in wanted.seats):
                    self.moves = True
            servers = membership.servers()
            if state.lost:
                found = rehome(state.seats.values(), self._c.registry.sizes, servers)
                state.seats.update((seat.slice, seat) for seat in found)
                self.moves = True
            self._server_is_out = False
            # From now on servers may count them: whoever dies while it enters has to be fenced.
            self._entering = {name: r for name, r in self._entering.items() if name in state.members}
            state.entered.update((name, state.members[name].incarnation) for name in self._entering)
            state.generation += 1
            state.is_changing = True
            self._c.keep()
            faults.reach("change.kept")
            change = Change(
                state.generation,
                servers,
                fenced={name: incarnation for name, (incarnation, _) in state.fencing.items()},
                entering={name: state.members[name].incarnation for name in self._entering},
                seats=list(state.seats.values()),
                moves=self.moves,
                staying={name: life for name, life in state.entered.items() if name not in self._entering},
                stretch=state.stretch,
            )
            return change, before

    def _take_back(self, before: Mapping[int, Seat]) -> None:
        """Somebody's open step could not be made anew just now: the plan waits."""
        with self._c.lock:
            state = self._c.membership.state
            seats, lost = without(before.values(), _gone(before.values(), state.members))
            state.seats.update((seat.slice, seat) for seat in seats)
            state.lost += [number for number in lost if number not in state.lost]
            self.moves = self._server_is_out
            state.is_changing = False
            self._c.keep()

    def _say_what_is_lost(self, change: Change) -> None:
        found = change.unsettled()
        with self._c.lock:
            servers, fencing = ", ".join(self._servers_out), self._c.membership.state.fencing
            dead = [name for name in change.fenced if name not in self._c.membership.state.left and name in fencing]
        if servers and change.num_orphans:
            found.append(f"{change.num_orphans} open commits of lost workers are dropped")
        elif servers and dead and not found:
            found.append(f"the last step of {', '.join(dead)} may lack what {servers} had of it")
        for text in found:
            self._c.event(
                f"a worker and a server were lost in one step, which is outside of what is promised: {text}"
            )

    def _finish(self, change: Change) -> None:
        """Every server has the generation: rounds, barriers and places are others' from now on."""
        stretch, _ = change.turn()
        with self._c.lock:
            state = self._c.membership.state
            for name, incarnation in change.fenced.items():
                if state.fencing.get(name, (0, ""))[0] == incarnation:
                    del state.fencing[name]
            state.is_changing = self._server_is_out
            self._c.keep()  # until it is kept nobody is answered, and the change is made once more
            self.moves = self._server_is_out
            if not self._server_is_out:
                self._servers_out = []
            entered = [name for name in change.entering if name in state.entered and name in self._entering]
            requests = [self._entering.pop(name) for name in entered]
            answer = Entered(stretch, change.back_at())
            self._answered.update((name, (change.entering[name], answer)) for name in entered)
        for request in requests:
            request.reply(answer)
        self._c.meeting.release()
        self._c.registering.try_again()
        self._c.joining.tell()

    # -- plans --------------------------------------------------------------------------------------------

    def _carry_out(self, wanted: Plan) -> float:
        """Seeds first, as long as they take, unless something more urgent comes up; then the seats."""
        with self._c.lock:
            members = dict(self._c.membership.state.members)
        jobs: dict[str, list[Message]] = {}
        for (source, target), slices in by_source(wanted.seeds).items():
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

    def _ask_all(self, messages: Mapping[str, Message], *, gives_way: bool = False) -> dict[str, Message]:
        """The servers' answers. Raises when one is out, or its connection is; `gives_way`: nothing, when that is so,
        or when anything urgent comes up."""
        calls: dict[str, Call] = {}
        for name, message in messages.items():
            with self._c.lock:
                endpoint = self._c.endpoints.get(name)
            if endpoint is None:
                raise ConnectionLost(f"{name} is not there")
            calls[name] = endpoint.call(message)
        for call in calls.values():
            while not call.arrives(_LOOK_SECONDS):
                with self._c.lock:
                    if self._closed:
                        raise ConnectionLost("the coordinator is closing")
                    if gives_way and self._is_urgent():
                        return {}
                    gone = [other for other in messages if other not in self._c.membership.state.members]
                    if gone:  # also one that another of them waits for
                        raise ConnectionLost(f"{', '.join(gone)} is out")
        return {name: call.wait(0) for name, call in calls.items()}

    def ask_servers(self, messages: Mapping[str, Message]) -> dict[str, Message]:
        return self._ask_all(messages)


def _gone(seats: Iterable[Seat], members: Mapping[str, Member]) -> set[str]:
    """Servers that seats name and that are no members any more."""
    return {name for seat in seats for name in (seat.primary, seat.backup) if name and name not in members}
