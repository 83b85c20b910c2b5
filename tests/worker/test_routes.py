"""Servers at addresses that do not answer: a worker goes on as soon as it hears that nobody is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.blackhole import blackhole
from tests.patience import PATIENCE

from syncline import Rule
from syncline.core.members import Member
from syncline.core.wire.control import Over
from syncline.errors import JobFailed
from syncline.net import tcp
from syncline.net.rpc import Endpoint
from syncline.net.transport import Peer
from syncline.worker.exchange import routes

SGD = Rule("SGD", lr=1.0)
DIAL_SECONDS = PATIENCE


@pytest.fixture
def nowhere() -> Iterator[Callable[[Any], Callable[[Member], Endpoint]]]:
    """Makes the dial of a house whose server-1 of the next life is at an address that does not answer."""
    with blackhole() as (host, port):

        def make(twin: Any) -> Callable[[Member], Endpoint]:
            first, ours = twin.members["server-1"].incarnation, twin.dial

            def dial(member: Member) -> Endpoint:
                if member.name == "server-1" and member.incarnation != first:
                    twin.dialled.set()
                    identity = tcp.Identity("twin", bytes(32), Peer("worker", "worker-0", 3))
                    return Endpoint(tcp.connect_tcp(host, port, identity, DIAL_SECONDS), twin.stamp)
                return ours(member)

            return dial

        yield make


def begin(house: Callable[..., Any], nowhere: Any) -> tuple[Any, threading.Thread, list[Any]]:
    """A worker in the middle of a push, which dials a server that came back at an address that does not answer."""
    twin = house(2, slice_bytes=64)
    twin.job.kv.register({"a": np.zeros(64)}, SGD)
    twin.dialled = threading.Event()
    twin.dial = nowhere(twin)
    twin.servers["server-1"].die()
    twin.add_server("server-1")
    twin.change()
    found: list[Any] = []

    def push() -> None:
        try:
            found.append(twin.job.kv.push_pull({"a": np.ones(64)}).wait())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=push)
    thread.start()
    assert twin.dialled.wait(PATIENCE)
    time.sleep(0.1)
    assert thread.is_alive() and not found
    return twin, thread, found


def test_a_newer_roster_without_that_server_ends_the_dial(house: Callable[..., Any], nowhere: Any) -> None:
    """In `sync` all others would wait so long for this worker, although everyone knows where the slices are."""
    twin, thread, found = begin(house, nowhere)
    began = time.monotonic()
    twin.servers["server-1"].die()
    twin.fail_over("server-1", "server-0")
    thread.join(DIAL_SECONDS)
    assert not thread.is_alive() and time.monotonic() - began < DIAL_SECONDS / 2
    np.testing.assert_array_equal(found[0]["a"], np.full(64, -1.0))


def test_the_end_of_the_job_ends_the_dial(house: Callable[..., Any], nowhere: Any) -> None:
    twin, thread, found = begin(house, nowhere)
    twin.coordinator.say(Over(True, "worker-7", "worker-7 failed"))
    thread.join(DIAL_SECONDS / 2)
    assert not thread.is_alive() and isinstance(found[0], JobFailed)


def test_a_roster_that_comes_while_a_server_is_reached_closes_nothing(house: Any, monkeypatch: Any) -> None:
    """It names the very server that was just reached: closed, it would have to be reached again."""
    twin, reader = house(2, slice_bytes=256), routes.ServerReader

    def heard(*given: Any, **more: Any) -> Any:
        twin.job.exchange.routes.hear(twin.roster())
        return reader(*given, **more)

    monkeypatch.setattr(routes, "ServerReader", heard)
    twin.job.kv.register({"a": np.zeros(64), "b": np.zeros(64)}, SGD)
    twin.job.kv.push({"a": np.ones(64), "b": np.ones(64)}).wait()
    assert all((value == -1.0).all() for value in twin.everything().values())
    assert [len(server.endpoints) for server in twin.servers.values()] == [1, 1]


def test_a_roster_that_comes_between_the_dial_and_the_way_counts(house: Any, monkeypatch: Any) -> None:
    """The server that was just reached is out by it: whoever asked it something would wait for its deadline."""
    twin, reader, open_ = house(2, slice_bytes=256), routes.ServerReader, []

    def heard(endpoint: Any, *given: Any, **more: Any) -> Any:
        made = reader(endpoint, *given, **more)
        if endpoint.peer.name == "server-1":
            look = made.look
            made.look = lambda parts: (open_.append(endpoint.is_open), look(parts))[1]
            twin.servers.pop("server-1")  # it hangs: its connection stays
            twin.fail_over("server-1", "server-0", tell=False)
            twin.job.exchange.routes.hear(twin.roster())
        return made

    monkeypatch.setattr(routes, "ServerReader", heard)
    twin.job.kv.register({"a": np.zeros(64), "b": np.zeros(64)}, SGD)
    assert not any(open_)
