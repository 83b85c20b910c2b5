"""Who may ask, how often and how much: the token, rates, bytes, connections."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hmac
import os
import pathlib
import re
import secrets
import stat
import time
from typing import Any

from syncline.errors import ConfigError
from syncline.serve.datatypes import RequestError

_MOST_CLIENTS = 4096
_MOST_HEAD_BYTES = 1 << 20
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)/(s|m)")
_SHORTEST_TOKEN = 16
#: Names of this host for every client. Each may have a port, which ssh and containers change.
_OWN_NAMES = ("localhost", "[::1]")


def parse_rate(text: str) -> float:
    """`100/s` or `600/m`, per second."""
    found = _RATE.fullmatch(text)
    if found is None or not float(found[1]):
        raise ConfigError(f"--rate {text!r}: give requests per second or minute, e.g. 100/s")
    return float(found[1]) / (60.0 if found[2] == "m" else 1.0)


def read_token(path: pathlib.Path) -> str:
    """The token in a file that only its owner may read."""
    try:
        mode = path.stat().st_mode
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path}: cannot be read: {error}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"--token-file {path}: others may read it; chmod 600 {path}")
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"--token-file {path}: a token is at least {_SHORTEST_TOKEN} printable characters, no spaces"
        )
    return token


def make_token(path: pathlib.Path) -> str:
    """A new token, in a file that only its owner may read."""
    token = secrets.token_urlsafe(32)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token


class Gate:
    """Checks the bearer token and the rate of each client's address."""

    def __init__(self, token: str, rate: float, host: str = "") -> None:
        """`rate`: requests per second of one address; 0.0: any. `host`: the name of this host that was given."""
        self._expected = f"Bearer {token}".encode() if token else b""
        self._names = {*_OWN_NAMES, host.lower()} - {""}
        self._rate = rate
        self._buckets: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    @property
    def needs_token(self) -> bool:
        return bool(self._expected)

    def check_token(self, authorization: bytes) -> None:
        if self._expected and not hmac.compare_digest(authorization, self._expected):
            raise RequestError(401, "send the server's token: Authorization: Bearer TOKEN")

    def check_site(self, host: bytes, origin: bytes) -> None:
        """Without a token everyone on this host may ask, but no page of another site that is open in a browser here:
        neither under its own name, nor under one that it lets lead here (DNS rebinding).
        """
        if self._expected:
            return
        if host and not self._is_own(host):
            raise RequestError(
                421, "the Host header names another host; ask for localhost, or serve with --token-file"
            )
        if origin and not self._is_own(origin.partition(b"://")[2]):
            raise RequestError(
                403, "requests from other sites are refused; serve with --token-file and send the token"
            )

    def _is_own(self, host: bytes) -> bool:
        name = re.sub(r":[0-9]{1,5}$", "", host.decode("latin-1").lower())
        return name in self._names or bool(re.fullmatch(r"127(\.[0-9]{1,3}){3}", name))

    def check_rate(self, address: str, now: float) -> None:
        """A bucket that fills at the rate, and holds one second of it."""
        if not self._rate:
            return
        most = max(1.0, self._rate)
        left, since = self._buckets.pop(address, (most, now))
        left = min(most, left + (now - since) * self._rate)
        refused = left < 1.0
        self._buckets[address] = (left if refused else left - 1.0, now)
        if len(self._buckets) > _MOST_CLIENTS:
            self._buckets.popitem(last=False)
        if refused:
            raise RequestError(429, f"more than {self._rate:g} requests per second; wait", (1.0 - left) / self._rate)


class ByteBudget:
    """Bytes of all requests that are being read or wait."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._taken = most_bytes, 0

    def take(self, num_bytes: int) -> None:
        if self._taken + num_bytes > self._most:
            raise RequestError(503, "too many large requests at once; send it again later", 1.0)
        self._taken += num_bytes

    def give(self, num_bytes: int) -> None:
        self._taken -= num_bytes

    def request(self) -> RequestBytes:
        """The part of a request that begins, which holds no bytes yet."""
        return RequestBytes(self)


class RequestBytes:
    """What one request has taken of a budget, until it is answered."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget, self._taken = budget, 0

    def __enter__(self) -> RequestBytes:
        return self

    def __exit__(self, *error: object) -> None:
        self._budget.give(self._taken)
        self._taken = 0

    def take(self, num_bytes: int) -> None:
        """RequestError: there is no room for so many more."""
        self._budget.take(num_bytes)
        self._taken += num_bytes


@dataclasses.dataclass(slots=True)
class _Open:
    transport: asyncio.Transport
    waits_since: float  # for the head of a request; 0.0: it is there
    num_bytes: int = 0
    is_proven: bool = False
    waiting: asyncio.Future[Any] | None = None  # for the answer of its request


class Connections:
    """Open connections. Those that do not send a request in time are closed; if there are too many, those are closed
    first that have never sent a valid one. Used in the event loop only.
    """

    def __init__(self, most: int, head_seconds: float, idle_seconds: float) -> None:
        self._most, self._head_seconds, self._idle_seconds = most, head_seconds, idle_seconds
        self._open: dict[object, _Open] = {}
        self._unproven: collections.OrderedDict[object, None] = collections.OrderedDict()
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._open)

    def made(self, peer: object, transport: asyncio.Transport) -> None:
        self._open[peer] = _Open(transport, time.monotonic())
        self._unproven[peer] = None
        if len(self._open) > self._most:
            oldest = next(iter(self._unproven))
            self._close(oldest)

    def received(self, peer: object, num_bytes: int) -> None:
        """Bytes came; before the head of a request is whole, only so many may."""
        one = self._open.get(peer)
        if one is not None and one.waits_since:
            one.num_bytes += num_bytes
            if one.num_bytes > _MOST_HEAD_BYTES:
                self._close(peer)

    def begins(self, peer: object) -> None:
        """The head of a request is whole."""
        one = self._open.get(peer)
        if one is not None:
            one.waits_since, one.num_bytes = 0.0, 0

    def waits(self, peer: object, future: asyncio.Future[Any]) -> None:
        """The request waits for this future, which is cancelled if the connection ends before."""
        one = self._open.get(peer)
        if one is not None:
            one.waiting = future
        else:
            future.cancel()  # it has ended while its request was read

    def ends(self, peer: object, *, is_proven: bool) -> None:
        """A request was answered."""
        one = self._open.get(peer)
        if one is not None:
            one.waiting = None
            one.waits_since, one.num_bytes = time.monotonic(), 0
            if is_proven and not one.is_proven:
                one.is_proven = True
                self._unproven.pop(peer, None)

    def lost(self, peer: object) -> None:
        one = self._open.pop(peer, None)
        self._unproven.pop(peer, None)
        if one is not None and one.waiting is not None:
            one.waiting.cancel()

    def sweep(self, now: float) -> None:
        """Closes connections that have waited too long. A proven one may be idle for longer."""
        late = [
            peer
            for peer, one in self._open.items()
            if one.waits_since
            and now - one.waits_since
            > (self._idle_seconds if one.is_proven and not one.num_bytes else self._head_seconds)
        ]
        for peer in late:
            self._close(peer)

    def _close(self, peer: object) -> None:
        transport = self._open[peer].transport
        self.lost(peer)
        self.num_evicted += 1
        transport.abort()
