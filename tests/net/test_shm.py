"""Shared memory: sealed, handed over by descriptor, refused when it could kill its reader, and never left open."""

from __future__ import annotations

import array
import fcntl
import gc
import mmap
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline.core.wire.control import Leave
from syncline.core.wire.traffic import Attach, Mapped
from syncline.errors import FrameError
from syncline.net import frame, shm
from syncline.net.frame import Header

Make = Callable[..., Any]
PAGE = mmap.PAGESIZE
ATTACH = frame.kind_of(Attach(0, 0, 0))


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def named_maps() -> int:
    with open("/proc/self/maps", encoding="ascii") as file:
        return sum("memfd:syncline" in line for line in file)


def test_what_one_side_writes_the_other_reads() -> None:
    mine = shm.create(3 * PAGE)
    theirs = shm.accept(os.dup(mine.fd), 3 * PAGE)
    mine.array[5] = 42
    assert theirs.array[5] == 42 and theirs.array.nbytes == 3 * PAGE
    assert not theirs.array.flags.writeable, "a worker maps the servers' parameters to read them"
    mine.close()
    theirs.close()


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE])
def test_the_smallest_memory_is_a_page_on_both_sides(num_bytes: int) -> None:
    mine = shm.create(num_bytes)
    theirs = shm.accept(os.dup(mine.fd), num_bytes)
    assert mine.num_bytes == theirs.num_bytes == PAGE
    mine.close()
    theirs.close()


def test_memory_cannot_shrink_grow_or_lose_its_seals() -> None:
    """A file that is cut under a mapping kills whoever reads there, with SIGBUS and no word."""
    memory = shm.create(2 * PAGE)
    for size in (0, PAGE, 3 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    memory.close()


def test_the_receiver_cannot_write() -> None:
    """A worker gets the descriptor of the servers' parameters: with it, it must not be able to change them."""
    memory = shm.create(PAGE)
    for reopened in (os.dup(memory.fd), os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR)):
        with pytest.raises(PermissionError):
            mmap.mmap(reopened, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(reopened, b"x", 0)
        os.close(reopened)
    memory.array[0] = 1  # the owner's own mapping, made before the seal
    memory.close()


def unsealed(size: int, seals: int = 0) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: unsealed(2 * PAGE), "not sealed against shrinking and growing"),
        (lambda: unsealed(2 * PAGE, fcntl.F_SEAL_SHRINK), "not sealed against shrinking and growing"),
        (lambda: unsealed(2 * PAGE, fcntl.F_SEAL_GROW), "not sealed against shrinking and growing"),
        (lambda: unsealed(PAGE, 0x6), f"shared memory of {PAGE} bytes where {2 * PAGE} were said"),
        (lambda: unsealed(3 * PAGE, 0x6), f"shared memory of {3 * PAGE} bytes where {2 * PAGE} were said"),
        (lambda: os.open("/dev/null", os.O_RDONLY), "shared memory of 0 bytes"),
    ],
)
def test_foreign_memory_that_could_kill_its_reader_is_refused_and_closed(
    make: Callable[[], int], message: str
) -> None:
    before = num_open()
    with pytest.raises(FrameError, match=message):
        shm.accept(make(), 2 * PAGE)
    assert num_open() == before


def test_nothing_is_left_open() -> None:
    """A mapping keeps a descriptor of its own: both go, the memory too, when the last array over it is gone."""
    before, maps = num_open(), named_maps()
    for _ in range(20):
        memory = shm.create(1 << 20)
        theirs = shm.accept(os.dup(memory.fd), 1 << 20)
        theirs.close()
        memory.close()
    del memory, theirs
    gc.collect()
    assert (num_open(), named_maps()) == (before, maps)


def test_an_array_keeps_its_bytes_after_the_memory_is_closed() -> None:
    """A model's parameters may still be views of it when the job has ended: reading them must not crash."""
    maps = named_maps()
    memory = shm.create(PAGE)
    memory.array[:] = 7
    kept = memory.array[10:20]
    memory.close()
    memory.close()
    assert np.array_equal(kept, np.full(10, 7, np.uint8)) and memory.array.nbytes == 0
    del kept, memory
    gc.collect()
    assert named_maps() == maps


def test_a_memory_that_is_forgotten_closes_its_descriptor() -> None:
    before = num_open()
    memory = shm.create(PAGE)
    del memory
    gc.collect()
    assert num_open() == before


def test_too_little_memory_is_an_error_now_and_not_a_bus_error_later(monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_open()
    monkeypatch.setattr(shm, "available_bytes", lambda: 1 << 20)
    with pytest.raises(OSError, match="2097152 bytes of shared memory wanted, 1048576 are there"):
        shm.create(2 << 20)
    assert num_open() == before


def test_available_memory_is_known_here() -> None:
    available = shm.available_bytes()
    assert available is not None and available > 1 << 20


# -- over a Unix socket ------------------------------------------------------------------------------------------


def send(connection: Any, message: Any, attachment: Any = None, flags: int = 0) -> None:
    body = frame.encode(message)
    header = Header(frame.kind_of(message), 1, flags, body_bytes=len(body))
    connection.send(header, body, (), attachment)


def send_raw(connection: Any, message: Any, fds: list[int], flags: int) -> None:
    """A frame with any descriptors beside it, as a broken member would send it."""
    body = frame.encode(message)
    data = Header(frame.kind_of(message), 1, flags, body_bytes=len(body)).pack() + body
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.stream.sock.sendmsg([data], rights)


def test_memory_goes_with_a_frame_in_both_directions(host: Make) -> None:
    (one, at_one), (two, at_two) = host(unix=True).pair(unix=True)
    for sender, receiver, message in ((one, at_two, Attach(0, 0, 5000)), (two, at_one, Mapped(5000))):
        memory = sender.create_memory(5000)
        assert sender.can_carry(memory)
        memory.array[:3] = (1, 2, 3)
        send(sender, message, memory, frame.ATTACHED)
        _, got, _, attached = receiver.next()
        assert got == message
        assert attached.array[:4].tolist() == [1, 2, 3, 0] and not attached.array.flags.writeable
        memory.array[3] = 9
        assert attached.array[3] == 9
        memory.close()
        attached.close()


def test_a_tcp_connection_carries_no_memory(host: Make) -> None:
    (one, _), (_, at_two) = host().pair()
    memory = one.create_memory(100)
    assert not one.can_carry(memory)
    send_raw(one, Attach(0, 0, 100), [], frame.ATTACHED)
    assert "FrameError: shared memory was announced and did not come" in at_two.end()
    memory.close()


@pytest.mark.parametrize(
    ("message", "num_fds", "flags", "reason"),
    [
        (Leave(), 1, 0, "a file descriptor that was not announced"),
        (Attach(0, 0, 2 * PAGE), 1, 0, "a file descriptor that was not announced"),
        (Attach(0, 0, 2 * PAGE), 0, frame.ATTACHED, "shared memory was announced and did not come"),
        (Attach(0, 0, 2 * PAGE), 2, frame.ATTACHED, "shared memory was announced and did not come"),
        (Attach(0, 0, 2 * PAGE), 60, frame.ATTACHED, "shared memory was announced and did not come"),
        (Leave(), 1, frame.ATTACHED, "shared memory was announced and did not come"),
        (Attach(0, 0, 2 * PAGE + 1), 1, frame.ATTACHED, f"shared memory of {2 * PAGE} bytes where {2 * PAGE + 1}"),
        (Attach(0, 0, -1), 1, frame.ATTACHED, f"shared memory of {2 * PAGE} bytes where {PAGE} were said"),
        (Attach(0, 0, 1 << 62), 1, frame.ATTACHED, f"shared memory of {2 * PAGE} bytes where {1 << 62} were said"),
    ],
)
def test_descriptors_that_are_not_as_said_are_refused_and_closed(
    host: Make, message: Any, num_fds: int, flags: int, reason: str
) -> None:
    """A descriptor nobody asked for stays open in the server: some thousands of them and it can accept no more."""
    there = host(unix=True)
    (one, _), (_, at_two) = there.pair(unix=True)
    memory, before = shm.create(2 * PAGE), num_open()
    send_raw(one, message, [memory.fd] * num_fds, flags)
    assert f"FrameError: {reason}" in at_two.end()
    assert at_two.frames.empty()
    memory.close()
    wait_until(lambda: num_open() <= before - 1)  # and the connection's own


def test_unsealed_memory_is_refused_over_a_socket(host: Make) -> None:
    (one, _), (_, at_two) = host(unix=True).pair(unix=True)
    fd = unsealed(2 * PAGE)
    send_raw(one, Attach(0, 0, 2 * PAGE), [fd], frame.ATTACHED)
    assert "FrameError: shared memory that is not sealed against shrinking and growing" in at_two.end()
    os.close(fd)


def test_descriptors_beside_a_body_are_refused_and_closed(host: Make) -> None:
    """Wherever in a frame they come: one that was not announced ends the connection, and leaks nothing."""
    (one, _), (_, at_two) = host(unix=True).pair(unix=True)
    memory, before = shm.create(2 * PAGE), num_open()
    body = frame.encode(Attach(0, 0, 2 * PAGE))
    sock = one.stream.sock
    sock.sendall(Header(ATTACH, 1, 0, body_bytes=len(body)).pack())
    sock.sendmsg([body], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory.fd]))])
    assert "a file descriptor that was not announced" in at_two.end()
    memory.close()
    wait_until(lambda: num_open() <= before - 1)  # and the connection's own


def test_a_received_descriptor_is_not_inherited_by_children(host: Make) -> None:
    (one, _), (_, at_two) = host(unix=True).pair(unix=True)
    memory = one.create_memory(100)
    send(one, Attach(0, 0, 100), memory, frame.ATTACHED)
    attached = at_two.next()[3]
    assert not os.get_inheritable(attached.fd) and not os.get_inheritable(memory.fd)
    memory.close()
    attached.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
