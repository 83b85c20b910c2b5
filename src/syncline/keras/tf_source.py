"""A `tf.data.Dataset` as a source: samples by number, read forward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from syncline.data.source import Batch, check_samples, counted
from syncline.errors import ConfigError, DataError


def is_tf_dataset(value: object) -> bool:
    """Without an import of TensorFlow, which may not be there."""
    return any(kind.__name__ == "DatasetV2" and "tensorflow" in kind.__module__ for kind in type(value).__mro__)


class TfSource:
    """Samples of a tf.data.Dataset, which has no random access: a worker reads on to the samples that it has leased,
    and skips those of the others. All workers must see the same order.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._length = dataset, _length_of(dataset)
        _check_single_samples(dataset)
        _check_order(dataset)
        self._samples: Iterator[Any] = iter(())
        self._at = self._length  # the next sample of the iterator

    def describe(self) -> str:
        return f"a tf.data.Dataset, {counted(self._length, 'sample')}"

    def __len__(self) -> int:
        return self._length

    @property
    def chunk_sizes(self) -> Sequence[int]:
        return (self._length,)

    def read(self, samples: npt.NDArray[np.int64]) -> Batch:
        check_samples(samples, self._length)
        found = [self._sample(int(number)) for number in samples]
        return tuple(np.stack(column) for column in zip(*found, strict=True))

    def where(self, sample: int) -> str:
        return f"element {sample} of the tf.data.Dataset"

    def _sample(self, number: int) -> tuple[Any, ...]:
        if number < self._at:
            self._samples, self._at = self._dataset.as_numpy_iterator(), 0
        element = next(itertools.islice(self._samples, number - self._at, None), None)
        if element is None:
            raise DataError(
                f"the tf.data.Dataset ended before sample {number}; it says that it has {self._length:,} samples"
            )
        self._at = number + 1
        return element if isinstance(element, tuple) else (element,)


def _length_of(dataset: Any) -> int:
    length = int(dataset.cardinality())
    if length < 0:
        how = "never ends (repeat())" if length == -1 else "does not know its number of samples"
        raise ConfigError(
            f"dataset(): the tf.data.Dataset {how}, so it cannot be split over workers. Where you know the number: "
            "tf_dataset.apply(tf.data.experimental.assert_cardinality(n)); else tf_dataset.take(n)"
        )
    if not length:
        raise ConfigError("dataset(): the tf.data.Dataset is empty: there is nothing to train on")
    return length


def _check_single_samples(dataset: Any) -> None:
    spec = dataset.element_spec
    parts = spec if isinstance(spec, tuple) else (spec,)
    if any(not hasattr(part, "shape") for part in parts):
        raise ConfigError(f"dataset(): elements of the tf.data.Dataset must be tensors or tuples of them, not {spec}")
    is_batched = all(part.shape.rank and part.shape[0] is None for part in parts)
    if is_batched or any("Batch" in type(each).__name__ for each in _chain(dataset)):
        raise ConfigError(
            "dataset(): the tf.data.Dataset is batched; leave out its .batch(), and give dataset(…, batch_size)"
        )


def _check_order(dataset: Any) -> None:
    """A shuffle that each worker draws for itself would give samples twice, and others never."""
    for each in _chain(dataset):
        if "Shuffle" not in type(each).__name__:
            continue
        if getattr(each, "_reshuffle_each_iteration", False) is not False:
            problem = "shuffles in another order each time"
        elif not _has_seed(each):
            problem = "shuffles without a seed, in another order in each process"
        else:
            continue
        raise ConfigError(
            f"dataset(): the tf.data.Dataset {problem}, and workers would not share the samples of an epoch. Give "
            ".shuffle(n, seed=1, reshuffle_each_iteration=False)"
        )


def _has_seed(shuffle: Any) -> bool:
    """TensorFlow derives two numbers from the seeds of the call and of the process; both are 0 without a seed."""
    return any(int(getattr(shuffle, name, 0)) for name in ("_seed", "_seed2"))


def _chain(dataset: Any) -> Iterator[Any]:
    """The dataset and those that it is made from."""
    yield dataset
    for each in getattr(dataset, "_inputs", lambda: ())():
        yield from _chain(each)
