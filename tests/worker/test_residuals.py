"""What an encoding leaves out of a push is part of the next one: exactly once, whatever happens to the push."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE
from tests.pushing import SGD, floats, push, register, residual_of

from syncline.coordinator import saves
from syncline.core.codecs.topk import TopK
from syncline.core.layout import to_ranges
from syncline.core.rule import Rule
from syncline.core.wire.traffic import Stage
from syncline.net.rpc import Endpoint
from syncline.testing import local_job
from syncline.worker.exchange.commit import Push
from syncline.worker.job import Job

# -- residuals -----------------------------------------------------------------------------------------------


def test_what_is_left_out_is_part_of_the_next_push() -> None:
    """topk:0.25 of eight: two at a time, until all of it has come."""
    grads = floats(8, 7, 6, 5, 4, 3, 2, 1)
    with local_job(workers=1, transport="tcp", codec="topk:0.25") as jobs:
        register(jobs[0], 8)
        seen = [-push(jobs[0], x=grads if k == 0 else np.zeros(8, np.float32))["x"] for k in range(5)]
    assert [np.count_nonzero(x) for x in seen] == [2, 4, 6, 8, 8]
    np.testing.assert_array_equal(seen[-1], grads)


def test_what_is_rounded_when_packed_comes_whole_in_the_end() -> None:
    """Of a large slice many travel at once, as powers of two: 7 comes as 8, and then as -1."""
    grads = np.random.default_rng(2).integers(-7, 8, 20_000).astype(np.float32)
    with local_job(workers=1, transport="tcp", codec="topk:0.01") as jobs:
        register(jobs[0], grads.size)
        arrived = -push(jobs[0], x=grads)["x"]
        assert np.count_nonzero(arrived) > 5 * 200 and set(np.abs(arrived)) == {0, 8}
        for _ in range(60):
            left = residual_of(jobs[0])
            if left is None:
                break
            np.testing.assert_array_equal(arrived + left, grads)
            arrived = -push(jobs[0], x=np.zeros_like(grads))["x"]
    np.testing.assert_array_equal(arrived, grads)
    assert left is None


def test_training_converges_by_it_where_it_does_not_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quadratic in which a few directions are steep and noisy: they alone would always be the largest."""
    size = 40
    is_steep = np.arange(size) < 2

    def distance() -> float:
        rng = np.random.default_rng(5)
        with local_job(workers=1, transport="tcp", codec="topk:0.05") as jobs:
            jobs[0].kv.register({"x": np.ones(size, np.float32)}, Rule("SGD", lr=0.02))
            x = np.ones(size, np.float32)
            for _ in range(400):
                steep = 30 * x + 30 * rng.standard_normal(size).astype(np.float32)
                x = push(jobs[0], x=np.where(is_steep, steep, x))["x"]
            return float(np.abs(x[2:]).mean())

    found = distance()
    monkeypatch.setattr(TopK, "is_lossy", False)  # then there are no residuals
    assert found < 0.3 < 0.8 < distance()


@pytest.fixture
def one() -> Iterator[Job]:
    with local_job(workers=1, transport="tcp", codec="topk:0.25", bad_pushes=100) as jobs:
        register(jobs[0], 8, y=np.zeros(4, np.float32))  # in one slice: three of its numbers travel
        yield jobs[0]


def test_a_push_that_is_void_leaves_residuals_as_they_were(one: Job) -> None:
    push(one, x=floats(8, 7, 6, 5, 4, 3, 2, 1))
    before = residual_of(one)
    push(one, x=floats(np.nan))
    np.testing.assert_array_equal(residual_of(one), before)
    one.kv.push({"x": np.zeros(8, np.float32)}, weight=0.0).wait()
    np.testing.assert_array_equal(residual_of(one), before)
    np.testing.assert_array_equal(before, floats(0, 0, 0, 5, 4, 3, 2, 1))


def test_parameters_that_are_not_pushed_keep_theirs(one: Job) -> None:
    push(one, x=floats(8, 7, 6, 5, 4, 3, 2, 1), y=floats(4, 3, 2, 1, size=4))
    push(one, y=floats(0, size=4))
    np.testing.assert_array_equal(residual_of(one), floats(0, 0, 0, 5, 4, 3, 2, 1))
    found = push(one, x=floats(0))
    np.testing.assert_array_equal(found["x"], -floats(8, 7, 6, 5, 4, 3, 0, 0))
    np.testing.assert_array_equal(one.kv.pull()["y"], -floats(4, 3, 2, 0, size=4))


def test_what_was_staged_early_and_has_changed_since_counts_once(one: Job) -> None:
    """The first encoding is dropped with its residual; so is that of a step that an overflow skips."""
    push(one, x=floats(8, 7, 6, 5, 4, 3, 2, 1), y=floats(0, size=4))
    exchange = one.exchange
    segment, index = exchange.layout.where["x"]
    pushed = to_ranges([segment.first_parameter + index])
    view = one.kv.gradients(["x"])["x"]
    view[:] = floats(100)
    exchange.stage(segment.slices)
    view[:] = 0
    exchange.commit(Push(pushed=pushed), None).wait()
    np.testing.assert_array_equal(residual_of(one), floats(0, 0, 0, 0, 0, 0, 2, 1))
    view[:] = floats(100)
    exchange.stage(segment.slices)
    exchange.commit(Push(pushed=(), skip=True), None).wait()
    np.testing.assert_array_equal(residual_of(one), floats(0, 0, 0, 0, 0, 0, 2, 1))
    np.testing.assert_array_equal(one.kv.pull()["x"], -floats(8, 7, 6, 5, 4, 3, 0, 0))


def test_what_left_before_residuals_were_put_back_leaves_again_with_them(one: Job) -> None:
    exchange = one.exchange
    assert exchange.encoder is not None
    segment, index = exchange.layout.where["x"]
    one.kv.gradients(["x"])["x"][:] = 0
    exchange.stage(segment.slices)
    exchange.encoder.put_back({"x": floats(8, 7, 6, 5, 4, 3, 2, 1)})
    exchange.commit(Push(pushed=to_ranges([segment.first_parameter + index])), None).wait()
    np.testing.assert_array_equal(one.kv.pull()["x"], -floats(8, 7, 6, 0, 0, 0, 0, 0))


def test_another_workers_overflow_takes_a_push_back() -> None:
    """The round changes nothing, though this worker's part of it was sound."""
    with local_job(workers=2, transport="tcp", codec="topk:0.25") as jobs:

        def work(job: Job) -> Any:
            register(job, 8)
            push(job, x=floats(8, 7, 6, 5, 4, 3, 2, 1))
            if job.rank:
                job.exchange.commit(Push(pushed=(), skip=True), None).wait()
            else:
                push(job, x=floats(0))
            return residual_of(job), job.kv.pull()["x"]

        for residual, x in jobs.run(work):
            np.testing.assert_array_equal(residual, floats(0, 0, 6, 5, 4, 3, 2, 1))
            np.testing.assert_array_equal(x, -floats(8, 7, 0, 0, 0, 0, 0, 0))


def test_a_late_push_is_taken_back() -> None:
    """With spare workers: nothing of it is applied, and its samples are read again."""
    first, go_on = threading.Barrier(2), threading.Event()
    with local_job(workers=2, policy="sync:spare=1", transport="tcp", codec="topk:0.25") as jobs:

        def work(job: Job) -> Any:
            register(job, 8)
            job.barrier("begin")
            first.wait(PATIENCE)
            if job.rank:
                go_on.wait(PATIENCE)
                push(job, x=floats(8, 7, 6, 5, 4, 3, 2, 1))
                late = (job.exchange.num_late, residual_of(job))
                job.barrier("end")
                return late
            for _ in range(3):
                push(job, x=floats(0))
            go_on.set()
            job.barrier("end")
            return job.kv.pull()["x"]

        x, (num_late, residual) = jobs.run(work)
    assert num_late == 1 and (residual is None or not residual.any()) and not x.any()


# -- servers that die ----------------------------------------------------------------------------------------


class Wire:
    """What a worker stages, as it goes out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Stage, bytes]] = []
        send = Endpoint.send

        def noted(endpoint: Any, number: int, flags: int, message: Any, buffers: Any, *rest: Any) -> None:
            buffers = list(buffers)
            if isinstance(message, Stage):
                self.seen.append((message, b"".join(bytes(buffer) for buffer in buffers)))
            send(endpoint, number, flags, message, buffers, *rest)

        monkeypatch.setattr(Endpoint, "send", noted)


def test_a_push_is_made_anew_in_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two servers dies while a round waits for the other worker: nothing is counted twice or left out."""
    wire = Wire(monkeypatch)
    with local_job(workers=2, servers=2, replicas=2, transport="tcp", codec="topk:0.25", slice_bytes=64) as jobs:
        waits = threading.Event()

        def work(job: Job) -> Any:
            job.kv.register({"x": np.zeros(64, np.float32)}, SGD)
            push(job, x=np.arange(1, 65, dtype=np.float32))
            if job.rank:
                waits.wait(PATIENCE)
                jobs.kill("server-1")
            ticket = job.kv.push_pull({"x": np.zeros(64, np.float32)})
            waits.set()
            ticket.wait()
            for _ in range(4):
                push(job, x=np.zeros(64, np.float32))
            return job.kv.pull()["x"]

        for x in jobs.run(work):
            np.testing.assert_array_equal(x, -np.arange(1, 65, dtype=np.float32))
    seconds = [(m, data) for m, data in wire.seen if m.clock == 2 and m.slices]
    by_slice: dict[int, set[tuple[Any, ...]]] = {}
    for message, data in seconds:
        assert message.codec == "topk:0.25"
        start = 0
        for number, sizes in zip(message.slices, message.sizes, strict=True):
            length = sum(size for size in sizes if size > 0)
            by_slice.setdefault(number, set()).add((tuple(sizes), data[start : start + length]))
            start += length
    assert all(len(found) == 1 for found in by_slice.values()), "each slice always in the same bytes"
    assert sum(len(message.slices) for message, _ in seconds) > 2 * len(by_slice), "some were sent again"


def test_a_new_primary_that_reads_the_arena_finds_what_others_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded for a server over a socket, which dies; the next one shares memory with the worker."""
    with local_job(workers=1, transport="tcp", codec="topk:0.25") as jobs:
        register(jobs[0], 8)
        job, sending = jobs[0], jobs[0].exchange.sender
        ticket = job.exchange.commit(_push_of(job, floats(8, 7, 6, 5, 4, 3, 2, 1)), None)
        ticket.wait()
        monkeypatch.setattr(job.exchange.routes.arenas, "is_shared", lambda *key: True)
        sending.lie_decoded(ticket)
        np.testing.assert_array_equal(job.kv.gradients(["x"])["x"], floats(8, 7, 0, 0, 0, 0, 0, 0))


def _push_of(job: Job, values: Any) -> Any:
    segment, _ = job.exchange.layout.where["x"]
    job.kv.gradients(["x"])["x"][:] = values
    return Push(pushed=((segment.first_parameter, segment.first_parameter + 1),))


# -- checkpoints ---------------------------------------------------------------------------------------------


def test_residuals_are_saved_and_put_back(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a script that has nothing of its own to be saved, and reads no loader."""
    monkeypatch.setattr(saves, "EXPECT_SECONDS", PATIENCE)  # else a slow worker's are left out
    settings = {"transport": "tcp", "codec": "topk:0.25", "checkpoint": str(tmp_path / "saved")}

    def first(job: Job) -> None:
        register(job, 8)
        push(job, x=floats(8, 7, 6, 5, 4, 3, 2, 1))
        assert job.save()

    def second(job: Job) -> Any:
        register(job, 8)
        job.save()
        return [push(job, x=floats(0))["x"] for _ in range(3)][-1]

    with local_job(workers=2, folder=str(tmp_path / "a"), **settings) as jobs:
        jobs.run(first)
    with local_job(workers=2, folder=str(tmp_path / "b"), **settings) as jobs:
        for x in jobs.run(second):
            np.testing.assert_array_equal(x, -floats(8, 7, 6, 5, 4, 3, 2, 1))


def test_those_of_other_workers_are_said_and_dropped(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"transport": "tcp", "codec": "topk:0.25", "checkpoint": str(tmp_path / "saved")}

    def work(job: Job) -> Any:
        register(job, 8)
        job.state["n"] = 0
        x = push(job, x=floats(8, 7, 6, 5, 4, 3, 2, 1) if job.world_size == 2 else floats(0))["x"]
        if job.world_size == 2:
            assert job.save()
        return x

    with local_job(workers=2, folder=str(tmp_path / "a"), **settings) as jobs:
        jobs.run(work)

    def after(job: Job) -> Any:
        register(job, 8)
        job.state["n"] = 0
        job.save()
        return push(job, x=floats(0))["x"]

    with local_job(workers=1, folder=str(tmp_path / "b"), **settings) as jobs:
        (x,) = jobs.run(after)
    np.testing.assert_array_equal(x, -floats(8, 7, 0, 0, 0, 0, 0, 0))
    said = capfd.readouterr()
    assert "residuals of 2 workers, the job has 1: they are dropped" in said.out + said.err
