"""From one worker to one other: offered, taken, and known by both to be taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from syncline.core.collectives import (
    INLINE_BYTES,
    ITEM_BYTES,
    MAX_BYTES,
    MAX_DIMENSIONS,
    apart_in_pair,
    crossing_words,
    num_bytes,
)
from syncline.core.members import Member
from syncline.core.wire.collectives import Broken, Offer, Piece, Take, Taken, Withdraw
from syncline.core.wire.message import Message
from syncline.errors import CollectiveError, ConnectionLost, FrameError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, buffer_of
from syncline.worker.arrays import Bytes, dtype_of, is_torch
from syncline.worker.collectives.calls import Calls
from syncline.worker.collectives.groups import Group
from syncline.worker.collectives.hearing import CHUNK_BYTES
from syncline.worker.collectives.moving import make_room
from syncline.worker.collectives.streams import Inbox, Stream
from syncline.worker.collectives.tickets import Lane
from syncline.worker.collectives.values import Value, made, own_bytes, put, value_of
from syncline.worker.collectives.waiting import Gone, Waiting
from syncline.worker.peers import Way

#: One stands at a time, and some may have been given up.
_MOST_OFFERS = 16


class Pairs:
    """An ear for what is offered to this worker, and its own two verbs."""

    def __init__(self, calls: Calls, me: Member) -> None:
        self._calls, self._me = calls, me
        self._peers, self._meetings = calls.peers, calls.meetings
        self._change = self._peers.change
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._peers.ears.update(dict.fromkeys((Offer, Take, Piece, Taken, Withdraw), self))

    # -- sending ------------------------------------------------------------------------------------------

    def send(self, x: Any, to: int, group: Group | None, wait: bool) -> Any:
        value, member = value_of(x), self._member(to, group, "send")
        what = f"send to {member.name}"
        lane = self._lane("send", member)
        return self._calls.go(what, lambda is_script: self._send(value, member, what, is_script, wait), wait, lane)

    def _send(self, value: Value, member: Member, what: str, is_script: bool, waits: bool) -> None:
        with self._way(member, what, is_script) as (way, stream, waiting):
            with self._change:
                number, stream.num_offered = stream.num_offered, stream.num_offered + 1
            try:
                self._offer(way, value, number, waits)
                answer = self._answer(way, stream, waiting, number, is_script)
                if answer is None:
                    for start in range(0, len(value.data), CHUNK_BYTES):
                        part = buffer_of(value.data[start : start + CHUNK_BYTES])
                        way.send(Piece(number, start), [part], len(part))
                    answer = self._answer(way, stream, waiting, number, False)
                    assert answer is not None
            except BaseException:
                with contextlib.suppress(ConnectionLost):
                    way.send(Withdraw(number))
                self._calls.memories.forget(f"to {way.incarnation}")  # it may be read at this moment
                raise
        if answer.refused:
            raise CollectiveError(answer.refused)

    def _offer(self, way: Way, value: Value, number: int, waits: bool) -> None:
        attempt = self._meetings.heard.attempt
        with self._change:
            offer = Offer(
                number, value.dtype, value.shape, waits=waits, of_torch=value.of_torch,
                attempt=attempt.number, is_stranger=attempt.is_stranger(way.incarnation),
            )  # fmt: skip
        if len(value.data) <= INLINE_BYTES:
            way.send(offer, [buffer_of(value.data)] if len(value.data) else (), len(value.data))
            return
        if way.shares_memory:
            memories = self._calls.memories
            found = memories.find(value.data)
            if found is None:
                memory, data = memories.kept(f"to {way.incarnation}", len(value.data))
                data[...] = value.data
                found = (memory, 0)
            self._meetings.share(way, found[0])
            offer = msgspec.structs.replace(offer, memory=found[0], offset=found[1])
        way.send(offer)

    def _answer(self, way: Way, stream: Stream, waiting: Waiting, number: int, is_script: bool) -> Taken | None:
        """How the offer was taken; None: its bytes are wanted first."""

        def ready() -> tuple[Taken | None] | None:
            if number in stream.answers:
                return (stream.answers.pop(number),)
            if number in stream.wants:
                stream.wants.discard(number)
                return (None,)
            self._look_for_collectives(way, stream, waiting, is_script)
            return None

        return waiting.until(way, ready)[0]

    # -- receiving ----------------------------------------------------------------------------------------

    def recv(self, source: int, out: Any, group: Group | None, wait: bool) -> Any:
        member = self._member(source, group, "recv")
        what = f"recv from {member.name}"
        lane = self._lane("recv", member)
        return self._calls.go(what, lambda is_script: self._recv(out, member, what, is_script), wait, lane)

    def _recv(self, out: Any, member: Member, what: str, is_script: bool) -> Any:
        with self._way(member, what, is_script) as (way, stream, waiting):

            def ready() -> tuple[Offer, Sequence[Buffer]] | None:
                while stream.offers:
                    offer, payload = stream.offers.popleft()
                    attempt = self._meetings.heard.attempt
                    if offer.attempt >= attempt.number or attempt.is_stranger(way.incarnation):
                        return offer, payload
                    _refuse(way, offer, f"{self._me.name} has restarted since {way.name} called send")
                self._look_for_collectives(way, stream, waiting, is_script)
                return None

            offer, payload = waiting.until(way, ready)
            try:
                reason = self._misfit(offer, out, way)
                if reason:
                    raise CollectiveError(reason)
                data = self._bytes(way, stream, waiting, offer, payload, out)
            except BaseException as error:
                _refuse(way, offer, f"{error}" or type(error).__name__)
                raise
            way.send(Taken(offer.number))
        if out is not None:
            return put(out, data, "recv")
        return made(data, offer.dtype, offer.shape, None, of_torch=offer.of_torch)

    def _misfit(self, offer: Offer, out: Any, way: Way) -> str:
        with self._change:
            attempt = self._meetings.heard.attempt
            if offer.is_stranger:
                return apart_in_pair(self._me.name, way.name)
            if offer.attempt > attempt.number or attempt.is_stranger(way.incarnation):
                return apart_in_pair(way.name, self._me.name)
        if out is None:
            return ""
        found = (dtype_of(out), tuple(out.shape)) if is_torch(out) or isinstance(out, np.ndarray) else ("", ())
        if found == (offer.dtype, offer.shape):
            return ""
        return (
            f"{way.name} sends {offer.dtype}{list(offer.shape)}, {self._me.name} receives it into "
            f"{found[0]}{list(found[1])}"
        )

    def _bytes(
        self, way: Way, stream: Stream, waiting: Waiting, offer: Offer, payload: Sequence[Buffer], out: Any
    ) -> Bytes:
        size = num_bytes(offer.dtype, offer.shape)
        if size <= INLINE_BYTES:
            return np.frombuffer(payload[0], np.uint8) if payload else np.empty(0, np.uint8)
        own = own_bytes(out) if out is not None else None
        data = make_room(size) if own is None else own
        if offer.memory:
            memory = stream.memories.get(offer.memory)
            if memory is None or offer.offset + size > len(memory.array):
                way.close(f"{way.name} has offered memory that it has not shared")
                raise Gone(way, "it has offered memory that it has not shared")
            data[...] = memory.array[offer.offset : offer.offset + size]
            return data
        inbox = Inbox(offer.number, data)
        with self._change:
            stream.inbox = inbox
        try:
            way.send(Take(offer.number))
            waiting.until(way, lambda: True if inbox.count == size else None)
        finally:
            with self._change:
                stream.inbox = None
        return data

    # -- both ---------------------------------------------------------------------------------------------

    def _member(self, rank: int, group: Group | None, verb: str) -> Member:
        world = self._calls.world
        members = {member.incarnation: member for member in world.members(group)[0]}
        found = members[world.root(rank, list(members), verb)]
        if found.incarnation == self._me.incarnation:
            raise CollectiveError(f"{verb}: rank {rank} is {self._me.name} itself")
        return found

    def _lane(self, verb: str, member: Member) -> Lane:
        key = (verb, member.incarnation)
        if key not in self._lanes:
            self._lanes[key] = Lane(f"{verb} {member.name}")
        return self._lanes[key]

    @contextlib.contextmanager
    def _way(self, member: Member, what: str, is_script: bool) -> Iterator[tuple[Way, Stream, Waiting]]:
        waiting = self._calls.waiting(what, is_script=is_script)
        try:
            way = self._meetings.wait_for_way(member, waiting)
            waiting.begin([way])
            yield way, self._meetings.heard.stream(way), waiting
        except (Gone, ConnectionLost) as gone:
            reason = gone.reason if isinstance(gone, Gone) else str(gone)
            raise CollectiveError(f"{member.name} is gone while {what} was under way: {reason}") from None
        except _Crossing as crossing:
            self._meetings.tell_broken(crossing.broken)
            raise CollectiveError(str(crossing)) from None
        finally:
            waiting.end()
            with self._change:
                self._meetings.heard.attempt.end(self._calls.there)

    def _look_for_collectives(self, way: Way, stream: Stream, waiting: Waiting, is_script: bool) -> None:
        """Under the lock: a script that waits in a collective for this one will neither take nor send anything."""
        heard = self._meetings.heard
        while stream.said and heard.is_over(stream.said[0][0].key):
            stream.said.popleft()
        if not (is_script and stream.said and stream.said[0][0].waits and self._calls.lane.is_idle):
            return
        said = stream.said[0][0]
        heard.skip(*said.key)
        raise _Crossing(*said.key, crossing_words(self._me.name, waiting.what, way.name, said))

    def settle(self) -> None:
        for lane in list(self._lanes.values()):
            lane.settle()

    def close(self) -> None:
        for lane in list(self._lanes.values()):
            lane.close()

    # -- what ways call -----------------------------------------------------------------------------------

    def landing(self, way: Way, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        if isinstance(message, Offer):
            if payload_bytes != self._inline_bytes(message):
                raise FrameError(f"{payload_bytes} bytes with an offer of other sizes")
            return [memoryview(bytearray(payload_bytes))]
        if isinstance(message, Piece) and 0 < payload_bytes <= CHUNK_BYTES:
            with self._change:
                inbox = self._meetings.heard.stream(way).inbox
            if inbox is None or inbox.number != message.number:
                return [memoryview(bytearray(payload_bytes))]  # of an offer that this worker has given up
            if message.offset != inbox.count or message.offset + payload_bytes > len(inbox.data):
                raise FrameError(
                    f"{payload_bytes} bytes at {message.offset}, of {len(inbox.data)} from {inbox.count} on"
                )
            return [buffer_of(inbox.data[message.offset : message.offset + payload_bytes])]
        raise FrameError(f"{type(message).__name__} with {payload_bytes} bytes")

    @staticmethod
    def _inline_bytes(offer: Offer) -> int:
        if (
            offer.dtype not in ITEM_BYTES
            or len(offer.shape) > MAX_DIMENSIONS
            or min((*offer.shape, offer.offset)) < 0
        ):
            raise FrameError(f"an offer of {offer.dtype[:20]!r} that cannot be")
        size = num_bytes(offer.dtype, offer.shape)
        if size > MAX_BYTES:
            raise FrameError(f"an offer of {size} bytes")
        return size if size <= INLINE_BYTES else 0

    def hear(self, way: Way, request: Request) -> None:
        message, stream = request.message, self._meetings.heard.stream(way)
        with self._change:
            if isinstance(message, Offer):
                if not request.payload and self._inline_bytes(message):
                    raise FrameError("an offer without its bytes")
                if len(stream.offers) >= _MOST_OFFERS:
                    raise FrameError("too many offers at once")
                stream.offers.append((message, request.payload))
            elif isinstance(message, Take):
                stream.wants.add(message.number)
            elif isinstance(message, Taken):
                stream.answers[message.number] = message
            elif isinstance(message, Withdraw):
                kept = [one for one in stream.offers if one[0].number != message.number]
                stream.offers.clear()
                stream.offers.extend(kept)
            elif isinstance(message, Piece) and stream.inbox is not None and stream.inbox.number == message.number:
                stream.inbox.count += sum(map(len, request.payload))
            self._change.notify_all()


def _refuse(way: Way, offer: Offer, reason: str) -> None:
    with contextlib.suppress(ConnectionLost):
        way.send(Taken(offer.number, reason))


class _Crossing(Exception):
    """One is in `send` or `recv`, the other in a collective: both end."""

    def __init__(self, group: tuple[int, ...], number: int, reason: str) -> None:
        super().__init__(reason)
        self.broken = Broken(group, number, reason)
