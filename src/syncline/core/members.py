"""A member, as everyone in a generation knows it."""

from __future__ import annotations

import msgspec


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a member listens: a Unix socket for its own host, host and port for the others."""

    unix: str
    host: str
    port: int


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One live process."""

    name: str
    role: str
    incarnation: int
    host: str
    address: Address | None = None
    since: int = 0  # generation in which it joined: who was there first has the lower rank
    kind: str = ""  # processor and torch
    cores: str = ""  # that are its own, where it was given some
    pid: int = 0  # on its host
    num_cores: int = 0  # that it may run on
