"""How a commit is put on its way: what each server is told, which bytes it must be sent, where its answer lands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from syncline.client.commit import CommitFlow
from syncline.client.copies import Copies
from syncline.client.exchange import Push
from syncline.client.landing import Landing
from syncline.client.lane import ServerLane
from syncline.client.placement import Placement
from syncline.client.sinks import Sink, Wanted
from syncline.client.ticket import ServersTicket
from syncline.core.layout import Ranges, Slice
from syncline.core.policy import Policy
from syncline.core.traffic import Stage
from syncline.errors import ConnectionLost
from syncline.net.rpc import Call, Stamp
from syncline.stats import PushBytes

_MOST_PLANS = 64  # what is worked out once for a push or a sink and kept


class Sending:
    """Puts tickets on their way, the first time and again. Bytes that were sent early need not go twice."""

    def __init__(
        self, placement: Placement, copies: Copies, stamp: Stamp, policy: Policy, *, has_window: bool
    ) -> None:
        self._placement, self._copies, self._stamp = placement, copies, stamp
        self._stands_still, self._has_spare, self._has_window = policy.stands_still, policy.spare > 0, has_window
        self._early: dict[str, list[Call]] = {}
        self._sent: set[int] = set()
        self._unshared: dict[tuple[str, Ranges, int], tuple[list[Slice], int]] = {}
        self._socket_bytes = self._shared_bytes = 0

    @property
    def pushed(self) -> PushBytes:
        return PushBytes(socket=self._socket_bytes, shared=self._shared_bytes)

    # -- early --------------------------------------------------------------------------------------------

    def stage(self, draft: ServersTicket, slices: Sequence[Slice]) -> None:
        """Sends slices early where a socket carries them; shared memory is read at the commit anyway."""
        primaries, arenas = self._placement.primaries, self._placement.arenas
        for server, endpoint in self._placement.endpoints.items():
            parts = [
                p for p in slices if primaries[p.id] == server and not arenas.is_shared(server, p.segment, draft.slot)
            ]
            if not parts:
                continue
            buffers = [arenas.view(part, draft.slot) for part in parts]
            message = _stage_message(draft, parts, None, commit=False)
            num_bytes = sum(map(len, buffers))
            try:
                call = endpoint.call(message, buffers=buffers, payload_bytes=num_bytes)
            except ConnectionLost:
                return  # seen to at the commit, which sends everything again
            self._socket_bytes += num_bytes
            self._early.setdefault(server, []).append(call)
            self._sent.update(part.id for part in parts)

    def restage(self, part: Slice) -> None:
        """This slice of the arena has changed since it was staged."""
        self._sent.discard(part.id)

    # -- at the commit ------------------------------------------------------------------------------------

    def send(self, ticket: ServersTicket, before: ServersTicket | None) -> CommitFlow:
        """`before`: the open ticket of the clock before, which is told to count first."""
        names = self._placement.names
        ticket.lanes = lanes = [self._lane(server, ticket, len(names) == 1) for server in names]
        earlier = before.flow if before is not None else None
        decider = self._decider(lanes) if self._has_spare else None
        ticket.flow = flow = CommitFlow(ticket.clock, lanes, earlier, ticket.flow.squared_norm, decider)
        ticket.generation = self._stamp.generation
        if self._sent or self._early:
            self._early, self._sent = {}, set()
        flow.start()
        return flow

    def _decider(self, lanes: Sequence[ServerLane]) -> ServerLane | None:
        """With several servers: the lane of the one that decides who is in a round, the primary of slice 0."""
        server = self._placement.primaries.get(0)
        return next((lane for lane in lanes if lane.server == server), None) if len(lanes) > 1 else None

    def forget(self) -> None:
        """Servers or slices have changed: nothing is staged anywhere, and nothing is known of who reads what."""
        self._early, self._sent = {}, set()
        self._unshared.clear()

    def _lane(self, server: str, ticket: ServersTicket, alone: bool) -> ServerLane:
        parts, shared_bytes = self._parts_to_send(server, ticket.push, ticket.slot)
        if not ticket.generation:  # else it is made anew, out of the same memory
            self._shared_bytes += shared_bytes
        if self._sent:
            parts = [part for part in parts if part.id not in self._sent]
        landing = self._landing(server, ticket.sink, ticket.slot) if ticket.sink is not None else None
        number = len(self._placement.layout.segments)
        message = _stage_message(ticket, parts, landing, commit=alone, num_segments=number)
        buffers = [self._placement.arenas.view(part, ticket.slot) for part in parts]
        self._socket_bytes += sum(map(len, buffers))
        endpoint = self._placement.endpoints[server]
        return ServerLane(server, endpoint, message, buffers, landing, self._early.get(server, ()))

    def _parts_to_send(self, server: str, push: Push, slot: int) -> tuple[list[Slice], int]:
        """The slices whose bytes this server cannot read in place, and the bytes that it can; the arena is there
        after this."""
        key = (server, push.pushed, slot)
        found = self._unshared.get(key)
        if found is None:
            layout, arenas = self._placement.layout, self._placement.arenas
            touched = layout.slices_with(push.pushed)
            hosted = [part for part in self._placement.hosted[server] if part.id in touched]
            for segment in {part.segment for part in hosted}:
                arenas.array(layout.segments[segment], slot)
            if len(self._unshared) >= _MOST_PLANS:
                self._unshared.clear()
            parts = [part for part in hosted if not arenas.is_shared(server, part.segment, slot)]
            num_bytes = sum(part.num_bytes for part in hosted) - sum(part.num_bytes for part in parts)
            found = self._unshared[key] = (parts, num_bytes)
        return found

    def _landing(self, server: str, sink: Sink, slot: int) -> Landing:
        reader, hosted = self._placement.readers[server], self._placement.hosted[server]
        wanted = sink.wanted.get(server)
        if wanted is None or wanted.hosted is not hosted:
            wanted = self._want(server, hosted, sink, reader.maps)
        return Landing(reader, wanted, sink, settled=self._stands_still, slot=slot if self._has_window else None)

    def _want(self, server: str, hosted: Sequence[Slice], sink: Sink, maps: Callable[[Slice], bool]) -> Wanted:
        before = sink.wanted.get(server)
        if before is not None:
            for number, found in before.landed().items():
                sink.kept.setdefault(number, found)
        self._copies.landed_in(sink)
        wanted = sink.wanted[server] = Wanted(hosted, sink, maps)
        return wanted


def _stage_message(
    ticket: ServersTicket, parts: Sequence[Slice], landing: Landing | None, *, commit: bool, num_segments: int = 0
) -> Stage:
    push = ticket.push
    return Stage(
        clock=ticket.clock,
        stretch=ticket.stretch,
        slot=ticket.slot,
        pushed=push.pushed,
        weight=push.weight,
        skip=push.skip,
        clip_norm=push.clip_norm,
        overrides=[(segment, group, dict(options)) for segment, group, options in push.overrides],
        back_at=ticket.back_at,
        slices=[part.id for part in parts],
        commit=commit,
        pull=landing.pull if commit and landing is not None else [],
        parts=commit and landing is not None and landing.in_parts,
        uses=ticket.uses,
        num_segments=num_segments,
    )
