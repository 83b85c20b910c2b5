"""`dataset()`: data for `fit`, where each worker of the job gets its own part of every epoch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.utils.rng_utils import get_random_seed

from syncline.core.leasing.loader import Loader
from syncline.data.batching import batches, order_of
from syncline.data.source import Source
from syncline.errors import ConfigError
from syncline.keras import backends, passes
from syncline.keras.sources import source_of
from syncline.worker.current import current_job
from syncline.worker.data.loop import LeasedNumbers, Loop


def dataset(
    source: Any,
    batch_size: int = 32,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    drop_last: bool = False,
    training: bool = True,
    name: str = "",
) -> Dataset:
    """Data for `model.fit`, split over the workers of the job.

    `source`: arrays as `(x, y)` or `(x, y, sample_weight)`, a source of `syncline.data`, or a `tf.data.Dataset` of
    single samples. For a model with several inputs, `x` is a tuple or dict of arrays. Every sample counts once in
    every epoch, also if a worker dies, joins or is slow. `batch_size` is each worker's. With `shuffle` the order
    depends on seed and epoch alone. The seed is `seed`, else that of `keras.utils.set_random_seed`, else 0, as the
    chief has it. The n-th epoch of `fit` is epoch n of the job.

    `training=False`: for `validation_data`, `evaluate` and `predict`. Every worker reads all of it.
    """
    if not isinstance(training, bool) or not isinstance(shuffle, bool):
        raise ConfigError("dataset(): training and shuffle must be True or False")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"dataset(): batch_size = {batch_size!r}: must be an int of at least 1, of each worker")
    found, structure = source_of(source, shuffle=shuffle)
    return Dataset(found, batch_size, shuffle, seed, drop_last, training, name, structure)


class NumBatches(int):
    """An upper bound of this worker's batches in an epoch, as Keras' loops need it, with what is expected."""

    dataset: Dataset
    expected: int

    def __new__(cls, most: int, expected: int, dataset: Dataset) -> NumBatches:
        found = super().__new__(cls, most)
        found.expected, found.dataset = expected, dataset
        return found


class Dataset(DataAdapter):  # type: ignore[misc, unused-ignore]
    """What `dataset()` returns: Keras takes it as it is, in place of an adapter of its own."""

    def __init__(
        self, source: Source, batch_size: int, shuffle: bool, seed: int | None, drop_last: bool, training: bool,
        name: str, structure: Any = None,
    ) -> None:  # fmt: skip
        """`structure`: of a batch, if it is not a plain tuple of arrays."""
        self._structure = structure
        self._source, self._batch_size, self._shuffle, self._given_seed = source, batch_size, shuffle, seed
        self._drop_last, self._training = drop_last, training
        self._job = current_job()
        self.name = self._job.samples.name_loader(name) if training else name
        self._next_epoch = self.epoch = 0  #: `epoch`: the job's number of the epoch that is read
        self.num_fits = 0  #: with the callback
        self.is_stopped = False  #: another worker has ended `fit`: the epoch that Keras still begins is not read
        self._begun: Loop | None = None  # over the next epoch, opened before `fit` reads it
        self._quiet: Any = None
        # Keras asks for the number of batches, may read one to see its shapes, ends the epoch, and then begins.
        self._is_probed = False

    def __iter__(self) -> Iterator[Any]:
        """For a loop of your own: the batches of this worker's next epoch."""
        return self.iterator("", StopIteration())

    def iterator(self, reader: str, end: Exception) -> Iterator[Any]:
        """`end`: raised when the epoch has no more batches."""
        if not self._training:
            return self._read_all(end)
        if reader and self._is_probed:
            return iter([self.stand_in()])
        if reader and self.is_stopped:
            passes.begin_unread(self._job)
            return self._read_nothing(end)
        found = passes.begin(self._job, self, self._open(), reader, end)
        self.epoch = found.epoch
        return found

    # -- as Keras reads it --------------------------------------------------------------------------------

    def get_numpy_iterator(self) -> Iterator[Any]:
        return self.iterator("fit", StopIteration())

    def get_jax_iterator(self) -> Iterator[Any]:
        return self.iterator("fit", StopIteration())

    def get_torch_dataloader(self) -> Any:
        return _Each(self)

    def get_tf_dataset(self) -> Any:
        return _Each(self)

    @property
    def num_batches(self) -> Any:
        most = -(-len(self._source) // self._batch_size)
        if not self._training:
            return most if not self._drop_last else len(self._source) // self._batch_size
        self._is_probed = True
        return NumBatches(len(self._source) + 1, self._expected, self)

    @property
    def _expected(self) -> int:
        """About the number of this worker's batches in an epoch."""
        return max(1, -(-len(self._source) // (self._batch_size * self._job.world_size)))

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def has_partial_batch(self) -> bool:
        return not self._drop_last and len(self._source) % self._batch_size > 0

    @property
    def partial_batch_size(self) -> int | None:
        return len(self._source) % self._batch_size or None

    def on_epoch_end(self) -> None:
        """Keras warns at the end of each epoch that the data has ended, which is as it should be."""
        self._is_probed = False
        quiet, self._quiet = self._quiet, None
        if quiet is not None:
            quiet.__exit__(None, None, None)

    def be_quiet(self) -> None:
        """Until `on_epoch_end`."""
        if self._quiet is None:
            self._quiet = warnings.catch_warnings()
            self._quiet.__enter__()
            warnings.filterwarnings("ignore", message="Your input ran out of data")

    # -- epochs -------------------------------------------------------------------------------------------

    @property
    def upcoming(self) -> int:
        """The number of the epoch that is read next."""
        return self._next_epoch if self._begun is None else self._next_epoch - 1

    @property
    def seed(self) -> int:
        if self._given_seed is not None:
            return self._given_seed
        return int(get_random_seed() or 0)

    def _open(self) -> Loop:
        if self._begun is not None:
            loop, self._begun = self._begun, None
            return loop
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        job, size = self._job, len(self._source)
        job.samples.batch_size = self._batch_size
        loader = Loader(size, self._batch_size, self._drop_last)
        loop = Loop(job, self.name, epoch, loader, self.seed if self._shuffle else None)
        job.samples.begin_epoch(epoch, self._expected)
        return loop

    def skip_finished(self, num_epochs: int) -> int:
        """Opens the first epoch that has a batch for this worker. Returns how many the job has finished before."""
        self.num_fits += 1
        job, first = self._job, self.upcoming
        job.samples.begin_run(self.name, first, num_epochs)
        for number in range(num_epochs):
            loop = self._open()
            if loop.has_batch():
                self._begun = loop
                if number:
                    job.script_went_on()
                return number
            with loop:
                job.samples.num_skipped += 1
                job.samples.note_place(self.name, first + number, 1.0)
            if job.should_stop:
                return num_epochs
        return num_epochs

    def numbers(self, loop: Loop) -> LeasedNumbers:
        """The samples of this worker's batches."""
        reading = loop.reading
        seed = self.seed if reading.seed is None else reading.seed
        return LeasedNumbers(loop, order_of(self._source, shuffle=self._shuffle, seed=seed, epoch=reading.epoch))

    def read(self, samples: Any) -> Any:
        """A batch as the trainer takes it."""
        return self._prepared(self._source.read(samples))

    def stand_in(self) -> Any:
        """A batch that is in no step, or in one that does not count."""
        return self.read(np.arange(min(self._batch_size, len(self._source)), dtype=np.int64))

    def _prepared(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            raise ConfigError(
                f"dataset(): the source has columns ({', '.join(batch)}), which do not say what the labels are; map "
                "it to a tuple (x, y) with syncline.data.mapped"
            )
        kind = keras.config.floatx()
        arrays = tuple(array.astype(kind, copy=False) if array.dtype.kind == "f" else array for array in batch)
        whole = arrays if self._structure is None else keras.tree.pack_sequence_as(self._structure, list(arrays))
        return backends.current().batch(whole)

    def _read_nothing(self, end: Exception) -> Iterator[Any]:
        self.be_quiet()
        if backends.current().has_extra_steps():  # Keras on JAX fails without a batch
            yield self.stand_in()
        if not isinstance(end, StopIteration):
            raise end

    def _read_all(self, end: Exception) -> Iterator[Any]:
        for batch in batches(self._source, self._batch_size, epoch=0, drop_last=self._drop_last, alone=True):
            yield self._prepared(batch)
        if not isinstance(end, StopIteration):
            raise end


class _Each:
    """A new iterator for every epoch."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return self._dataset.iterator("fit", backends.current().end_of_data())
