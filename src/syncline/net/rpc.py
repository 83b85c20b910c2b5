"""Calls over a connection, in both directions: `Call` for outgoing requests, `Request` for incoming ones."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from syncline.core.wire.message import Message, Refused
from syncline.core.wire.tables import MAY_SAY
from syncline.errors import (
    ConnectionLost,
    FencedError,
    FrameError,
    ProtocolError,
    SynclineError,
    WaitTimeout,
    from_wire,
    to_wire,
)
from syncline.net import frame
from syncline.net.frame import ANSWER, ATTACHED, MORE, Header
from syncline.net.transport import Buffer, Connection, Memory, Peer
from syncline.stats import WireStats

#: Receive buffers for an answer's payload, or a function that makes them from the answer's message.
Into = Sequence[Buffer] | Callable[[Message], Sequence[Buffer]]
#: Called for parts of an answer before its end, in the receiving thread.
OnPart = Callable[[Message], None]


class Latch:
    """Opens once. Several times as fast as an Event, which can close again."""

    __slots__ = ("_lock", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        self.is_open = True
        try:  # noqa: SIM105 - a context takes longer than all of this
            self._lock.release()
        except RuntimeError:  # open already
            pass

    def wait(self, seconds: float | None) -> bool:
        if not self.is_open and self._lock.acquire(timeout=-1 if seconds is None else max(0.0, seconds)):
            self._lock.release()
        return self.is_open


class Call:
    """A request in flight. `wait` returns the answer, or raises the peer's error."""

    __slots__ = ("_actions", "_endpoint", "_error", "_kind", "_latch", "answer", "attachment", "into", "on_part")

    def __init__(self, endpoint: Endpoint, kind: type[Message], into: Into, on_part: OnPart | None = None) -> None:
        self._endpoint, self._kind, self.into, self.on_part = endpoint, kind, into, on_part
        self.answer: Message | None = None
        self.attachment: Memory | None = None
        self._error: Exception | None = None
        self._latch = Latch()
        self._actions: list[Callable[[], None]] = []

    @property
    def what(self) -> str:
        return f"{self._kind.__name__} to {self._endpoint.peer}"

    @property
    def is_done(self) -> bool:
        return self._latch.is_open

    @property
    def is_read_by_waiter(self) -> bool:
        return self._endpoint.waiter_reads

    def read(self, seconds: float) -> bool:
        """If callers read: reads one frame, whatever it answers; False on timeout."""
        return self._endpoint.read(seconds)

    def done(self) -> bool:
        """Whether the answer is here; if callers read, checks for it."""
        if not self._latch.is_open and self._endpoint.waiter_reads:
            self._endpoint.read(0.0)
        return self._latch.is_open

    def finish(self, answer: Message | None, attachment: Memory | None, error: Exception | None) -> None:
        self.answer, self.attachment, self._error = answer, attachment, error
        self._latch.open()
        self._act()

    def when_done(self, action: Callable[[], None]) -> None:
        """Runs the action once when the answer is here, in the receiving thread; it must be quick."""
        self._actions.append(action)
        if self._latch.is_open:
            self._act()

    def _act(self) -> None:
        # The answer may arrive during `when_done`: the thread that pops an action runs it.
        while self._actions:
            try:
                action = self._actions.pop()
            except IndexError:
                return
            action()

    def wait(self, timeout_seconds: float | None) -> Message:
        if not self.arrives(timeout_seconds):
            raise WaitTimeout(f"{self.what}: no answer within {timeout_seconds:g} s")
        if self._error is not None:
            raise self._error
        assert self.answer is not None
        return self.answer

    def arrives(self, timeout_seconds: float | None) -> bool:
        """Waits; returns whether any answer came in time."""
        if not self._endpoint.waiter_reads:
            return self._latch.wait(timeout_seconds)
        until = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self._latch.is_open:
            left = until - time.monotonic()
            if not self._endpoint.read(max(0.0, left)) and left <= 0:
                break
        return self._latch.is_open


class Request:
    """An incoming request. Answer it once, now or later, from any thread."""

    __slots__ = ("_endpoint", "_number", "attachment", "generation", "message", "payload", "peer")

    def __init__(
        self,
        endpoint: Endpoint,
        number: int,
        message: Message,
        payload: Sequence[Buffer],
        attachment: Memory | None,
        generation: int = 0,
    ) -> None:
        self._endpoint, self._number, self.generation = endpoint, number, generation
        self.peer = endpoint.peer
        self.message, self.payload, self.attachment = message, payload, attachment

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    @property
    def number(self) -> int:
        """0: no answer is expected."""
        return self._number

    def reply(
        self,
        answer: Message,
        buffers: Iterable[Buffer] = (),
        payload_bytes: int = 0,
        attachment: Memory | None = None,
    ) -> None:
        """Sends the answer. It is no error if the caller is gone or expects none."""
        if self._number:
            try:  # noqa: SIM105 - a context takes longer
                self._endpoint.send(self._number, ANSWER, answer, buffers, payload_bytes, attachment)
            except ConnectionLost:  # the reader sees it too
                pass

    def reply_part(self, answer: Message, buffers: Iterable[Buffer] = (), payload_bytes: int = 0) -> None:
        """Sends a part of the answer; the end is a `reply` or a `refuse`."""
        with contextlib.suppress(ConnectionLost):
            self._endpoint.send(self._number, ANSWER | MORE, answer, buffers, payload_bytes, None)

    def refuse(self, error: BaseException) -> None:
        self.reply(Refused(*to_wire(error)))


class Service(Protocol):
    """What answers requests."""

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        """Where the payload of a request goes; a ProtocolError refuses it and closes the connection."""

    def handle(self, request: Request) -> None:
        """Answers the request, or keeps it for later. A SynclineError raised here becomes the answer."""

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        """The peer is gone."""


class NoService:
    """For a side that only asks."""

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        raise ProtocolError(f"{peer} asks a side that answers nothing")

    def handle(self, request: Request) -> None:
        raise ProtocolError(f"{request.peer} asks a side that answers nothing")

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        pass


class Stamp:
    """The values in every frame of a process: job, incarnation, generation, term. Shared by its endpoints."""

    def __init__(self, job: str, *, superseded: Callable[[int], None] = lambda term: None) -> None:
        """`superseded`: called when a coordinator sees a newer term."""
        self.job, self.superseded = frame.job_key(job), superseded
        self.incarnation = self.generation = self.term = 0
        self.is_coordinators = False


class Endpoint:
    """One side of a connection. It answers with its service and asks with `call`.

    `waiter_reads`: on a connection within this host a waiting caller reads from the socket itself, which saves a
    thread hand-over. Nothing is read while no caller waits: only for a side that gets no requests.
    """

    def __init__(
        self, connection: Connection, stamp: Stamp, service: Service | None = None, *, waiter_reads: bool = False
    ) -> None:
        self.connection, self._stamp = connection, stamp
        self._service: Service = service or NoService()
        self.peer = connection.peer
        self.shares_memory = connection.shares_memory
        self.create_memory = connection.create_memory
        self.can_carry = connection.can_carry
        self._numbers = itertools.count()
        self._calls: dict[int, Call] = {}
        self._lock = threading.Lock()
        self._lost: str | None = None
        self.read, self.post, self.take_like = connection.read, connection.post, connection.take_like
        self.waiter_reads = False  # messages may arrive before `start` returns
        self.waiter_reads = connection.start(self, waiter_reads=waiter_reads)

    def call(
        self,
        message: Message,
        *,
        buffers: Iterable[Buffer] = (),
        payload_bytes: int = 0,
        into: Into = (),
        attachment: Memory | None = None,
        on_part: OnPart | None = None,
        then: Callable[[Call], None] | None = None,
    ) -> Call:
        """Sends a request; the answer's payload is received directly into the given buffers.

        `then` runs when the answer is here, before anything after it is read.
        """
        number = next(self._numbers) % 0xFFFFFFFF + 1  # 32 bits, and never 0
        call = Call(self, type(message), into, on_part)
        if then is not None:
            call.when_done(functools.partial(then, call))
        with self._lock:
            if self._lost is not None:
                raise ConnectionLost(f"{self.peer} is gone: {self._lost}")
            self._calls[number] = call
        try:
            self.send(number, 0, message, buffers, payload_bytes, attachment)
        except BaseException as error:
            self._calls.pop(number, None)
            if isinstance(error, ConnectionLost):
                # Not closed here: the peer's last messages may be unread and give the reason.
                raise ConnectionLost(f"{self.peer} is gone: {self._lost or error}") from None
            raise
        return call

    def tell(self, message: Message) -> None:
        """Sends an unanswered message."""
        self.send(0, 0, message, (), 0, None)

    def mention(self, message: Message) -> None:
        """Like `tell`, but ignores a peer that is gone."""
        with contextlib.suppress(ConnectionLost):
            self.tell(message)

    def send(
        self,
        number: int,
        flags: int,
        message: Message,
        buffers: Iterable[Buffer],
        payload_bytes: int,
        attachment: Memory | None,
    ) -> None:
        body = frame.encode(message)
        stamp = self._stamp
        flags |= ATTACHED if attachment is not None else 0
        header = Header(
            frame.kind_of(message), number, flags, stamp.job, stamp.incarnation, stamp.generation, stamp.term,
            len(body), payload_bytes,
        )  # fmt: skip
        self.connection.send(header, body, buffers, attachment)

    def head(self, kind: type[Message], body: bytes, payload_bytes: int) -> bytes:
        """Header and body of an unanswered frame, for `post` and `take_like`."""
        stamp = self._stamp
        sender = (stamp.job, stamp.incarnation, stamp.generation, stamp.term)
        return frame.head(kind, sender, body, payload_bytes)

    # -- what the connection calls ------------------------------------------------------------------------

    def buffers_for(self, header: Header, message: Message) -> Sequence[Buffer]:
        self._check(header, message)
        if not header.is_answer:
            return self._service.buffers_for(self.peer, message, header.payload_bytes)
        call = self._calls.get(header.request)
        if call is None:
            raise FrameError("an answer to a question that was not asked")
        return call.into(message) if callable(call.into) else call.into

    def _check(self, header: Header, message: Message) -> None:
        if header.job != self._stamp.job:
            raise ProtocolError(f"{self.peer} sent a frame of another job")
        if self.peer.incarnation and header.incarnation != self.peer.incarnation:
            raise FencedError(f"{self.peer} sent a frame of another incarnation")
        if header.term != self._stamp.term:
            self._check_term(header.term)
        if not header.flags & ANSWER and type(message) not in MAY_SAY[self.peer.role]:
            raise ProtocolError(f"a {self.peer.role} may not say {type(message).__name__}")

    def _check_term(self, term: int) -> None:
        """Tracks the highest known term; a coordinator of a lower one is refused."""
        if self._stamp.is_coordinators:
            if term > self._stamp.term:
                self._stamp.superseded(term)
        elif self.peer.role == "coordinator":
            if term < self._stamp.term:
                raise FencedError(f"a coordinator of term {term} speaks; the job has one of term {self._stamp.term}")
            self._stamp.term = term

    def deliver(self, header: Header, message: Message, payload: Sequence[Buffer], attachment: Memory | None) -> None:
        try:
            self._check(header, message)
        except SynclineError as error:
            self.close(f"refused what {self.peer} sent: {error}")
            return
        if header.flags & ANSWER:
            self._deliver_answer(header, message, attachment)
            return
        request = Request(self, header.request, message, payload, attachment, header.generation)
        try:
            self._service.handle(request)
        except SynclineError as error:
            if header.request:
                request.refuse(error)

    def _deliver_answer(self, header: Header, message: Message, attachment: Memory | None) -> None:
        is_part = header.flags & MORE
        with self._lock:
            call = self._calls.get(header.request) if is_part else self._calls.pop(header.request, None)
        if call is None:
            self.close(f"{self.peer} answered a question that was not asked")
        elif is_part:
            if call.on_part is None:
                self.close(f"{self.peer} answered in parts what was not asked so")
            else:
                call.on_part(message)
        elif isinstance(message, Refused):
            call.finish(None, None, from_wire(message.error, message.reason))
        else:
            call.finish(message, attachment, None)

    def lost(self, reason: str) -> None:
        with self._lock:
            self._lost = reason
            calls, self._calls = list(self._calls.values()), {}
        with contextlib.ExitStack() as ends:  # all are notified, whatever one of them raises
            ends.callback(self._service.lost, self, reason)
            for call in reversed(calls):
                ends.callback(call.finish, None, None, ConnectionLost(f"{self.peer} is gone: {reason}"))

    def close(self, reason: str = "closed") -> None:
        self.connection.close(reason)

    @property
    def is_open(self) -> bool:
        return self._lost is None

    def stats(self) -> WireStats:
        return self.connection.stats()


def wait_all(calls: Sequence[Call], timeout_seconds: float | None) -> list[Message]:
    """The answers of several calls, within one deadline."""
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    answers = []
    for call in calls:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            answers.append(call.wait(left))
        except WaitTimeout:
            raise WaitTimeout(f"{call.what}: no answer within {timeout_seconds:g} s") from None
    return answers
