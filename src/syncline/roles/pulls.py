"""Pulls at a server: answers with parameters, read pins, and pulls that wait for a version."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from syncline.core.messages import Committed, Done, Pin, Pull, Pulled, Unpin
from syncline.errors import ConnectionLost, ProtocolError
from syncline.net.rpc import Endpoint, Request
from syncline.net.transport import Buffer, buffer_of
from syncline.roles.answers import MakeBuffer, PartialAnswer
from syncline.roles.hosted import HostedSlice
from syncline.roles.pool import Pool


class Pulls:
    """Everything that reads parameters. Bytes are sent by threads of their own: a slow reader holds up nobody."""

    def __init__(self, slices: dict[int, HostedSlice], pool: Pool, senders: ThreadPoolExecutor) -> None:
        self._slices, self._pool, self._senders = slices, pool, senders
        self._lock = threading.Lock()
        self._waiting: list[tuple[Request, Pull]] = []
        self._pinned: dict[Endpoint, list[int]] = {}
        self.bytes_copied = 0
        self.num_pins = 0

    def _slot(self, number: int) -> HostedSlice:
        slot = self._slices.get(number)
        if slot is None:
            raise ProtocolError(f"slice {number} is not hosted here")
        return slot

    def committed(self, request: Request, clock: int) -> None:
        """Answers a commit of a worker that reads shared memory: with versions."""
        versions = []
        worker = request.peer.name
        for slot in list(self._slices.values()):  # more may be hosted meanwhile
            version = slot.state.seen[worker] = slot.state.version
            versions.append(version)
        request.reply(Committed(clock, versions))

    def answer_in_parts(
        self, request: Request, clock: int, pull: list[int], make: MakeBuffer | None
    ) -> PartialAnswer:
        """An answer to a commit that goes out slice by slice."""
        for number in pull:
            self._slot(number)
        submit = functools.partial(self._send, request)
        return PartialAnswer(request, clock, pull, make, submit=submit, copied=self._copied)

    def _copied(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes_copied += num_bytes

    def _send(self, request: Request, send: Callable[[], None]) -> None:
        """Sends bytes from another thread; whatever goes wrong there, the asker hears of it."""

        def attempt() -> None:
            try:
                send()
            except Exception as error:
                request.refuse(error)

        try:
            self._senders.submit(attempt)
        except RuntimeError:  # the server is closing
            request.refuse(ConnectionLost("the server is closing"))

    # -- pulls by themselves ------------------------------------------------------------------------------

    def pull(self, request: Request, message: Pull) -> None:
        """Parameters now, or once they are new enough."""
        if message.rows is not None:
            raise ProtocolError(f"{request.peer} pulls rows; that is not supported yet")
        for number in message.slices:
            self._slot(number)
        with self._lock:
            if not self._is_new_enough(message):
                self._waiting.append((request, message))
                return
        self._answer(request, message)

    def _is_new_enough(self, message: Pull) -> bool:
        least = message.min_version
        return least is None or all(self._slices[n].state.version >= least for n in message.slices)

    def advanced(self) -> None:
        """A round is in: pulls that waited for it may go."""
        if not self._waiting:
            return
        with self._lock:
            ready = [item for item in self._waiting if self._is_new_enough(item[1])]
            self._waiting = [item for item in self._waiting if item not in ready]
        for request, message in ready:
            self._answer(request, message)

    def _answer(self, request: Request, message: Pull) -> None:
        if message.bytes_wanted:
            self._send(request, functools.partial(self._send_pulled, request, message))
            return
        versions = [self._slices[number].state.version for number in message.slices]
        request.reply(Pulled(versions))

    def _send_pulled(self, request: Request, message: Pull) -> None:
        """Copies of the slices, each whole, with the versions that they have."""
        buffers, versions = list[Buffer](), list[int]()
        for number in message.slices:
            slot = self._slices[number]
            buffers.append(buffer_of(np.empty(slot.part.num_bytes, np.uint8)))
            version = slot.copy_into(buffers[-1])
            self._copied(slot.part.num_bytes)
            slot.state.seen[request.peer.name] = version
            versions.append(version)
        request.reply(Pulled(versions), buffers, sum(map(len, buffers)))

    # -- read pins ----------------------------------------------------------------------------------------

    def pin(self, request: Request, message: Pin) -> None:
        """No update until unpinned: for a reader whose optimistic copies were overtaken twice."""
        versions = []
        for number in message.slices:
            slot = self._slot(number)
            version = slot.pin()
            slot.state.seen[request.peer.name] = version
            versions.append(version)
            with self._lock:
                self._pinned.setdefault(request.endpoint, []).append(number)
                self.num_pins += 1
        request.reply(Pulled(versions))

    def unpin(self, request: Request, message: Unpin) -> None:
        held = self._pinned.get(request.endpoint, [])
        for number in message.slices:
            with self._lock:
                if number not in held:
                    raise ProtocolError(f"{request.peer} lets go of slice {number}, which it has not pinned")
                held.remove(number)
            self._let_go(number)
        request.reply(Done())

    def forget(self, endpoint: Endpoint) -> None:
        """A connection ended: its pins end with it, and nothing waits for it."""
        with self._lock:
            numbers = self._pinned.pop(endpoint, [])
            self._waiting = [item for item in self._waiting if item[0].endpoint is not endpoint]
        for number in numbers:
            self._let_go(number)

    def _let_go(self, number: int) -> None:
        slot = self._slices[number]
        slot.unpin()
        self._pool.submit(functools.partial(_drain, slot))


def _drain(slot: HostedSlice) -> None:
    for work in slot.drain():
        work.slice_done()
