"""The `servers` exchange: gradients go to the servers that host their slices, new parameters come back."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from syncline.client.arena import Arenas
from syncline.client.arrays import Bytes
from syncline.client.commit import CommitFlow
from syncline.client.exchange import Push
from syncline.client.landing import Landing
from syncline.client.lane import ServerLane
from syncline.client.reading import ServerReader
from syncline.client.sinks import Sink, Wanted
from syncline.client.states import read_state, write_state
from syncline.client.ticket import ServersTicket
from syncline.client.times import StepClock
from syncline.config import JobConfig
from syncline.core.layout import Layout, Ranges, Segment, Slice
from syncline.core.messages import (
    AskPlace,
    AskWhy,
    GivenPlace,
    GivenWhy,
    Leave,
    Message,
    Prefer,
    Rest,
    Stage,
    StateEntry,
    Upload,
)
from syncline.core.policy import policy_of
from syncline.errors import ConnectionLost, SynclineError, WaitTimeout
from syncline.net.rpc import Call, Endpoint, wait_all
from syncline.net.transport import buffer_of
from syncline.stats import WireStats

_MOST_PLANS = 64  # what is worked out once for a push or a sink and kept
_MOST_OPEN = 16
_LOOK_SECONDS = 0.05


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
        self._names = sorted(self._endpoints)
        self._hosted: dict[str, list[Slice]] = {name: [] for name in endpoints}
        self._open: collections.deque[ServersTicket] = collections.deque()
        self._early: dict[str, list[Call]] = {name: [] for name in endpoints}
        self._sent: set[int] = set()
        self.times = StepClock()
        self._before_commit: list[Callable[[], None]] = []
        self._unshared: dict[tuple[str, Ranges, int], list[Slice]] = {}

    @property
    def _wait_seconds(self) -> float:
        return self._config.wait_seconds

    # -- layout -------------------------------------------------------------------------------------------

    def add(self, segments: Sequence[Segment]) -> None:
        self._unshared.clear()
        self.times.pause()
        for segment in segments[len(self.layout.segments) :]:
            self.layout.add(segment)
            for part in segment.slices:
                self._hosted[part.server].append(part)
            for server, reader in self._readers.items():
                if any(part.server == server for part in segment.slices):
                    reader.map(segment)
        self.times.resume()

    def upload(self, segment: Segment, values: Bytes) -> None:
        # Few are open at a time: answers that nobody reads yet would fill the socket, and stop the server.
        calls: collections.deque[Call] = collections.deque()
        for part in segment.slices:
            view = values[part.offset : part.offset + part.num_bytes]
            message = Upload(segment.index, [part.id])
            calls.append(self._ask(self._endpoints[part.server], message, [buffer_of(view)], view.nbytes))
            if len(calls) >= _MOST_OPEN:
                self._wait_all([calls.popleft()])
        self._wait_all(list(calls))

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
    def slot(self) -> int:
        return (self.clock + 1) % self._num_slots

    def arena(self, segment: int) -> Bytes:
        self.make_room()
        return self._arenas.array(self.layout.segments[segment], self.slot)

    def make_room(self) -> None:
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
                message = self._stage_message(Push(pushed=()), parts, None)
                buffers = [self._arenas.view(part, message.slot) for part in parts]
                call = endpoint.call(message, buffers=buffers, payload_bytes=sum(map(len, buffers)))
                self._early[server].append(call)
                self._sent.update(part.id for part in parts)

    def restage(self, part: Slice) -> None:
        """This slice of the arena has changed since it was staged."""
        self._sent.discard(part.id)

    def _is_shared(self, server: str, part: Slice) -> bool:
        return self._arenas.is_shared(server, part.segment, self.slot)

    def _stage_message(
        self, push: Push, parts: Sequence[Slice], landing: Landing | None, commit: bool = False
    ) -> Stage:
        return Stage(
            clock=self.clock + 1,
            stretch=self._stretch + self._rested,
            slot=self.slot,
            pushed=push.pushed,
            weight=push.weight,
            skip=push.skip,
            clip_norm=push.clip_norm,
            overrides=[(segment, group, dict(options)) for segment, group, options in push.overrides],
            back_at=self._back_at,
            slices=[part.id for part in parts],
            commit=commit,
            pull=landing.pull if commit and landing is not None else [],
            parts=commit and landing is not None and landing.in_parts,
        )

    def commit(self, push: Push, sink: Sink | None) -> ServersTicket:
        self.make_room()
        for action in self._before_commit:
            action()
        self._come_back()
        lanes = [self._lane(server, push, sink) for server in self._names]
        flow = CommitFlow(self.clock + 1, lanes)
        ticket = ServersTicket(self, flow, lanes)
        flow.start()
        self._open.append(ticket)
        self.clock += 1
        self._stretch, self._rested = self._stretch + self._rested, False
        if self._sent:
            self._early = {name: [] for name in self._endpoints}
            self._sent.clear()
        self._is_active, self._back_at = True, None
        if len(lanes) > 1:
            self._stage_everywhere(flow)
        self.times.num_steps += 1
        self.times.lap("stage")
        return ticket

    def _stage_everywhere(self, flow: CommitFlow) -> None:
        """With several servers the commit follows from their answers: it must not wait until the script waits."""
        try:
            flow.wait_until_staged(self._wait_seconds)
        except WaitTimeout:
            raise WaitTimeout(f"step {flow.clock} could not be staged: {self.why()}") from None

    def _come_back(self) -> None:
        """After a rest: where this worker stands from now on must be the same at every server."""
        if not self._is_active and self._is_bounded and len(self._endpoints) > 1:
            answers = self._wait_all([self._ask(e, AskPlace()) for e in self._endpoints.values()])
            self._back_at = max(answer.position for answer in answers if isinstance(answer, GivenPlace))

    def _lane(self, server: str, push: Push, sink: Sink | None) -> ServerLane:
        parts = [part for part in self._parts_to_send(server, push) if part.id not in self._sent]
        landing = self._landing(server, sink) if sink is not None else None
        message = self._stage_message(push, parts, landing, commit=len(self._names) == 1)
        buffers = [self._arenas.view(part, message.slot) for part in parts]
        return ServerLane(self._endpoints[server], message, buffers, landing, self._early[server])

    def _parts_to_send(self, server: str, push: Push) -> list[Slice]:
        """The slices whose bytes this server cannot read in place; the arena is there after this."""
        slot = self.slot
        key = (server, push.pushed, slot)
        if key not in self._unshared:
            touched = self.layout.slices_with(push.pushed)
            hosted = [part for part in self._hosted[server] if part.id in touched]
            for segment in {part.segment for part in hosted}:
                self._arenas.array(self.layout.segments[segment], slot)
            if len(self._unshared) >= _MOST_PLANS:
                self._unshared.clear()
            self._unshared[key] = [part for part in hosted if not self._is_shared(server, part)]
        return self._unshared[key]

    def _landing(self, server: str, sink: Sink) -> Landing:
        reader, hosted = self._readers[server], self._hosted[server]
        wanted = sink.wanted.get(server)
        if wanted is None or wanted.num_hosted != len(hosted):
            wanted = sink.wanted[server] = Wanted(hosted, sink, reader.maps)
        slot = self.slot if self._config.window else None
        return Landing(reader, wanted, sink, settled=self._in_rounds, slot=slot)

    def finish(self, flow: CommitFlow, lanes: Sequence[ServerLane], timeout_seconds: float | None) -> None:
        """Waits for a commit and lands its parameters."""
        self.times.lap("compute")
        began = time.monotonic()
        try:
            flow.wait(self._wait_seconds if timeout_seconds is None else timeout_seconds)
            self.times.lap("wait")
            for lane in lanes:
                lane.finish()
        except WaitTimeout:
            raise self._has_waited(flow, began) from None
        except ConnectionLost as error:
            raise self._explain(error) from None
        self.times.lap("pull")

    def wait_for(self, flow: CommitFlow, lanes: Sequence[ServerLane], slices: Collection[int]) -> bool:
        """Waits until these slices have landed; False when the whole commit is answered before that."""
        self.times.lap("compute")
        began = time.monotonic()
        wanted = [(lane, lane.landing, lane.landing.wants(slices)) for lane in lanes if lane.landing is not None]
        try:
            while not flow.is_over:
                missing = next((found for found in wanted if not found[1].has(found[2])), None)
                if missing is None:
                    return True
                left = began + self._wait_seconds - time.monotonic()
                if left < 0:
                    raise WaitTimeout
                self._await_lane(flow, *missing, left)
        except WaitTimeout:
            raise self._has_waited(flow, began) from None
        except ConnectionLost as error:
            raise self._explain(error) from None
        finally:
            self.times.lap("wait")
        return False

    @staticmethod
    def _await_lane(flow: CommitFlow, lane: ServerLane, landing: Landing, numbers: set[int], seconds: float) -> None:
        """Something more of this lane, or of the flow that it belongs to."""
        if lane.is_read_by_waiter:
            if lane.call is not None and not lane.call.is_done:
                lane.call.read(seconds)
            else:
                flow.go_on(seconds)
        elif not flow.done():  # looks at the lanes that nobody else reads
            landing.wait_for(numbers, min(seconds, _LOOK_SECONDS))

    def _has_waited(self, flow: CommitFlow, began: float) -> WaitTimeout:
        return WaitTimeout(f"step {flow.clock} has waited {time.monotonic() - began:.1f} s: {self.why()}")

    def forget(self, ticket: ServersTicket) -> None:
        """This ticket has landed: its slot may be used again."""
        if ticket in self._open:
            self._open.remove(ticket)

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

    def before_commit(self, action: Callable[[], None]) -> Callable[[], None]:
        self._before_commit.append(action)
        return lambda: self._before_commit.remove(action)

    def prefer(self, slices: Sequence[int]) -> None:
        self._wait_all([self._ask(e, Prefer(list(slices))) for e in self._endpoints.values()])

    def pull(self, slices: Sequence[Slice], sink: Sink, min_version: int | None) -> list[int]:
        self.make_room()  # what is read has this worker's own pushes, but for those in the window
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

    def mapped(self) -> list[Bytes]:
        return [array for reader in self._readers.values() for array in reader.mapped()]

    def read_state(self, slices: Sequence[Slice]) -> list[tuple[StateEntry, Bytes]]:
        try:
            return read_state(self._endpoints, slices, self._wait_seconds)
        except ConnectionLost as error:
            raise self._explain(error) from None

    def write_state(self, slices: Sequence[Slice], entries: Sequence[tuple[StateEntry, Bytes]]) -> None:
        try:
            write_state(self._endpoints, slices, entries, self._wait_seconds)
        except ConnectionLost as error:
            raise self._explain(error) from None

    # -- comings and goings -------------------------------------------------------------------------------

    def rest(self) -> None:
        self.settle()
        self.times.pause()
        self._stretch += self._rested
        self._rested, self._is_active = True, False
        self._wait_all([self._ask(e, Rest(self._stretch, False)) for e in self._endpoints.values()])
        self.times.resume()

    def step_aside(self) -> int:
        """No round waits for this worker until its next push; the stretch it was in."""
        self.settle()
        self.times.pause()
        self._is_active = False
        self._wait_all([self._ask(e, Rest(self._stretch, True)) for e in self._endpoints.values()])
        return self._stretch + self._rested

    def begin_stretch(self, stretch: int) -> None:
        """Behind a barrier everyone is in the same, new stretch."""
        self._stretch, self._rested, self._is_active = stretch, False, True
        self.times.resume()

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
