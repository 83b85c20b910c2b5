"""`async:gather=N`: the weighted mean of every N pushes is applied. Numbers are dyadic: checks are exact."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.server.conftest import WAIT, House, eventually

from syncline import Rule
from syncline.core.wire.traffic import Replicate, Replicated
from syncline.errors import ConfigError, SynclineError
from syncline.net.rpc import Stamp
from syncline.net.transport import Peer
from syncline.testing import local_job
from syncline.worker.job import Job

SHAPES = pytest.mark.parametrize(
    "settings",
    [{}, {"servers": 2, "slice_bytes": 64}, {"servers": 2, "replicas": 2}, {"transport": "tcp"}],
    ids=["one server", "two servers", "two replicas", "tcp"],
)
SIZE = 64


def ones(value: float = 1.0) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.full(SIZE, value, np.float32)}


@SHAPES
def test_a_group_is_applied_as_its_weighted_mean(settings: dict[str, Any]) -> None:
    """(1·1 + 3·2) / 4 = 1.75; from 1.0, at a rate of 0.1, that is 0.825."""
    with local_job(workers=2, policy="async:gather=2", **settings) as jobs:

        def work(job: Job) -> None:
            job.kv.register(ones(), Rule("SGD", lr=0.1))
            if job.rank == 0:
                job.kv.push(ones(1.0), weight=1.0).wait()
            # No barrier here: it would flush the group.

        jobs.run(work)
        held = np.asarray(jobs[0].kv.pull()["x"])
        assert (held == 1.0).all(), "a push is acknowledged while it is held"
        jobs[1].kv.push(ones(2.0), weight=3.0).wait()
        assert (np.asarray(jobs[0].kv.pull()["x"]) == np.float32(0.825)).all()


@SHAPES
@pytest.mark.parametrize("rests", ["barrier", "leave"])
def test_what_is_left_is_flushed(rests: str, settings: dict[str, Any]) -> None:
    """Three pushes, groups of two: the last is applied by itself when its worker rests or ends."""
    with local_job(workers=2, policy="async:gather=2", **settings) as jobs:

        def work(job: Job) -> None:
            job.kv.register({"x": np.zeros(SIZE, np.float32)}, Rule("SGD", lr=0.5))
            if job.rank == 0:
                for value in (1.0, 3.0, 4.0):
                    job.kv.push(ones(value)).wait()

        jobs.run(work)
        assert (np.asarray(jobs[1].kv.pull()["x"]) == -1.0).all(), "the third is held"
        if rests == "leave":
            jobs[0].close()
        else:
            jobs.run(lambda job: job.barrier("all"))
        assert (np.asarray(jobs[1].kv.pull()["x"]) == -3.0).all()


@SHAPES
def test_the_one_hot_ledger_is_exact(settings: dict[str, Any]) -> None:
    """With `reduce="sum"` a group is the sum of its pushes: every push is in, once, whatever the groups were."""
    pushes, workers = 25, 3
    with local_job(workers=workers, policy="async:gather=3", **settings) as jobs:

        def work(job: Job) -> np.ndarray[Any, Any]:
            job.kv.register({"ledger": np.zeros((workers, pushes), np.float32)}, Rule("Add"), reduce="sum")
            for number in range(pushes):
                cell = np.zeros((workers, pushes), np.float32)
                cell[job.rank, number] = 1.0
                job.kv.push({"ledger": cell}).wait()
            job.barrier("all in")
            return np.asarray(job.kv.pull()["ledger"])

        for ledger in jobs.run(work):
            assert (ledger == 1.0).all(), ledger


def test_held_pushes_move_with_their_slice() -> None:
    """The primary dies while a push is held: its backup holds the same one, and so does the backup that is seeded."""
    with local_job(workers=2, servers=3, replicas=2, policy="async:gather=2") as jobs:
        jobs.run(lambda job: job.kv.register({"x": np.zeros(SIZE, np.float32)}, Rule("SGD", lr=0.5)))

        def are_on(*servers: str, copies: int) -> bool:
            sets = jobs.coordinator.job.membership.state.replica_sets.values()
            return all(len(one.names) == copies and one.primary and {*one.names} <= {*servers} for one in sets)

        eventually(lambda: are_on("server-0", "server-1", "server-2", copies=2))
        jobs[0].kv.set(lr=0.25)
        jobs[0].kv.push(ones(2.0)).wait()
        jobs.kill("server-0")
        eventually(lambda: are_on("server-1", "server-2", copies=2))
        eventually(lambda: "replica sets: 2 slices get a backup" in jobs.coordinator.job.events)
        jobs.kill("server-1")  # backups on server-2 were seeded while the push was held
        eventually(lambda: are_on("server-2", copies=1))
        assert not np.asarray(jobs[1].kv.pull()["x"]).any()
        jobs.run(lambda job: job.barrier("all"))
        assert (np.asarray(jobs[1].kv.pull()["x"]) == -0.5).all(), "flushed with the rate of its own push"


def test_a_flush_whose_answer_was_lost_is_repeated_and_applied_once(make_house: Callable[..., House]) -> None:
    """The test is the primary: it flushes its backup, hears nothing, and says the same again."""
    house = make_house(2, 2, replicas=2, policy="async:gather=2")
    house.register({"x": np.zeros(16, np.float32)})
    (replica_set,) = house.replica_sets.values()
    primary, backup = replica_set.primary, "server-1" if replica_set.primary == "server-0" else "server-0"
    house.seed(primary, backup)
    house.workers["worker-0"].commit(primary, 1, {"x": np.ones(16, np.float32)}).wait(WAIT)
    slot = house.slot(backup, 0)
    assert slot.rules.num_gathered == 1 and not slot.memory.any(), "the backup holds the push"
    stamp = Stamp("job")
    stamp.generation = house.generation
    endpoint = house.connect(Peer("server", primary, 0), Peer("server", backup, 0), stamp, backup)
    for _ in range(2):
        answer = endpoint.call(Replicate(0, 0, [], [], [], [], 1.0, gather=1)).wait(WAIT)
        assert isinstance(answer, Replicated) and answer.version == 1
    assert (slot.memory.view(np.float32) == -1.0).all()


def test_a_rule_that_raises_at_a_flush_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(self: object, *given: object) -> None:
        raise ValueError("no idea")

    with local_job(workers=2, policy="async:gather=2") as jobs:
        jobs.run(lambda job: job.kv.register({"x": np.zeros(SIZE, np.float32)}, Rule("SGD", lr=0.5)))
        jobs[0].kv.push(ones()).wait()
        monkeypatch.setattr("syncline.server.rules.SliceRules.apply", raises)
        with pytest.raises(SynclineError, match="the pushes that were held could not be applied: no idea"):
            jobs.run(lambda job: job.barrier("all"))


def test_a_save_has_what_is_held(tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path / "saved")
    with local_job(workers=2, policy="async:gather=2", checkpoint=folder) as jobs:
        jobs.run(lambda job: job.kv.register({"x": np.zeros(SIZE, np.float32)}, Rule("SGD", lr=0.5)))
        jobs[0].kv.push(ones(2.0)).wait()
        jobs[0].save()
        assert (np.asarray(jobs[1].kv.pull()["x"]) == -1.0).all()
    with local_job(workers=1, policy="async", checkpoint=folder) as jobs:
        found = jobs[0].kv.register({"x": np.ones(SIZE, np.float32)}, Rule("SGD", lr=0.5))
        assert (np.asarray(found["x"]) == -1.0).all()


def test_the_state_of_a_rule_is_loaded_beside_what_is_held() -> None:
    with local_job(workers=2, policy="async:gather=2") as jobs:
        jobs.run(lambda job: job.kv.register({"x": np.zeros(SIZE, np.float32)}, Rule("SGD", lr=0.5, momentum=0.5)))
        jobs[0].kv.push(ones(1.0)).wait()
        jobs[1].kv.push(ones(1.0)).wait()
        jobs[0].kv.push(ones(1.0)).wait()
        slices = jobs[0].exchange.layout.segments[0].slices
        jobs[0].exchange.write_state(slices, jobs[0].exchange.read_state(slices))
        jobs.run(lambda job: job.barrier("all"))
        assert (np.asarray(jobs[1].kv.pull()["x"]) == -0.5 - 0.5 * 1.5).all()


@pytest.mark.parametrize(("reduce", "wanted"), [("sum", 7), ("mean", 2)])
def test_counters_and_deltas(reduce: str, wanted: int) -> None:
    """1 with weight 1 and 2 with weight 3: the sum is 7, the mean 7/4; integers are rounded."""
    with local_job(workers=2, policy="async:gather=2") as jobs:
        start = {"count": np.zeros(4, np.int64), "x": np.zeros(4, np.float32)}
        jobs.run(lambda job: job.kv.register(start, Rule("Add"), reduce=reduce))
        for value, weight in ((1, 1.0), (2, 3.0)):
            pushed = {name: np.full(4, value, array.dtype) for name, array in start.items()}
            jobs[0].kv.push(pushed, weight=weight).wait()
        found = jobs[1].kv.pull()
        assert (np.asarray(found["count"]) == wanted).all()
        assert (np.asarray(found["x"]) == (7.0 if reduce == "sum" else 1.75)).all()


def test_deltas_are_not_damped() -> None:
    with local_job(workers=2, policy="async:gather=2,damped") as jobs:
        jobs.run(lambda job: job.kv.register({"x": np.zeros(4, np.float32)}, Rule("Add"), reduce="sum"))
        for _ in range(3):  # worker-1 has not pulled since the beginning
            jobs[0].kv.push_pull({"x": np.ones(4, np.float32)}).wait()
            jobs[1].kv.push({"x": np.ones(4, np.float32)}).wait()
        assert (np.asarray(jobs[0].kv.pull()["x"]) == 6.0).all()


def test_parameters_that_a_push_does_not_touch_have_groups_of_their_own() -> None:
    with local_job(workers=2, policy="async:gather=2", slice_bytes=64) as jobs:
        start = {name: np.zeros(16, np.float32) for name in ("a", "b")}
        jobs.run(lambda job: job.kv.register(start, Rule("SGD", lr=1.0)))
        for name, value in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
            jobs[0].kv.push({name: np.full(16, value, np.float32)}).wait()
        found = jobs[1].kv.pull()
        assert (np.asarray(found["a"]) == -2.0).all() and not np.asarray(found["b"]).any()


@pytest.mark.parametrize(
    "policy", ["async:gather=0", "async:gather=3", "sync:gather=2", "bounded:gather=2", "async:gather=x"]
)
def test_what_cannot_be_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match="gather"), local_job(workers=2, policy=policy):
        pass
