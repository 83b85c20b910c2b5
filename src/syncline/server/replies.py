"""Replies to commits, slice by slice as they are applied; unsent bytes are counted and bounded."""

from __future__ import annotations

import collections
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from syncline.core.codecs.pieces import SliceCoder
from syncline.core.layout import Slice
from syncline.core.rounds import RoundMembership
from syncline.core.wire.traffic import Committed
from syncline.net.rpc import Endpoint, Request
from syncline.net.transport import Buffer, buffer_of
from syncline.server.slices import HostedSlice, Snapshot
from syncline.server.tasks import StagedCommit

#: Limit per connection: a multiple of the hosted bytes plus a constant. A correct worker asks for all slices once
#: with each commit of its window, and once or twice besides.
EACH_TIMES, EACH_BYTES = 4, 64 << 20
#: Limit in total: all hosted bytes plus this. Beyond it, pulls wait.
ALL_BYTES = 1 << 30
#: Concurrent pulls per connection: one is sent while the next is copied.
MOST_PULLS = 2


class _Pull(NamedTuple):
    """A pull that waits for its turn."""

    number: int
    num_bytes: int
    go: Callable[[], None]


class _Account:
    """Outstanding bytes and waiting pulls of one connection."""

    __slots__ = ("is_cut_off", "num_bytes", "num_pulls", "waiting")

    def __init__(self) -> None:
        self.num_bytes = self.num_pulls = 0
        self.is_cut_off = False
        self.waiting: collections.deque[_Pull] = collections.deque()


class Outgoing:
    """Accounts for replies with bytes until they are sent.

    A connection far over its limit sends requests without reading the replies: it is closed. Above the total limit,
    pulls wait in arrival order before they are copied. A slow connection has only a few pulls in progress and does
    not block others. Replies to commits never wait, because their round is already applied.
    """

    def __init__(self, hosted_bytes: Callable[[], int], most_bytes: int | None = None) -> None:
        self._hosted_bytes, self._most_bytes = hosted_bytes, most_bytes
        self.window = 0  #: commits that a worker may leave unanswered, besides the one it waits for
        self.num_bytes = 0  #: copied or being sent, in total
        self.num_waiting = 0  #: pulls that wait for their turn
        self.num_cut_off = 0
        self._pull_bytes = 0  # the share of pulls in `num_bytes`
        self._numbers = itertools.count()
        self._accounts: dict[Endpoint, _Account] = {}
        self._lock = threading.Lock()

    def outstanding(self, endpoint: Endpoint) -> int:
        """Bytes requested by this connection and not sent, including waiting pulls."""
        account = self._accounts.get(endpoint)
        return account.num_bytes if account else 0

    # -- pulls --------------------------------------------------------------------------------------------

    @property
    def num_accounts(self) -> int:
        """Connections that something is owed to."""
        return len(self._accounts)

    def pull(self, endpoint: Endpoint, num_bytes: int, go: Callable[[], None]) -> None:
        """Calls `go` to copy and send, now or in turn. `pulled` must follow."""
        with self._lock:
            account = self._owe(endpoint, num_bytes)
            if account.is_cut_off:  # the connection is being closed
                self._settle(endpoint, num_bytes)
                return
            account.waiting.append(_Pull(next(self._numbers), num_bytes, go))
            self.num_waiting += 1
            ready = self._take()
        _start(ready)

    def pulled(self, endpoint: Endpoint, num_bytes: int) -> None:
        """The pull is sent, or failed."""
        with self._lock:
            self._accounts[endpoint].num_pulls -= 1
            self._pull_bytes -= num_bytes
            self.num_bytes -= num_bytes
            self._settle(endpoint, num_bytes)
            ready = self._take()
        _start(ready)

    def _take(self) -> list[_Pull]:
        """Under the lock: the pulls whose turn it is."""
        ready: list[_Pull] = []
        while self.num_waiting:
            # Skip connections that are behind; others need not wait for them.
            free = [a for a in self._accounts.values() if a.waiting and a.num_pulls < MOST_PULLS]
            account = min(free, key=lambda a: a.waiting[0].number, default=None)
            if account is None or not self._fits(account.waiting[0].num_bytes):
                break  # later pulls must not take its room
            pull = account.waiting.popleft()
            self.num_waiting -= 1
            account.num_pulls += 1
            self._pull_bytes += pull.num_bytes
            self.num_bytes += pull.num_bytes
            ready.append(pull)
        return ready

    def _fits(self, num_bytes: int) -> bool:
        wanted = self.num_bytes + num_bytes
        if self._most_bytes is not None:
            fits = wanted <= self._most_bytes
        else:
            fits = wanted <= ALL_BYTES or wanted <= ALL_BYTES + self._hosted_bytes()
        # Otherwise a pull larger than the limit, or one among constant commits, would wait for ever.
        return fits or not self._pull_bytes

    def forget(self, endpoint: Endpoint) -> None:
        """The connection ended: drops its waiting pulls. Sends in progress fail on their own."""
        with self._lock:
            account = self._accounts.get(endpoint)
            if account is not None:
                dropped = sum(pull.num_bytes for pull in account.waiting)
                self.num_waiting -= len(account.waiting)
                account.waiting.clear()
                self._settle(endpoint, dropped)
            ready = self._take()
        _start(ready)

    # -- commits ------------------------------------------------------------------------------------------

    def hold(self, endpoint: Endpoint, num_bytes: int) -> None:
        """Counts slices of a reply as outstanding; a negative number settles them."""
        with self._lock:
            self.num_bytes += num_bytes
            if num_bytes > 0:
                self._owe(endpoint, num_bytes)
                return
            self._settle(endpoint, -num_bytes)
            ready = self._take()
        _start(ready)

    # -- the bound of each --------------------------------------------------------------------------------

    def _owe(self, endpoint: Endpoint, num_bytes: int) -> _Account:
        """Under the lock: adds outstanding bytes."""
        account = self._accounts.get(endpoint)
        if account is None:
            account = self._accounts[endpoint] = _Account()
        account.num_bytes += num_bytes
        if account.num_bytes > EACH_BYTES and not account.is_cut_off:
            most = EACH_BYTES + (EACH_TIMES + self.window) * self._hosted_bytes()
            if account.num_bytes > most:
                account.is_cut_off = True
                self._cut_off(endpoint, account.num_bytes, most)
        return account

    def _settle(self, endpoint: Endpoint, num_bytes: int) -> None:
        """Under the lock: settles outstanding bytes."""
        account = self._accounts.get(endpoint)
        if account is not None:
            account.num_bytes -= num_bytes
            if not (account.num_bytes or account.num_pulls or account.waiting):
                del self._accounts[endpoint]

    def _cut_off(self, endpoint: Endpoint, num_bytes: int, most: int) -> None:
        self.num_cut_off += 1
        reason = (
            f"{endpoint.peer} has {num_bytes >> 20} MiB of answers outstanding, at most {most >> 20} MiB are "
            "allowed: it asks and does not read"
        )
        # In a thread: the caller may hold a slice's lock, which closing a connection needs too.
        name = f"cut off {endpoint.peer}"
        threading.Thread(target=endpoint.close, args=(reason,), name=name, daemon=True).start()


def _start(pulls: list[_Pull]) -> None:
    for pull in pulls:
        pull.go()


MakeBuffer = Callable[[Slice], Buffer]
Submit = Callable[[Callable[[], None]], None]
#: Target size of a frame; smaller replies are sent by the calling thread.
FRAME_BYTES, SMALL_BYTES = 16 << 20, 1 << 16


class _Part(NamedTuple):
    """A slice that is ready to be sent."""

    slice: int
    num_bytes: int
    version: int
    buffers: list[Buffer] | None  # None: shared memory, the slice is only named
    snapshot: Snapshot | None  # the snapshot that owns the buffer, if several replies share it
    sizes: list[int]  # of the encoded pieces


class PartialAnswer:
    """One worker's reply in progress. Parts are sent one after the other, then the end.

    `pull`: slices whose bytes are sent; without it slices are only named (shared memory). `make` returns the buffer
    that a slice is copied into. None sends the slice without a copy, because no round may write it yet.
    """

    def __init__(
        self,
        request: Request,
        clock: int,
        pull: list[int],
        make: MakeBuffer | None,
        *,
        submit: Submit,
        copied: Callable[[int], None],
        hold: Callable[[int], None],
        coder: SliceCoder | None = None,
    ) -> None:
        self._request, self._clock, self._make = request, clock, make
        self._coder = coder if pull else None
        self._submit, self._copied, self._hold = submit, copied, hold
        self._wanted = set(pull) if pull else None
        self._given: set[int] = set()
        self._ready: list[_Part] = []
        self._waiting_bytes = 0
        self._end: Callable[[], None] | None = None
        self._refused = False  # nothing is sent after a refusal
        self._error: Exception | None = None  # a slice could not be encoded
        self._sending = False
        self._lock = threading.Lock()
        self._word: tuple[StagedCommit, RoundMembership | None] | None = None  # the content of the end

    def hear(self, item: StagedCommit, round_membership: RoundMembership | None) -> None:
        self._word = (item, round_membership)

    @property
    def copies(self) -> bool:
        return self._wanted is not None and self._make is not None and self._coder is None

    def count(self, num_bytes: int) -> None:
        self._copied(num_bytes)

    def applied(self, slot: HostedSlice, *, snapshot: Snapshot | None = None, locked: bool = False) -> None:
        """The slice includes this commit. `locked`: the caller holds the slice's lock."""
        number = slot.part.id
        if number in self._given or (self._wanted is not None and number not in self._wanted):
            if snapshot is not None:
                snapshot.sent()
            return
        self._given.add(number)  # written by one thread: the one that applies, or the one that finishes
        try:
            part = self._part_of(slot, snapshot, locked)
        except Exception as error:  # a user's codec failed: applying goes on, the caller gets the error
            self._error = self._error or error
            return
        if part.buffers is not None:
            self._hold(part.num_bytes)
        with self._lock:
            refused = self._refused
            if not refused:
                self._ready.append(part)
                self._waiting_bytes += part.num_bytes
                if self._sending or self._waiting_bytes <= SMALL_BYTES:  # wait for the end, or for the next frame
                    return
                self._sending = True
        if refused:
            self._let_go([part])
        else:
            self._submit(self._send)

    def _part_of(self, slot: HostedSlice, snapshot: Snapshot | None, locked: bool) -> _Part:
        """Prepares a slice for sending. It copies now if needed, so that sending takes no lock."""
        version, buffer = slot.state.version, None
        if self._coder is not None and self._coder.encodes(slot.segment, slot.part):
            version, encoded = slot.encoded(self._coder, locked=locked)
            slot.state.seen[self._request.peer.name] = version
            num_bytes = sum(data.size for data in encoded.buffers)
            return _Part(slot.part.id, num_bytes, version, [*map(buffer_of, encoded.buffers)], None, encoded.sizes)
        if snapshot is not None:
            version, buffer = snapshot.version, snapshot.buffer
        elif self._wanted is not None:
            buffer = buffer_of(slot.memory)
            if self._make is not None:
                buffer = self._make(slot.part)
                version = slot.copy_locked(buffer) if locked else slot.copy_into(buffer)
                self._copied(len(buffer))
        else:
            slot.show()
        slot.state.seen[self._request.peer.name] = version
        buffers = [buffer] if buffer is not None else None
        return _Part(slot.part.id, slot.part.num_bytes, version, buffers, snapshot, [])

    def finish(self, end: Callable[[], None] | None = None) -> None:
        """Ends the reply: the round is applied, or `end` is a refusal."""
        if end is None and (error := self._error) is not None:
            end = functools.partial(self._request.refuse, error)
        with self._lock:
            dropped = self._ready if end is not None else []
            if end is not None:
                self._ready, self._refused = [], True
            self._end = end or self._send_end
            small = self._waiting_bytes <= SMALL_BYTES
            sending, self._sending = self._sending, True
        self._let_go(dropped)
        if sending:
            return
        if small:
            self._send()
        else:
            self._submit(self._send)

    def _send(self) -> None:
        while True:
            with self._lock:
                end = self._end
                parts = self._take() if end is None or self._more_than_a_frame() else []
                if end is None and not parts:
                    self._sending = False
                    return
            if parts:
                try:
                    self._request.reply_part(*self._message(parts))
                finally:
                    self._let_go(parts)
            else:
                assert end is not None
                end()
                return

    def _more_than_a_frame(self) -> bool:
        return sum(part.num_bytes for part in self._ready) > FRAME_BYTES

    def _take(self) -> list[_Part]:
        """Under the lock: the parts of the next frame."""
        taken: list[_Part] = []
        num_bytes = 0
        while self._ready and (not taken or num_bytes + self._ready[0].num_bytes <= FRAME_BYTES):
            taken.append(self._ready.pop(0))
            num_bytes += taken[-1].num_bytes
        self._waiting_bytes -= num_bytes
        return taken

    def _message(self, parts: list[_Part]) -> tuple[Committed, list[Buffer], int]:
        buffers = [buffer for part in parts if part.buffers is not None for buffer in part.buffers]
        answer = Committed(self._clock, [part.version for part in parts], [part.slice for part in parts])
        if self._coder is not None and any(part.sizes for part in parts):
            sizes = [part.sizes for part in parts]
            answer = msgspec.structs.replace(answer, codec=self._coder.codec.name, sizes=sizes)
        return answer, buffers, sum(map(len, buffers))

    def _send_end(self) -> None:
        answer, buffers, num_bytes = self._message(self._ready)
        if self._word is not None:
            item, round_membership = self._word
            answer = msgspec.structs.replace(
                answer,
                clocks=item.clocks,
                late=item.is_late,
                round_membership=round_membership,
                skipped=item.is_skipped,
            )
        try:
            self._request.reply(answer, buffers, num_bytes)
        finally:
            self._let_go(self._ready)

    def _let_go(self, parts: Sequence[_Part]) -> None:
        """The parts are sent, or failed."""
        num_bytes = sum(part.num_bytes for part in parts if part.buffers is not None)
        if num_bytes:
            self._hold(-num_bytes)
        for part in parts:
            if part.snapshot is not None:
                part.snapshot.sent()
