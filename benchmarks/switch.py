"""Several hosts on one machine: network namespaces around a switch, each with a wire of its own to it."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import subprocess
from collections.abc import Iterator

from benchmarks.namespaces import NEEDS, deleted_at_the_end, inside, ip, shape
from benchmarks.row import NotMeasured

_NETWORK = "10.77.0"
_COUNTER = "/sys/class/net/{card}/statistics/tx_bytes"
_READ_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Switch:
    """The hosts around it, and the end of each one's wire."""

    hosts: tuple[str, ...]
    cards: tuple[str, ...]

    def sent_bytes(self) -> int:
        """What all hosts have sent so far, with the headers of all layers."""
        total = 0
        for host, card in zip(self.hosts, self.cards, strict=True):
            words = [*inside(host), "cat", _COUNTER.format(card=card)]
            found = subprocess.run(words, check=True, capture_output=True, timeout=_READ_SECONDS)
            total += int(found.stdout)
        return total


class Meter:
    """Bytes per operation since it was read last, whoever's turn it was."""

    def __init__(self, over: Switch) -> None:
        self._over, self._before = over, 0

    def read(self, num_operations: int) -> float:
        before, self._before = self._before, self._over.sent_bytes()
        return (self._before - before) / num_operations


@contextlib.contextmanager
def switch(num_hosts: int, rate: str) -> Iterator[Switch]:
    """Makes them, each with a wire of this rate in either direction; deletes them however this ends."""
    tag = secrets.token_hex(3)
    middle = f"syncline{tag}m"
    made = Switch(
        tuple(f"syncline{tag}h{k}" for k in range(num_hosts)), tuple(f"sl{tag}h{k}" for k in range(num_hosts))
    )
    with deleted_at_the_end((middle, *made.hosts)):
        try:
            _make(middle, made, rate)
        except (OSError, subprocess.SubprocessError):
            raise NotMeasured(NEEDS) from None
        yield made


def _make(middle: str, made: Switch, rate: str) -> None:
    ip("netns", "add", middle)
    ip("-n", middle, "link", "add", "switch", "type", "bridge")
    ip("-n", middle, "link", "set", "switch", "up")
    for number, (host, card) in enumerate(zip(made.hosts, made.cards, strict=True), 1):
        port = f"port{number}"
        ip("netns", "add", host)
        ip("link", "add", card, "netns", host, "type", "veth", "peer", port, "netns", middle)
        ip("-n", middle, "link", "set", port, "master", "switch", "up")
        ip("-n", host, "addr", "add", f"{_NETWORK}.{number}/24", "dev", card)
        ip("-n", host, "link", "set", card, "up")
        ip("-n", host, "link", "set", "lo", "up")
        shape(host, card, rate)
        shape(middle, port, rate)
