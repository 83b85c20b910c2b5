"""TLS between two hosts: the bare echo, the namespaces, and a job that spans them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.patience import PATIENCE

from benchmarks import moving, namespaces, tls
from benchmarks.match import play
from benchmarks.row import Effort, NotMeasured, Reach
from benchmarks.sides import ProcessSide
from benchmarks.task import Task
from syncline.errors import ConnectionLost, JobFailed, WaitTimeout
from syncline.net.certificate import Certificate, client_context
from syncline.net.transport import buffer_of

SECONDS = PATIENCE


@contextlib.contextmanager
def connected(other_end: Callable[[tls.Duplex], None] = tls.echo) -> Iterator[tls.Duplex]:
    """What the other end does runs in a thread, and has ended at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    for sock in (here, there):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)  # a bite seldom goes whole

    def partner() -> None:
        context = Certificate.create().server_context()
        with context.wrap_socket(there, server_side=True) as wrapped, contextlib.suppress(ConnectionLost):
            other_end(tls.Duplex(wrapped))

    thread = threading.Thread(target=partner, daemon=True)
    thread.start()
    try:
        with client_context().wrap_socket(here) as sock:
            yield tls.Duplex(sock)
    finally:
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("num_bytes", [1, 5000, tls.PIECE_BYTES, 2 * tls.PIECE_BYTES + 777])
def test_the_echo_sends_back_every_byte_in_order(num_bytes: int):
    """Sizes at which a piece ends inside a record: the rest of it waits where no poll sees it."""
    there = np.random.default_rng(0).integers(256, size=num_bytes, dtype=np.uint8)
    back = np.zeros_like(there)
    with connected() as duplex:
        for _ in range(3):
            sent = received = 0
            back[...] = 0
            while received < num_bytes:
                sent += duplex.send(buffer_of(there)[sent:])
                received += duplex.receive(buffer_of(back)[received:])
                if received < num_bytes:
                    duplex.wait(to_receive=True, to_send=sent < num_bytes)
            assert sent == num_bytes and np.array_equal(there, back)


def test_a_stream_is_there_and_back_again(monkeypatch: pytest.MonkeyPatch):
    """An operation leaves nothing under way: another one begins with its own bytes."""
    num_bytes, moved = tls.PIECE_BYTES + 5, {"send": 0, "receive": 0}

    def counted(name: str, real: Callable[[memoryview], int]) -> Callable[[memoryview], int]:
        def count(view: memoryview) -> int:
            done = real(view)
            moved[name] += done
            return done

        return count

    with connected() as duplex:
        for name in moved:
            monkeypatch.setattr(duplex, name, counted(name, getattr(duplex, name)))
        operation = tls.stream(Task(kind="stream", num_bytes=num_bytes), duplex)
        for number in (1, 2, 3):
            operation()
            assert moved == {"send": number * num_bytes, "receive": number * num_bytes}


def test_the_end_of_the_stream_is_an_error():
    with connected(lambda other_end: None) as duplex, pytest.raises(ConnectionLost, match="the other side closed"):
        while True:
            duplex.receive(buffer_of(np.zeros(1, np.uint8)))
            duplex.wait(to_receive=True, to_send=False)


def side(name: str, num_bytes: int, address: str = "127.0.0.1", *prefix: str) -> ProcessSide:
    return ProcessSide(
        "tls", Task(kind="stream", num_bytes=num_bytes, address=address, prefix=list(prefix)), side=name
    )


def test_processes_take_turns_on_one_host(fast: Effort):
    samples = play(side("ours", 1 << 20), side("reference", 5000), fast)
    assert len(samples.ours) == len(samples.reference) == 5 and min(*samples.ours, *samples.reference) > 0


def test_a_partner_that_cannot_be_started_is_told_of(fast: Effort):
    with pytest.raises(
        JobFailed, match=r"ours 0 ended with exit code 1: (?s:.*)the partner has ended before it listened"
    ):
        play(side("ours", 64, "127.0.0.1", "false"), side("reference", 64), fast)


# -- namespaces ---------------------------------------------------------------------------------------------


def existing() -> set[str]:
    if shutil.which("ip") is None:
        return set()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.strip()}


@pytest.fixture
def wire() -> Iterator[namespaces.Wire]:
    try:
        with namespaces.wire() as made:
            yield made
    except NotMeasured as reason:
        pytest.skip(str(reason))
    assert not {made.server, made.worker} & existing()


def wait_until_deleted(names: set[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while names & existing():
        assert time.monotonic() < deadline, f"{names & existing()} are left"
        time.sleep(0.05)


def test_namespaces_differ_and_reach_each_other(wire: namespaces.Wire):
    assert {wire.server, wire.worker} <= existing()
    code = (
        "import socket; s = socket.create_server(('10.77.0.1', 0)); print(s.getsockname()[1], flush=True); s.accept()"
    )
    with subprocess.Popen(
        [*namespaces.inside(wire.server), sys.executable, "-c", code], stdout=subprocess.PIPE
    ) as one:
        assert one.stdout is not None
        port = one.stdout.readline().decode().strip()
        code = f"import socket; socket.create_connection(('10.77.0.1', {port}), 300)"
        subprocess.run([*namespaces.inside(wire.worker), sys.executable, "-c", code], check=True)
    with namespaces.wire() as other:
        assert {other.server, other.worker}.isdisjoint({wire.server, wire.worker})


def test_namespaces_are_deleted_when_the_row_fails(wire: namespaces.Wire):
    with pytest.raises(KeyboardInterrupt), namespaces.wire() as made:
        raise KeyboardInterrupt
    assert not {made.server, made.worker} & existing()


def test_namespaces_are_deleted_when_the_bench_is_killed(wire: namespaces.Wire):
    """By SIGKILL: nobody is left to tidy up but the one that waits for the lifeline."""
    code = (
        "import time\nfrom benchmarks.namespaces import wire\n"
        "with wire() as made:\n print(made.server, made.worker, flush=True)\n time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        names = set(process.stdout.readline().split())
        assert len(names) == 2 and names <= existing()
        process.send_signal(signal.SIGKILL)
    wait_until_deleted(names)


def test_namespaces_that_cannot_be_deleted_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(namespaces, "_DELETE", "read -r _; exec sleep 60")
    monkeypatch.setattr(namespaces, "_DELETE_SECONDS", 0.2)
    waiting = namespaces.deleted_at_the_end(["some", "more"])
    with pytest.raises(WaitTimeout, match=r"taken 0.2 s for some, more"), waiting:
        pass


@pytest.mark.parametrize("made_so_far", [0, 1, 2, 5])
def test_where_they_cannot_be_made_the_row_is_not_measured(
    made_so_far: int, monkeypatch: pytest.MonkeyPatch, fast: Effort
):
    """Whatever `ip` refuses, and however much it had made before."""
    before, calls, real = existing(), [], namespaces.ip

    def refuse(*words: str) -> None:
        calls.append(words)
        if len(calls) > made_so_far:
            raise subprocess.CalledProcessError(2, "ip", stderr="Operation not permitted")
        if os.geteuid() == 0 and shutil.which("ip"):
            real(*words)

    monkeypatch.setattr(namespaces, "ip", refuse)
    with pytest.raises(NotMeasured, match=r"^needs root and iproute2$"):
        moving.tls("t", 64, reach=Reach("at most", 1.3)).measure(fast)
    assert existing() <= before


def test_without_iproute2_the_row_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: Effort):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotMeasured, match=r"^needs root and iproute2$"):
        moving.tls("t", 64, reach=Reach("at most", 1.3)).measure(fast)


@pytest.mark.proof
def test_a_turn_of_the_spanned_job_goes_over_the_wire(wire: namespaces.Wire, fast: Effort):
    """The worker that works is on the other side of it: all its bytes, there and back."""
    num_bytes = 4 << 20

    def carried(_: int) -> float:
        command = ["ip", "-n", wire.worker, "-s", "-j", "link", "show", "type", "veth"]
        counted = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)[0]["stats64"]
        return float(min(counted["rx"]["bytes"], counted["tx"]["bytes"]))

    task = Task(kind="push_pull", num_bytes=num_bytes, num_bystanders=1)
    floor = ProcessSide("floors", Task(kind="round trip", num_bytes=64))
    samples = play(namespaces.SpannedJobSide(task, wire), floor, fast, gauges={"ours": carried})
    turns = np.diff(samples.ours)
    assert len(turns) == 4 and min(turns) > 3 * num_bytes  # one operation is not counted, two are at least


@pytest.mark.slow
@pytest.mark.proof
def test_a_small_row_from_end_to_end(wire: namespaces.Wire, fast: Effort):
    samples = moving.tls("t", 1 << 20, reach=Reach("at most", 1.3)).measure(fast)
    assert len(samples.ours) == len(samples.reference) == 5 and min(*samples.ours, *samples.reference) > 0
