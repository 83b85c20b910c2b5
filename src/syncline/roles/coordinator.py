"""The coordinator: membership, registrations, barriers, numbers and the verdict. Small, and off the hot path."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from syncline import config as configuration
from syncline.core.layout import Segment
from syncline.core.membership import Barriers, Membership, Outcome
from syncline.core.messages import (
    AskServerStats,
    AskStats,
    AskWhy,
    Barrier,
    Died,
    Done,
    GivenServerStats,
    GivenStats,
    GivenWhy,
    Host,
    Join,
    Joined,
    Leave,
    Message,
    Over,
    Passed,
    Register,
    Registered,
    Report,
    Standings,
    Uploaded,
    Watch,
)
from syncline.core.policy import policy_of
from syncline.core.registry import Registry
from syncline.errors import JobFailed, ProtocolError, SynclineError
from syncline.net.rpc import Call, Endpoint, Request
from syncline.net.transport import Buffer, Peer
from syncline.roles.profile import profile_lines

#: How long the launcher has to say how a process ended, before a closed connection is the whole verdict.
GRACE_SECONDS = 2.0
#: How long the end of a job waits for the servers' own numbers, for its profile.
PROFILE_SECONDS = 3.0


class Coordinator:
    """The service that every member and the launcher speak to."""

    def __init__(
        self,
        given: Mapping[str, Any],
        *,
        log: Callable[[str], None],
        ended: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self._given = dict(given)  # said at launch or in syncline.toml
        self.config = configuration.resolve(self._given)
        self._log, self._ended = log, ended
        self._lock = threading.RLock()
        self._membership = Membership(self.config.workers, self.config.servers)
        self._barriers = Barriers()
        self._registry: Registry | None = None
        self._endpoints: dict[str, Endpoint] = {}
        self._launchers: set[Endpoint] = set()
        self._joining: dict[str, Request] = {}
        self._registering: list[Request] = []
        self._at_barrier: dict[tuple[str, int], list[Request]] = {}
        self._reports: dict[str, Report] = {}
        self._formed_at: float | None = None
        self._ended_at: float | None = None
        self._deadline: threading.Timer | None = None
        self.over = threading.Event()

    def start_deadline(self) -> None:
        """From now on the members have `start_seconds` to be there."""
        self._deadline = threading.Timer(self.config.start_seconds, self._never_came)
        self._deadline.daemon = True
        self._deadline.start()

    def _never_came(self) -> None:
        with self._lock:
            self._membership.never_came(self.config.start_seconds)
        self._conclude()

    # -- what the endpoint calls --------------------------------------------------------------------------

    def landing(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        raise ProtocolError(f"{type(message).__name__} has no payload")

    def handle(self, request: Request) -> None:
        handlers: dict[type[Message], Callable[[Request, Any], None]] = {
            Join: self._join,
            Register: self._register,
            Uploaded: self._uploaded,
            Barrier: self._barrier,
            Report: self._report,
            AskStats: self._stats,
            AskWhy: self._why,
            Leave: self._leave,
            Watch: self._watch,
            Died: self._died,
        }
        handler = handlers.get(type(request.message))
        if handler is None:
            raise ProtocolError(f"the coordinator does not answer {type(request.message).__name__}")
        handler(request, request.message)

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        """A member whose connection ends without a word is dead; the launcher may know better why."""
        with self._lock:
            self._launchers.discard(endpoint)
            name = next((n for n, known in self._endpoints.items() if known is endpoint), None)
            if name is None or name in self._membership.left or self._membership.outcome is not None:
                return
            has_launcher = bool(self._launchers)
        if has_launcher:
            timer = threading.Timer(GRACE_SECONDS, self.declare_dead, (name, reason))
            timer.daemon = True
            timer.start()
        else:
            self.declare_dead(name, reason)

    def declare_dead(self, name: str, reason: str) -> None:
        """This member is gone: the job ends, with this reason."""
        with self._lock:
            self._membership.died(name, f"is gone: {reason}")
        self._conclude()

    # -- joining ------------------------------------------------------------------------------------------

    def _join(self, request: Request, message: Join) -> None:
        if message.role != request.peer.role:
            raise ProtocolError(f"{request.peer} joins as a {message.role}, and proved to be another")
        with self._lock:
            if self._membership.outcome is not None:
                raise JobFailed(self._membership.outcome.reason)
            member = self._membership.join(message.role, message.name, message.host, message.address)
            self._endpoints[member.name] = request.endpoint
            request.endpoint.peer = Peer(member.role, member.name, member.incarnation)
            self._joining[member.name] = request
            if member.name == self._membership.chief:
                self._take_defaults(message.defaults)
            if not self._membership.formed:
                return
            self._formed_at = time.monotonic()
            servers = [m.name for m in self._membership.ordered() if m.role == "server"]
            self._registry = Registry(servers, self.config.slice_bytes)
            members, generation = self._membership.ordered(), self._membership.generation
            joining, self._joining = self._joining, {}
        if self._deadline is not None:
            self._deadline.cancel()
        # Servers first: a worker must find them ready.
        for name in sorted(joining, key=lambda n: self._membership.members[n].role != "server"):
            incarnation = self._membership.members[name].incarnation
            joining[name].reply(Joined(incarnation, generation, members, self.config))

    def _take_defaults(self, defaults: dict[str, Any]) -> None:
        """What the chief's script said counts where neither the launch nor syncline.toml said anything."""
        known = configuration.check_known(defaults, "init()")
        config = configuration.resolve(self._given, known)
        policy_of(config)
        self.config = config

    # -- registering --------------------------------------------------------------------------------------

    def _register(self, request: Request, message: Register) -> None:
        who = request.peer.name
        with self._lock:
            registry = self._formed_registry()
            is_chief = who == self._membership.chief
            decision = registry.register(
                who, is_chief, message.ordinal, message.parameters, message.rules, message.reduce
            )
            if decision.kind == "wait":
                self._registering.append(request)
                return
        if decision.segment is None:
            request.reply(Registered(registry.segments_with(message.parameters)))
        else:
            self._host(request, decision.segment)

    def _formed_registry(self) -> Registry:
        if self._registry is None:
            raise ProtocolError("the job is not whole yet")
        return self._registry

    def _host(self, request: Request, segment: Segment) -> None:
        """Every server makes room; then the chief is asked for its values."""
        registry = self._formed_registry()
        answer = Registered(list(registry.layout.segments), segment.index)

        def hosted(calls: list[Call]) -> None:
            try:
                for call in calls:
                    call.wait(0)
            except SynclineError as error:
                with self._lock:
                    registry.take_back(segment)
                request.refuse(error)
                return
            request.reply(answer)

        self._ask_servers(Host(segment), hosted)

    def _ask_servers(self, message: Message, then: Callable[[list[Call]], None]) -> None:
        """Asks every server; `then` runs when all have answered, in the thread of the last answer."""
        with self._lock:
            servers = [
                self._endpoints[name]
                for name, role in self._membership.expected.items()
                if role == "server" and name in self._endpoints
            ]
        calls = [endpoint.call(message) for endpoint in servers]
        lock, left = threading.Lock(), [len(calls)]

        def one_done() -> None:
            with lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                then(calls)

        for call in calls:
            call.when_done(one_done)

    def _uploaded(self, request: Request, message: Uploaded) -> None:
        with self._lock:
            registry = self._formed_registry()
            if request.peer.name != self._membership.chief:
                raise ProtocolError(f"{request.peer} is not the chief, whose values count")
            if not 0 <= message.segment < len(registry.layout.segments):
                raise ProtocolError(f"there is no segment {message.segment}")
            registry.ready.add(message.segment)
            waiting, self._registering = self._registering, []
        request.reply(Done())
        for waiter in waiting:
            try:
                assert isinstance(waiter.message, Register)
                self._register(waiter, waiter.message)
            except SynclineError as error:
                waiter.refuse(error)

    # -- barriers and numbers -----------------------------------------------------------------------------

    def _barrier(self, request: Request, message: Barrier) -> None:
        with self._lock:
            key = (message.name, message.turn)
            self._barriers.arrive(message.name, message.turn, request.peer.name, message.stretch)
            self._at_barrier.setdefault(key, []).append(request)
        self._release_barriers()

    def _release_barriers(self) -> None:
        with self._lock:
            passed = [
                (self._at_barrier.pop(key, []), Passed(self._barriers.next_stretch()))
                for key in self._barriers.whole(self._membership.workers())
            ]
        for requests, answer in passed:
            for request in requests:
                request.reply(answer)

    def _why(self, request: Request, message: AskWhy) -> None:
        """What this worker waits for at the coordinator: a barrier, or a registration."""
        with self._lock:
            for (name, turn), requests in self._at_barrier.items():
                if any(r.peer.name == request.peer.name for r in requests):
                    missing = self._barriers.missing(name, turn, self._membership.workers())
                    request.reply(GivenWhy(f"the barrier {name!r} waits for {', '.join(missing)}"))
                    return
            waiting = any(r.peer.name == request.peer.name for r in self._registering)
        chief = self._membership.chief
        request.reply(GivenWhy(f"{chief} (the chief) has not registered yet" if waiting else "nothing is open"))

    def _report(self, request: Request, message: Report) -> None:
        with self._lock:
            self._reports[request.peer.name] = message
        if request.number:
            request.reply(Done())

    def _stats(self, request: Request, message: AskStats) -> None:
        def gathered(calls: list[Call]) -> None:
            servers = [call.answer.stats for call in calls if isinstance(call.answer, GivenServerStats)]
            with self._lock:
                samples = sum(report.samples for report in self._reports.values())
                busy = max((report.seconds for report in self._reports.values()), default=0.0)
            request.reply(GivenStats(self._seconds(), samples, busy, servers))

        self._ask_servers(AskServerStats(), gathered)

    def _seconds(self) -> float:
        if self._formed_at is None:
            return 0.0
        return (self._ended_at or time.monotonic()) - self._formed_at

    # -- how it ends --------------------------------------------------------------------------------------

    def _leave(self, request: Request, message: Leave) -> None:
        with self._lock:
            self._membership.leave(request.peer.name)
        request.reply(Done())
        self._release_barriers()
        self._conclude()

    def _watch(self, request: Request, message: Watch) -> None:
        with self._lock:
            self._launchers.add(request.endpoint)
            outcome = self._membership.outcome
            standings = Standings(
                formed=self._membership.formed,
                missing=self._membership.missing(),
                seconds=self._seconds(),
                reports=dict(self._reports),
                left=sorted(self._membership.left),
                verdict=outcome.reason if outcome else "",
                culprit=outcome.culprit if outcome else "",
            )
        request.reply(standings)

    def _died(self, request: Request, message: Died) -> None:
        with self._lock:
            self._membership.died(message.name, message.reason)
        request.reply(Done())
        self._conclude()

    def _conclude(self) -> None:
        """Once there is an outcome, everyone hears of it, once."""
        with self._lock:
            outcome = self._membership.outcome
            if outcome is None or self._ended_at is not None:
                return
            self._ended_at = time.monotonic()
            endpoints, joining = list(self._endpoints.values()), list(self._joining.values())
        if outcome.failed:
            self._log(f"JobFailed: the job has ended: {outcome.reason}")
        for request in joining:
            request.refuse(JobFailed(outcome.reason))

        if self.config.profile and not outcome.failed:
            self._profile_first(lambda: self._tell_all(outcome, endpoints))
        else:
            self._tell_all(outcome, endpoints)

    def _profile_first(self, then: Callable[[], None]) -> None:
        """Shows where the time went, if the servers say so soon; the job ends in any case, once."""
        once = threading.Lock()

        def end(calls: Sequence[Call] = ()) -> None:
            if once.acquire(blocking=False):
                timer.cancel()
                self._profile(calls)
                then()

        timer = threading.Timer(PROFILE_SECONDS, end)
        timer.daemon = True
        timer.start()
        try:
            self._ask_servers(AskServerStats(), end)
        except SynclineError:
            end()

    def _profile(self, calls: Sequence[Call]) -> None:
        servers = [call.answer.stats for call in calls if isinstance(call.answer, GivenServerStats)]
        times = {name: report.times for name, report in self._reports.items()}
        for line in profile_lines(times, servers, self.config):
            self._log(line)

    def _tell_all(self, outcome: Outcome, endpoints: Sequence[Endpoint]) -> None:
        for endpoint in endpoints:
            if endpoint.is_open:
                try:
                    endpoint.tell(Over(outcome.failed, outcome.culprit, outcome.reason))
                except SynclineError:
                    continue
        self._ended(outcome)
        self.over.set()

    def close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        for endpoint in list(self._endpoints.values()) + list(self._launchers):
            endpoint.close()
