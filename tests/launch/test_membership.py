"""How long a member tries to reach its coordinator."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from tests.patience import PATIENCE

from syncline.config import JobConfig
from syncline.core.members import Address, Member
from syncline.errors import ConnectionLost, NoAnswer
from syncline.launch import jobfile, membership
from syncline.launch.jobfile import JobFile
from syncline.net import handshake, tcp
from syncline.net.transport import Peer


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(handshake, "SECONDS", 0.1)
    monkeypatch.setattr(membership, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(membership, "AGAIN_SECONDS", 0.0)
    yield


def identity(file: JobFile, role: str) -> tcp.Identity:
    return tcp.Identity(file.job, file.token_bytes, Peer(role, role, 0))


def test_where_nobody_listens_it_is_said_soon() -> None:
    with tcp.bind("127.0.0.1", 0) as sock:
        file = jobfile.new("127.0.0.1", sock.getsockname()[1], {"start_seconds": PATIENCE})
    with pytest.raises(ConnectionLost, match=r"no coordinator at 127\.0\.0\.1:\d+ within \d+ s: .*refused"):
        membership.connect(file, identity(file, "worker"))


def test_one_that_listens_and_is_silent_is_waited_for_as_long_as_for_the_job() -> None:
    with tcp.bind("127.0.0.1", 0) as sock:
        file = jobfile.new("127.0.0.1", sock.getsockname()[1], {"start_seconds": 0.9})
        with pytest.raises(ConnectionLost, match=r"within \d+ s: no handshake within 0\.1 s"):
            membership.connect(file, identity(file, "worker"))


def test_a_queue_full_of_those_who_gave_up_is_no_reason_to_give_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try leaves a connection behind that nobody has taken: after many, the system answers no more."""
    tries: list[float] = []

    def connect(host: str, port: int, identity: tcp.Identity, seconds: float) -> None:
        tries.append(seconds)
        if len(tries) == 1:
            raise NoAnswer("no handshake within 5 s")
        time.sleep(0.1)
        raise TimeoutError("timed out")

    monkeypatch.setattr(tcp, "connect_tcp", connect)
    file = jobfile.new("127.0.0.1", 1, {"start_seconds": 0.9})
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match="timed out"):
        membership.connect(file, identity(file, "worker"))
    assert time.monotonic() - began > 0.9 and len(tries) > 2
    tries[:] = [0.0]  # silent from the first: nobody may be there at all
    with pytest.raises(ConnectionLost, match=r"no coordinator at 127\.0\.0\.1:1 within \d+ s: timed out"):
        membership.connect(jobfile.new("127.0.0.1", 1, {"start_seconds": PATIENCE}), identity(file, "worker"))


@pytest.mark.parametrize("transport", ["auto", "shm"])
@pytest.mark.parametrize("num_silent", [1, 2])
def test_a_server_beside_that_is_silent_is_no_reason_for_sockets(
    transport: str, num_silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no time. Without shared memory the job would be slow to its end; and `shm` is not what is wrong."""
    found, tries = object(), []

    def connect(path: str, identity: tcp.Identity, seconds: float) -> object:
        tries.append(path)
        if len(tries) <= num_silent:
            raise NoAnswer("no handshake within 5 s")
        return found

    monkeypatch.setattr(tcp, "connect_unix", connect)
    file, config = jobfile.new("127.0.0.1", 1, {}), JobConfig(transport=transport)
    member = Member("server-0", "server", 1, "here", Address("@there", "127.0.0.1", 1))
    if num_silent == 1:
        assert membership.reach(member, identity(file, "worker"), config) is found
    else:
        with pytest.raises(ConnectionLost, match="server-0 does not answer: no handshake within 5 s"):
            membership.reach(member, identity(file, "worker"), config)
    assert tries == ["@there"] * 2


def test_a_coordinator_that_starts_slowly_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket is bound before its process has loaded, which on a busy machine takes longer than any one try."""
    sock, made = tcp.bind("127.0.0.1", 0), []
    file = jobfile.new("127.0.0.1", sock.getsockname()[1], {"start_seconds": PATIENCE})

    def wake_up() -> None:
        monkeypatch.setattr(handshake, "SECONDS", PATIENCE)
        there = identity(file, "coordinator")
        made.append(tcp.Listener(there, lambda connection: None, sock=sock, log=lambda line: None))

    timer = threading.Timer(1.0, wake_up)  # after CONNECT_SECONDS
    timer.start()
    try:
        connection = membership.connect(file, identity(file, "worker"))
        assert connection.peer.role == "coordinator"
        connection.close()
    finally:
        timer.join()
        made[0].close()
