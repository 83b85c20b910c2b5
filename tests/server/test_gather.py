"""`async:gather=N`: the weighted mean of every N pushes is applied. Numbers are dyadic: checks are exact."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from tests.server.conftest import eventually

from syncline import Rule
from syncline.errors import ConfigError
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
