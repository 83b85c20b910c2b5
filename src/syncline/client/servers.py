"""The `servers` exchange: gradients go to the servers that host their slices, new parameters come back."""

from __future__ import annotations

import collections
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from syncline.client.arena import Arenas
from syncline.client.arrays import Bytes
from syncline.client.commit import CommitFlow, Lane
from syncline.client.exchange import Push
from syncline.client.reading import ServerReader
from syncline.client.sinks import Sink
from syncline.config import JobConfig
from syncline.core.layout import Layout, Segment, Slice
from syncline.core.messages import (
    AskPlace,
    AskState,
    AskWhy,
    GivenPlace,
    GivenState,
    GivenWhy,
    Leave,
    LoadState,
    Message,
    Rest,
    Stage,
    StateEntry,
    Upload,
)
from syncline.core.policy import policy_of
from syncline.errors import ConnectionLost, ProtocolError, SynclineError, WaitTimeout
from syncline.net.rpc import Call, Endpoint, wait_all
from syncline.net.transport import buffer_of
from syncline.stats import WireStats


class ServersTicket:
    """A push to the servers. `wait` may be called again after a WaitTimeout."""

    def __init__(self, exchange: ServersExchange, flow: CommitFlow, sink: Sink | None) -> None:
        self._exchange, self._flow, self._sink = exchange, flow, sink
        self._landed = False

    def done(self) -> bool:
        return self._flow.done()

    def wait(self, timeout_seconds: float | None = None) -> None:
        if not self._landed:
            self._exchange.finish(self._flow, self._sink, timeout_seconds)
            self._landed = True
            self._exchange.forget(self)


class ServersExchange:
    """One worker's view of all servers."""

    def __init__(
        self,
        config: JobConfig,
        endpoints: Mapping[str, Endpoint],
        *,
        explain: Callable[[SynclineError], SynclineError],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._endpoints, self._explain = config, dict(endpoints), explain
        policy = policy_of(config)
        self._in_rounds, self._is_bounded = policy.in_rounds, policy.kind == "bounded"
        self._num_slots = config.window + 1
        self.layout = Layout()
        self.clock = 0
        self._stretch, self._rested = 0, False
        self._is_active = True  # whether rounds and lag count this worker
        self._back_at: int | None = None
        self._arenas = Arenas(self._endpoints, self._num_slots, config, say)
        self._readers = {name: ServerReader(endpoint, config.wait_seconds) for name, endpoint in endpoints.items()}
        self._hosted: dict[str, list[Slice]] = {name: [] for name in endpoints}
        self._open: collections.deque[ServersTicket] = collections.deque()
        self._early: dict[str, list[Call]] = {name: [] for name in endpoints}
        self._sent: set[int] = set()
        self.wait_seconds = 0.0

    @property
    def _wait_seconds(self) -> float:
        return self._config.wait_seconds

    # -- layout -------------------------------------------------------------------------------------------

    def add(self, segments: Sequence[Segment]) -> None:
        for segment in segments[len(self.layout.segments) :]:
            self.layout.add(segment)
            for part in segment.slices:
                self._hosted[part.server].append(part)
            for server, reader in self._readers.items():
                if any(part.server == server for part in segment.slices):
                    reader.map(segment)

    def upload(self, segment: Segment, values: Bytes) -> None:
        calls = []
        for server, endpoint in self._endpoints.items():
            for part in segment.slices:
                if part.server == server:
                    view = values[part.offset : part.offset + part.num_bytes]
                    message = Upload(segment.index, [part.id])
                    calls.append(self._ask(endpoint, message, [buffer_of(view)], view.nbytes))
        self._wait_all(calls)

    def _ask(
        self, endpoint: Endpoint, message: Message, buffers: Sequence[memoryview] = (), num_bytes: int = 0
    ) -> Call:
        try:
            return endpoint.call(message, buffers=buffers, payload_bytes=num_bytes)
        except ConnectionLost as error:
            raise self._explain(error) from None

    def _wait_all(self, calls: Sequence[Call]) -> list[Message]:
        try:
            return wait_all(calls, self._wait_seconds)
        except ConnectionLost as error:
            raise self._explain(error) from None

    # -- pushing ------------------------------------------------------------------------------------------

    @property
    def _slot(self) -> int:
        return (self.clock + 1) % self._num_slots

    def arena(self, segment: int) -> Bytes:
        self._make_room()
        return self._arenas.array(self.layout.segments[segment], self._slot)

    def _make_room(self) -> None:
        """One open clock at a time, and `window` more: the slot of the next commit is free after this."""
        while len(self._open) > self._config.window:
            self._open[0].wait()

    @property
    def needs_bytes(self) -> bool:
        """Whether any server gets its bytes over a socket, so that sending early helps."""
        return not all(endpoint.shares_memory for endpoint in self._endpoints.values())

    def stage(self, slices: Sequence[Slice]) -> None:
        """Sends slices early where a socket carries them; shared memory is read at the commit anyway."""
        for server, endpoint in self._endpoints.items():
            parts = [p for p in slices if p.server == server and not self._is_shared(server, p)]
            if parts:
                message = self._stage_message(Push(pushed=()), parts, commit=False, pull=[])
                self._early[server].append(self._send_stage(endpoint, message, parts, ()))
                self._sent.update(part.id for part in parts)

    def restage(self, part: Slice) -> None:
        """This slice of the arena has changed since it was staged."""
        self._sent.discard(part.id)

    def _is_shared(self, server: str, part: Slice) -> bool:
        return self._arenas.is_shared(server, part.segment, self._slot)

    def _stage_message(self, push: Push, parts: Sequence[Slice], *, commit: bool, pull: list[int]) -> Stage:
        return Stage(
            clock=self.clock + 1,
            stretch=self._stretch + self._rested,
            slot=self._slot,
            pushed=push.pushed,
            weight=push.weight,
            skip=push.skip,
            clip_norm=push.clip_norm,
            overrides=[(segment, group, dict(options)) for segment, group, options in push.overrides],
            back_at=self._back_at,
            slices=[part.id for part in parts],
            commit=commit,
            pull=pull,
        )

    def _send_stage(
        self, endpoint: Endpoint, message: Stage, parts: Sequence[Slice], into: Sequence[memoryview]
    ) -> Call:
        buffers = [self._arenas.view(part, message.slot) for part in parts]
        return endpoint.call(message, buffers=buffers, payload_bytes=sum(len(b) for b in buffers), into=into)

    def commit(self, push: Push, sink: Sink | None) -> ServersTicket:
        self._make_room()
        self._come_back()
        touched = self._touched(push)
        lanes = [self._lane(server, push, touched, sink) for server in sorted(self._endpoints)]
        flow = CommitFlow(self.clock + 1, lanes)
        ticket = ServersTicket(self, flow, sink)
        flow.start()
        self._open.append(ticket)
        self.clock += 1
        self._stretch, self._rested = self._stretch + self._rested, False
        self._early = {name: [] for name in self._endpoints}
        self._sent.clear()
        self._is_active, self._back_at = True, None
        return ticket

    def _come_back(self) -> None:
        """After a rest: where this worker stands from now on must be the same at every server."""
        if not self._is_active and self._is_bounded and len(self._endpoints) > 1:
            answers = self._wait_all([self._ask(e, AskPlace()) for e in self._endpoints.values()])
            self._back_at = max(answer.position for answer in answers if isinstance(answer, GivenPlace))

    def _touched(self, push: Push) -> set[int]:
        """The slices that hold any of what is pushed."""
        found: set[int] = set()
        for start, stop in push.pushed:
            for segment in self.layout.segments:
                low = max(start - segment.first_parameter, 0)
                high = min(stop - segment.first_parameter, len(segment.parameters))
                if low < high:
                    begin = segment.offsets[low]
                    end = segment.offsets[high - 1] + segment.parameters[high - 1].num_bytes
                    found.update(
                        part.id
                        for part in segment.slices
                        if part.offset < end and part.offset + part.num_bytes > begin
                    )
        return found

    def _lane(self, server: str, push: Push, touched: set[int], sink: Sink | None) -> Lane:
        endpoint, slot = self._endpoints[server], self._slot
        parts = [
            part
            for part in self._hosted[server]
            if part.id in touched and part.id not in self._sent and not self._is_shared(server, part)
        ]
        for segment in {part.segment for part in self._hosted[server] if part.id in touched}:
            self._arenas.array(self.layout.segments[segment], slot)
        reader = self._readers[server]
        wanted = [
            part for part in self._hosted[server] if sink is not None and sink.wants(part) and not reader.maps(part)
        ]
        into = reader.landing(wanted, sink, slot if self._config.window else None)
        pull = [part.id for part in wanted]
        single = len(self._endpoints) == 1
        message = self._stage_message(push, parts, commit=single, pull=pull if single else [])
        return Lane(
            functools.partial(self._send_stage, endpoint, message, parts, into),
            functools.partial(endpoint.call, into=into),
            pull,
            self._early[server],
        )

    def finish(self, flow: CommitFlow, sink: Sink | None, timeout_seconds: float | None) -> None:
        """Waits for a commit and lands its parameters."""
        began = time.monotonic()
        try:
            flow.wait(self._wait_seconds if timeout_seconds is None else timeout_seconds)
        except WaitTimeout:
            seconds = time.monotonic() - began
            raise WaitTimeout(f"step {flow.clock} has waited {seconds:.1f} s: {self.why()}") from None
        except ConnectionLost as error:
            raise self._explain(error) from None
        finally:
            self.wait_seconds += time.monotonic() - began
        if sink is not None:
            try:
                for server, lane in zip(sorted(self._endpoints), flow.lanes, strict=True):
                    self._land(server, flow.clock % self._num_slots, lane, sink)
            except ConnectionLost as error:
                raise self._explain(error) from None

    def forget(self, ticket: ServersTicket) -> None:
        """This ticket has landed: its slot may be used again."""
        if ticket in self._open:
            self._open.remove(ticket)

    def _land(self, server: str, slot: int, lane: Lane, sink: Sink) -> None:
        reader = self._readers[server]
        if lane.pull and self._config.window:
            reader.unload([p for p in self._hosted[server] if p.id in set(lane.pull)], sink, slot)
        mapped = [
            (part, version)
            for part, version in zip(self._hosted[server], lane.versions or itertools.repeat(0), strict=False)
            if reader.maps(part) and sink.wants(part)
        ]
        parts = [part for part, _ in mapped]
        if not lane.pull:
            reader.copy(parts, [version for _, version in mapped], sink, settled=self._in_rounds)
        elif parts:  # some segments come by socket, some by shared memory: ask for the versions of these
            reader.pull(parts, sink, None)

    def why(self) -> str:
        """For whom this worker waits, by the servers' own words."""
        found = []
        for endpoint in self._endpoints.values():
            try:
                answer = endpoint.call(AskWhy()).wait(5.0)
            except SynclineError as error:
                return str(error)
            if isinstance(answer, GivenWhy):
                found.append(answer.reason)
        return "; ".join(found)

    # -- pulling and state --------------------------------------------------------------------------------

    def pull(self, slices: Sequence[Slice], sink: Sink, min_version: int | None) -> list[int]:
        versions: dict[int, int] = {}
        try:
            for server, reader in self._readers.items():
                parts = [part for part in slices if part.server == server]
                if parts:
                    found = reader.pull(parts, sink, min_version)
                    versions.update(zip((part.id for part in parts), found, strict=True))
        except WaitTimeout:
            raise WaitTimeout(f"a pull has waited {self._wait_seconds:g} s for version {min_version}") from None
        except ConnectionLost as error:
            raise self._explain(error) from None
        return [versions[part.id] for part in slices]

    def read_state(self, slices: Sequence[Slice]) -> list[tuple[StateEntry, Bytes]]:
        found: list[tuple[StateEntry, Bytes]] = []
        for server, endpoint in self._endpoints.items():
            numbers = [part.id for part in slices if part.server == server]
            for number in numbers:
                found += self._read_state(endpoint, number)
        return found

    def _read_state(self, endpoint: Endpoint, number: int) -> list[tuple[StateEntry, Bytes]]:
        landed: list[Bytes] = []

        def landing(answer: Message) -> list[memoryview]:
            if isinstance(answer, GivenState):
                landed.extend(np.empty(entry.num_bytes, np.uint8) for entry in answer.entries)
            return [buffer_of(array) for array in landed]

        try:
            answer = endpoint.call(AskState([number]), into=landing).wait(self._wait_seconds)
        except ConnectionLost as error:
            raise self._explain(error) from None
        if not isinstance(answer, GivenState):
            raise ProtocolError(f"state was answered with {type(answer).__name__}")
        return list(zip(answer.entries, landed, strict=True)) if landed else []

    def write_state(self, slices: Sequence[Slice], entries: Sequence[tuple[StateEntry, Bytes]]) -> None:
        calls = []
        for server, endpoint in self._endpoints.items():
            numbers = [part.id for part in slices if part.server == server]
            mine = [(entry, data) for entry, data in entries if entry.slice in set(numbers)]
            if numbers:
                message = LoadState(numbers, [entry for entry, _ in mine])
                buffers = [buffer_of(data) for _, data in mine]
                calls.append(self._ask(endpoint, message, buffers, sum(map(len, buffers))))
        self._wait_all(calls)

    # -- comings and goings -------------------------------------------------------------------------------

    def rest(self) -> None:
        self.settle()
        self._stretch += self._rested
        self._rested, self._is_active = True, False
        self._wait_all([self._ask(e, Rest(self._stretch, False)) for e in self._endpoints.values()])

    def step_aside(self) -> int:
        """No round waits for this worker until its next push; the stretch it was in."""
        self.settle()
        self._is_active = False
        self._wait_all([self._ask(e, Rest(self._stretch, True)) for e in self._endpoints.values()])
        return self._stretch + self._rested

    def begin_stretch(self, stretch: int) -> None:
        """Behind a barrier everyone is in the same, new stretch."""
        self._stretch, self._rested, self._is_active = stretch, False, True

    def settle(self) -> None:
        """Waits for everything that is still open."""
        while self._open:
            self._open[0].wait()

    def leave(self) -> None:
        self._wait_all([self._ask(e, Leave()) for e in self._endpoints.values() if e.is_open])

    def stats(self) -> WireStats:
        total = WireStats()
        for endpoint in self._endpoints.values():
            total += endpoint.stats()
        return total

    def break_off(self) -> None:
        """The job has failed: every wait ends now."""
        for endpoint in self._endpoints.values():
            endpoint.close("the job has ended")

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()
        for reader in self._readers.values():
            reader.close()
        self._arenas.close()
