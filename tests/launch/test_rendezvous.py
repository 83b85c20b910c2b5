"""How ranks find each other: what follows from the secret, which secrets are refused, and what is said then."""

from __future__ import annotations

import os
import pathlib
import stat
from typing import Any

import pytest
from tests.patience import PATIENCE

from syncline.errors import ConfigError, WrongLauncher
from syncline.launch import ranks, rendezvous
from syncline.launch.jobfile import JobFile
from syncline.launch.world import StartedRanks
from syncline.net import tcp
from syncline.net.transport import Peer

SECRET, GIVEN = b"5" * 32, {"workers": 4}
FAR = StartedRanks(launcher="mpirun", rank=1, size=4, found="OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=1", run="1")
HERE = StartedRanks(launcher="mpirun", rank=1, size=4, found="OMPI_COMM_WORLD_SIZE=4", run="1", is_here=True)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delenv("SYNCLINE_TOKEN_FILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_ranks_with_one_secret_compute_one_job_and_nothing_of_it_is_the_secret() -> None:
    one, two = rendezvous.meeting_of(SECRET, "run", GIVEN), rendezvous.meeting_of(SECRET, "run", dict(GIVEN))
    assert one == two and len(set(one.ports)) > 1
    assert all(rendezvous.FIRST_PORT <= port < rendezvous.LAST_PORT for port in one.ports)
    assert SECRET.decode() not in (one.job + one.token)


@pytest.mark.parametrize(
    ("secret", "run", "given"),
    [
        (b"6" * 32, "run", GIVEN),
        (SECRET, "another", GIVEN),
        (SECRET, "run", {"workers": 3}),
        (SECRET, "run", {**GIVEN, "exchange": "ring"}),
    ],
)
def test_another_secret_start_or_exchange_is_another_job(secret: bytes, run: str, given: dict[str, Any]) -> None:
    one, two = rendezvous.meeting_of(SECRET, "run", GIVEN), rendezvous.meeting_of(secret, run, given)
    assert one.job != two.job and one.token != two.token


def test_bind_says_address_and_port() -> None:
    assert rendezvous.meeting_of(SECRET, "run", {**GIVEN, "bind": "a:7000"}).ports == [7000]
    assert rendezvous.address_of(FAR, "a:7000") == rendezvous.address_of(FAR, "a") == "a"
    assert rendezvous.address_of(FAR, "[fd00::2]:7000") == "fd00::2"
    assert rendezvous.address_of(HERE, "") == "127.0.0.1"


def test_several_hosts_without_an_address_are_an_error_that_says_how_to_give_one() -> None:
    with pytest.raises(WrongLauncher, match="does not say where rank 0 is; set MASTER_ADDR to its host"):
        rendezvous.address_of(FAR, "")


def test_several_hosts_without_a_secret_are_an_error_that_says_how_to_make_one() -> None:
    with pytest.raises(WrongLauncher, match=r"hands them no secret; make one with \(umask 077; openssl rand"):
        ranks.secret_of(FAR)


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (None, 0, "cannot be read on .*No such file"),
        ("5" * 32, 0o644, r"can be read by others \(mode 644\); run chmod 600"),
        ("short", 0o600, "has 5 bytes; a secret has 16 to 1024"),
        ("5" * 2000, 0o600, "a secret has 16 to 1024"),
    ],
)
def test_a_file_that_is_no_secret_is_refused(tmp_path: pathlib.Path, content: str, mode: int, said: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(WrongLauncher, match=said):
        rendezvous.read_token(path)


def test_the_secret_of_one_host_is_for_its_user_only_and_is_replaced_and_removed(tmp_path: pathlib.Path) -> None:
    assert ranks.secret_of(HERE) is None
    path = rendezvous.own_token_path(HERE)
    rendezvous.write_token(path, b"4" * 32)
    rendezvous.write_token(path, SECRET)
    modes = [stat.S_IMODE(os.stat(each).st_mode) for each in (path, path.parent)]
    assert ranks.secret_of(HERE) == SECRET and modes == [0o600, 0o700]
    rendezvous.remove_token(path, b"4" * 32)
    assert path.exists(), "a later start has put its own there"
    rendezvous.remove_token(path, SECRET)
    assert not path.exists()


def test_a_folder_that_others_can_enter_is_refused() -> None:
    folder = rendezvous.own_token_path(HERE).parent
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match=r"is open to others; run chmod 700"):
        rendezvous.own_token_path(HERE)


def test_a_stranger_on_the_port_is_passed_over_and_named() -> None:
    """Another job listens where ours is expected: it proves another token."""
    meeting = rendezvous.meeting_of(SECRET, "run", GIVEN)
    identity = tcp.Identity("another", b"7" * 32, Peer("coordinator", "coordinator", 0))
    listener = tcp.Listener(identity, lambda connection: None, sock=tcp.bind("127.0.0.1", 0), log=lambda line: None)
    try:
        there = rendezvous.Meeting(job=meeting.job, token=meeting.token, ports=[listener.address.port])
        refused: set[str] = set()
        assert rendezvous.find(there, "127.0.0.1", GIVEN, refused) is None
        said = str(rendezvous.no_coordinator(HERE, "127.0.0.1", there.ports, PATIENCE, refused))
        assert f"port {listener.address.port}: " in said and "do all ranks have one token" in said
    finally:
        listener.close()


def test_ports_that_drop_what_is_sent_share_the_deadline_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would take ten seconds: eight of them much longer than the start may take. None is left out."""
    now, asked = 1000.0, list[int]()

    def silent(file: JobFile, seconds: float) -> None:
        nonlocal now
        now += seconds
        asked.append(file.port)
        raise TimeoutError("timed out")

    monkeypatch.setattr(rendezvous, "reach_coordinator", silent)
    monkeypatch.setattr("time.monotonic", lambda: now)
    meeting, refused = rendezvous.meeting_of(SECRET, "run", GIVEN), set[str]()
    assert rendezvous.find(meeting, "192.0.2.1", GIVEN, refused, 24.0) is None
    assert asked == meeting.ports and now <= 1024.0 + 1e-6
    assert rendezvous.find(meeting, "192.0.2.1", GIVEN, refused, 0.0) is None and asked == meeting.ports
    said = str(rendezvous.no_coordinator(FAR, "192.0.2.1", meeting.ports, 24.0, refused))
    assert f"port {meeting.ports[0]}: no answer; does a firewall drop" in said


def test_ports_that_are_taken_are_passed_over() -> None:
    with tcp.bind("127.0.0.1", 0) as taken, tcp.bind("127.0.0.1", 0) as free:
        number = free.getsockname()[1]
        free.close()
        ports = [taken.getsockname()[1], number]
        with rendezvous.listen(rendezvous.Meeting(job="j", token="t", ports=ports), HERE, "127.0.0.1") as sock:
            assert sock.getsockname()[1] == number
        with pytest.raises(WrongLauncher, match=r"rank 0 of mpirun on .* cannot listen for the others"):
            rendezvous.listen(rendezvous.Meeting(job="j", token="t", ports=ports[:1]), HERE, "127.0.0.1")
