"""Slices on their way onto a device: memory is not reused while a copy still reads it, and reads wait for theirs."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from tests.patience import PATIENCE

from syncline.core.layout import Slice
from syncline.torch.device_target import DeviceTarget

PARTS = [Slice(k, 0, "float32", 64 * k, 64) for k in range(4)]
ON_HOST = Slice(9, 1, "float32", 0, 64)


class Setting:
    """A sink with four slices on the device and one on the host, and a server's memory."""

    def __init__(self, side: Any) -> None:
        self.server = np.arange(256, dtype=np.uint8)
        self.server.flags.writeable = False
        self.flat = torch.zeros(256, dtype=torch.uint8)
        self.on_host = np.zeros(64, np.uint8)
        self.side = side
        self.target = DeviceTarget(side, {0: self.flat}, {1: self.on_host}, lambda: [self.server])

    def source(self, part: Slice) -> Any:
        return self.server[part.offset : part.offset + part.num_bytes]


@pytest.fixture
def setting(slow_side: Any) -> Setting:
    return Setting(slow_side)


def test_slices_are_taken_from_the_servers_memory_to_their_own_place(setting: Setting) -> None:
    setting.target.take([(part, setting.source(part)) for part in (PARTS[3], PARTS[1])])
    assert not setting.flat.any()  # nothing has been copied yet
    assert setting.target.order([1]) is False
    assert torch.equal(setting.flat[64:128], torch.arange(64, 128, dtype=torch.uint8))
    assert not setting.flat[:64].any() and not setting.flat[128:192].any()
    assert setting.target.order([1]) is True and setting.target.order([0]) is True


def test_a_reader_waits_for_the_last_of_its_slices(setting: Setting) -> None:
    setting.target.take([(part, setting.source(part)) for part in PARTS[:3]])
    setting.target.order([2, 0])
    assert setting.side.num_done == 3
    setting.target.take([(PARTS[0], setting.source(PARTS[0])), (PARTS[3], setting.source(PARTS[3]))])
    setting.target.order([0, 2])
    assert setting.side.num_done == 4


def test_nothing_reads_the_servers_memory_after_finish(setting: Setting) -> None:
    setting.target.take([(part, setting.source(part)) for part in PARTS])
    setting.target.finish()
    assert setting.side.num_done == 4
    assert torch.equal(setting.flat, torch.arange(256, dtype=torch.uint8))


def test_buffers_are_given_again_only_when_they_have_been_read(setting: Setting) -> None:
    for value in (5, 7):
        (view,) = setting.target.views(PARTS[2])
        assert setting.side.num_done == setting.side.num_queued
        view[:] = value
        setting.target.filled([PARTS[2]])
    setting.target.finish()  # is about the servers' memory only
    assert setting.flat[128] == 5 and setting.side.num_done == 1
    setting.target.order([2])
    assert setting.flat[128:192].tolist() == [7] * 64 and not setting.flat[192:].any()


def test_what_stays_on_the_host_is_there_at_once(setting: Setting) -> None:
    assert setting.target.wants(ON_HOST) and setting.target.wants(PARTS[0])
    assert not setting.target.wants(Slice(10, 2, "float32", 0, 64))
    setting.target.take([(ON_HOST, setting.source(PARTS[1]))])
    assert setting.on_host.tolist() == list(range(64, 128))
    setting.target.views(ON_HOST)[0][:] = 1
    setting.target.filled([ON_HOST])
    assert setting.on_host.tolist() == [1] * 64 and setting.side.num_queued == 0


def test_parameters_are_overwritten_only_after_the_callers_stream(setting: Setting) -> None:
    """The side follows the caller's stream once per push, before the first slice."""
    followed: list[int] = []
    setting.side.follow = lambda stream=None: followed.append(setting.side.num_queued)
    setting.target.begin()
    setting.target.take([(part, setting.source(part)) for part in PARTS[:2]])
    setting.target.take([(PARTS[2], setting.source(PARTS[2]))])
    assert followed == [0]
    setting.target.follow()
    setting.target.take([(PARTS[3], setting.source(PARTS[3]))])
    assert followed == [0, 3]


def test_two_servers_first_slices_land_in_the_same_memory(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two readers' threads ask for buffers at once, and making them takes a while."""
    make, both = setting.side.new_host_memory, threading.Barrier(2, timeout=PATIENCE)

    def slowly(num_bytes: int) -> Any:
        time.sleep(0.05)
        return make(num_bytes)

    monkeypatch.setattr(setting.side, "new_host_memory", slowly)
    found: dict[int, Any] = {}

    def ask(part: Slice) -> None:
        both.wait()
        found[part.id] = setting.target.views(part)[0]

    threads = [threading.Thread(target=ask, args=(part,), name="Thread-asks") for part in PARTS[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for number, view in found.items():
        view[:] = number + 1
    setting.target.filled(PARTS[:2])
    setting.target.order([0, 1])
    assert (setting.flat[:64] == 1).all() and (setting.flat[64:128] == 2).all()


def test_a_device_gives_back_what_has_come(slow_side: Any) -> None:
    flat = torch.zeros(256, dtype=torch.uint8)
    target = DeviceTarget(slow_side, {0: flat}, {1: np.full(64, 9, np.uint8)}, list)
    part, host = Slice(0, 0, "uint8", 64, 128), Slice(1, 1, "uint8", 0, 64)
    target.take([(part, np.arange(128, dtype=np.uint8))])
    assert not flat.any(), "the copy is queued"
    data = target.copy_of(part)
    assert data is not None and (data == np.arange(128)).all()
    assert (target.copy_of(host) == 9).all() and target.holds(part) and target.holds(host)
    assert not target.holds(Slice(2, 2, "uint8", 0, 64)) and target.copy_of(Slice(2, 2, "uint8", 0, 64)) is None
    data[:] = 0
    assert flat[64:192].any(), "a copy is a copy"
