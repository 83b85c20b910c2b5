"""Deputies: in a ring, through whom the sums of a slice go inside a host and between hosts.

Of every slice each host has one deputy: on the host of its primary that one, elsewhere a server that follows from the
seats alone. A deputy adds up its host's gradients, the primary adds up what deputies have carried to it; the sum goes
to them, and from them to their neighbours. So of each slice a host's sum crosses once, and the sum of all once to
each host: 2 (h-1)/h of the model for each of h hosts, however many workers it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from syncline.config import JobConfig
from syncline.core.codecs.named import NONE
from syncline.core.members import Member
from syncline.core.ring import partner_of
from syncline.core.seats import Seat
from syncline.core.standings import by_name


class Deputies:
    """Of one generation."""

    def __init__(self, seats: Mapping[int, Seat], hosts: Mapping[str, str]) -> None:
        """`hosts`: of the servers, by name."""
        self._seats, self._hosts = seats, hosts
        self._known: dict[int, dict[str, str]] = {}

    def host_of(self, name: str) -> str:
        """Of a server, or of a worker by the server in its process; "": it has no seat."""
        return self._hosts.get(name if name in self._hosts else partner_of(name), "")

    def of(self, number: int) -> dict[str, str]:
        """By host, in the order of hosts."""
        found = self._known.get(number)
        if found is None:
            seat = self._seats.get(number)
            found = self._known[number] = _deputies(seat, self._hosts) if seat is not None and seat.primary else {}
        return found

    def primary(self, number: int) -> str:
        seat = self._seats.get(number)
        return seat.primary if seat is not None else ""

    def carries(self, sender: str, number: int, to: str) -> bool:
        """Whether this server gives that one its host's sum of a slice: a deputy, the primary."""
        host = self.host_of(sender)
        return self.primary(number) == to and host != self.host_of(to) and self.of(number).get(host) == sender

    def gives(self, sender: str, number: int, to: str) -> bool:
        """Whether it gives it the sum of all: the primary a deputy, a deputy its neighbours."""
        deputy, primary = self.of(number).get(self.host_of(to)), self.primary(number)
        return to not in ("", primary) and sender == (primary if deputy == to else deputy)

    def neighbours(self, name: str) -> list[str]:
        """The other servers on its host."""
        host = self._hosts[name]
        return sorted((other for other, where in self._hosts.items() if where == host and other != name), key=by_name)


def deputies_of(config: JobConfig, seats: Mapping[int, Seat], members: Iterable[Member]) -> Deputies | None:
    """None where sums go straight: of a lone worker, of two on two hosts, on one host without cores to spare, without
    shared memory, with a codec, or where torch.distributed adds up. All members come to the same by
    the seats, and by what the roster says of who is in them."""
    codecs = (config.codec, config.pull_codec)
    if not config.is_ring or config.has_circle or config.transport == "tcp" or any(c not in NONE for c in codecs):
        return None
    names = {name for seat in seats.values() for name in seat.names}
    seated = {member.name: member for member in members if member.name in names}
    hosts = {name: seated[name].host if name in seated else "" for name in names}
    num_hosts = len(set(hosts.values()))
    if len(names) <= num_hosts <= 2 or (num_hosts == 1 and not _have_cores_to_spare(seated.values())):
        return None
    return Deputies(seats, hosts)


def _have_cores_to_spare(seated: Collection[Member]) -> bool:
    """Whether sums are made by cores that are idle while backward goes on: of one host's, two for each process. With
    fewer, sums and backward would only take turns, and straight is less work."""
    return all(member.num_cores >= (2 if member.cores else 2 * len(seated)) for member in seated)


def _deputies(seat: Seat, hosts: Mapping[str, str]) -> dict[str, str]:
    by_host: dict[str, list[str]] = {}
    for name in sorted(seat.names, key=by_name):
        by_host.setdefault(hosts.get(name, ""), []).append(name)
    # As even as primaries are, whoever has how many workers: by the primary's place on its own host, and in turn.
    turn = by_host[hosts.get(seat.primary, "")].index(seat.primary) + seat.slice // len(seat.names)
    found = {host: names[turn % len(names)] for host, names in sorted(by_host.items())}
    return {**found, hosts.get(seat.primary, ""): seat.primary}
