"""Jobs in one process, one for many tests: collectives leave nothing behind."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.collectives.together import together

from syncline import collectives
from syncline.core.members import Member
from syncline.launch import embedded
from syncline.net import shm
from syncline.net.connection import SocketConnection
from syncline.net.streams import PlainStream
from syncline.net.transport import Connection, Peer
from syncline.testing import local_job
from syncline.testing.local import LocalJob
from syncline.worker.job import Job

WAYS: dict[str, dict[str, Any]] = {
    "one": {"workers": 1},
    "shared": {"workers": 3},
    "sockets": {"workers": 3, "transport": "tcp"},
    "hosts": {"workers": 5, "on": ["a", "a", "b", "b", "b"]},
}


@pytest.fixture(scope="module", params=WAYS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalJob]:
    """Alone; on one host; over sockets; two hosts of two and three."""
    folder = str(tmp_path_factory.mktemp("runs"))
    with local_job(folder=folder, **WAYS[request.param]) as made:
        yield made


@pytest.fixture(scope="module", params=["shared", "sockets"])
def three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalJob]:
    folder = str(tmp_path_factory.mktemp("runs"))
    with local_job(folder=folder, **WAYS[request.param]) as made:
        yield made


@contextlib.contextmanager
def over_unix_sockets(workers: int, folder: str, **settings: Any) -> Iterator[LocalJob]:
    """A job in this process whose workers reach each other as processes of one host do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded.WorkerTwin, "connect", _connect)
        patch.setattr(embedded.WorkerTwin, "create_memory", lambda twin, size: shm.create(size, for_all=True))
        with local_job(workers=workers, folder=folder, **settings) as made:
            together(made, _meet)
            yield made


def _meet(me: Job) -> None:
    """Ways, and the memory that is kept, are there before a test looks at what it leaves behind."""
    for size in (1, 100_000):
        collectives.all_reduce(np.ones(size))


def _connect(twin: Any, member: Member) -> Connection:
    others = twin.process.peers_of(member)
    one, two = (Peer("worker", who.name, who.incarnation) for who in (twin.me, member))
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    others.accept(SocketConnection(PlainStream(theirs), one, "theirs"))
    return SocketConnection(PlainStream(mine), two, "mine")
