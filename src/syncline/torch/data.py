"""torch's DataLoader, where each worker of the job gets its own part of every epoch."""

from __future__ import annotations

import collections
import inspect
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils.data

from syncline.core.leasing.loader import Loader
from syncline.core.leasing.order import ByRank
from syncline.core.leasing.shares import equal_parts
from syncline.data.batching import SHARDS_END
from syncline.errors import ConfigError, DataError
from syncline.torch.batches import Aim, Rows, data_of, tensors
from syncline.torch.naming import Beginning, Collating, Named
from syncline.worker.checkpoint import rng_state
from syncline.worker.current import current_job, has_current_job
from syncline.worker.data.loop import Loop, TakesSamples

_T_co = TypeVar("_T_co", covariant=True)
#: torch's own seed, of 64 random bits where the script has called no `manual_seed` before this import.
SEED_AT_IMPORT = torch.initial_seed()
#: Loaders without a name of their own that were made before init(), in this order: who is used first names them all.
made_before: list[weakref.ref[DataLoader[Any]]] = []


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """`torch.utils.data.DataLoader`, split over the workers of a job.

    Takes torch's own arguments in torch's own order. Every sample counts once in every epoch, also when workers die,
    join or are slow: workers lease what they read, and what they have not committed is read by others. Nothing is
    padded: the last batches may be smaller (`drop_last=True` leaves them out). With `shuffle` the order depends on
    seed and epoch alone, and is the same for any number of workers. The seed is `seed`, else that of `generator`,
    else that of `torch.manual_seed`, else 0: as the chief has it at its first training pass, for all workers and all
    their lives.

    `batch_size` is each worker's. `global_batch_size=N`, in its place, is that of all workers together: in `sync`
    every round has N samples, however many workers there are, and each reads its part; in `async` and `bounded` a
    worker's batch has N divided by the workers, rounded up. `loader.batch_size` is then this worker's part now. With
    `batch="auto"`, in `sync`, each worker's part of the global batch (N, or batch_size times the workers) follows its
    measured speed. The n-th `iter()` is epoch n of the job: one that the
    job has finished yields nothing, one that is under way what is left. A loader is known by the order in which it
    was made, or by `name`. `len(loader)` is about the number of this worker's batches, `total_steps` the job's steps
    in an epoch.

    A worker that has finished an epoch rests, so no worker waits for it. One that left the loop early does not rest.

    `split` says which part of the data a worker reads. `None`: `iter()` decides. With gradients enabled the pass is
    an epoch of the job, which its workers share; what is read in a loop without a step is passed over. With gradients
    disabled (`no_grad`, `inference_mode`) the pass is an evaluation: every worker reads the whole data set, without a
    lease, and the epoch does not advance; `len(loader)` is the whole's number of batches until the next training
    pass. `True`: an evaluation gives each worker its part by rank; a script adds up the counts itself. `False`: every
    worker reads the whole data set in every pass, also in training, and no pass is an epoch of the job.

    The data may be a map-style data set; a source of `syncline.data` (its arrays come as tensors, a `collate_fn` gets
    the arrays of the batch); or shards: a shard source, or an IterableDataset with a list `shards` that `__iter__`
    reads. A shard is read by one worker at a time, through a copy of the data set that has only this one.
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
        seed: int | None = None,
        batch: str = "",
        name: str = "",
        split: bool | None = None,
        global_batch_size: int | None = None,
    ) -> None:
        if global_batch_size is not None:
            batch_size = _checked_global(global_batch_size, batch_size)
        self._global, self._own_part = global_batch_size, 0  # this worker's part of it, in a loop
        _check(batch_size, sampler, batch_sampler, num_workers, in_order)
        if batch not in ("", "auto"):
            raise ConfigError(f'DataLoader: batch = {batch!r}: must be "auto"; the size is batch_size')
        if not (split is None or isinstance(split, bool)):
            raise ConfigError(f"DataLoader: split = {split!r}: give None, True or False")
        self._job, self._shuffle = job, bool(shuffle)
        self._given_seed, self._given_generator = seed, generator
        self._job_seed: int | None = None  # once a training pass has begun
        self._split, self._is_whole = split, False  # whether the last pass was over the whole data set
        self._is_auto = batch == "auto"
        self._given_data, self._data = dataset, data_of(dataset)
        if self._data.num_samples is None and num_workers > 0:
            raise ConfigError(
                "DataLoader: num_workers must be 0 for shards: data processes read ahead, and how far a shard was "
                "read could not be told; start more workers, or give a data set with __getitem__"
            )
        if self._data.num_samples is None and drop_last:
            raise ConfigError(f"DataLoader: drop_last cannot be given for shards: {SHARDS_END}")
        self._has_told_empty = False
        self._begun: Loop | None = None  # over the epoch that `epochs` has given, and the script has not read yet
        self._given_name = name
        self._named_in: weakref.ref[TakesSamples] | None = None
        self._next_epoch = self._num_unleased = 0
        self._aim = Aim()
        self._own_rng = torch.Generator()  # for torch's iterators, which draw a seed: nothing of the script's
        self._reader: weakref.ref[Generator[_T_co]] | None = None  # who reads from the persistent workers
        is_rows = isinstance(self._data.dataset, Rows)  # which come as arrays of a whole batch
        super().__init__(
            self._data.dataset,
            batch_sampler=self._aim,
            num_workers=num_workers,
            collate_fn=collate_fn or (tensors if is_rows else None),
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator if generator is not None else self._own_rng,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        if job is not None or has_current_job():
            self._name_in(self._current_job())
        elif not name:
            made_before.append(weakref.ref(self))
        # With a batch sampler torch blanks these two, then guards them; scripts read them, so put them back.
        self.__dict__.update(batch_size=batch_size, drop_last=drop_last)

    @property
    def batch_size(self) -> int | None:
        """Samples of this worker's batch; with `global_batch_size`, its part of the global batch now."""
        if self._global is None:
            known: int | None = self.__dict__["batch_size"]
            return known
        if self._own_part:
            return self._own_part
        job = self._current_job()
        rank, num_workers = _place(job)
        parts = equal_parts(self._global, num_workers)
        return max(1, parts[rank] if job.in_rounds else parts[0])

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        self.__dict__["batch_size"] = value

    def __len__(self) -> int:
        job, size = self._current_job(), self._num_samples
        is_whole = self._reads_whole(torch.is_grad_enabled()) or (self._split is None and self._is_whole)
        if is_whole or self._global is None or not job.in_rounds:
            return self._part(job, size, is_whole=is_whole).num_batches
        rank, num_workers = _place(job)
        begin = sum(equal_parts(self._global, num_workers)[:rank])
        num_whole, left = divmod(size, self._global)
        end = begin + equal_parts(self._global, num_workers)[rank]
        has_part = left * end // self._global > left * begin // self._global
        return num_whole + (has_part and not self.drop_last)

    @property
    def total_steps(self) -> int:
        """Steps of the job in one epoch: rounds in `sync`, else the steps of all workers together."""
        job, size = self._current_job(), self._num_samples
        if self._split is False:
            return self._part(job, size, is_whole=True).num_batches * (1 if job.in_rounds else job.world_size)
        if self._global is not None:
            size -= size % self._global if self.drop_last else 0
            return -(-size // (self._global if job.in_rounds else equal_parts(self._global, job.world_size)[0]))
        assert self.batch_size is not None
        wide = self.batch_size * (job.world_size if job.in_rounds else 1)
        return size // wide if self.drop_last else -(-size // wide)

    @property
    def _num_samples(self) -> int:
        if self._data.num_samples is None:
            raise TypeError(
                "DataLoader: the number of samples in shards is known only after they are read; use schedules by "
                "job.step or by time"
            )
        return self._data.num_samples

    def __iter__(self) -> Iterator[_T_co]:  # type: ignore[override]  # torch promises its private class
        job = self._current_job()
        # With persistent workers torch has one iterator and turns it to the new epoch, even while the old one
        # is still read from it: then the new epoch gets processes of its own.
        alone = not self._is_being_read()
        is_training = torch.is_grad_enabled()
        self._is_whole = self._reads_whole(is_training)
        if not is_training:
            return self._read_by(alone, (batch for batch in self._unleased(job, alone, collections.deque())))
        if self._data.num_samples == 0:
            raise DataError(
                f"DataLoader: the data set {type(self._given_data).__name__} is empty: there is nothing to train on; "
                "check the path or the filter that it comes from"
            )
        if self._is_whole:
            return self._read_by(alone, self._train_on_the_whole(job, alone))
        loop, self._begun = self._begun or self._open(job), None
        self._draw_from(job, loop.reading.epoch)
        return self._read_by(alone, self._train(loop, loop.reading.epoch, alone))

    def _open(self, job: TakesSamples) -> Loop:
        """This worker's loop over its next epoch."""
        name, epoch = self._name_in(job), self._next_epoch
        self._next_epoch += 1
        loop = Loop(job, name, epoch, self._described(job, epoch), self.seed if self._shuffle else None)
        self._job_seed = loop.reading.seed
        self._mind_the_order(job, epoch)
        job.samples.begin_epoch(epoch, self._part(job, self._data.num_samples or 0, is_whole=False).num_batches)
        return loop

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The numbers of the next `num_epochs` epochs, from 0, for a loop around the loop over the batches.

        Epochs that the job has finished, before this worker started again or before the job was taken up, are left
        out, and so are those that end without a batch for this worker: every epoch that it gives has one at least.
        When training stops by a rule, so does this. It tells the job how long the run is: see `job.progress`. Pass
        over the loader once in each epoch.
        """
        if isinstance(num_epochs, bool) or not isinstance(num_epochs, int) or num_epochs < 0:
            raise ConfigError(
                f"DataLoader: epochs({num_epochs!r}): must be an int of at least 0, how many epochs to train"
            )
        if self._reads_whole(torch.is_grad_enabled()) or not torch.is_grad_enabled():  # the job does not count them
            yield from range(num_epochs)
            return
        job = self._current_job()
        self._name_in(job)
        first = self._next_epoch
        job.samples.begin_run(self._name, first, num_epochs)
        has_skipped = False
        for number in range(num_epochs):
            self._next_epoch = first + number
            loop = self._open(job)
            if not loop.has_batch():
                has_skipped = True
                with loop:
                    job.samples.num_skipped += 1
                    job.samples.note_place(self._name, first + number, 1.0)
                if job.should_stop:
                    return
                continue
            self._begun, job.samples.is_in_epoch = loop, True
            if has_skipped:
                has_skipped = False
                job.script_went_on()
            try:
                yield number
            finally:
                job.samples.is_in_epoch = False
                unread, self._begun = self._begun, None
                if unread is not None:  # the script has not read it
                    unread.__exit__(GeneratorExit, None, None)
            job.samples.note_place(self._name, first + number, 1.0)
            if self._next_epoch > first + number + 1:
                raise ConfigError(
                    f"DataLoader: epochs({num_epochs}): epoch {number + 1} passed over the loader more than once: "
                    "each pass is an epoch of the job; pass over it once in each, or loop over range(n)"
                )

    def _reads_whole(self, is_training: bool) -> bool:
        """Whether a pass that begins now gives every worker the whole data set."""
        return not is_training if self._split is None else not self._split

    def _unleased(self, job: TakesSamples, alone: bool, sizes: collections.deque[int]) -> Iterator[_T_co]:
        """A pass that the job does not count: the whole data set, or this worker's part by rank.

        `sizes` gets the number of samples of each batch when its reading begins.
        """
        number, self._num_unleased = self._num_unleased, self._num_unleased + 1
        if self._is_whole and self._split is None and job.world_size > 1:
            job.notice(
                "evaluation: with gradients disabled every worker now reads the whole data set, so do not add up the "
                "workers' counts; DataLoader(split=True) gives each worker its part, job.validate shares the work"
            )
        part = self._part(job, self._data.num_samples or 0, is_whole=self._is_whole)
        self._draw_from(job, number)
        self._aim.at(_noting(self._data.by_rank(part, self.seed, number, self._shuffle), sizes))
        return self._new_iterator(alone)

    def _train_on_the_whole(self, job: TakesSamples, alone: bool) -> Generator[_T_co]:
        """The batches count in a step's weight, and training ends by the job's rules; there is no lease."""
        sizes: collections.deque[int] = collections.deque()
        number, batches = self._num_unleased, self._unleased(job, alone, sizes)
        job.samples.begin_epoch(number, self._part(job, self._data.num_samples or 0, is_whole=True).num_batches)
        return self._count(job, batches, sizes)

    @staticmethod
    def _count(job: TakesSamples, batches: Iterator[_T_co], sizes: collections.deque[int]) -> Generator[_T_co]:
        for batch in batches:
            if job.should_stop:
                return
            job.samples.took(sizes.popleft())
            yield batch

    @property
    def seed(self) -> int:
        """Of the order: the job's, as soon as it is known; before that, what this worker's script says."""
        if self._job_seed is not None:
            return self._job_seed
        if self._given_seed is not None:
            return self._given_seed
        if self._given_generator is not None:
            return self._given_generator.initial_seed()
        return _seed_of_the_script()

    def _described(self, job: TakesSamples, epoch: int) -> Loader:
        """As all workers of the job must have it."""
        size = self.batch_size if self._global is None else self._global
        assert size is not None
        if self._global is not None and job.in_rounds and epoch == 0 and job.world_size > size:
            raise ConfigError(
                f"DataLoader: global_batch_size={size} is less than the {job.world_size} workers of this job, and "
                f"each needs a sample of every round: give global_batch_size={job.world_size} or more, or start "
                "fewer workers (-w)"
            )
        job.samples.batch_size = size if self._global is None else -(-size // max(1, job.world_size))
        return self._data.loader(size, self.drop_last, self._is_auto, self._global is not None)

    def _draw_from(self, job: TakesSamples, number: int) -> None:
        """The seed of data processes depends on the loader's and the script's seed, the epoch and the worker."""
        parts = (self.seed, torch.initial_seed(), number, job.rank)
        seed = np.random.SeedSequence([part % (1 << 64) for part in parts]).generate_state(1, np.uint64)[0]
        self._own_rng.manual_seed(int(seed) >> 1)

    def _new_iterator(self, alone: bool) -> Iterator[_T_co]:
        return super().__iter__() if alone else self._get_iterator()

    def _get_iterator(self) -> Any:
        """torch's iterators keep what they find here when they are made: so they read what names its samples."""
        given = {key: self.__dict__[key] for key in ("dataset", "collate_fn", "worker_init_fn")}
        self.__dict__.update(
            dataset=Named(self.dataset),
            collate_fn=Collating(self.collate_fn),
            worker_init_fn=Beginning(self.worker_init_fn),
        )
        try:
            return super()._get_iterator()
        finally:
            self.__dict__.update(given)

    def _read_by(self, alone: bool, batches: Generator[_T_co]) -> Generator[_T_co]:
        if self.persistent_workers and alone:
            self._reader = weakref.ref(batches)
        return batches

    def _train(self, loop: Loop, epoch: int, alone: bool) -> Generator[_T_co]:
        """The batches of this worker's leases, until the epoch is finished for all."""
        with loop:
            leased = self._data.leased(loop, self.seed, epoch, self._shuffle)
            self._own_part = 0
            # The first of them is waited for here: data processes are not started for nothing.
            for first in leased:
                self._aim.at(_After(first, leased))
                for batch in self._new_iterator(alone):
                    if loop.is_over:
                        return
                    loop.hand_out()
                    self._own_part = loop.reading.step
                    yield batch
                    loop.comes_back()
        if loop.is_empty and not loop.is_over:
            self._tell_empty(epoch)

    def _tell_empty(self, epoch: int) -> None:
        self._has_told_empty, has_told = True, self._has_told_empty
        if not has_told:
            self._current_job().notice(
                f"epoch {epoch + 1} of {self._name!r} had no batch left for this worker, so the loop over it was "
                "empty: a mean over its batches would divide by zero. `for epoch in loader.epochs(n):` skips such "
                "epochs",
                is_own=True,
            )

    def _mind_the_order(self, job: TakesSamples, epoch: int) -> None:
        """A loader made again for every epoch begins with the order of epoch 0 every time: told once."""
        if epoch or not self._shuffle:
            return
        size = (self.__dict__["batch_size"], self._global)
        if job.samples.has_begun((id(self._given_data), size, self.seed)):
            job.notice(
                "a new DataLoader over the same data starts with the same order again: create it once, before the "
                "loop over the epochs, and each pass has a new order"
            )

    def _is_being_read(self) -> bool:
        reader = self._reader() if self._reader is not None else None
        return reader is not None and inspect.getgeneratorstate(reader) != inspect.GEN_CLOSED

    def _current_job(self) -> TakesSamples:
        return current_job() if self._job is None else self._job

    def _name_in(self, job: TakesSamples) -> str:
        """Its name in this job, and its first epoch there: a process may have one job after the other."""
        if self._job is None:
            while made_before:
                loader = made_before.pop(0)()
                if loader is None:
                    job.samples.name_loader("")  # it is gone, and was counted
                else:
                    loader._take_name_in(job)
        if self._named_in is None or self._named_in() is not job:
            self._take_name_in(job)
        return self._name

    def _take_name_in(self, job: TakesSamples) -> None:
        self._named_in, self._next_epoch, self._job_seed = weakref.ref(job), 0, None
        self._name = job.samples.name_loader(self._given_name)

    def _part(self, job: TakesSamples, num_samples: int, *, is_whole: bool) -> ByRank:
        """The whole data set, or this worker's part by the rank and the number of workers that hold now."""
        rank, num_workers = _place(job)
        size = self.batch_size if self._global is None else equal_parts(self._global, num_workers)[0]
        assert size is not None
        return ByRank(num_samples, size, *((0, 1) if is_whole else (rank, num_workers)), self.drop_last)


def _seed_of_the_script() -> int:
    """What the script gave to `seed_everything`, or to `torch.manual_seed`; 0 where it called neither.

    torch does not tell these apart. A seed that has changed since our import was given; so was a small one.
    """
    found = torch.initial_seed()
    if (given := rng_state.last_given(found)) is not None:
        return given
    return found if found != SEED_AT_IMPORT or found < 1 << 32 else 0


def _place(job: TakesSamples) -> tuple[int, int]:
    """Rank and number of workers of one and the same generation: members may come and go while they are read."""
    while True:
        rank, count = job.rank, job.world_size
        if rank == job.rank and count == job.world_size:
            return rank, count


def _noting(batches: Iterator[list[Any]], sizes: collections.deque[int]) -> Iterator[list[Any]]:
    for samples in batches:
        sizes.append(len(samples))
        yield samples


class _After:
    """One batch, and then the others. Not a generator: the others may end, and go on later."""

    def __init__(self, first: list[Any], others: Iterator[list[Any]]) -> None:
        self._first: list[Any] | None = first
        self._others = others

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        first, self._first = self._first, None
        return next(self._others) if first is None else first


def _checked_global(size: object, batch_size: object) -> int:
    """What torch gets as the batch size."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(
            f"DataLoader: global_batch_size = {size!r}: must be an int of at least 1, the samples of one step of all "
            "workers together"
        )
    if batch_size not in (None, 1):
        raise ConfigError(
            f"DataLoader: batch_size={batch_size!r} and global_batch_size={size} cannot both be given: batch_size is "
            "each worker's, global_batch_size that of all workers together; leave one of them out"
        )
    return size


def _check(
    batch_size: object,
    sampler: object,
    batch_sampler: object,
    num_workers: int,
    in_order: bool,
) -> None:
    """Refuses what cannot be split over workers, and says what to do instead."""
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
