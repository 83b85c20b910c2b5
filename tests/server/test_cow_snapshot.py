"""Marks: what is saved is what was there at the cut, whatever happens to the slices until it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syncline.core.replica_sets import ReplicaSet
from syncline.core.wire.checkpoints import EndSave, Mark, WriteMarked
from syncline.errors import ProtocolError, StoreError
from syncline.server import cow_snapshot as marks_module
from syncline.store import checkpoints
from syncline.store.folders import Folder
from syncline.store.tensors import TensorReader

from .conftest import WAIT, House, Waiting, eventually
from .snapshots import close_gates, manifest_of, mark, new_folder, save, write

MakeHouse = Callable[..., House]
Noted = dict[str, tuple[bytes, ...]]


def grads(seed: int, num_items: int = 256) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=num_items).astype(np.float32) for name in ("x", "y")}


def made(make_house: MakeHouse, servers: int = 2, commits: int = 3, **settings: Any) -> House:
    house = make_house(servers, 1, **{"policy": "async", "slice_bytes": 512, **settings})
    house.register(grads(0), "Adam", lr=0.1)
    for clock in range(1, commits + 1):
        push(house, clock)
    return house


def push(house: House, clock: int) -> None:
    for call in house.workers["worker-0"].commit_all(clock, grads(clock)):
        call.wait(WAIT)


def noted(house: House) -> Noted:
    """All there is of every primary, by the names that it will have in a file."""
    found = {}
    for number, replica_set in house.replica_sets.items():
        slot = house.slot(replica_set.primary, number)
        found[f"slice-{number}"] = (slot.memory.tobytes(),)
        for entry, tensor in slot.rules.state():
            found[f"slice-{number}/{entry.piece}/{entry.key}"] = (tensor.numpy().tobytes(),)
    return found


def written(folder: Folder, answers: Any) -> Noted:
    found = {}
    for answer in answers:
        with TensorReader(folder, answer.file) as reader:
            found.update({t.name: (reader.read(t.name).tobytes(),) for t in answer.file.tensors})
    return found


def hooks(house: House) -> list[int]:
    return [n for n, replica_set in house.replica_sets.items() if house.slot(replica_set.primary, n).rules.is_marked]


def cut(house: House, number: int = 1) -> Noted:
    close_gates(house.tell, list(house.servers), number)
    then = noted(house)
    mark(house.tell, list(house.servers), number)
    return then


@pytest.mark.parametrize("replicas", [1, 2])
def test_updates_before_it_is_written_do_not_show(make_house: MakeHouse, tmp_path: Any, replicas: int) -> None:
    house = made(make_house, replicas=replicas)
    if replicas == 2:
        house.seed("server-0", "server-1")
        house.seed("server-1", "server-0")
        push(house, 4)
    then = cut(house)
    first = 4 + (replicas == 2)
    for clock in range(first, first + 3):
        push(house, clock)
    assert noted(house) != then and not hooks(house)
    folder = new_folder(tmp_path)
    answers = write(house.tell, list(house.servers), folder)
    assert written(folder, answers) == then
    assert sum(answer.num_copied for answer in answers) == sum(len(each[0]) for each in then.values())
    assert all(s.version == first - 1 for a in answers for s in a.slices)
    assert {c for a in answers for s in a.slices for *_, c in s.clocks} == {first - 1}


def test_what_nobody_changes_is_copied_by_who_writes_it_alone(make_house: MakeHouse, tmp_path: Any) -> None:
    house = made(make_house)
    then = cut(house)
    assert len(hooks(house)) == 4
    folder = new_folder(tmp_path)
    answers = write(house.tell, list(house.servers), folder)
    assert written(folder, answers) == then
    assert not any(answer.num_copied or answer.num_waited for answer in answers) and not hooks(house)
    checkpoints.write_manifest(folder, manifest_of(house.registry.layout, answers))
    (found,) = checkpoints.find(folder.parent())
    assert found.manifest is not None, found.reason


def test_saves_one_after_the_other_beside_a_worker_that_never_stops(make_house: MakeHouse, tmp_path: Any) -> None:
    house = made(make_house)
    over = threading.Event()

    def work() -> int:
        clock = 3
        while not over.is_set():
            clock += 1
            push(house, clock)
        return clock

    pushing = Waiting(work)
    try:
        for number in range(1, 6):
            then = cut(house, number)
            folder = new_folder(tmp_path, number)
            assert written(folder, write(house.tell, list(house.servers), folder, number)) == then
    finally:
        over.set()
    assert pushing.result() > 3


# -- memory -----------------------------------------------------------------------------------------------


class Watched:
    """The memory of a save, and the most that was ever used of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most, self.marks = 0, []
        reserve, begin = marks_module.CowSnapshot.reserve, marks_module.CowSnapshot.__init__

        def watching(marks: Any, num_bytes: int) -> Any:
            found = reserve(marks, num_bytes)
            self.most = max(self.most, marks.memory.used + marks.memory.num_spare)
            return found

        def beginning(marks: Any, *arguments: Any) -> None:
            self.marks.append(marks)
            begin(marks, *arguments)

        monkeypatch.setattr(marks_module.CowSnapshot, "reserve", watching)
        monkeypatch.setattr(marks_module.CowSnapshot, "__init__", beginning)


@pytest.mark.parametrize("most", [1, 4000])
def test_a_bound_on_memory_is_kept_and_updates_wait(
    make_house: MakeHouse, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(marks_module, "WORD_SECONDS", WAIT)
    watched = Watched(monkeypatch)
    house = made(make_house, 1)
    house.servers["server-0"].saving.most_bytes = most
    then = cut(house)
    pushing = Waiting(lambda: push(house, 4))
    eventually(lambda: watched.marks[0].num_waited)
    folder = new_folder(tmp_path)
    answers = write(house.tell, ["server-0"], folder)
    pushing.result()
    assert written(folder, answers) == then
    assert answers[0].num_waited and watched.most <= most
    assert sum("updates wait" in line for line in house.lines) == 1
    assert watched.marks[0].memory.used == 0, "all of it is free again"


def test_memory_is_free_again_without_a_bound(
    make_house: MakeHouse, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    house = made(make_house, 1)
    then = cut(house)
    push(house, 4)
    write(house.tell, ["server-0"], new_folder(tmp_path))
    assert watched.most == sum(len(each[0]) for each in then.values()) and watched.marks[0].memory.used == 0
    assert all(one.kept is None for one in watched.marks[0].slices)


def test_without_memory_and_without_a_word_the_save_is_given_up_and_not_the_update(
    make_house: MakeHouse, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks_module, "WORD_SECONDS", 0.05)
    house = made(make_house, 1)
    house.servers["server-0"].saving.most_bytes = 1
    cut(house)
    push(house, 4)
    with pytest.raises(StoreError, match="no memory left"):
        write(house.tell, ["server-0"], new_folder(tmp_path))
    push(house, 5)


# -- ends -------------------------------------------------------------------------------------------------


def test_a_save_that_is_over_keeps_nothing(make_house: MakeHouse, tmp_path: Any) -> None:
    house = made(make_house)
    cut(house)
    for server in house.servers:
        house.tell(server, EndSave(1))
    eventually(lambda: not hooks(house))
    push(house, 4)
    with pytest.raises(StoreError, match="nothing is marked"):
        write(house.tell, ["server-0"], new_folder(tmp_path))


class Slow:
    """A file that waits for the test before anything is written."""

    def __init__(self, writer: Any) -> None:
        self.writer, self.may, self.begun = writer, threading.Event(), threading.Event()

    def write(self, name: str, data: Any) -> None:
        self.begun.set()
        assert self.may.wait(WAIT)
        self.writer.write(name, data)

    def finish(self) -> Any:
        return self.writer.finish()

    def abandon(self) -> None:
        self.writer.abandon()


def slowly(house: House, server: str) -> list[Slow]:
    saving, made_ = house.servers[server].saving, []
    opens = saving.open_writer

    def open_slow(*arguments: Any) -> Any:
        made_.append(Slow(opens(*arguments)))
        return made_[-1]

    saving.open_writer = open_slow
    return made_


@pytest.mark.parametrize("how", ["another", "ended", "closed"])
def test_a_save_under_way_is_abandoned(make_house: MakeHouse, tmp_path: Any, how: str) -> None:
    house = made(make_house, 1)
    files = slowly(house, "server-0")
    cut(house)
    folder = new_folder(tmp_path)
    call = house.tell("server-0", WriteMarked(1, folder.url, "server-0.safetensors"))
    eventually(lambda: files and files[0].begun.is_set())
    closing = None
    if how == "another":
        then = cut(house, 2)
    elif how == "ended":
        house.tell("server-0", EndSave(1))
        eventually(lambda: not hooks(house))
    else:
        closing = Waiting(house.servers["server-0"].saving.close)
    push(house, 4)
    files[0].may.set()
    with pytest.raises(StoreError, match="given up"):
        call.wait(WAIT)
    assert folder.list() == []
    if closing is not None:
        closing.result()
    if how == "another":
        second = new_folder(tmp_path, 2)
        answer = house.tell("server-0", WriteMarked(2, second.url, "server-0.safetensors"))
        eventually(lambda: len(files) == 2)
        files[1].may.set()
        assert written(second, [answer.wait(WAIT)]) == then


def test_updates_go_on_while_a_file_is_slow(make_house: MakeHouse, tmp_path: Any) -> None:
    house = made(make_house, 1)
    files = slowly(house, "server-0")
    then = cut(house)
    folder = new_folder(tmp_path)
    call = house.tell("server-0", WriteMarked(1, folder.url, "server-0.safetensors"))
    eventually(lambda: files and files[0].begun.is_set())
    for clock in (4, 5, 6):
        push(house, clock)
    files[0].may.set()
    assert written(folder, [call.wait(WAIT)]) == then


def test_a_folder_that_cannot_be_written_ends_the_save_and_not_the_job(make_house: MakeHouse, tmp_path: Any) -> None:
    house = made(make_house, 1)
    cut(house)
    with pytest.raises(StoreError, match="missing"):
        house.tell("server-0", WriteMarked(1, str(tmp_path / "missing"), "server-0.safetensors")).wait(WAIT)
    assert not hooks(house)
    push(house, 4)
    save(house.tell, ["server-0"], house.registry.layout, tmp_path, 2)


def test_a_disk_that_is_full_in_the_middle(make_house: MakeHouse, tmp_path: Any) -> None:
    house = made(make_house, 1)

    class Full(Slow):
        def write(self, name: str, data: Any) -> None:
            if name.endswith("exp_avg"):
                raise StoreError(f"{name}: No space left on device")
            self.writer.write(name, data)

    saving = house.servers["server-0"].saving
    opens, saving.open_writer = saving.open_writer, lambda *a: Full(opens(*a))
    cut(house)
    folder = new_folder(tmp_path)
    with pytest.raises(StoreError, match="No space left"):
        write(house.tell, ["server-0"], folder)
    assert folder.list() == [] and not hooks(house)
    push(house, 4)


def test_nothing_is_marked_while_a_slice_has_no_values(make_house: MakeHouse) -> None:
    house = made(make_house, 1)
    house.slot("server-0", 2).uploaded = False
    close_gates(house.tell, ["server-0"])
    with pytest.raises(StoreError, match="slice 2 has no values yet"):
        house.tell("server-0", Mark(1)).wait(WAIT)
    assert not hooks(house)
    push(house, 4)  # the gate is open all the same
    with pytest.raises(ProtocolError, match="no longer closed"):
        house.tell("server-0", Mark(1)).wait(WAIT)


# -- other changes than updates ---------------------------------------------------------------------------


def test_state_that_is_loaded_does_not_show(make_house: MakeHouse, tmp_path: Any) -> None:
    house = made(make_house, 1)
    then = cut(house)
    slot = house.slot("server-0", 1)
    with slot.lock:
        slot.rules.load_state([])
    folder = new_folder(tmp_path)
    assert written(folder, write(house.tell, ["server-0"], folder)) == then
    assert not list(slot.rules.live_state())


def test_slices_that_move_away_are_saved_as_they_were(make_house: MakeHouse, tmp_path: Any) -> None:
    house = made(make_house, 2, replicas=2)
    house.seed("server-0", "server-1")
    then = cut(house)
    gone = [part.id for part in house.parts("server-0")]
    assert gone
    house.carry_out(replica_sets=[ReplicaSet(number, "server-1") for number in gone], moves=True)
    push(house, 4)
    folder = new_folder(tmp_path)
    assert written(folder, write(house.tell, list(house.servers), folder)) == then
