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
from syncline.core.wire.collectives import Broken, Offer, Take, Taken, TensorPiece, Withdraw
from syncline.core.wire.message import Message
from syncline.errors import CollectiveError, ConnectionLost, FrameError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, buffer_of
from syncline.worker.arrays import Bytes, dtype_of, is_torch
from syncline.worker.collectives.calls import Calls, TicketQueue
from syncline.worker.collectives.groups import Group
from syncline.worker.collectives.incoming import CHUNK_BYTES, PeerGone, PeerWait
from syncline.worker.collectives.peers import Inbox, PeerLink, PeerStream
from syncline.worker.collectives.transfer import make_room
from syncline.worker.collectives.values import Value, made, own_bytes, put, value_of

#: One stands at a time, and some may have been given up.
_MOST_OFFERS = 16


class Pairs:
    """`send` and `recv`: handles what is offered to this worker, and makes its own offers."""

    def __init__(self, calls: Calls, me: Member) -> None:
        self._calls, self._me = calls, me
        self._peers, self._rendezvous = calls.peers, calls.rendezvous
        self._change = self._peers.change
        self._queues: dict[tuple[str, int], TicketQueue] = {}
        self._peers.handlers.update(dict.fromkeys((Offer, Take, TensorPiece, Taken, Withdraw), self))

    # -- sending ------------------------------------------------------------------------------------------

    def send(self, x: Any, to: int, group: Group | None, wait: bool) -> Any:
        value, member = value_of(x), self._member(to, group, "send")
        what = f"send to {member.name}"
        queue = self._queue("send", member)
        return self._calls.go(what, lambda is_script: self._send(value, member, what, is_script, wait), wait, queue)

    def _send(self, value: Value, member: Member, what: str, is_script: bool, waits: bool) -> None:
        with self._link(member, what, is_script) as (link, stream, waiting):
            with self._change:
                number, stream.num_offered = stream.num_offered, stream.num_offered + 1
            try:
                self._offer(link, value, number, waits)
                answer = self._answer(link, stream, waiting, number, is_script)
                if answer is None:
                    for start in range(0, len(value.data), CHUNK_BYTES):
                        part = buffer_of(value.data[start : start + CHUNK_BYTES])
                        link.send(TensorPiece(number, start), [part], len(part))
                    answer = self._answer(link, stream, waiting, number, False)
                    assert answer is not None
            except BaseException:
                with contextlib.suppress(ConnectionLost):
                    link.send(Withdraw(number))
                self._calls.memories.forget(f"to {link.incarnation}")  # it may be read at this moment
                raise
        if answer.refused:
            raise CollectiveError(answer.refused)

    def _offer(self, link: PeerLink, value: Value, number: int, waits: bool) -> None:
        attempt = self._rendezvous.heard.attempt
        with self._change:
            offer = Offer(
                number, value.dtype, value.shape, waits=waits, of_torch=value.of_torch,
                attempt=attempt.number, is_stranger=attempt.is_stranger(link.incarnation),
            )  # fmt: skip
        if len(value.data) <= INLINE_BYTES:
            link.send(offer, [buffer_of(value.data)] if len(value.data) else (), len(value.data))
            return
        if link.shares_memory:
            memories = self._calls.memories
            found = memories.find(value.data)
            if found is None:
                memory, data = memories.kept(f"to {link.incarnation}", len(value.data))
                data[...] = value.data
                found = (memory, 0)
            self._rendezvous.share(link, found[0])
            offer = msgspec.structs.replace(offer, memory=found[0], offset=found[1])
        link.send(offer)

    def _answer(
        self, link: PeerLink, stream: PeerStream, waiting: PeerWait, number: int, is_script: bool
    ) -> Taken | None:
        """How the offer was taken; None: its bytes are wanted first."""

        def ready() -> tuple[Taken | None] | None:
            if number in stream.answers:
                return (stream.answers.pop(number),)
            if number in stream.wants:
                stream.wants.discard(number)
                return (None,)
            self._look_for_collectives(link, stream, waiting, is_script)
            return None

        return waiting.until(link, ready)[0]

    # -- receiving ----------------------------------------------------------------------------------------

    def recv(self, source: int, out: Any, group: Group | None, wait: bool) -> Any:
        member = self._member(source, group, "recv")
        what = f"recv from {member.name}"
        queue = self._queue("recv", member)
        return self._calls.go(what, lambda is_script: self._recv(out, member, what, is_script), wait, queue)

    def _recv(self, out: Any, member: Member, what: str, is_script: bool) -> Any:
        with self._link(member, what, is_script) as (link, stream, waiting):

            def ready() -> tuple[Offer, Sequence[Buffer]] | None:
                while stream.offers:
                    offer, payload = stream.offers.popleft()
                    attempt = self._rendezvous.heard.attempt
                    if offer.attempt >= attempt.number or attempt.is_stranger(link.incarnation):
                        return offer, payload
                    _refuse(link, offer, f"{self._me.name} has restarted since {link.name} called send")
                self._look_for_collectives(link, stream, waiting, is_script)
                return None

            offer, payload = waiting.until(link, ready)
            try:
                reason = self._misfit(offer, out, link)
                if reason:
                    raise CollectiveError(reason)
                data = self._bytes(link, stream, waiting, offer, payload, out)
            except BaseException as error:
                _refuse(link, offer, f"{error}" or type(error).__name__)
                raise
            link.send(Taken(offer.number))
        if out is not None:
            return put(out, data, "recv")
        return made(data, offer.dtype, offer.shape, None, of_torch=offer.of_torch)

    def _misfit(self, offer: Offer, out: Any, link: PeerLink) -> str:
        with self._change:
            attempt = self._rendezvous.heard.attempt
            if offer.is_stranger:
                return apart_in_pair(self._me.name, link.name)
            if offer.attempt > attempt.number or attempt.is_stranger(link.incarnation):
                return apart_in_pair(link.name, self._me.name)
        if out is None:
            return ""
        found = (dtype_of(out), tuple(out.shape)) if is_torch(out) or isinstance(out, np.ndarray) else ("", ())
        if found == (offer.dtype, offer.shape):
            return ""
        return (
            f"{link.name} sends {offer.dtype}{list(offer.shape)}, {self._me.name} receives it into "
            f"{found[0]}{list(found[1])}"
        )

    def _bytes(
        self, link: PeerLink, stream: PeerStream, waiting: PeerWait, offer: Offer, payload: Sequence[Buffer], out: Any
    ) -> Bytes:
        size = num_bytes(offer.dtype, offer.shape)
        if size <= INLINE_BYTES:
            return np.frombuffer(payload[0], np.uint8) if payload else np.empty(0, np.uint8)
        own = own_bytes(out) if out is not None else None
        data = make_room(size) if own is None else own
        if offer.memory:
            memory = stream.memories.get(offer.memory)
            if memory is None or offer.offset + size > len(memory.array):
                link.close(f"{link.name} has offered memory that it has not shared")
                raise PeerGone(link, "it has offered memory that it has not shared")
            data[...] = memory.array[offer.offset : offer.offset + size]
            return data
        inbox = Inbox(offer.number, data)
        with self._change:
            stream.inbox = inbox
        try:
            link.send(Take(offer.number))
            waiting.until(link, lambda: True if inbox.count == size else None)
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

    def _queue(self, verb: str, member: Member) -> TicketQueue:
        key = (verb, member.incarnation)
        if key not in self._queues:
            self._queues[key] = TicketQueue(f"{verb} {member.name}")
        return self._queues[key]

    @contextlib.contextmanager
    def _link(self, member: Member, what: str, is_script: bool) -> Iterator[tuple[PeerLink, PeerStream, PeerWait]]:
        waiting = self._calls.waiting(what, is_script=is_script)
        try:
            link = self._rendezvous.wait_for_link(member, waiting)
            waiting.begin([link])
            yield link, self._rendezvous.heard.stream(link), waiting
        except (PeerGone, ConnectionLost) as gone:
            reason = gone.reason if isinstance(gone, PeerGone) else str(gone)
            raise CollectiveError(f"{member.name} is gone while {what} was under way: {reason}") from None
        except _CrossedVerbs as crossing:
            self._rendezvous.tell_broken(crossing.broken)
            raise CollectiveError(str(crossing)) from None
        finally:
            waiting.end()
            with self._change:
                self._rendezvous.heard.attempt.end(self._calls.there)

    def _look_for_collectives(self, link: PeerLink, stream: PeerStream, waiting: PeerWait, is_script: bool) -> None:
        """Under the lock: a script that waits in a collective for this one will neither take nor send anything."""
        heard = self._rendezvous.heard
        while stream.said and heard.is_over(stream.said[0][0].key):
            stream.said.popleft()
        if not (is_script and stream.said and stream.said[0][0].waits and self._calls.queue.is_idle):
            return
        said = stream.said[0][0]
        heard.skip(*said.key)
        raise _CrossedVerbs(*said.key, crossing_words(self._me.name, waiting.what, link.name, said))

    def settle(self) -> None:
        for queue in list(self._queues.values()):
            queue.settle()

    def close(self) -> None:
        for queue in list(self._queues.values()):
            queue.close()

    # -- what links call ----------------------------------------------------------------------------------

    def buffers_for(self, link: PeerLink, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        if isinstance(message, Offer):
            if payload_bytes != self._inline_bytes(message):
                raise FrameError(f"{payload_bytes} bytes with an offer of other sizes")
            return [memoryview(bytearray(payload_bytes))]
        if isinstance(message, TensorPiece) and 0 < payload_bytes <= CHUNK_BYTES:
            with self._change:
                inbox = self._rendezvous.heard.stream(link).inbox
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

    def hear(self, link: PeerLink, request: Request) -> None:
        message, stream = request.message, self._rendezvous.heard.stream(link)
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
            elif (
                isinstance(message, TensorPiece)
                and stream.inbox is not None
                and stream.inbox.number == message.number
            ):
                stream.inbox.count += sum(map(len, request.payload))
            self._change.notify_all()


def _refuse(link: PeerLink, offer: Offer, reason: str) -> None:
    with contextlib.suppress(ConnectionLost):
        link.send(Taken(offer.number, reason))


class _CrossedVerbs(Exception):
    """One is in `send` or `recv`, the other in a collective: both end."""

    def __init__(self, group: tuple[int, ...], number: int, reason: str) -> None:
        super().__init__(reason)
        self.broken = Broken(group, number, reason)
