"""Joining at the coordinator: who becomes a member, when the job begins, and what everyone is told of the others."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from syncline import config as configuration
from syncline.core.checkpoint.schedule import check_words
from syncline.core.settings import check_settings
from syncline.core.wire.control import (
    AskLife,
    AskRoster,
    AskServerStats,
    GivenLife,
    GivenServerStats,
    Join,
    Joined,
    Rejoin,
    Roster,
)
from syncline.core.wire.message import Done
from syncline.errors import ConfigError, JobFailed, ProtocolError
from syncline.net.rpc import Call, Request
from syncline.net.transport import Peer

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator


class Joining:
    """Comings, and the roster."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._defaults: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, Request] = {}  # until the job is whole
        self._asking: list[tuple[Request, int]] = []  # for the roster of a generation
        self._asking_life: dict[str, Request] = {}  # workers, where they stand

    def forget(self, name: str) -> None:
        self._defaults.pop(name, None)
        self._waiting.pop(name, None)
        self._asking_life.pop(name, None)

    def take_waiting(self) -> list[Request]:
        """Those who still wait to be members, and will not be."""
        waiting, self._waiting = list(self._waiting.values()), {}
        return waiting

    def join(self, request: Request, message: Join) -> None:
        if message.role != request.peer.role:
            raise ProtocolError(f"{request.peer} joins as a {message.role}, and proved to be another")
        with self._c.lock:
            if self._c.membership.outcome is not None:
                raise JobFailed(self._c.membership.outcome.reason)
            self._make_way(message)
            member = self._c.membership.join(
                message.role,
                message.name,
                message.host,
                message.address,
                message.process,
                message.kind,
                message.cores,
                message.pid,
                message.num_cores,
            )
            self._c.endpoints[member.name] = request.endpoint
            request.endpoint.peer = Peer(member.role, member.name, member.incarnation)
            self._defaults[member.name] = message.defaults
            if not self._c.membership.formed:
                self._waiting[member.name] = request
                self.form_if_ready(False)
                return
            self._c.liveness.watch(member.name, time.monotonic())
            self._c.registry.servers = self._c.membership.servers()
            self._c.keep()
            late = member.name not in self._c.membership.state.entered
            answer = self._joined(member.incarnation, member.since, late)
            self._c.event(f"{member.name} (incarnation {member.incarnation}) has joined")
            self._c.changing.member_is_in(member)
            request.reply(answer)  # before a change has anything to say to it
        self.tell()
        self._c.pacing.tell()
        self._c.stopping.tell()
        self._c.validating.tell()

    def _joined(self, incarnation: int, generation: int, late: bool = False) -> Joined:
        """Under the lock."""
        state, taken_up = self._c.membership.state, self._c.membership.state.saves.taken_up
        return Joined(
            incarnation,
            generation,
            self._c.membership.ordered(),
            state.config,
            late,
            finished=list(state.finished.values()),
            is_chief_done=bool(state.chief_done),
            step=taken_up.step if taken_up is not None else 0,
            seconds=self._c.stopping.seconds(),
        )

    # -- earlier lives ------------------------------------------------------------------------------------

    def ask_life(self, request: Request, message: AskLife) -> None:
        """Answered when all servers have settled what counts of this name's earlier lives."""
        with self._c.lock:
            self._asking_life[request.peer.name] = request
        self.answer_lives()

    def answer_lives(self) -> None:
        """Those whose earlier lives are settled by now; the servers say how far the job is."""
        with self._c.lock:
            state = self._c.membership.state
            ready = [request for name, request in self._asking_life.items() if name not in state.fencing]
            self._asking_life = {n: request for n, request in self._asking_life.items() if n in state.fencing}
        if ready:
            self._c.reporting.ask_servers(AskServerStats(), functools.partial(self._give_lives, ready))

    def _give_lives(self, requests: Sequence[Request], calls: Sequence[Call]) -> None:
        servers = [call.answer.stats for call in calls if isinstance(call.answer, GivenServerStats)]
        with self._c.lock:
            state = self._c.membership.state
            step = max([self._c.reporting.step(), *(server.most_updates for server in servers)])
            lives = [
                GivenLife(
                    state.lives.get(name, 1), step, state.settled.get(name, (0, 0))[1], self._rates_known_to(name)
                )
                for name in (request.peer.name for request in requests)
            ]
        for request, given in zip(requests, lives, strict=True):
            request.reply(given)

    def _rates_known_to(self, name: str) -> dict[str, list[float]]:
        """Under the lock: the last learning rates of this name, and those of the workers that live."""
        found: dict[str, list[float]] = {}
        others = [other for other in self._c.membership.workers() if other != name]
        for key, rate in self._c.rates.get(name, {}).items():
            found[key] = [rate, *(self._c.rates[one][key] for one in others if key in self._c.rates.get(one, {}))]
        return found

    def _make_way(self, message: Join) -> None:
        """Whoever starts a process under the name of one whose connection is gone knows that it is dead."""
        known = message.name in self._c.membership.state.members
        same = self._c.membership.state.processes.get(message.name) == message.process
        if known and not same and message.name not in self._c.endpoints and self._c.membership.formed:
            self._c.evict(message.name, "was replaced by a new process of its name")

    def form_if_ready(self, has_gathered: bool) -> None:
        """Under the lock: begins the job when those are there whom it begins with."""
        if not self._c.membership.may_form(has_gathered):
            return
        state = self._c.membership.state
        try:
            self._take_defaults(self._defaults.get(self._c.membership.chief, {}))
        except ConfigError as error:
            self._refuse_defaults(error)
            return
        if not self._c.resuming.is_ready(state.config):
            return  # comes by here again when it is known what to take up
        self._c.resuming.form()
        self._c.membership.form()
        self._c.formed_at = time.monotonic()
        self._c.registry.servers = self._c.membership.servers()
        self._c.registry.use_slices_of(state.config.slice_bytes)
        now = time.monotonic()
        for name in state.members:
            self._c.liveness.watch(name, now)
        self._c.keep()
        joining = self._waiting
        self._waiting, self._defaults = {}, {}
        self._c.changing.start(resume=False)
        # Servers first: a worker must find them ready.
        for name in sorted(joining, key=lambda n: state.members[n].role != "server"):
            joining[name].reply(self._joined(state.members[name].incarnation, state.generation))
        self._c.stopping.begin()

    def _refuse_defaults(self, error: ConfigError) -> None:
        """What the chief's script says cannot be: it hears so itself, and the job is over."""
        chief = self._c.membership.chief
        request = self._waiting.pop(chief, None)
        self._c.membership.fail(chief, f"{chief}: {error}")
        if request is not None:
            request.refuse(error)
        self._c.ending.conclude()

    def _take_defaults(self, defaults: dict[str, Any]) -> None:
        """What the chief's script said counts where neither the launch nor syncline.toml said anything."""
        known = configuration.check_known(defaults, "init()")
        config = configuration.resolve(self._c.given, known)
        check_settings(config)
        check_words(config)
        self._c.membership.state.config = config

    def rejoin(self, request: Request, message: Rejoin) -> None:
        with self._c.lock:
            member = self._c.membership.state.members.get(message.name)
            if member is None or member.incarnation != message.incarnation:
                self._c.refuse_fenced(message.name, message.incarnation)
                return
            before = self._c.endpoints.get(member.name)
            self._c.endpoints[member.name] = request.endpoint
            request.endpoint.peer = Peer(member.role, member.name, member.incarnation)
            self._c.liveness.heard(member.name, time.monotonic())
            is_server = member.role == "server"
            # While primaries are about to change, the roster comes when that is settled.
            answer = Done() if self._c.changing.moves else self.roster()
        if before is not None and before is not request.endpoint:
            before.close("it has come back by another connection")  # who waits for an answer on this one hears so
        request.reply(answer)
        if is_server:
            self._c.registering.try_again()
        self._c.scaling.remind_to_retire(message.name)
        self._c.pacing.tell()
        self._c.stopping.tell()
        self._c.validating.tell()

    def roster(self) -> Roster:
        with self._c.lock:
            state = self._c.membership.state
            finished = list(state.finished.values())
            return Roster(
                state.generation,
                self._c.membership.ordered(),
                list(state.replica_sets.values()),
                finished,
                is_chief_done=bool(state.chief_done),
            )

    def ask_roster(self, request: Request, message: AskRoster) -> None:
        with self._c.lock:
            if self._c.changing.moves or self._c.membership.generation < message.generation:
                self._asking.append((request, message.generation))
                return
        request.reply(self.roster())

    def tell(self) -> None:
        """Everybody hears of the generation; not while primaries are about to change."""
        with self._c.lock:
            if self._c.changing.moves or not self._c.membership.formed:
                return
            roster = self.roster()
            endpoints = list(self._c.endpoints.values())
            asking = [r for r, generation in self._asking if generation <= roster.generation]
            self._asking = [a for a in self._asking if a[1] > roster.generation]
        for request in asking:
            request.reply(roster)
        for endpoint in endpoints:
            endpoint.mention(roster)
