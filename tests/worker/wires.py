"""Connections of jobs inside this process, as they are between processes of one host."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from typing import Any

from syncline.core.members import Member
from syncline.launch import embedded
from syncline.launch.embedded import InProcess
from syncline.net import shm
from syncline.net.connection import SocketConnection
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.streams import PlainStream
from syncline.net.transport import Connection, Peer
from syncline.server import pool


def go_between_processes(
    setattr: Callable[[Any, str, Any], None], broken: Callable[[Exception], None], *, shares: bool
) -> None:
    """Workers and servers speak over Unix sockets, and the servers have threads of their own, which say what broke.

    `shares`: memory, too; then whoever waits for an answer reads it.
    """
    serve_in_threads(setattr, broken)
    setattr(embedded, "HeapMemory", shm.create)
    in_process = InProcess.pair

    def connect(self: InProcess, one: Peer, two: Peer, theirs: Any) -> Connection:
        if "server" not in (one.role, two.role) or "coordinator" in (one.role, two.role):
            return in_process(self, one, two, theirs)
        ends = socket.socketpair()
        left, right = (
            SocketConnection(PlainStream(end, peer.name), peer, peer.name)
            for end, peer in zip(ends, (two, one), strict=True)
        )
        left.shares_memory = right.shares_memory = shares
        other = Endpoint(right, self.stamp(), theirs)
        for name in (one.name, two.name):
            self.endpoints.setdefault(name, []).append(other)
        theirs.greet(other)
        return left

    setattr(InProcess, "pair", connect)
    if shares:
        waiting = functools.partial(Endpoint, waiter_reads=True)
        setattr(InProcess, "dial", functools.partialmethod(_dial, waiting))


def serve_in_threads(setattr: Callable[[Any, str, Any], None], broken: Callable[[Exception], None]) -> None:
    setattr(pool, "InlinePool", lambda: pool.ThreadPool(broken, 2))


def _dial(self: InProcess, endpoint: Any, me: Member, stamp: Stamp, member: Member) -> Endpoint:
    one, two = Peer("worker", me.name, me.incarnation), Peer("server", member.name, 0)
    return endpoint(self.pair(one, two, self._server(member.name)), stamp)
