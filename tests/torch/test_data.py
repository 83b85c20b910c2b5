"""The DataLoader of a job: epochs, what the job is told, and torch's own options."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from tests.leased import FakeJob, LeaseQueue, alone, order
from torch.utils.data import Dataset, TensorDataset

import syncline.torch.data
import syncline.worker.data.loop
from syncline.core.wire.leases import LeaveEpoch
from syncline.errors import ConfigError
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.torch.data import DataLoader


@pytest.fixture(autouse=True)
def seed_of_the_script() -> None:
    """An order without a seed of its own follows torch's, which other tests may have set."""
    torch.manual_seed(0)


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


def lists(batches: Iterable[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def train(loader: DataLoader[Any], job: FakeJob) -> list[list[int]]:
    found = []
    for batch in loader:
        found.append(batch.tolist())
        job.step()
    return found


def test_each_iter_is_the_next_epoch_in_another_order() -> None:
    loader = DataLoader(Numbers(50), 50, True, job=alone())
    assert lists(loader) == [order(50, 0, 0)]
    assert lists(loader) == [order(50, 0, 1)]


@pytest.mark.parametrize("block_samples", [3, 7, 15])
def test_the_order_is_the_same_whatever_the_block_in_which_it_is_evaluated(
    block_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syncline.worker.data.loop, "BLOCK_SAMPLES", block_samples)
    loader = DataLoader(Numbers(100), 7, True, job=alone())
    assert flat(lists(loader)) == order(100, 0, 0)
    with torch.no_grad():
        assert flat(lists(loader)) == order(100, 0, 0)


def test_seeds_give_different_orders() -> None:
    one, two = (lists(DataLoader(Numbers(50), 50, True, job=alone(), seed=seed)) for seed in (1, 2))
    assert one != two


def test_without_shuffle_every_epoch_is_in_the_order_of_the_data_set() -> None:
    loader = DataLoader(Numbers(5), 2, job=alone())
    assert lists(loader) == lists(loader) == [[0, 1], [2, 3], [4]]


def test_an_epoch_that_the_job_has_finished_yields_nothing_and_one_under_way_what_is_left() -> None:
    """A script that starts again after a death, with its plain loop over epochs."""
    lease_queue = LeaseQueue(2, in_rounds=False)
    first, again = lease_queue
    loader = DataLoader(Numbers(20), 4, job=first)
    train(loader, first)
    for number, _ in enumerate(loader):
        first.step()
        if number == 1:
            break
    loader = DataLoader(Numbers(20), 4, job=again)
    assert train(loader, again) == []
    assert train(loader, again) == [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]
    assert len(train(loader, again)) == 5


@pytest.mark.parametrize("num_samples", [1, 10, 13])
def test_the_last_batch_is_small_or_left_out(num_samples: int) -> None:
    whole, rest = divmod(num_samples, 4)
    lease_queue = LeaseQueue()
    batches = train(DataLoader(Numbers(num_samples), 4, job=lease_queue[0]), lease_queue[0])
    assert [len(batch) for batch in batches] == [4] * whole + [rest] * bool(rest)
    lease_queue = LeaseQueue()
    loader = DataLoader(Numbers(num_samples), 4, drop_last=True, job=lease_queue[0])
    assert len(train(loader, lease_queue[0])) == len(loader) == whole and lease_queue.left == 0


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_two_live_iterators_are_two_epochs(options: dict[str, Any]) -> None:
    """Both are made before either is read, then read in turns: each keeps its own epoch.

    torch's persistent workers have one iterator per loader, which a second `iter()` would turn around.
    """
    loader: DataLoader[Any] = DataLoader(Numbers(12), 3, True, job=alone(), **options)
    one, two = iter(loader), iter(loader)
    read: tuple[list[int], list[int]] = ([], [])
    for first, second in zip(one, two, strict=True):
        read[0].extend(first.tolist())
        read[1].extend(second.tolist())
    assert read[0] == order(12, 0, 0)
    assert read[1] == order(12, 0, 1)
    assert flat(lists(loader)) == order(12, 0, 2)


def test_an_iterator_outlives_two_later_ones() -> None:
    """The second is read to its end; the third finds only the first, which must keep its processes."""
    loader = DataLoader(Numbers(12), 3, True, num_workers=1, persistent_workers=True, job=alone())
    one, two = iter(loader), iter(loader)
    assert flat(lists(two)) == order(12, 0, 1)
    assert flat(lists(loader)) == order(12, 0, 2)
    assert flat(lists(one)) == order(12, 0, 0)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_data_processes_advance_by_one_epoch_each_time(persistent_workers: bool) -> None:
    """torch calls the batch sampler's `iter` twice for a first epoch, and reads ahead: no epoch is lost."""
    job = alone()
    loader = DataLoader(
        Numbers(30), 4, True, num_workers=2, prefetch_factor=3, persistent_workers=persistent_workers, job=job
    )
    for epoch in range(2):
        assert flat(train(loader, job)) == order(30, 0, epoch)
    for _ in loader:
        break
    assert flat(train(loader, job)) == order(30, 0, 3)
    assert job.samples.progress[0] == 3


def test_persistent_workers_are_started_once() -> None:
    """Whole epochs, one left early, one read to its end but still held: all by the same process."""

    def process(_: list[int]) -> int:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return os.getpid()

    loader = DataLoader(Numbers(4), 2, num_workers=1, persistent_workers=True, collate_fn=process, job=alone())
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
    job = alone()
    batches = iter(DataLoader(Numbers(10), 4, num_workers=1, prefetch_factor=4, job=job))
    for taken in (4, 8, 10):
        next(batches)
        assert (job.samples.taken, job.samples.lease_acks.samples) == (taken, taken)


def test_the_epoch_begins_at_iter_and_not_at_its_first_batch() -> None:
    job = alone()
    iter(DataLoader(Numbers(10), 4, job=job))
    assert job.samples.progress == (0, 0, 3)
    assert job.lease_queue.leasing.epoch("loader-0", 0) is not None


def test_a_worker_rests_after_an_epoch_in_which_it_stepped() -> None:
    job = alone()
    train(DataLoader(Numbers(10), 4, job=job), job)
    assert job.num_rests == 1 and job.lease_queue.left == 0 and job.lease_queue.passed_over == 0


def test_a_worker_without_any_batch_rests_at_once() -> None:
    job = alone()
    assert train(DataLoader(Numbers(3), 4, drop_last=True, job=job), job) == []
    assert job.num_rests == 1


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode], ids=lambda f: f.__name__)
def test_an_evaluation_loop_never_rests(without_gradients: Any) -> None:
    job = alone()
    with without_gradients():
        assert len(lists(DataLoader(Numbers(10), 4, job=job))) == 3
    assert not job.num_rests and not job.samples.taken


def test_a_loop_without_steps_passes_over_what_it_has_read() -> None:
    """Its samples count as read, in no step: not in the one that another loop makes later."""
    lease_queue = LeaseQueue()
    lists(DataLoader(Numbers(10), 4, job=lease_queue[0]))
    assert lease_queue.passed_over == 10 and lease_queue.left == 0
    assert lease_queue[0].samples.lease_acks.take() == [] and not lease_queue[0].samples.taken
    assert lease_queue[0].num_rests == 1, "as all workers that were in this loop"


@pytest.mark.parametrize("num_samples", [1, 10])
def test_the_job_hears_nothing_of_an_evaluation(num_samples: int) -> None:
    """In the middle of an epoch its samples would weigh on the next step, and spoil the progress shown."""
    lease_queue = LeaseQueue(2)
    job = lease_queue[1]
    training = iter(DataLoader(Numbers(20), 4, job=job))
    next(training)
    heard, taken, progress = list(lease_queue.heard), job.samples.taken, job.samples.progress
    held = job.samples.lease_acks.held({1, 2})
    read = []
    with torch.no_grad():
        for one in lease_queue:
            read += flat(lists(DataLoader(Numbers(num_samples), 4, job=one)))
    assert read == [*range(num_samples), *range(num_samples)]
    assert (lease_queue.heard, job.samples.taken, job.samples.progress) == (heard, taken, progress)
    assert job.samples.lease_acks.held({1, 2}) == held


def test_gradients_off_when_the_loop_began_is_what_counts() -> None:
    """The body of the loop may switch them, and step."""
    job = alone()
    with torch.no_grad():
        batches = iter(DataLoader(Numbers(10), 4, job=job))
    for _ in batches:
        job.step()
    assert not job.lease_queue.heard and not job.num_rests


def test_an_evaluation_is_no_epoch_of_the_job() -> None:
    """It may come at another place in a script that starts again: epoch n stays epoch n."""
    loader = DataLoader(Numbers(50), 50, True, job=alone())
    with torch.no_grad():
        lists(loader)
    assert lists(loader) == [order(50, 0, 0)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_the_loop_early_gives_back_what_the_script_has_not_got(num_workers: int) -> None:
    lease_queue = LeaseQueue(2, in_rounds=False)
    for _ in DataLoader(Numbers(40), 4, num_workers=num_workers, job=lease_queue[0]):
        lease_queue[0].step()
        break
    assert lease_queue[0].num_rests == 1, "behind a loop all are level, also behind one that was left"
    assert flat(train(DataLoader(Numbers(40), 4, job=lease_queue[1]), lease_queue[1])) == list(range(4, 40))


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 9:
            raise KeyError("sample 9 is broken")
        return index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_cannot_be_read_ends_the_loop_and_stays_with_the_worker_that_failed(num_workers: int) -> None:
    """If it dies of it, the job knows at which batch; the rest is others' at once."""
    lease_queue = LeaseQueue(2, in_rounds=False)
    job = lease_queue[0]
    with pytest.raises(KeyError, match="sample 9"):
        train(DataLoader(Broken(40), 4, num_workers=num_workers, job=job), job)
    assert not job.num_rests
    epoch = lease_queue.leasing.epoch("loader-0", 0)
    assert epoch is not None
    assert [span.positions().tolist() for lease in epoch.of(job.owner) for span in lease.rest()] == [[8, 9, 10, 11]]
    lease_queue.leasing.out(job.owner, failed=True)
    assert [(one.span.start, one.span.stop, one.workers) for one in epoch.suspect_batches] == [(8, 12, ["worker-0"])]


def test_a_script_that_goes_on_after_a_sample_that_cannot_be_read_keeps_it_from_nobody() -> None:
    lease_queue = LeaseQueue(2, in_rounds=False)
    loader = DataLoader(Broken(20), 4, job=lease_queue[0])
    with pytest.raises(KeyError):
        train(loader, lease_queue[0])
    iter(loader)
    assert flat(train(DataLoader(Numbers(20), 4, job=lease_queue[1]), lease_queue[1])) == list(range(8, 20))


@pytest.mark.parametrize(("drop_last", "in_rounds", "expected"), [
    (False, True, 3), (True, True, 2), (False, False, 8), (True, False, 7),
])  # fmt: skip
def test_total_steps_are_the_jobs(drop_last: bool, in_rounds: bool, expected: int) -> None:
    lease_queue = LeaseQueue(3, in_rounds=in_rounds)
    assert DataLoader(Numbers(31), 4, drop_last=drop_last, job=lease_queue[0]).total_steps == expected


def test_nothing_is_said_of_an_epoch_that_was_read_to_its_end() -> None:
    job = alone()
    train(DataLoader(Numbers(8), 2, job=job), job)
    assert not [message for message in job.lease_queue.heard if isinstance(message, LeaveEpoch)]


def test_the_arguments_are_torchs_own_in_torchs_own_order() -> None:
    ours = list(inspect.signature(DataLoader.__init__).parameters.values())
    torchs = list(inspect.signature(torch.utils.data.DataLoader.__init__).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[: len(torchs)]] == [(p.name, p.kind, p.default) for p in torchs]
    assert [(p.name, p.kind) for p in ours[len(torchs) :]] == [
        ("job", inspect.Parameter.KEYWORD_ONLY),
        ("seed", inspect.Parameter.KEYWORD_ONLY),
        ("batch", inspect.Parameter.KEYWORD_ONLY),
        ("name", inspect.Parameter.KEYWORD_ONLY),
        ("split", inspect.Parameter.KEYWORD_ONLY),
        ("global_batch_size", inspect.Parameter.KEYWORD_ONLY),
    ]


def test_torchs_options_reach_torch() -> None:
    def collate(samples: list[int]) -> tuple[int, ...]:
        return tuple(samples)

    generator = torch.Generator()
    loader: DataLoader[Any] = DataLoader(
        Numbers(6), 4, collate_fn=collate, drop_last=True, timeout=300, num_workers=1, prefetch_factor=5,
        generator=generator, job=alone(),
    )  # fmt: skip
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert (loader.batch_size, loader.drop_last, loader.timeout, loader.prefetch_factor) == (4, True, 300, 5)
    assert loader.generator is generator
    assert list(loader) == [(0, 1, 2, 3)]
    with pytest.raises(ValueError, match="persistent_workers"):
        DataLoader(Numbers(6), persistent_workers=True)


def test_tensors_are_collated_as_by_torch() -> None:
    images, labels = torch.arange(24.0).reshape(6, 4), torch.arange(6)
    loader = DataLoader(TensorDataset(images, labels), 4, True, job=alone(), seed=3)
    x, y = next(iter(loader))
    chosen = order(6, 3, 0)[:4]
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
        (Stream(), {}, "IterableDataset .* give it `shards`.* or give a dataset with __len__ and __getitem__"),
        (Unsized(), {}, "Unsized cannot be split over workers without a __len__; add one"),
        (Numbers(3), {"batch_size": None}, "batch_size = None: .* use batch_size=1"),
        (Numbers(3), {"batch_size": 0}, "batch_size = 0: must be an int of at least 1"),
        (Numbers(3), {"batch_size": 2.0}, "batch_size = 2.0: must be an int"),
        (Numbers(3), {"batch_size": True}, "batch_size = True: must be an int"),
        (Numbers(3), {"batch": "automatic"}, 'must be "auto"; the size is batch_size'),
        (Numbers(3), {"in_order": False, "num_workers": 1}, "in_order=False cannot be given: .* leave"),
    ],
)
def test_what_cannot_be_split_is_refused_with_a_remedy(
    dataset: Dataset[int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DataLoader(dataset, **options)


def test_bytes_sent_early_before_a_rest_count_after_it() -> None:
    """Over sockets: three batches, a step every two. The third backward is sent before the rest, and counts after."""

    def work(job: Any) -> tuple[Any, int]:
        model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        number, loader = 0, DataLoader(torch.ones(3, 3), batch_size=1)
        for _ in range(2):
            for x in loader:
                model(x).sum().backward()
                number += 1
                if number % 2 == 0:
                    opt.step()
                    opt.zero_grad()
            assert job.exchange.early_bytes == 0 and (job.debug_state().num_early_slices or number == 6)
        return model.weight.tolist(), job.step

    with local_job(workers=1, transport="tcp") as local:
        assert local.run(work) == [([[-6.0, -6.0, -6.0]], 3)]
