"""Sends a commit: the message and bytes for each server, and the target of its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from syncline.config import JobConfig
from syncline.core.codecs.named import codecs_of
from syncline.core.codecs.pieces import Encoded, coder_of
from syncline.core.layout import Ranges, Slice
from syncline.core.policy import policy_of
from syncline.core.wire.traffic import Stage
from syncline.errors import ConnectionLost
from syncline.extensions import load
from syncline.net.rpc import Call, Stamp
from syncline.net.transport import Buffer, buffer_of
from syncline.stats import PushBytes
from syncline.worker.exchange.commit import CommitFlow, Push, ServerCommit, ServersTicket
from syncline.worker.exchange.receiver import CommitReceiver, EncodedAnswer
from syncline.worker.exchange.residuals import encoder_of
from syncline.worker.exchange.routes import ServerRoutes
from syncline.worker.exchange.targets import Target, WantedSlices
from syncline.worker.exchange.values import SliceCopies

_MOST_PLANS = 64  # cached plans


class CommitSender:
    """Sends tickets and resends them. Bytes that were sent early are not sent twice."""

    def __init__(self, routes: ServerRoutes, copies: SliceCopies, stamp: Stamp, config: JobConfig) -> None:
        policy, codecs = policy_of(config), codecs_of(config, load)
        self._routes, self._copies, self._stamp = routes, copies, stamp
        self._stands_still, self._has_spare, self._in_rounds = policy.stands_still, policy.has_spare, policy.in_rounds
        self._weighs = policy.in_rounds or policy.weighs
        self._has_window, self._is_ring = config.window > 0, config.exchange == "ring"
        self.encoder = encoder_of(codecs, routes.layout, checks_finite=config.check_finite, forget_staged=self.forget)
        self._decoder = coder_of(codecs.pull, codecs)
        self._early: dict[str, list[Call]] = {}
        self._sent: set[tuple[str, int]] = set()  # server, slice
        self._told: set[int] = set()  # slices that servers may be summing for the next commit
        self._stale: set[int] = set()  # announced more than once, or to other servers
        self._unshared: dict[tuple[str, Ranges, int], tuple[list[Slice], int]] = {}
        self._socket_bytes = self._shared_bytes = 0

    @property
    def pushed(self) -> PushBytes:
        return PushBytes(socket=self._socket_bytes, shared=self._shared_bytes)

    @property
    def num_early_slices(self) -> int:
        """Slices of the next commit that are on their way already, counted for each server that they go to."""
        return len(self._sent)

    # -- early --------------------------------------------------------------------------------------------

    def stage(self, draft: ServersTicket, slices: Sequence[Slice]) -> None:
        """Sends slices early over sockets. With early sums, also announces slices in shared memory."""
        routes, known = self._routes, dict[int, Encoded | None]()
        sums_early = routes.sums_early and self.encoder is None
        if sums_early:
            self._stale.update(part.id for part in slices if part.id in self._told)
            self._told.update(part.id for part in slices)
        for server, endpoint in routes.endpoints.items():
            taken = [(self._is_shared(server, p, draft.slot), p) for p in slices if routes.takes(server, p)]
            parts = [part for is_shared, part in taken if not is_shared]
            ready = [part.id for is_shared, part in taken if is_shared and sums_early]
            if not (parts or ready):
                continue
            carried = self._load(parts, self._encode(parts, draft.slot, None, known), draft.slot)
            message, buffers = _stage_message(draft, parts, None, carried, commit=False, ready=ready), carried.buffers
            num_bytes = sum(map(len, buffers))
            try:
                call = endpoint.call(message, buffers=buffers, payload_bytes=num_bytes)
            except ConnectionLost:
                return  # the commit handles it and sends everything again
            self._socket_bytes += num_bytes
            self._early.setdefault(server, []).append(call)
            while call.is_read_by_waiter and not call.is_done and call.read(0.0):
                pass  # unread answers would fill the socket
            self._sent.update((server, part.id) for part in parts)

    def _is_shared(self, server: str, part: Slice, slot: int) -> bool:
        device_channel = self._routes.device_channel
        is_handed = device_channel is not None and part.segment in device_channel.segments
        return is_handed or self._routes.arenas.is_shared(server, part.segment, slot)

    # -- encoding -----------------------------------------------------------------------------------------

    def _encode(
        self, parts: Sequence[Slice], slot: int, pushed: Ranges | None, known: dict[int, Encoded | None]
    ) -> list[Encoded | None]:
        """`known`: encodings made for another server."""
        if self.encoder is None:
            return [None] * len(parts)
        for part in parts:
            if part.id not in known:
                data = self._routes.arenas.bytes_of(part, slot)
                known[part.id] = self.encoder.encode(part, data, pushed)
        return [known[part.id] for part in parts]

    def _load(self, parts: Sequence[Slice], encoded: Sequence[Encoded | None], slot: int) -> _Load:
        """The payload of these slices, encoded or not."""
        arenas, buffers = self._routes.arenas, list[Buffer]()
        for part, found in zip(parts, encoded, strict=True):
            buffers += [arenas.view(part, slot)] if found is None else map(buffer_of, found.buffers)
        if self.encoder is None or all(found is None for found in encoded):
            return _Load(buffers, "", [])
        return _Load(buffers, self.encoder.coder.codec.name, [f.sizes if f is not None else [] for f in encoded])

    def lie_decoded(self, ticket: ServersTicket) -> None:
        """Writes decoded values to the arena for servers that read it: of spread slices, or of a replay."""
        assert self.encoder is not None
        routes, layout, arenas = self._routes, self._routes.layout, self._routes.arenas
        for part in [part for part in layout.slices() if part.id in ticket.encoded]:
            near = [name for name in routes.names if arenas.is_shared(name, part.segment, ticket.slot)]
            if any(routes.takes(name, part) for name in near):
                data, coder = arenas.bytes_of(part, ticket.slot), self.encoder.coder
                coder.decode(layout.segments[part.segment], part, ticket.encoded[part.id], data)

    # -- at the commit ------------------------------------------------------------------------------------

    def send(self, ticket: ServersTicket, before: ServersTicket | None) -> CommitFlow:
        """`before`: the open ticket of the previous clock, which must be committed first."""
        names, known = self._routes.names, dict[int, Encoded | None](ticket.encoded)
        if not ticket.generation and (self._sent or self._told or self._stale):
            self._go_by(ticket)
        at_once = len(names) == 1 or self._is_ring
        ticket.server_commits = server_commits = [
            self._server_commit(server, ticket, at_once, known) for server in names
        ]
        earlier = before.flow if before is not None else None
        decider = self._decider(server_commits) if self._has_spare else None
        ticket.flow = flow = CommitFlow(
            ticket.clock, server_commits, earlier, ticket.flow.squared_norm, decider, at_once
        )
        if self.encoder is not None and not ticket.generation:
            ticket.encoded = self.encoder.commit(self._counted(ticket.push))
        if ticket.encoded:
            self.lie_decoded(ticket)
        ticket.generation = self._stamp.generation
        if self._sent or self._early:
            self._early, self._sent = {}, set()
        flow.start()
        return flow

    def _go_by(self, ticket: ServersTicket) -> None:
        """Keeps early slices that the push confirms; all others are sent again."""
        same = ticket.push.as_staged
        for number in {number for _, number in self._sent} - same:
            self._sent = {sent for sent in self._sent if sent[1] != number}
            if self.encoder is not None:
                self.encoder.forget(number)
        ticket.is_early, ticket.is_edited = bool(self._told), bool((self._told - same) | self._stale)
        self._told, self._stale = set(), set()

    def _counted(self, push: Push) -> Ranges:
        """The parameters that a push contains."""
        return push.pushed if not push.skip and (push.weight > 0 or not self._weighs) else ()

    def has_landed(self, ticket: ServersTicket) -> None:
        """The commit is answered. If it did not count (late, or an overflow elsewhere), restores its residuals."""
        if self.encoder is None:
            return
        answers = [
            server_commit.answer for server_commit in ticket.server_commits if server_commit.answer is not None
        ]
        if any(answer.late or answer.skipped for answer in answers):
            self.encoder.take_back(ticket.encoded)

    def _decider(self, server_commits: Sequence[ServerCommit]) -> ServerCommit | None:
        """With several servers: the one that decides round membership, the primary of slice 0."""
        server = self._routes.primaries.get(0)
        return (
            next((server_commit for server_commit in server_commits if server_commit.server == server), None)
            if len(server_commits) > 1
            else None
        )

    def forget(self) -> None:
        """Servers or slices have changed: forgets what was staged and cached."""
        self._early, self._sent = {}, set()
        self._stale |= self._told
        self._unshared.clear()
        if self.encoder is not None:
            self.encoder.forget()

    def _server_commit(
        self, server: str, ticket: ServersTicket, at_once: bool, known: dict[int, Encoded | None]
    ) -> ServerCommit:
        parts, shared_bytes = self._parts_to_send(server, ticket.push, ticket.slot)
        if not ticket.generation:  # else it is replayed from the same memory
            self._shared_bytes += shared_bytes
        if self._sent:
            parts = [part for part in parts if (server, part.id) not in self._sent]
        receiver = self._receiver(server, ticket.target, ticket.slot) if ticket.target is not None else None
        number = len(self._routes.layout.segments)
        if not parts:
            carried = _NO_LOAD
        elif ticket.generation:  # as it was sent before
            carried = self._load(parts, [ticket.encoded.get(part.id) for part in parts], ticket.slot)
        else:
            encoded = self._encode(parts, ticket.slot, ticket.push.pushed, known)
            carried = self._load(parts, encoded, ticket.slot)
        message = _stage_message(ticket, parts, receiver, carried, commit=at_once, num_segments=number)
        self._socket_bytes += sum(map(len, carried.buffers))
        endpoint = self._routes.endpoints[server]
        return ServerCommit(server, endpoint, message, carried.buffers, receiver, self._early.get(server, ()))

    def _parts_to_send(self, server: str, push: Push, slot: int) -> tuple[list[Slice], int]:
        """The slices that this server cannot read in place, and the bytes that it can. Creates the arena."""
        key = (server, push.pushed, slot)
        found = self._unshared.get(key)
        if found is None:
            layout, arenas = self._routes.layout, self._routes.arenas
            touched = layout.slices_with(push.pushed)
            handed = self._routes.device_channel.segments if self._routes.device_channel is not None else ()
            hosted = [p for p in self._routes.taken[server] if p.id in touched and p.segment not in handed]
            for segment in {part.segment for part in hosted}:
                arenas.array(layout.segments[segment], slot)
            if len(self._unshared) >= _MOST_PLANS:
                self._unshared.clear()
            parts = [part for part in hosted if not arenas.is_shared(server, part.segment, slot)]
            num_bytes = sum(part.num_bytes for part in hosted) - sum(part.num_bytes for part in parts)
            found = self._unshared[key] = (parts, num_bytes)
        return found

    def _receiver(self, server: str, target: Target, slot: int) -> CommitReceiver:
        reader, hosted = self._routes.readers[server], self._routes.read[server]
        wanted = target.wanted.get(server)
        if wanted is None or wanted.hosted is not hosted:
            wanted = self._want(server, hosted, target, lambda part: target.fetches(part) or reader.maps(part))
        slot_of_window = slot if self._has_window else None
        incoming = EncodedAnswer(self._decoder, self._routes.layout) if self._decoder is not None else None
        return CommitReceiver(
            reader, wanted, target, settled=self._stands_still, slot=slot_of_window, incoming=incoming,
            device_channel=self._routes.device_channel, arena_slot=slot,
        )  # fmt: skip

    def _want(
        self, server: str, hosted: Sequence[Slice], target: Target, maps: Callable[[Slice], bool]
    ) -> WantedSlices:
        before = target.wanted.get(server)
        if before is not None:
            for number, found in before.landed().items():
                target.kept.setdefault(number, found)
        self._copies.landed_in(target)
        wanted = target.wanted[server] = WantedSlices(hosted, target, maps)
        return wanted


class _Load(NamedTuple):
    """The payload of a message and its description."""

    buffers: list[Buffer]
    codec: str
    sizes: list[list[int]]


_NO_LOAD = _Load([], "", [])


def _stage_message(
    ticket: ServersTicket,
    parts: Sequence[Slice],
    receiver: CommitReceiver | None,
    carried: _Load,
    *,
    commit: bool,
    num_segments: int = 0,
    ready: Sequence[int] = (),
) -> Stage:
    push = ticket.push
    return Stage(
        clock=ticket.clock,
        phase=ticket.phase,
        slot=ticket.slot,
        pushed=push.pushed,
        weight=push.weight,
        nominal=push.nominal,
        squared_norm=push.squared_norm,
        skip=push.skip,
        clip_norm=push.clip_norm,
        overrides=[(segment, group, dict(options)) for segment, group, options in push.overrides],
        back_at=ticket.back_at,
        slices=[part.id for part in parts],
        commit=commit,
        pull=receiver.pull if commit and receiver is not None else [],
        parts=commit and receiver is not None and receiver.in_parts,
        acks=ticket.acks,
        num_segments=num_segments,
        codec=carried.codec,
        sizes=carried.sizes,
        ready=list(ready),
        edited=ticket.is_edited,
        early=ticket.is_early,
        reads=receiver is not None,
    )
