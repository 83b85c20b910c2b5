"""The names under which a request may ask for the page.

A site elsewhere can make a name of its own mean this machine (DNS rebinding); the browser then sends that name as the
Host. So a request must name this machine: by an address or name of its own, or by a name that the job was told.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Sequence

from syncline.errors import ConfigError

#: In every browser they mean the reader's own machine: no name server can make them mean another one. A tunnel ends
#: there, on a port that only its user knows.
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_NAME = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_.])?|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


class Hosts:
    """What a request may name as its Host."""

    def __init__(
        self, exact: frozenset[str], any_port: frozenset[str] = frozenset(), *, is_proxied: bool = False
    ) -> None:
        """`exact`: NAME:PORT; `any_port`: NAME; `is_proxied`: what a proxy says of a request is believed."""
        self._exact, self._any_port, self.is_proxied = exact, any_port, is_proxied

    def allows(self, said: str) -> bool:
        said = said.lower()
        name, colon, port = said.rpartition(":")
        if not colon or port.endswith("]"):
            name, port = said, ""
        elif not (port.isascii() and port.isdecimal()):
            return False
        return said in self._exact or name in self._any_port


def hosts_of(sock: socket.socket, page_hosts: Sequence[str] = ()) -> Hosts:
    """The address of a socket, the names that mean it here, and those of `--page-host`."""
    host, port = sock.getsockname()[:2]
    names, any_port = {host, f"[{host}]"}, set[str]()
    if host in ("::1", "0.0.0.0", "::") or host.startswith("127."):
        any_port |= LOOPBACK
    if host in ("0.0.0.0", "::"):
        own = socket.gethostname()
        names |= {own, own.partition(".")[0], socket.getfqdn()}
        with contextlib.suppress(OSError):
            found = {str(info[4][0]) for info in socket.getaddrinfo(own, None)}
            names |= found | {f"[{one}]" for one in found if ":" in one}
    elif not host.startswith("127."):
        with contextlib.suppress(OSError):
            names.add(socket.getfqdn(host))
    exact = {f"{name}:{port}".lower() for name in names}
    told = page_hosts_of(page_hosts)
    for name in told:
        has_port = name.rpartition(":")[2].isdecimal() and not name.endswith("]") and ":" in name
        (exact if has_port else any_port).add(name)
    return Hosts(frozenset(exact), frozenset(any_port), is_proxied=bool(told))


def page_hosts_of(said: Sequence[str]) -> list[str]:
    """The names that `--page-host` gives, each said by itself or several with commas. Raises ConfigError."""
    names = [name.strip().lower() for text in said for name in text.split(",") if name.strip()]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"--page-host {name!r}: give the name that browsers ask for, NAME or NAME:PORT, e.g. jobs.example.org"
            )
    return names
