"""torch's DataLoader, where each worker of the job gets its own part of every epoch."""

from __future__ import annotations

import collections
import contextlib
import inspect
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
import torch.utils.data

from syncline.client.job import Job, current_job
from syncline.client.leases import Piece, Reading
from syncline.client.samples import Samples
from syncline.core.leasing import Loader
from syncline.core.order import Order
from syncline.core.policy import policy_of
from syncline.core.splits import Share
from syncline.errors import ConfigError, SynclineError

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
    @property
    def samples(self) -> Samples: ...
    def rest(self) -> None: ...


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """`torch.utils.data.DataLoader`, split over the workers of a job.

    Takes torch's own arguments in torch's own order. Every sample counts once in every epoch, whoever dies, joins or
    is slow: workers lease what they read, and what they have not committed is read by others. Nothing is padded:
    the last batches may be smaller (`drop_last=True` leaves them out). With `shuffle` the order depends on `seed`
    and epoch alone, and is the same for any number of workers.

    `batch_size` is each worker's; with `batch="auto"`, in `sync`, each worker's part of the global batch
    (batch_size times the workers) follows its measured speed. The n-th `iter()` is epoch n of the job: one that the
    job has finished yields nothing, one that is under way what is left. A loader is known by the order in which it
    was made, or by `name`. `len(loader)` is about the number of this worker's batches, `total_steps` the job's steps
    in an epoch.

    A worker that has finished an epoch rests, so that nobody waits for it; one that left the loop early does not. A
    loop that begins with gradients off (`torch.no_grad()`) is an evaluation: each worker reads its own part of the
    data, which counts for no step, and the job hears nothing of it.
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
        batch: str = "",
        name: str = "",
    ) -> None:
        _check(dataset, batch_size, sampler, batch_sampler, num_workers, in_order)
        if batch not in ("", "auto"):
            raise ConfigError(f'DataLoader: batch = {batch!r}: there is "auto"; the size is batch_size')
        self._job, self._seed, self._shuffle = job, seed, bool(shuffle)
        self._is_auto = batch == "auto"
        self._name = self._current_job().samples.name_loader(name)
        self._next_epoch = self._num_evaluations = 0
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

    @property
    def total_steps(self) -> int:
        """Steps of the job in one epoch: rounds in `sync`, else the steps of all workers together."""
        job, size = self._current_job(), len(cast(Sized, self.dataset))
        assert self.batch_size is not None
        in_rounds = isinstance(job, Job) and policy_of(job.config).in_rounds
        wide = self.batch_size * (job.world_size if in_rounds else 1)
        return size // wide if self.drop_last else -(-size // wide)

    def __iter__(self) -> Iterator[_T_co]:  # type: ignore[override]  # torch promises its private class
        job = self._current_job()
        share = self._share(job)
        # With persistent workers torch has one iterator and turns it to the new epoch, even while the old one
        # is still read from it: then the new epoch gets processes of its own.
        alone = not self._is_being_read()
        if not torch.is_grad_enabled():
            order = Order(share.num_samples, self._seed, self._num_evaluations, self._shuffle)
            self._num_evaluations += 1
            self._batches.aim(_shared(share, order))
            batches = self._new_iterator(alone)
            return self._read_by(alone, (batch for batch in batches))
        epoch = self._next_epoch
        self._next_epoch += 1
        job.samples.begin_epoch(epoch, share.num_batches)
        data = Loader(share.num_samples, share.batch_size, self.drop_last, self._is_auto)
        reading = job.samples.open(self._name, epoch, data)
        order = Order(share.num_samples, self._seed, epoch, self._shuffle)
        return self._read_by(alone, self._train(job, reading, order, alone))

    def _new_iterator(self, alone: bool) -> Iterator[_T_co]:
        return super().__iter__() if alone else self._get_iterator()

    def _read_by(self, alone: bool, batches: Generator[_T_co]) -> Generator[_T_co]:
        if self.persistent_workers and alone:
            self._reader = weakref.ref(batches)
        return batches

    def _train(self, job: TakesSamples, reading: Reading, order: Order, alone: bool) -> Generator[_T_co]:
        """The batches of this worker's leases, until the epoch is finished for all."""
        first_step, taken = job.step, 0
        cut: collections.deque[Piece] = collections.deque()  # torch has their samples, the script not yet
        try:
            while not reading.is_finished:
                self._batches.aim(_Leased(reading, order, cut))
                for batch in self._new_iterator(alone):
                    piece = cut.popleft()
                    taken += len(piece)
                    job.samples.read(piece)
                    yield batch
        finally:
            without_a_step = job.step == first_step
            if taken and without_a_step:
                job.samples.took(-taken)  # it was an evaluation: its samples are in no step's weight
            with contextlib.suppress(SynclineError):  # the job may be over by now
                job.samples.close(reading, list(cut), passes_over=without_a_step)
        # A worker without a batch could not step: nobody must wait for it.
        if not (taken and without_a_step):
            job.rest()

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


def _shared(share: Share, order: Order) -> Iterator[list[int]]:
    """A worker's own part of an evaluation, by its rank: the samples of each batch."""
    num_at_once = max(1, _BLOCK_SAMPLES // share.batch_size)
    for first in range(0, share.num_batches, num_at_once):
        numbers = range(first, min(first + num_at_once, share.num_batches))
        spans = [np.arange(*share.batch(number), dtype=np.int64) for number in numbers]
        samples = order.at(np.concatenate(spans)).tolist()
        taken = 0
        for span in spans:
            yield samples[taken : taken + span.size]
            taken += span.size


class _Leased:
    """What a worker has leased: the samples of each batch. Not a generator: after an end there may be more later.

    `cut` has the pieces whose samples torch reads, and the script has not got yet.
    """

    def __init__(self, reading: Reading, order: Order, cut: collections.deque[Piece]) -> None:
        self._reading, self._order, self._cut = reading, order, cut
        self._lease = self._begin = 0
        self._samples: list[int] = []  # of that lease, from there on

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        # Others may wait for what is on its way to the script: then nobody may wait here.
        piece = self._reading.next(may_wait=not self._cut)
        if piece is None:
            raise StopIteration
        self._cut.append(piece)
        at = piece.begin - self._begin
        if piece.lease != self._lease or at + len(piece) > len(self._samples):
            self._lease, self._begin, at = piece.lease, piece.begin, 0
            upto = min(len(piece.span), max(piece.end, piece.begin + _BLOCK_SAMPLES))
            self._samples = self._order.at(piece.span.positions(piece.begin, upto)).tolist()
        return self._samples[at : at + len(piece)]


class _Batches(torch.utils.data.Sampler[list[int]]):
    """The batch sampler behind a loader: the samples of this worker's batches in the epoch it is aimed at."""

    def __init__(self) -> None:
        self.aim(iter(()))

    def aim(self, batches: Iterator[list[int]]) -> None:
        """What the next `iter()` gives; iterators that are already there keep what they were made for."""
        self._aim = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._aim


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
