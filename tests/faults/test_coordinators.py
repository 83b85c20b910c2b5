"""Members whose coordinator is there twice, or hard to reach: each started by hand, on a socket that the test has."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.patience import JOB_PATIENCE, PATIENCE

from syncline.core.wire.control import AskStatus, GivenStatus
from syncline.errors import SynclineError
from syncline.launch import jobfile
from syncline.launch.processes import MemberPlan, MemberProcess, start_member
from syncline.launch.restarts import EVICTED
from syncline.launch.watching import ask
from syncline.net import tcp
from syncline.testing.proxy import Proxy

pytestmark = [pytest.mark.slow, pytest.mark.proof]
LEDGER = pathlib.Path(__file__).parents[2] / "examples" / "chaos_ledger.py"
SECONDS = JOB_PATIENCE


class ByHand:
    """Members of one job, each a process of its own; nobody starts them again."""

    def __init__(self, folder: pathlib.Path, policy: str) -> None:
        self.folder = folder
        self.sock, self.second = tcp.bind("127.0.0.1", 0), tcp.bind("127.0.0.1", 0)
        given = {
            "runs": str(folder / "runs"), "name": "byhand", "workers": 2, "servers": 2, "replicas": 2,
            "policy": policy,
        }  # fmt: skip
        self.file = jobfile.new("127.0.0.1", self.sock.getsockname()[1], given)
        self.proxy = Proxy("127.0.0.1", self.file.port)
        self.output = ""
        self._started: list[tuple[MemberProcess, threading.Thread]] = []

    def coordinator(self) -> MemberProcess:
        return self._start("coordinator", self.file, listen_fd=self.sock.fileno())

    def second_coordinator(self) -> MemberProcess:
        """Takes the job up, at an address of its own to which the members' connections are turned."""
        host, port = "127.0.0.1", self.second.getsockname()[1]
        process = self._start("coordinator", self.file, listen_fd=self.second.fileno(), resumes=True)
        self.file = msgspec.structs.replace(self.file, port=port)
        self.proxy.turn_to(host, port)
        self.proxy.cut()
        return process

    def member(self, name: str, *, through_proxy: bool = False) -> MemberProcess:
        file = msgspec.structs.replace(self.file, port=self.proxy.port) if through_proxy else self.file
        pushes = ["--seconds", str(2 * JOB_PATIENCE), "--until", "enough", "--think", "0.02"]
        script = {"script": str(LEDGER), "arguments": pushes} if name.startswith("worker") else {}
        return self._start(name, file, **script)

    def _start(self, name: str, file: jobfile.JobFile, **more: Any) -> MemberProcess:
        role = name.partition("-")[0]
        plan = MemberPlan(role=role, name=name, host="local", file=file, folder=str(self.folder), **more)
        process = start_member(plan)
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        self._started.append((process, reader))
        return process

    def _read(self, process: MemberProcess) -> None:
        for line in iter(process.output.readline, b""):
            self.output += f"{process.name}: {line.decode()}"

    def until(self, condition: Callable[[], object], seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def says(self, text: str) -> Callable[[], object]:
        return lambda: re.search(text, self.output)

    def term(self) -> int:
        try:
            return ask(self.file, AskStatus(), GivenStatus, 5.0).status.term
        except SynclineError:
            return 0

    def ends_well(self, *processes: MemberProcess, may_be_out: bool = False) -> None:
        """The ledger closes, nothing is lost or doubled, and these have ended in order, or as evicted."""
        (self.folder / "enough").touch()
        self.until(lambda: all(process.poll() is not None for process in processes))
        self.until(self.says(r"ledger: \d+ acknowledged"))
        assert re.search(r"ledger: [1-9]\d* acknowledged, 0 lost, 0 doubled$", self.output, re.MULTILINE), self.output
        codes = {process.poll() for process in processes}
        assert codes <= ({0, EVICTED} if may_be_out else {0}), self.output

    def close(self) -> None:
        self.proxy.close()
        for process, _ in self._started:
            if process.poll() is None:
                process.signal(signal.SIGCONT)
                process.kill()
        for process, reader in self._started:
            reader.join(PATIENCE)
            process.stop(PATIENCE)
        self.sock.close()
        self.second.close()


@pytest.fixture
def by_hand(tmp_path: pathlib.Path) -> Iterator[Callable[..., ByHand]]:
    made: list[ByHand] = []

    def make(policy: str) -> ByHand:
        made.append(ByHand(tmp_path.resolve(), policy))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_of_two_coordinators_of_a_job_the_older_one_goes(by_hand: Callable[..., ByHand], policy: str) -> None:
    """The first is stopped, a second takes the job up from the journal, and the way there leads to it. Then the first
    goes on: it may write nothing any more and change nobody's mind, and says why it ends."""
    job = by_hand(policy)
    first = job.coordinator()
    names = ("server-0", "server-1", "worker-0", "worker-1")
    others = [job.member(name, through_proxy=True) for name in names]
    job.until(job.says("worker-0 has row"))
    job.until(job.says("worker-1 has row"))
    os.kill(first.pid, signal.SIGSTOP)
    second = job.second_coordinator()
    job.until(lambda: job.term() == 2)
    time.sleep(1.0)
    os.kill(first.pid, signal.SIGCONT)
    job.until(lambda: first.poll() is not None)
    said = r"FencedError: .*a newer coordinator, term 2, has taken over .*; this coordinator ends"
    assert re.search(said, job.output), job.output
    assert job.term() == 2
    job.ends_well(*others, second)


def cut_mid_frame(proxy: Proxy) -> None:
    proxy.cut_after(7, "up")
    time.sleep(1.0)
    proxy.cut_after(5, "down", reset=True)


def corrupt(proxy: Proxy) -> None:
    """Headers and bodies of what comes next, in both directions; the connection ends and is made again, where a
    length was changed after some seconds: a part of what never comes is waited for."""
    for offset in (0, 9, 40):
        proxy.corrupt(offset, "up")
        time.sleep(0.7)
        proxy.corrupt(offset, "down")
        time.sleep(0.7)
    time.sleep(4.0)


def replay(proxy: Proxy) -> None:
    """All that a member ever said is said once more, by somebody else: nothing of it counts."""
    proxy.record()
    proxy.cut()
    deadline = time.monotonic() + SECONDS
    while not proxy.recordings or len(proxy.recordings[0].up) < 2000:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert proxy.replay(proxy.recordings[0], 2.0).was_closed


@pytest.mark.parametrize("harm", [cut_mid_frame, corrupt, replay])
def test_harm_between_a_member_and_the_coordinator_costs_nothing(
    by_hand: Callable[..., ByHand], harm: Callable[[Proxy], None]
) -> None:
    """A worker and a server reach their coordinator by a wire that cuts, changes and repeats. A length that was
    changed makes a member deaf for some seconds: it may be out then, and says so."""
    job = by_hand("sync")
    coordinator = job.coordinator()
    others = [job.member(name) for name in ("server-0", "worker-0")]
    others += [job.member(name, through_proxy=True) for name in ("server-1", "worker-1")]
    job.until(job.says("worker-0 has row"))
    job.until(job.says("worker-1 has row"))
    harm(job.proxy)
    time.sleep(1.0)
    job.ends_well(*others, coordinator, may_be_out=harm is corrupt)
    assert harm is corrupt or " is out: " not in job.output, job.output


def is_closed(stranger: socket.socket) -> bool:
    """By the other side, in time; whatever that has said before."""
    stranger.settimeout(PATIENCE)
    try:
        while stranger.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_stranger_that_says_nothing_or_nonsense_is_no_trouble(by_hand: Callable[..., ByHand]) -> None:
    job = by_hand("async")
    coordinator = job.coordinator()
    others = [job.member(name) for name in ("server-0", "server-1", "worker-0", "worker-1")]
    job.until(job.says("worker-0 has row"))
    strangers = [socket.create_connection(("127.0.0.1", job.file.port)) for _ in range(20)]
    try:
        for stranger in strangers[::2]:
            stranger.sendall(b"\xff" * 100)
        for stranger in strangers[::2]:
            assert is_closed(stranger), job.output
        job.ends_well(*others, coordinator)
    finally:
        for stranger in strangers:
            stranger.close()
