"""`batches` inside a job: workers share a pass, without torch."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.leased import FakeJob, LeaseQueue, alone, order

from syncline.core.leasing.leases import SHARD_POSITIONS
from syncline.data import ArraySource, IterableSource, batches, samples_at
from syncline.data import batching as module
from syncline.errors import ConfigError

of_thread = threading.local()


@pytest.fixture(autouse=True)
def in_a_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The job of a thread, where it has one."""
    monkeypatch.setattr(module, "current_job", lambda: of_thread.job)
    monkeypatch.setattr(module, "has_current_job", lambda: getattr(of_thread, "job", None) is not None)
    yield
    of_thread.job = None


def train(job: FakeJob, source: Any, **options: Any) -> list[list[int]]:
    of_thread.job = job
    found = []
    for batch in batches(source, 4, **options):
        found.append((batch["n"] if isinstance(batch, dict) else batch[0]).tolist())
        job.step()
    return found


def numbers(count: int) -> ArraySource:
    return ArraySource({"n": np.arange(count)})


def shards() -> IterableSource:
    def shard(number: int) -> Any:
        return lambda: ({"n": 100 * number + k} for k in range(6))

    return IterableSource({str(number): shard(number) for number in range(4)})


@pytest.mark.parametrize("in_rounds", [True, False])
def test_every_sample_goes_to_one_worker(in_rounds: bool) -> None:
    lease_queue, source = LeaseQueue(3, in_rounds=in_rounds), numbers(101)
    world = lease_queue.run(lambda job: train(job, source, shuffle=True))
    assert sorted(itertools.chain(*itertools.chain(*world))) == list(range(101)) and lease_queue.left == 0


def test_shards_too() -> None:
    lease_queue, source = LeaseQueue(2, in_rounds=False), shards()
    world = lease_queue.run(lambda job: train(job, source, shuffle=True))
    assert sorted(itertools.chain(*itertools.chain(*world))) == [100 * s + k for s in range(4) for k in range(6)]
    assert lease_queue.left == 0


def test_each_call_with_a_source_is_its_next_epoch() -> None:
    job, one, two = alone(), numbers(20), numbers(20)
    epochs = [list(itertools.chain(*train(job, source, shuffle=True))) for source in (one, two, one)]
    assert epochs == [order(20, 0, epoch) for epoch in (0, 0, 1)]
    assert train(job, one, epoch=1) == [], "the job has finished it"
    assert list(itertools.chain(*train(job, one, shuffle=True, epoch=7))) == order(20, 0, 7)
    assert set(job.lease_queue.leasing.state.loaders) == {"loader-0", "loader-1"}


def test_a_source_has_passes_of_its_own_under_each_name() -> None:
    job, source = alone(), numbers(8)
    first, second, third, fourth = (train(job, source, shuffle=True, name=name) for name in ("a", "b", "a", ""))
    assert first == second == fourth != third and sorted(itertools.chain(*third)) == list(range(8))
    assert set(job.lease_queue.leasing.state.loaders) == {"a", "b", "loader-0"}


def test_a_job_keeps_no_source_alive() -> None:
    """One that is opened again for every epoch would otherwise stay for the life of the job, with all it has read."""
    job, refs = alone(), []
    for _ in range(3):
        source = numbers(8)
        refs.append(weakref.ref(source))
        train(job, source, shuffle=True)
        del source
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3
    (notice,) = set(job.noticed)
    assert "opened again start with the same order again: open it once" in notice


def test_two_sources_of_one_kind_are_no_source_that_was_opened_anew() -> None:
    job, one, two = alone(), numbers(8), numbers(8)
    for source in (one, two, one, two):
        train(job, source, shuffle=True)
    assert not job.noticed


class Slotted:
    """A source to which there is no weak reference."""

    __slots__ = ("_source",)

    def __init__(self) -> None:
        self._source = numbers(8)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return 8


def test_a_source_without_weak_references_is_known_again() -> None:
    job, source = alone(), Slotted()
    epochs = [list(itertools.chain(*train(job, source, shuffle=True))) for _ in range(2)]
    assert epochs == [order(8, 0, epoch) for epoch in range(2)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_positions_of_the_log_are_samples_again(shuffle: bool) -> None:
    """What was quarantined is named by its positions: the samples that a worker reads there."""
    job, source, options = alone(), numbers(20), {"shuffle": shuffle, "seed": 3}
    train(job, source, **options)
    read = list(itertools.chain(*train(job, source, **options)))
    assert samples_at(source, 5, 8, epoch=1, **options) == [f"sample {n} (arrays, element {n})" for n in read[5:9]]
    assert samples_at(range(20), 5, 8, epoch=1, **options) == [f"sample {n}" for n in read[5:9]]
    parts = shards()
    found = [n for batch in train(job, parts, **options) for n in batch]
    for place in range(4):
        first = place * SHARD_POSITIONS
        told = [f"sample {n % 100} of {n // 100}" for n in found[6 * place : 6 * place + 6]]
        assert samples_at(parts, first, first + 5, **options) == told


def test_the_last_batch_may_be_left_out() -> None:
    lease_queue = LeaseQueue(2)
    source = numbers(21)
    world = lease_queue.run(lambda job: train(job, source, drop_last=True))
    assert sorted(map(len, itertools.chain(*world))) == [4] * 4 and lease_queue.left == 0
    assert len(list(batches(numbers(21), 4, drop_last=True))) == 5


@pytest.mark.parametrize("in_job", [True, False])
def test_the_last_batches_of_shards_cannot_be_left_out(in_job: bool) -> None:
    """Nothing is dropped by a rule that holds in one place and not in the other: where shards end nobody knows."""
    of_thread.job = alone() if in_job else None
    with pytest.raises(ConfigError, match=r"drop_last cannot be given: where shards end .*leave it out"):
        batches(shards(), 4, drop_last=True)


def test_sources_of_different_length_are_refused_with_both_named() -> None:
    lease_queue = LeaseQueue(2)
    of_thread.job = lease_queue[0]
    batches(numbers(20), 4)
    of_thread.job = lease_queue[1]
    with pytest.raises(
        ConfigError, match=r"worker-1 has 21 samples .*worker-0 has 20 samples.*must read the same data"
    ):
        batches(numbers(21), 4)


def test_a_loop_that_is_left_gives_back() -> None:
    lease_queue, source = LeaseQueue(2, in_rounds=False), numbers(40)
    of_thread.job = lease_queue[0]
    for _ in batches(source, 4):
        lease_queue[0].step()
        break
    assert list(itertools.chain(*train(lease_queue[1], source))) == list(range(4, 40))


def test_an_evaluation_reads_all_of_it_and_the_job_hears_nothing() -> None:
    job = of_thread.job = alone()
    assert [len(batch["n"]) for batch in batches(numbers(10), 4, alone=True)] == [4, 4, 2]  # type: ignore[call-overload]
    assert not job.lease_queue.heard


def test_a_worker_without_torch() -> None:
    code = """
import sys, numpy as np, syncline, syncline.data as data
assert "torch" not in sys.modules
assert len(list(data.batches(data.ArraySource(np.arange(10)), 4))) == 3
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
