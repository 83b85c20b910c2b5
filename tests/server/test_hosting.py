"""What servers host, and rules on parts of it: registrations that were refused, parameters that come late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from syncline import Rule, RuleError
from syncline.core.layout import Parameter
from syncline.core.replica_sets import ReplicaSet
from syncline.core.rule import RuleSpec
from syncline.core.wire.control import Host, SeedTo
from syncline.core.wire.traffic import Upload
from syncline.net.rpc import Stamp
from syncline.net.stalls import BROKEN_OFF
from syncline.net.transport import Peer, buffer_of
from syncline.testing import local_job
from syncline.worker.job import Job

from .conftest import WAIT, House

SGD = Rule("SGD", lr=1.0)


def test_slices_of_a_refused_registration_are_forgotten() -> None:
    """One server has made room, the other refuses; the next registration uses the same ids for other slices."""

    def work(job: Job) -> Any:
        job.kv.register({"x": np.zeros(16, np.float32)}, SGD)
        both = {"b": np.zeros(4096, np.float32), "c": np.zeros(4096, np.float32)}
        with pytest.raises(RuleError):
            job.kv.register(both, {"b": SGD, "c": Rule("SGD", lr=-1.0)})
        job.kv.push({"x": np.ones(16, np.float32)}).wait()
        job.kv.register(both, {"b": SGD, "c": Rule("SGD", lr=1.0)})
        return job.kv.push_pull({name: np.ones(4096, np.float32) for name in both}).wait()

    with local_job(workers=1, servers=2) as jobs:
        out = jobs.run(work)[0]
    assert (out["b"] == -1).all() and (out["c"] == -1).all()


def test_a_segment_that_is_hosted_twice_at_once_lies_in_one_place(make_house: Callable[..., House]) -> None:
    """Room takes long; the coordinator is dialled again meanwhile, and asks again. Workers map what it tells them."""
    house = make_house()
    server, num_made, waits = house.servers["server-0"], [0], threading.Event()
    make = server.hosting.blocks.make

    def slowly(num_bytes: int) -> int:
        num_made[0] += 1
        if num_made[0] == 1:
            waits.wait(0.2)  # with nothing to wait for, if the other one has to
        else:
            waits.set()
        return make(num_bytes)

    server.hosting.blocks.make = slowly  # type: ignore[method-assign]
    parameters = [Parameter("x", "float32", (64,))]
    decision = house.registry.register("worker-0", True, 0, parameters, [RuleSpec("SGD", {"lr": 1.0})], "sum")
    assert decision.segment is not None
    message = Host(decision.segment, [part.id for part in decision.segment.slices])
    threads = [
        threading.Thread(target=lambda: house.tell("server-0", message).wait(WAIT), name=f"host {k}")
        for k in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    places = server.hosting.blocks
    for number, slot in server.slices.items():
        block, offset = places.places[number]
        told = places.blocks[block].memory.array[offset : offset + slot.part.num_bytes]
        told[:] = 7
        assert (slot.memory == 7).all(), f"slice {number} does not lie where workers read it"


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "Adam", "SGD"])
def test_workers_may_push_different_subsets_under_any_rule(name: str) -> None:
    def work(job: Job) -> Any:
        values = {key: np.ones((4, 4), np.float32) for key in ("a", "b")}
        job.kv.register(values, Rule(name, lr=0.1))
        names = ["a"] if job.rank == 0 else ["a", "b"]
        job.kv.push_pull({key: np.eye(4, dtype=np.float32) for key in names}).wait()
        job.barrier("pushed")
        return job.kv.pull()

    with local_job(workers=2) as jobs:
        out = jobs.run(work)
    for pulled in out:
        assert pulled["a"].shape == (4, 4) and (pulled["a"] != 1).any() and (pulled["b"] != 1).any()


def test_a_parameter_may_come_later_than_its_neighbours_with_momentum() -> None:
    def work(job: Job) -> Any:
        job.kv.register({"a": np.zeros(4), "b": np.zeros(4)}, Rule("SGD", lr=1.0, momentum=0.5))
        for names in ("a", "ab", "ab"):
            job.kv.push({name: np.ones(4) for name in names}).wait()
        return job.kv.pull()

    with local_job(workers=1) as jobs:
        out = jobs.run(work)[0]
    assert out["a"].tolist() == [-(1 + 1.5 + 1.75)] * 4 and out["b"].tolist() == [-(1 + 1.5)] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_summed_in_single_precision(dtype: torch.dtype) -> None:
    """256 + 1 + 1 of bfloat16 is 258, whose mean of three is 86; summed as halves it would be 256."""
    pushed = {0: 256.0, 1: 1.0, 2: 1.0} if dtype is torch.bfloat16 else {0: 40000.0, 1: 40000.0, 2: 40000.0}

    def work(job: Job) -> Any:
        job.kv.register({"x": torch.zeros(8, dtype=dtype)}, Rule("Add"))
        return job.kv.push_pull({"x": torch.full((8,), pushed[job.rank], dtype=dtype)}).wait()["x"]

    with local_job(workers=3) as jobs:
        out = jobs.run(work)
    assert all((x == (86.0 if dtype is torch.bfloat16 else 40000.0)).all() for x in out)


def test_a_slice_that_is_hosted_anew_is_where_workers_read_it(make_house: Callable[..., House]) -> None:
    """A copy of it is here too, on which no replica set counted when its primary died: nobody is to read that one."""
    house = make_house(2, 1, replicas=2)
    segment = house.register({"w": np.zeros(64, np.float32)})
    number = house.parts("server-1")[0].id
    target = next(member for member in house.members if member.name == "server-0")
    house.tell("server-1", SeedTo([number], target)).wait(WAIT)
    house.kill("server-1")
    house.members = [member for member in house.members if member.name != "server-1"]
    house.tell("server-0", Host(segment, [number])).wait(WAIT)
    values = buffer_of(np.full(list(house.registry.layout.slices())[number].num_bytes, 1, np.uint8))
    chief = house.workers["worker-0"]
    chief.ask("server-0", Upload(0, [number]), buffers=[values], payload_bytes=len(values)).wait(WAIT)
    house.carry_out(replica_sets=[ReplicaSet(part.id, "server-0") for part in segment.slices], moves=True)
    hosting = house.servers["server-0"].hosting
    block, _ = hosting.blocks.places[number]
    assert np.shares_memory(hosting.blocks.blocks[block].memory.array, hosting.slices[number].memory)
    assert (hosting.slices[number].memory == 1).all()
    assert number not in hosting.backups.backups


def test_of_who_is_gone_without_a_word_one_plain_line_tells(make_house: Callable[..., House]) -> None:
    """However many connections it had; who closes them in order is not worth a line."""
    house = make_house(1, 2)
    peer = Peer("worker", "worker-1", house.workers["worker-1"].incarnation)
    ways = [house.connect(peer, Peer("server", "server-0", 0), Stamp("job"), "server-0") for _ in range(3)]
    ways[0].close()
    assert not house.lines
    for way in ways[1:]:
        way.close(BROKEN_OFF)
    assert house.lines == ["worker-1 is gone: the connection broke off"]
