"""What a server has to send and has not sent: counted and bounded, for each connection and in all."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable
from typing import NamedTuple

from syncline.net.rpc import Endpoint

#: A connection may have this many times what is hosted outstanding, and so many bytes more: an honest worker asks for
#: everything once with each commit of its window, and once or twice beside.
EACH_TIMES, EACH_BYTES = 4, 64 << 20
#: In all, everything hosted and so many bytes more; beyond it pulls wait.
ALL_BYTES = 1 << 30
#: Pulls of one connection that are copied or sent at a time: one is sent while the next is copied.
MOST_PULLS = 2


class _Pull(NamedTuple):
    """A pull that waits for its turn."""

    number: int
    num_bytes: int
    go: Callable[[], None]


class _Account:
    """What one connection has outstanding, and which of its pulls wait."""

    __slots__ = ("is_cut_off", "num_bytes", "num_pulls", "waiting")

    def __init__(self) -> None:
        self.num_bytes = self.num_pulls = 0
        self.is_cut_off = False
        self.waiting: collections.deque[_Pull] = collections.deque()


class Outgoing:
    """Answers with bytes, from the moment they are owed until they are sent.

    Whoever has far too much outstanding asks and does not read: it is cut off. When there is too much in all, pulls
    wait before they are copied, in the order in which they came; a connection that reads slowly has a few of its own
    in hand and holds up nobody with the others. The slices of commits never wait: the round is there already.
    """

    def __init__(self, hosted_bytes: Callable[[], int], most_bytes: int | None = None) -> None:
        self._hosted_bytes, self._most_bytes = hosted_bytes, most_bytes
        self.window = 0  #: commits that a worker may leave unanswered, beside the one that it waits for
        self.num_bytes = 0  #: copied or being sent, in all
        self.num_waiting = 0  #: pulls that wait for their turn
        self.num_cut_off = 0
        self._pull_bytes = 0  # those of pulls among `num_bytes`
        self._numbers = itertools.count()
        self._accounts: dict[Endpoint, _Account] = {}
        self._lock = threading.Lock()

    def outstanding(self, endpoint: Endpoint) -> int:
        """Bytes that this connection has asked for and that are not sent, those of waiting pulls among them."""
        account = self._accounts.get(endpoint)
        return account.num_bytes if account else 0

    # -- pulls --------------------------------------------------------------------------------------------

    def pull(self, endpoint: Endpoint, num_bytes: int, go: Callable[[], None]) -> None:
        """Has `go` copy and send so much, now or when it is its turn; `pulled` must follow."""
        with self._lock:
            account = self._owe(endpoint, num_bytes)
            if account.is_cut_off:  # nobody will read it
                self._settle(endpoint, num_bytes)
                return
            account.waiting.append(_Pull(next(self._numbers), num_bytes, go))
            self.num_waiting += 1
            ready = self._take()
        _start(ready)

    def pulled(self, endpoint: Endpoint, num_bytes: int) -> None:
        """It is sent, or will not be."""
        with self._lock:
            self._accounts[endpoint].num_pulls -= 1
            self._pull_bytes -= num_bytes
            self.num_bytes -= num_bytes
            self._settle(endpoint, num_bytes)
            ready = self._take()
        _start(ready)

    def _take(self) -> list[_Pull]:
        """Under the lock: those whose turn it is."""
        ready: list[_Pull] = []
        while self.num_waiting:
            # A connection that is behind is left out; others need not wait for it.
            free = [a for a in self._accounts.values() if a.waiting and a.num_pulls < MOST_PULLS]
            account = min(free, key=lambda a: a.waiting[0].number, default=None)
            if account is None or not self._fits(account.waiting[0].num_bytes):
                break  # what came later must not take its room
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
        # One that is larger than the bound, or beside commits that never pause, would wait for ever.
        return fits or not self._pull_bytes

    def forget(self, endpoint: Endpoint) -> None:
        """The connection ended: what waits for its turn is dropped. What is being sent fails, and is told as ever."""
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
        """Slices of a commit's answer are ready to be sent; less than 0: they are sent, or will not be."""
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
        """Under the lock: so much more for this connection."""
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
        """Under the lock: so much less."""
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
        # The caller may hold a slice's lock, which the end of a connection takes too.
        name = f"cut off {endpoint.peer}"
        threading.Thread(target=endpoint.close, args=(reason,), name=name, daemon=True).start()


def _start(pulls: list[_Pull]) -> None:
    for pull in pulls:
        pull.go()
