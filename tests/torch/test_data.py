"""The DataLoader of a job: disjoint parts, epochs, what the job is told, and torch's own options."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset, TensorDataset

import syncline.torch.data
from syncline.core.order import order
from syncline.errors import ConfigError
from syncline.torch.data import DataLoader


class FakeJob:
    """Writes down what a loader tells its job."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size, self.step = rank, world_size, 0
        self.told: list[tuple[Any, ...]] = []

    def begin_epoch(self, epoch: int, num_batches: int) -> None:
        self.told.append(("begin", epoch, num_batches))

    def took(self, num_samples: int) -> None:
        self.told.append(("took", num_samples))

    def rest(self) -> None:
        self.told.append(("rest",))

    @property
    def rested(self) -> bool:
        return ("rest",) in self.told


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


def lists(batches: Iterator[Any] | DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def train(loader: DataLoader[Any], job: FakeJob) -> None:
    for _ in loader:
        job.step += 1


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_samples", [0, 1, 20, 23])
def test_every_sample_goes_to_exactly_one_worker(num_samples: int, shuffle: bool) -> None:
    taken: list[int] = []
    for rank in range(3):
        job = FakeJob(rank, 3)
        loader = DataLoader(Numbers(num_samples), 4, shuffle, job=job, seed=5)
        mine = lists(loader)
        assert len(loader) == len(mine)
        took = [told[1] for told in job.told if told[0] == "took"]
        # No step was made: at the end the samples are taken back, they are in no step's weight.
        assert took == [len(batch) for batch in mine] + [-sum(map(len, mine))] * bool(mine)
        taken += flat(mine)
    assert sorted(taken) == list(range(num_samples))


def test_workers_together_take_the_global_batches_of_the_order() -> None:
    world = [lists(DataLoader(Numbers(20), 4, True, job=FakeJob(rank, 2), seed=9)) for rank in range(2)]
    together = [flat(parts) for parts in zip(*world, strict=True)]
    expected = order(20, 9, 0, 0, 20).tolist()
    assert together == [expected[:8], expected[8:16], expected[16:]]


@pytest.mark.parametrize("block_samples", [3, 7, 15])
def test_the_order_is_the_same_whatever_the_block_in_which_it_is_evaluated(
    block_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = lists(DataLoader(Numbers(100), 7, True, job=FakeJob(1, 2)))
    monkeypatch.setattr(syncline.torch.data, "_BLOCK_SAMPLES", block_samples)
    assert lists(DataLoader(Numbers(100), 7, True, job=FakeJob(1, 2))) == whole


def test_drop_last_drops_the_partial_global_batch() -> None:
    for rank in range(3):
        loader = DataLoader(Numbers(23), 4, drop_last=True, job=FakeJob(rank, 3))
        assert len(loader) == 1
        assert lists(loader) == [list(range(4 * rank, 4 * rank + 4))]


def test_each_iter_is_the_next_epoch_in_another_order() -> None:
    job = FakeJob()
    loader = DataLoader(Numbers(50), 50, True, job=job)
    first, second = lists(loader), lists(loader)
    assert first != second
    assert first == [order(50, 0, 0, 0, 50).tolist()]
    assert second == [order(50, 0, 1, 0, 50).tolist()]
    assert [told for told in job.told if told[0] == "begin"] == [("begin", 0, 1), ("begin", 1, 1)]


def test_seeds_give_different_orders() -> None:
    assert lists(DataLoader(Numbers(50), 50, True, job=FakeJob(), seed=1)) != lists(
        DataLoader(Numbers(50), 50, True, job=FakeJob(), seed=2)
    )


def test_without_shuffle_every_epoch_is_in_the_order_of_the_data_set() -> None:
    loader = DataLoader(Numbers(5), 2, job=FakeJob())
    assert lists(loader) == lists(loader) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_two_live_iterators_are_two_epochs(options: dict[str, Any]) -> None:
    """Both are made before either is read, then read in turns: each keeps its own epoch.

    torch's persistent workers have one iterator per loader, which a second `iter()` would turn around.
    """
    loader: DataLoader[Any] = DataLoader(Numbers(12), 3, True, job=FakeJob(), **options)
    one, two = iter(loader), iter(loader)
    read: tuple[list[int], list[int]] = ([], [])
    for first, second in zip(one, two, strict=True):
        read[0].extend(first.tolist())
        read[1].extend(second.tolist())
    assert read[0] == order(12, 0, 0, 0, 12).tolist()
    assert read[1] == order(12, 0, 1, 0, 12).tolist()
    assert flat(lists(loader)) == order(12, 0, 2, 0, 12).tolist()


def test_an_iterator_outlives_two_later_ones() -> None:
    """The second is read to its end; the third finds only the first, which must keep its processes."""
    loader = DataLoader(Numbers(12), 3, True, num_workers=1, persistent_workers=True, job=FakeJob())
    one, two = iter(loader), iter(loader)
    assert flat(lists(two)) == order(12, 0, 1, 0, 12).tolist()
    assert flat(lists(loader)) == order(12, 0, 2, 0, 12).tolist()
    assert flat(lists(one)) == order(12, 0, 0, 0, 12).tolist()


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_data_processes_advance_by_one_epoch_each_time(persistent_workers: bool) -> None:
    """torch calls the batch sampler's `iter` twice for a first epoch, and reads ahead: no epoch is lost."""
    job = FakeJob()
    loader = DataLoader(
        Numbers(30), 4, True, num_workers=2, prefetch_factor=3, persistent_workers=persistent_workers, job=job
    )
    for epoch in range(2):
        assert flat(lists(loader)) == order(30, 0, epoch, 0, 30).tolist()
    for _ in loader:
        break
    assert flat(lists(loader)) == order(30, 0, 3, 0, 30).tolist()
    assert [told[1] for told in job.told if told[0] == "begin"] == [0, 1, 2, 3]


def test_persistent_workers_are_started_once() -> None:
    """Whole epochs, one left early, one read to its end but still held: all by the same process."""

    def process(_: list[int]) -> int:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return os.getpid()

    loader = DataLoader(Numbers(4), 2, num_workers=1, persistent_workers=True, collate_fn=process, job=FakeJob())
    seen = set(loader)
    for number in loader:
        seen.add(number)
        break
    held = iter(loader)
    seen.update(held)
    seen.update(loader)
    assert len(seen) == 1


def test_samples_count_when_the_script_takes_them_not_when_they_are_read_ahead() -> None:
    """A step's weight is what was handed out since the last step; a prefetched batch is not yet."""
    job = FakeJob()
    batches = iter(DataLoader(Numbers(10), 4, num_workers=1, prefetch_factor=4, job=job))
    assert job.told == [("begin", 0, 3)]
    next(batches)
    assert job.told == [("begin", 0, 3), ("took", 4)]
    next(batches), next(batches)
    assert job.told == [("begin", 0, 3), ("took", 4), ("took", 4), ("took", 2)]


def test_the_epoch_begins_at_iter_and_not_at_its_first_batch() -> None:
    job = FakeJob()
    iter(DataLoader(Numbers(10), 4, job=job))
    assert job.told == [("begin", 0, 3)]


def test_a_worker_rests_after_an_epoch_in_which_it_stepped() -> None:
    job = FakeJob()
    train(DataLoader(Numbers(10), 4, job=job), job)
    assert job.told[-1] == ("rest",)
    assert job.told.count(("rest",)) == 1


def test_a_worker_without_any_batch_rests_at_once() -> None:
    """One sample, two workers: rank 0 has nothing to push, and the round must not wait for it."""
    job = FakeJob(0, 2)
    train(DataLoader(Numbers(1), 4, job=job), job)
    assert job.told == [("begin", 0, 0), ("rest",)]


@pytest.mark.parametrize(
    "without_gradients",
    [torch.no_grad, torch.inference_mode, contextlib.nullcontext],
    ids=lambda f: f.__name__,
)
def test_an_evaluation_loop_never_rests(without_gradients: Any) -> None:
    """Not with gradients off, nor with them left on: it does not step."""
    job = FakeJob()
    with without_gradients():
        lists(DataLoader(Numbers(10), 4, job=job))
    assert not job.rested


@pytest.mark.parametrize("num_samples", [1, 10])
def test_the_job_hears_nothing_of_an_evaluation(num_samples: int) -> None:
    """In the middle of an epoch its samples would weigh on the next step, and spoil the progress shown."""
    job = FakeJob(1, 2)
    training = iter(DataLoader(Numbers(20), 4, job=job))
    next(training)
    told = list(job.told)
    with torch.no_grad():
        assert flat(lists(DataLoader(Numbers(num_samples), 4, job=job)))
    assert job.told == told


def test_gradients_off_when_the_loop_began_is_what_counts() -> None:
    """The body of the loop may switch them, and step."""
    job = FakeJob()
    with torch.no_grad():
        batches = iter(DataLoader(Numbers(10), 4, job=job))
    for _ in batches:
        job.step += 1
    assert job.told == []


def test_an_evaluation_is_an_epoch_of_its_loader_too() -> None:
    loader = DataLoader(Numbers(50), 50, True, job=FakeJob())
    with torch.no_grad():
        lists(loader)
    assert lists(loader) == [order(50, 0, 1, 0, 50).tolist()]


def test_a_break_never_rests() -> None:
    job = FakeJob()
    for _ in DataLoader(Numbers(10), 4, job=job):
        job.step += 1
        break
    assert not job.rested


def test_an_exception_in_the_dataset_reaches_the_script_and_does_not_rest() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 5:
                raise KeyError("sample 5 is broken")
            return index

    job = FakeJob()
    with pytest.raises(KeyError, match="sample 5"):
        train(DataLoader(Broken(10), 4, job=job), job)
    assert not job.rested


def test_rank_and_world_size_are_those_at_iter() -> None:
    """A later generation has other ranks: the next epoch is split anew, the length follows."""
    job = FakeJob(1, 2)
    loader = DataLoader(Numbers(8), 2, job=job)
    assert lists(loader) == [[2, 3], [6, 7]]
    job.rank, job.world_size = 0, 1
    assert len(loader) == 4
    assert lists(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_current_job_is_taken_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for at iter() only: a loader may be made before init()."""
    loader = DataLoader(Numbers(8), 2)
    job = FakeJob(1, 2)
    monkeypatch.setattr(syncline.torch.data, "current_job", lambda: job)
    assert lists(loader) == [[2, 3], [6, 7]]
    assert job.told[0] == ("begin", 0, 2)


def test_the_arguments_are_torchs_own_in_torchs_own_order() -> None:
    ours = list(inspect.signature(DataLoader.__init__).parameters.values())
    torchs = list(inspect.signature(torch.utils.data.DataLoader.__init__).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[: len(torchs)]] == [(p.name, p.kind, p.default) for p in torchs]
    assert [(p.name, p.kind) for p in ours[len(torchs) :]] == [
        ("job", inspect.Parameter.KEYWORD_ONLY),
        ("seed", inspect.Parameter.KEYWORD_ONLY),
    ]


def test_torchs_options_reach_torch() -> None:
    def collate(samples: list[int]) -> tuple[int, ...]:
        return tuple(samples)

    generator = torch.Generator()
    loader: DataLoader[Any] = DataLoader(
        Numbers(6), 4, collate_fn=collate, drop_last=True, timeout=7, num_workers=1, prefetch_factor=5,
        generator=generator, job=FakeJob(),
    )  # fmt: skip
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert (loader.batch_size, loader.drop_last, loader.timeout, loader.prefetch_factor) == (4, True, 7, 5)
    assert loader.generator is generator
    assert list(loader) == [(0, 1, 2, 3)]
    with pytest.raises(ValueError, match="persistent_workers"):
        DataLoader(Numbers(6), persistent_workers=True)


def test_tensors_are_collated_as_by_torch() -> None:
    images, labels = torch.arange(24.0).reshape(6, 4), torch.arange(6)
    loader = DataLoader(TensorDataset(images, labels), 4, True, job=FakeJob(), seed=3)
    x, y = next(iter(loader))
    chosen = order(6, 3, 0, 0, 4).tolist()
    assert torch.equal(x, images[chosen]) and torch.equal(y, labels[chosen])


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Numbers(3), {"sampler": [0, 1]}, "sampler cannot be given: .* use shuffle and seed .*Subset"),
        (Numbers(3), {"batch_sampler": [[0], [1]]}, "batch_sampler cannot be given: .* use shuffle and seed"),
        (Stream(), {}, "IterableDataset .* give a dataset with __len__ and __getitem__"),
        (Unsized(), {}, "Unsized cannot be split over workers without a __len__; add one"),
        (Numbers(3), {"batch_size": None}, "batch_size = None: .* use batch_size=1"),
        (Numbers(3), {"batch_size": 0}, "batch_size = 0: must be an int of at least 1"),
        (Numbers(3), {"batch_size": 2.0}, "batch_size = 2.0: must be an int"),
        (Numbers(3), {"batch_size": True}, "batch_size = True: must be an int"),
        (Numbers(3), {"in_order": False, "num_workers": 1}, "in_order=False cannot be given: .* leave"),
    ],
)
def test_what_cannot_be_split_is_refused_with_a_remedy(
    dataset: Dataset[int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DataLoader(dataset, **options)
