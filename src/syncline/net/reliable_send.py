"""Messages to another server that are repeated until it acknowledges them.

Servers send updates to backups, votes, sums and keys of process groups this way. A receiver may see a message twice,
and repeated messages in another order.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from syncline.core.members import Member
from syncline.core.wire.message import Message
from syncline.errors import ConnectionLost, SynclineError
from syncline.net.rpc import Call, Endpoint
from syncline.net.transport import Buffer

#: Until a server whose connection broke is dialed again; the pause grows up to the second.
_AGAIN_SECONDS, _MOST_AGAIN_SECONDS = 0.05, 1.0


class OutgoingMessage(NamedTuple):
    """A message with the buffers that follow it."""

    message: Message
    buffers: Sequence[Buffer] = ()

    def send(self, endpoint: Endpoint) -> Call:
        return endpoint.call(self.message, buffers=self.buffers, payload_bytes=sum(map(len, self.buffers)))


class ReliableSend:
    """A message on its way to one other server.

    A refusal counts as an acknowledgement: one of the two servers is out, and the coordinator will tell it.
    Subclasses may treat answers and refusals in another way.
    """

    def __init__(
        self,
        partner: Partner,
        message: Message,
        buffers: Sequence[Buffer] = (),
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """`then`: is called when it is acknowledged."""
        self.partner, self._outgoing, self._then = partner, OutgoingMessage(message, buffers), then
        self.is_acknowledged = False

    def take_back(self) -> None:
        """Stops the repetition, and lets go of the buffers."""
        self.is_acknowledged, self._outgoing = True, OutgoingMessage(self._outgoing.message)

    def send(self) -> None:
        outgoing = self._outgoing  # before the flag is read: `take_back` sets that first
        if self.is_acknowledged:
            return
        endpoint = self.partner.current()
        if endpoint is None:
            self.partner.repeat_later(self)
            return
        try:
            call = self.transmit(endpoint, outgoing)
        except ConnectionLost:
            self.partner.repeat_later(self)
            return
        call.when_done(functools.partial(self._done, call))

    def _done(self, call: Call) -> None:
        """In the thread that brings the answer."""
        try:
            self.answered(call.wait(0))
        except ConnectionLost:
            self.partner.repeat_later(self)
            return
        except SynclineError as error:
            if not self.refused(error):
                return
        self.is_acknowledged = True
        self.acknowledged()

    # -- what a subclass may change -----------------------------------------------------------------------

    def transmit(self, endpoint: Endpoint, outgoing: OutgoingMessage) -> Call:
        """Sends it once."""
        return outgoing.send(endpoint)

    def answered(self, answer: Message) -> None:
        """Reads the answer, before the message counts as acknowledged."""

    def refused(self, error: SynclineError) -> bool:
        """Whether this refusal is an acknowledgement. If not, this method has arranged what follows."""
        return True

    def acknowledged(self) -> None:
        """Called once it is."""
        self._then()


class Partner:
    """The connection to another server, dialed again when it breaks; what was not acknowledged is sent again then."""

    def __init__(
        self,
        member: Member,
        dial: Callable[[Member], Endpoint],
        *,
        is_of_our_kind: bool,
        submit: Callable[[Callable[[], None]], None],
        log: Callable[[str], None],
    ) -> None:
        self.member, self.is_of_our_kind = member, is_of_our_kind
        self.submit, self.log = submit, log
        self._dial = dial
        self._lock = threading.Lock()
        self._dialing = threading.Lock()
        self._endpoint: Endpoint | None = None
        self._waiting: list[ReliableSend] = []
        self._repeating = False
        self._closed = threading.Event()
        self.num_lent = 0

    @property
    def name(self) -> str:
        return self.member.name

    def current(self) -> Endpoint | None:
        endpoint = self._endpoint
        return endpoint if endpoint is not None and endpoint.is_open else None

    def connect(self) -> Endpoint:
        """The connection that there is, or a new one."""
        with self._dialing:
            endpoint = self.current()
            if endpoint is None:
                if self._closed.is_set():
                    raise ConnectionLost(f"{self.name} is out")
                endpoint = self._dial(self.member)
                with self._lock:
                    is_out = self._closed.is_set()  # closed during the dial: `close` has not seen this connection
                    self._endpoint = None if is_out else endpoint
                if is_out:
                    endpoint.close()
                    raise ConnectionLost(f"{self.name} is out")
            return endpoint

    def repeat_later(self, item: ReliableSend) -> None:
        """Sends this again, over a new connection where the old one broke."""
        with self._lock:
            self._waiting.append(item)
            if self._repeating or self._closed.is_set():
                return
            self._repeating = True
        threading.Thread(target=self._repeat, name=f"redial {self.name}", daemon=True).start()

    def _repeat(self) -> None:
        pause = _AGAIN_SECONDS
        while not self._closed.wait(pause):
            with self._lock:
                self._waiting = [item for item in self._waiting if not item.is_acknowledged]
                if not self._waiting:
                    self._repeating = False
                    return
            try:
                self.connect()
            except (SynclineError, OSError):
                pause = min(2 * pause, _MOST_AGAIN_SECONDS)
                continue
            pause = _AGAIN_SECONDS
            with self._lock:
                waiting, self._waiting = self._waiting, []
            for item in waiting:
                item.send()

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()


class Outbox:
    """A thread that sends large messages to one other server, so that a slow receiver holds up neither the caller nor
    other receivers.
    """

    def __init__(self, name: str) -> None:
        self._sends: queue.SimpleQueue[ReliableSend | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"sums to {name}", daemon=True).start()

    def put(self, send: ReliableSend) -> None:
        self._sends.put(send)

    def close(self) -> None:
        """Returns at once; the thread ends after what is in the queue."""
        self._sends.put(None)

    def _run(self) -> None:
        while (send := self._sends.get()) is not None:
            send.send()
