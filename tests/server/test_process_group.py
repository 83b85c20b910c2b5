"""A ring whose sums torch.distributed makes: the same numbers, the same votes, in process groups of our own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.patience import PATIENCE
from tests.server.conftest import eventually
from tests.server.rings import check_all_equal, check_ledger, copies, kill, push_cells, start
from tests.server.test_ring import STEPS, train

from syncline import Rule
from syncline.core.ring import partner_of
from syncline.errors import ConfigError, ProtocolError, RuleError
from syncline.reduce import process_group
from syncline.reduce.process_group import Buckets, GroupRound, GroupStore, ProcessGroupReducer, StoreKeys
from syncline.server.clipping import Clipping
from syncline.server.executor import RoundExecutor
from syncline.server.hosting import Hosting
from syncline.server.replicate import Replica
from syncline.server.ring_sums import RingReducer
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer

GLOO: dict[str, Any] = {"exchange": "ring", "sums": "gloo"}


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of what was added up, whoever did it; and no sum goes from server to server by itself."""
    sizes: list[int] = []
    original = ProcessGroupReducer.all_reduce

    def reduce(self: Any, tensor: torch.Tensor) -> Any:
        sizes.append(tensor.numel())
        return original(self, tensor)

    def prepare(self: Any, slot: Any, update: Any) -> Any:
        assert not update.has, "a sum was sent to a backup"
        return sent(self, slot, update)

    sent = Replica.prepare
    monkeypatch.setattr(ProcessGroupReducer, "all_reduce", reduce)
    monkeypatch.setattr(Replica, "prepare", prepare)
    yield sizes
    assert sizes, "gloo was not used"


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_every_server_comes_to_the_same_bit_by_bit(transport: str, reduced: list[int]) -> None:
    with local_job(workers=3, slice_bytes=64, transport=transport, **GLOO) as jobs:
        acknowledged: dict[str, int] = {}
        jobs.run(lambda job: (push_cells(job, STEPS, acknowledged), job.barrier("all")))
        check_all_equal(jobs)
        assert check_ledger(jobs[0], acknowledged)[:3] == [STEPS] * 3
        assert not dist.is_initialized(), "no default group is made"


@pytest.mark.parametrize(("rule", "clip"), [("Adam", None), ("SGD", 0.1)])
def test_gloo_and_servers_come_to_the_same(rule: str, clip: float | None, reduced: list[int]) -> None:
    """Also where the round's mean is clipped, and where a worker has fewer steps."""
    found = {}
    for name, settings in {"servers": {}, "gloo": GLOO}.items():
        with local_job(workers=3, slice_bytes=128, **settings) as jobs:
            found[name] = jobs.run(lambda job: train(job, rule, clip))
            if name == "gloo":
                check_all_equal(jobs)
    for one, two in zip(found["servers"], found["gloo"], strict=True):
        torch.testing.assert_close(one, two)
        assert torch.equal(two, found["gloo"][0]), "all ranks have the same, bit by bit"


def odd_pushes(job: Any) -> dict[str, Any]:
    """Halves, integers, assigned values, sums beside means, a parameter that only one worker pushes, one that nobody
    does, weights that differ, and a worker that weighs nothing."""
    ones = {
        "half": torch.ones(33, dtype=torch.bfloat16), "long": torch.ones(7, dtype=torch.int64),
        "set": torch.zeros(5), "flag": torch.zeros(4).bool(), "alone": torch.zeros(9),
        "nobody": torch.full((3,), 7.0),
    }  # fmt: skip
    rules = {name: Rule("Assign" if name in ("set", "flag") else "Add") for name in ones}
    job.kv.register(ones, rules)
    job.kv.register({"sum": torch.zeros(11, dtype=torch.int16)}, Rule("Add"), reduce="sum")
    for step in range(3):
        push: dict[str, Any] = {
            "half": torch.full((33,), 1.0 + job.rank, dtype=torch.bfloat16),
            "long": torch.full((7,), 3 * job.rank + step, dtype=torch.int64),
            "set": torch.full((5,), float(job.rank + step)),
            "flag": torch.full((4,), job.rank == 1),
            "sum": torch.full((11,), job.rank + 1, dtype=torch.int16),
        }
        if job.rank == 1:
            push["alone"] = torch.full((9,), 6.0)
        job.kv.push(push, weight=float((2, 3, 0)[job.rank])).wait()
    job.barrier("all")
    return {name: torch.as_tensor(value) for name, value in job.kv.pull([*ones, "sum"]).items()}


def test_whatever_is_pushed_means_the_same(reduced: list[int]) -> None:
    found = {}
    for name, settings in {"servers": {}, "gloo": GLOO}.items():
        with local_job(workers=3, slice_bytes=64, **settings) as jobs:
            found[name] = jobs.run(odd_pushes)[0]
    for name, value in found["servers"].items():
        torch.testing.assert_close(found["gloo"][name], value, msg=lambda text, name=name: f"{name}: {text}")
    assert (found["gloo"]["nobody"] == 7.0).all() and found["gloo"]["alone"].all()


def test_a_process_that_dies_costs_nobody_a_step_and_comes_back(reduced: list[int]) -> None:
    """Its sums never come; the others make the round again, in another process group; a third one is made with who
    comes."""
    with local_job(workers=3, slice_bytes=256, **GLOO) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()
        threads = start(jobs, lambda job: (push_cells(job, 60, acknowledged), job.barrier("all")), gone)
        eventually(lambda: acknowledged.get("worker-1", 0) >= 3)
        kill(jobs, 1, gone)
        before = dict(acknowledged)
        eventually(lambda: acknowledged["worker-0"] > before["worker-0"] + 1)
        back = jobs.add_worker("worker-1")

        def again(job: Any) -> None:
            zeros = np.zeros((4, 64), np.float32)
            job.kv.register({"here": zeros, "there": zeros}, Rule("Add"), reduce="sum")
            job.resume_at()
            cell = zeros.copy()
            cell[1, 63] = 1.0
            job.kv.push({"here": cell, "there": cell}).wait()
            job.barrier("all")

        threads += start([back], again, set())
        for thread in (threads[0], threads[2], threads[3]):
            thread.join(PATIENCE)
        found = {name: np.asarray(value) for name, value in back.kv.pull(["here", "there"]).items()}
        assert np.array_equal(found["here"], found["there"]), "a step counts on all slices or on none"
        assert list(found["here"][[0, 2]].sum(axis=1)) == [60, 60] and found["here"][1, 63] == 1
        assert found["here"][1, :63].sum() >= acknowledged["worker-1"]
        eventually(lambda: "server-1" in jobs.servers["server-0"].ring.voting.votes.voters)
        check_all_equal(jobs)


def test_no_sum_begins_while_slices_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket laid out meanwhile has another size than the peers' buckets: gloo would end their processes."""
    moving, num_moves, bad = set[str](), [0], list[str]()
    last: dict[int, dict[int, tuple[str, ...]]] = {}
    take_replica_sets, reduce, buckets = Hosting.take_replica_sets, ProcessGroupReducer.all_reduce, Buckets.of

    def slow_buckets(self: Any, *given: Any) -> Any:
        found = buckets(self, *given)
        time.sleep(0.02)
        return found

    def slow_take_replica_sets(self: Any, replica_sets: Any, members: Any) -> Any:
        worker, sets = partner_of(self.name), {one.slice: one.names for one in replica_sets}
        if sets == last.get(id(self)):  # nothing moves: sums go on meanwhile
            return take_replica_sets(self, replica_sets, members)
        last[id(self)] = sets
        moving.add(worker)
        num_moves[0] += 1
        time.sleep(0.02)
        found = take_replica_sets(self, replica_sets, members)
        moving.discard(worker)
        return found

    def watched_reduce(self: Any, tensor: torch.Tensor) -> Any:
        is_moving = self.own_worker in moving
        pending = reduce(self, tensor)
        if is_moving:
            bad.append(self.own_worker)
        return pending

    monkeypatch.setattr(Hosting, "take_replica_sets", slow_take_replica_sets)
    monkeypatch.setattr(ProcessGroupReducer, "all_reduce", watched_reduce)
    monkeypatch.setattr(Buckets, "of", slow_buckets)
    with local_job(workers=3, slice_bytes=256, **GLOO) as jobs:
        gone: set[str] = set()
        acknowledged: dict[str, int] = {}
        threads = start(jobs, lambda job: (push_cells(job, 60, acknowledged), job.barrier("all")), gone)
        eventually(lambda: acknowledged.get("worker-1", 0) >= 3)
        kill(jobs, 1, gone)
        eventually(lambda: acknowledged["worker-0"] >= 6)
        back = jobs.add_worker("worker-1")

        def again(job: Any) -> None:
            zeros = np.zeros((4, 64), np.float32)
            job.kv.register({"here": zeros, "there": zeros}, Rule("Add"), reduce="sum")
            job.resume_at()
            for _ in range(20):
                job.kv.push({"here": zeros, "there": zeros}).wait()
            job.barrier("all")

        threads += start([back], again, set())
        for thread in (threads[0], threads[2], threads[3]):
            thread.join(PATIENCE)
        assert num_moves[0] >= 6 and not bad


def test_who_has_not_added_up_has_not_voted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One server's sums are kept back: the others have theirs, and nobody applies the round."""
    stops, goes_on = threading.Event(), threading.Event()
    original = GroupRound.finish

    def finish(self: Any, complete: Any, is_as_expected: bool) -> Any:
        found = original(self, complete, is_as_expected)
        if stops.is_set() and self.own_worker == "worker-1":
            goes_on.wait(PATIENCE)
        return found

    monkeypatch.setattr(GroupRound, "finish", finish)
    with local_job(workers=2, slice_bytes=64, **GLOO) as jobs:
        passed = threading.Barrier(3)

        def work(job: Any) -> None:
            zeros = np.zeros(64, np.float32)
            job.kv.register({"x": zeros}, Rule("Add"), reduce="sum")
            job.kv.push({"x": zeros + 1}).wait()
            passed.wait(PATIENCE)
            passed.wait(PATIENCE)
            job.kv.push({"x": zeros + 1}).wait()

        threads = start(jobs, work, set())
        passed.wait(PATIENCE)
        stops.set()
        passed.wait(PATIENCE)
        backups = jobs.servers["server-0"].hosting.backups
        eventually(lambda: all(backup.held for backup in backups.backups.values()))
        assert {slot.state.version for slots in copies(jobs).values() for slot in slots.values()} == {1}
        goes_on.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert {slot.state.version for slots in copies(jobs).values() for slot in slots.values()} == {2}
        check_all_equal(jobs)


def test_a_slice_that_is_looked_at_early_does_not_vote_before_all_sums_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody drains the slices here, late and for another reason, when a round's sums have just come: a vote at
    that moment would have others apply it, and this server only its own slices."""
    original = RingReducer.hold

    def hold(self: Any, work: Any) -> bool:
        for slot in work.slots:
            slot.drain()
        return original(self, work)

    monkeypatch.setattr(RingReducer, "hold", hold)
    with local_job(workers=2, slice_bytes=256, **GLOO) as jobs:
        acknowledged: dict[str, int] = {}
        jobs.run(lambda job: (push_cells(job, 6, acknowledged), job.barrier("all")))
        check_all_equal(jobs)
        assert check_ledger(jobs[0], acknowledged)[:2] == [6, 6]


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_change_that_is_not_to_be_is_over_and_the_sums_count_once(
    clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is prepared between a round's sums and their being held, and let go after that."""
    original, frozen = RingReducer.hold, set[int]()

    def hold(self: Any, work: Any) -> bool:
        if id(work) in frozen:
            return original(self, work)
        frozen.add(id(work))
        kept.append(work)
        self._voting.freeze()
        assert not original(self, work) and not any(work in slot.queue for slot in work.slots)
        self._voting.thaw()
        assert not any(list(slot.queue).count(work) > 1 for slot in work.slots)
        return False

    kept: list[Any] = []
    found = {}
    for name, settings in {"servers": {}, "gloo": GLOO}.items():
        monkeypatch.setattr(RingReducer, "hold", hold)
        with local_job(workers=2, slice_bytes=128, **settings) as jobs:
            found[name] = jobs.run(lambda job: train(job, "SGD", clip))[0]
            if name == "gloo":
                check_all_equal(jobs)
    assert kept and all(work.applied and not work.has_more for work in kept)
    torch.testing.assert_close(found["servers"], found["gloo"])


@pytest.mark.parametrize("point", ["summed", "clipped"])
def test_what_a_change_has_dropped_gets_into_no_slice(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process dies, and the change after that is over, between a round's sums (or the word on its norm) and the
    slices' queues: there the round would stand in the way of all that follow."""
    clip, goes_on = (0.1 if point == "clipped" else None), threading.Event()
    owner, name = (Clipping, "_apply_clipped") if point == "clipped" else (RoundExecutor, "summed")
    original, late = getattr(owner, name), list[Any]()

    def slow(self: Any, work: Any, *given: Any) -> None:
        flow = getattr(self, "_flow", self)
        if armed.is_set() and flow is first.commits.flow and not late:
            late.append(work)
            goes_on.wait(PATIENCE)
        original(self, work, *given)

    armed = threading.Event()
    monkeypatch.setattr(owner, name, slow)
    with local_job(workers=3, slice_bytes=256, **GLOO) as jobs:
        first, gone, steps = jobs.servers["server-0"], set[str](), dict[str, int]()

        def work(job: Any) -> None:
            model = torch.nn.Linear(16, 16)
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = DistributedOptimizer(plain, model=model, clip_norm=clip, job=job)
            for number in range(6):
                model(torch.ones(1, 16)).sum().backward()
                optimizer.step()
                steps[job.name] = number + 1
                if number == 1:
                    armed.wait(PATIENCE)

        threads = start(jobs, work, gone)
        eventually(lambda: list(steps.values()) == [2, 2, 2])
        armed.set()
        eventually(lambda: bool(late))
        generation = first.ring.voting.votes.generation
        kill(jobs, 2, gone)
        eventually(lambda: first.ring.voting.votes.generation > generation)
        goes_on.set()
        for thread in threads[:2]:
            thread.join(PATIENCE)
        assert steps["worker-0"] == steps["worker-1"] == 6
        assert not any(late[0] in slot.queue or slot.is_summing(late[0]) for slot in first.slices.values())


def test_a_script_uses_torch_distributed_as_it_likes(reduced: list[int]) -> None:
    """Its default group is its own: made before, used during and after, and taken down while ours goes on."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with local_job(workers=2, slice_bytes=64, **GLOO) as jobs:
            acknowledged: dict[str, int] = {}
            jobs.run(lambda job: push_cells(job, 3, acknowledged))
            mine = torch.ones(3)
            dist.all_reduce(mine)
            assert mine.tolist() == [1.0] * 3 and dist.get_world_size() == 1
            dist.destroy_process_group()
            jobs.run(lambda job: job.kv.push({"here": np.zeros((4, 64), np.float32)}).wait())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_what_goes_wrong_without_a_death_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """No change follows: whoever waits hears of it, and what it was."""

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no route to host")

    monkeypatch.setitem(process_group.GROUPS, "gloo", broken)
    monkeypatch.setattr(process_group, "PATIENCE_SECONDS", 0.2)
    with (
        pytest.raises(
            RuleError, match=r"gloo could not add up gradients among server-0, server-1: .*no route to host"
        ),
        local_job(workers=2, slice_bytes=64, **GLOO) as jobs,
    ):
        jobs.run(lambda job: push_cells(job, 3, {}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sums": "gloo"}, "use --exchange ring"),
        ({**GLOO, "codec": "bf16"}, "leave --codec out"),
        ({**GLOO, "policy": "bounded:2"}, "use --policy sync"),
        ({"exchange": "ring", "sums": "nccl", "device": "cpu"}, "use --sums gloo"),
        ({"exchange": "ring", "sums": "mpi"}, "must be one of ours, gloo, nccl"),
    ],
)
def test_what_cannot_be_together_is_said(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said), local_job(workers=2, **settings):
        pass


def test_between_hosts_only_where_the_network_is_trusted() -> None:
    """Also where members have joined from elsewhere by hand."""
    for trusted in (False, True):
        with local_job(workers=2, on=["a", "b"], slice_bytes=64, trust_network=trusted, **GLOO) as jobs:
            if trusted:
                jobs.run(lambda job: push_cells(job, 2, {}))
            else:
                with pytest.MonkeyPatch.context() as patch, pytest.raises(RuleError, match="use --trust-network"):
                    patch.setattr(process_group, "PATIENCE_SECONDS", 0.2)
                    jobs.run(lambda job: push_cells(job, 2, {}))


# -- how servers find each other ------------------------------------------------------------------------------


def test_introductions_wait_for_others_and_end_with_their_generation() -> None:
    heard, told = StoreKeys(), list[tuple[str, bytes]]()
    heard.begin(3)
    store = GroupStore(3, heard, lambda key, value: told.append((key, value)), PATIENCE)
    store.set("mine", "here")
    assert told == [("mine", b"here")] and store.get("mine") == b"here" and not store.check(["theirs"])
    heard.put(2, "theirs", b"of before")
    assert not store.check(["theirs"]) and 2 not in heard.generations(), "nothing of what is over is kept"
    heard.put(4, "theirs", b"of a later one")
    heard.put(3, "theirs", b"there")
    assert store.get("theirs") == b"there" and store.num_keys() == 2
    found: list[Exception] = []

    def wait() -> None:
        try:
            store.get("nobody's")
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    heard.begin(4)
    thread.join(PATIENCE)
    assert "generation 3 is over" in str(found[0])
    assert heard.of(4) == {"theirs": b"of a later one"}


def test_introductions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = StoreKeys()
    with pytest.raises(ProtocolError, match="at most 65536"):
        heard.put(1, "key", bytes(process_group.MOST_BYTES + 1))
    monkeypatch.setattr(process_group, "MOST_KEYS", 2)
    heard.put(1, "a", b"")
    heard.put(1, "b", b"")
    with pytest.raises(ProtocolError, match="more than 2"):
        heard.put(1, "c", b"")
