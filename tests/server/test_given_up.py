"""Saves that were given up at a server: nothing of them stands in the way of the next one, or of anybody else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from syncline.core.wire.checkpoints import EndSave, Mark, WriteMarked
from syncline.core.wire.control import AskServerStats
from syncline.errors import StoreError
from syncline.server import cow_snapshot

from .conftest import WAIT, House, eventually
from .snapshots import close_gates, new_folder, write
from .test_cow_snapshot import cut, hooks, made, push, slowly, written

MakeHouse = Callable[..., House]


def test_of_a_save_that_is_over_nothing_takes_up_memory(make_house: MakeHouse, tmp_path: Any) -> None:
    house = made(make_house, 1)
    files = slowly(house, "server-0")
    cut(house)
    snapshot = house.servers["server-0"].saving.snapshot
    assert snapshot is not None
    slices = list(snapshot.slices)
    call = house.tell("server-0", WriteMarked(1, new_folder(tmp_path).url, "server-0.safetensors"))
    eventually(lambda: files and files[0].begun.is_set())
    push(house, 4)
    assert any(one.kept is not None for one in slices)
    house.tell("server-0", EndSave(1))
    eventually(lambda: not any(one.kept is not None for one in slices))
    files[0].may.set()
    with pytest.raises(StoreError):
        call.wait(WAIT)
    there = weakref.ref(snapshot)
    del snapshot
    slices.clear()
    gc.collect()
    assert there() is None


def test_a_writer_that_comes_late_lets_the_next_save_be(make_house: MakeHouse, tmp_path: Any) -> None:
    """It has taken a slice to write when its save is given up, and comes to the slice when that is marked again."""
    house = made(make_house, 1)
    cut(house)
    snapshot = house.servers["server-0"].saving.snapshot
    assert snapshot is not None
    late = snapshot.next()
    assert late is not None
    then = cut(house, 2)
    late.take(slowly)  # type: ignore[arg-type]
    push(house, 4)
    folder = new_folder(tmp_path, 2)
    assert written(folder, write(house.tell, ["server-0"], folder, 2)) == then


def test_a_disk_that_does_not_answer_stops_one_slice_and_nobody_else(
    make_house: MakeHouse, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory a slice is held while it is written: whoever reads what the coordinator says goes on."""
    monkeypatch.setattr(cow_snapshot, "MARK_SECONDS", 0.05)
    house = made(make_house, 1)
    house.servers["server-0"].saving.most_bytes = 1
    files = slowly(house, "server-0")
    cut(house)
    call = house.tell("server-0", WriteMarked(1, new_folder(tmp_path).url, "server-0.safetensors"))
    eventually(lambda: files and files[0].begun.is_set())
    house.tell("server-0", EndSave(1))
    house.tell("server-0", AskServerStats()).wait(WAIT)
    close_gates(house.tell, ["server-0"], 2)
    with pytest.raises(StoreError, match="still being written"):
        house.tell("server-0", Mark(2)).wait(WAIT)
    files[0].may.set()
    with pytest.raises(StoreError, match="given up"):
        call.wait(WAIT)
    eventually(lambda: not hooks(house))
    push(house, 4)
