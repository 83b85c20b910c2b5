"""torch's DataLoader, where each worker of the job gets its own part of every epoch."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
import torch.utils.data

from syncline.client.job import Job, current_job
from syncline.core.order import Order
from syncline.core.splits import Share
from syncline.errors import ConfigError

_T_co = TypeVar("_T_co", covariant=True)
# How many samples the order is evaluated for at once: enough that numpy's cost per call vanishes, little
# enough that the first batch does not wait (a block takes 1 ms).
_BLOCK_SAMPLES = 4096


class TakesSamples(Protocol):
    """What a loader asks of a job."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def step(self) -> int: ...
    def begin_epoch(self, epoch: int, num_batches: int) -> None: ...
    def took(self, num_samples: int) -> None: ...
    def rest(self) -> None: ...


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """`torch.utils.data.DataLoader`, split over the workers of a job.

    Takes torch's own arguments in torch's own order. `batch_size` is each worker's; the n-th `iter()` of a
    loader is epoch n, and with `shuffle` its order depends on `seed` and epoch alone, so all workers agree on
    it without a word. Every sample is handed to exactly one worker in each epoch, without padding: the last
    batch may be smaller, and a worker may have one batch less than another (`drop_last=True` evens that out).
    `len(loader)` is the number of this worker's batches.

    A worker that has finished an epoch in which it stepped rests, so that nobody waits for it; one that left
    the loop early does not. A loop that begins with gradients off (`torch.no_grad()`) is an evaluation: its
    samples count for no step, and the job hears nothing of it.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: torch.utils.data.Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: torch.utils.data.Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        job: TakesSamples | None = None,
        seed: int = 0,
    ) -> None:
        _check(dataset, batch_size, sampler, batch_sampler, num_workers, in_order)
        self._job, self._seed, self._shuffle = job, seed, bool(shuffle)
        self._next_epoch = 0
        self._batches = _Batches()
        self._reader: weakref.ref[Generator[_T_co]] | None = None  # who reads from the persistent workers
        super().__init__(
            dataset,
            batch_sampler=self._batches,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        # With a batch sampler torch blanks these two, then guards them; scripts read them, so put them back.
        self.__dict__.update(batch_size=batch_size, drop_last=drop_last)

    def __len__(self) -> int:
        return self._share(self._current_job()).num_batches

    def __iter__(self) -> Iterator[_T_co]:  # type: ignore[override]  # torch promises its private class
        job = self._current_job()
        share = self._share(job)
        epoch = self._next_epoch
        self._next_epoch += 1
        self._batches.aim(share, Order(share.num_samples, self._seed, epoch, self._shuffle))
        # With persistent workers torch has one iterator and turns it to the new epoch, even while the old one
        # is still read from it: then the new epoch gets processes of its own.
        alone = not self._is_being_read()
        batches = super().__iter__() if alone else self._get_iterator()
        if torch.is_grad_enabled():
            self._mind_the_order(job, epoch)
            job.begin_epoch(epoch, share.num_batches)
            handed_out = _counted(batches, share, job, job.step)
        else:
            handed_out = (batch for batch in batches)
        if self.persistent_workers and alone:
            self._reader = weakref.ref(handed_out)
        return handed_out

    def _mind_the_order(self, job: TakesSamples, epoch: int) -> None:
        """A loader made anew for every epoch begins with the order of epoch 0 every time: told once."""
        if epoch or not self._shuffle or not isinstance(job, Job):
            return
        kind = (id(self.dataset), self.batch_size, self._seed)
        if kind in job.loaders_begun:
            job.notice(
                "a new DataLoader over the same data begins with the same order again: make it once, before the "
                "loop over the epochs, and every pass has an order of its own"
            )
        job.loaders_begun.add(kind)

    def _is_being_read(self) -> bool:
        reader = self._reader() if self._reader is not None else None
        return reader is not None and inspect.getgeneratorstate(reader) != inspect.GEN_CLOSED

    def _current_job(self) -> TakesSamples:
        return current_job() if self._job is None else self._job

    def _share(self, job: TakesSamples) -> Share:
        """By the rank and the number of workers that hold now: for an epoch, when it begins."""
        assert self.batch_size is not None
        return Share(len(cast(Sized, self.dataset)), self.batch_size, *_place(job), self.drop_last)


def _place(job: TakesSamples) -> tuple[int, int]:
    """Rank and number of workers of one and the same generation: members may come and go while they are read."""
    while True:
        rank, count = job.rank, job.world_size
        if rank == job.rank and count == job.world_size:
            return rank, count


def _counted(batches: Iterator[_T_co], share: Share, job: TakesSamples, first_step: int) -> Generator[_T_co]:
    """The batches as the script takes them: counted one by one, and a rest at the end of training."""
    taken = 0
    try:
        for number, batch in enumerate(batches):
            start, stop = share.batch(number)
            taken += stop - start
            job.took(stop - start)
            yield batch
    finally:
        if taken and job.step == first_step:
            job.took(-taken)  # without a step it was an evaluation: its samples are in no step's weight
    # A worker without a batch could not step: nobody must wait for it.
    if job.step != first_step or share.num_batches == 0:
        job.rest()


class _Batches(torch.utils.data.Sampler[list[int]]):
    """The batch sampler behind a loader: the indices of this worker's batches in the epoch it is aimed at."""

    def __init__(self) -> None:
        self.aim(Share(0, 1), Order(0))

    def aim(self, share: Share, order: Order) -> None:
        """What the next `iter()` gives; iterators that are already there keep what they were made for."""
        self._share, self._order = share, order

    def __len__(self) -> int:
        return self._share.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator itself: that would look at the aim only at its first batch, maybe an epoch late.
        return _index_lists(self._share, self._order)


def _index_lists(share: Share, order: Order) -> Iterator[list[int]]:
    num_at_once = max(1, _BLOCK_SAMPLES // share.batch_size)
    for first in range(0, share.num_batches, num_at_once):
        numbers = range(first, min(first + num_at_once, share.num_batches))
        spans = [np.arange(*share.batch(number), dtype=np.int64) for number in numbers]
        samples = order.at(np.concatenate(spans)).tolist()
        taken = 0
        for span in spans:
            yield samples[taken : taken + span.size]
            taken += span.size


def _check(
    dataset: object,
    batch_size: object,
    sampler: object,
    batch_sampler: object,
    num_workers: int,
    in_order: bool,
) -> None:
    """Refuses what cannot be split over workers, and says what to do instead."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            "DataLoader: an IterableDataset has no positions that could be split over workers; give a "
            "dataset with __len__ and __getitem__, or use torch's own DataLoader and split the stream by "
            "job.rank and job.world_size"
        )
    if not isinstance(dataset, Sized):
        raise ConfigError(
            f"DataLoader: {type(dataset).__name__} cannot be split over workers without a __len__; add one"
        )
    for name, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if value is not None:
            raise ConfigError(
                f"DataLoader: {name} cannot be given: the job decides who takes which samples; use shuffle "
                f"and seed for the order and torch.utils.data.Subset to choose samples, or torch's own "
                f"DataLoader with your {name} split by job.rank and job.world_size"
            )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(
            f"DataLoader: batch_size = {batch_size!r}: must be an int of at least 1, the samples of one "
            "worker's step; for single samples use batch_size=1 and a collate_fn that takes the sample out"
        )
    if not in_order and num_workers > 0:
        raise ConfigError(
            "DataLoader: in_order=False cannot be given: a step's weight is the number of samples in its "
            "batch, and batches out of order cannot be told apart; leave in_order as it is"
        )
