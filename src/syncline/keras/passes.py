"""One epoch of a dataset in this worker, and what a step does with it.

Keras may read batches before the steps that use them. A commit acknowledges all samples that were handed out, so a
batch is handed out when its step is committed, not when it is read.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Hashable, Iterator
from typing import Any, Protocol

from syncline.errors import ConfigError
from syncline.keras import backends
from syncline.worker.data.loop import LeasedNumbers, Loop
from syncline.worker.job import Job

#: Batches that Keras may have read ahead of its steps.
_MOST_AHEAD = 3
_passes: weakref.WeakKeyDictionary[Job, Pass | Unread] = weakref.WeakKeyDictionary()  # the open pass of each job


class Reads(Protocol):
    """What a pass needs of its dataset."""

    def numbers(self, loop: Loop) -> LeasedNumbers: ...
    def read(self, samples: Any) -> Any: ...
    def stand_in(self) -> Any: ...
    def be_quiet(self) -> None: ...


class Pass:
    """One epoch of a dataset in this worker. Keras may read ahead of its steps."""

    def __init__(self, dataset: Reads, loop: Loop, reader: str, end: Exception) -> None:
        self.dataset, self._loop = dataset, loop
        self.reader, self._end_of_data = reader, end  #: `reader`: "fit", or empty for a loop of the script
        self.epoch, self._numbers = loop.reading.epoch, dataset.numbers(loop)
        self._ahead: collections.deque[bool] = collections.deque()  # read, and in no step yet: whether it is leased
        self._last: Any = None  # the last batch
        self._num_used, self._counts = 0, True  # batches in steps so far; whether the steps of the last one count
        self._used: dict[Hashable, int] = {}  # the same by optimizer
        self.num_samples = 0  #: of the batch that the last step used
        self._is_entered = self._is_over = False
        self.failure: BaseException | None = None  #: of a step, to be raised in the script's thread

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        backends.current().settle()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        samples = self._next_samples()
        if samples is not None:
            self._last = self.dataset.read(samples)
        elif self._needs_a_batch():
            self._last = self.dataset.stand_in()
        elif not any(self._ahead):
            self._end(None)
            if self.reader:
                self.dataset.be_quiet()
            raise self._end_of_data
        # Else there may be more when the steps of the batches that were read ahead are made, and not before: the last
        # batch comes again, in a step that does not count.
        self._ahead.append(samples is not None)
        return self._last

    def _needs_a_batch(self) -> bool:
        """Keras on JAX fails in an epoch of `fit` without a batch: one comes, in a step that does not count."""
        return bool(self.reader) and self._last is None and backends.current().has_extra_steps()

    def _next_samples(self) -> Any:
        """Of the next batch; None: there is none."""
        if self._is_over:
            return None
        if len(self._ahead) >= _MOST_AHEAD:
            raise ConfigError(
                "this dataset was read without a step of a syncline.keras.DistributedOptimizer. For validation_data, "
                "evaluate and predict give dataset(…, training=False); to train, compile the model with "
                "DistributedOptimizer"
            )
        if not self._is_entered:
            self._is_entered = True
            self._loop.__enter__()
        elif not any(self._ahead):
            self._loop.comes_back()
        return None if self._loop.is_over else self._numbers.next()

    def hand_out(self, optimizer: Hashable) -> bool:
        """A step uses the oldest batch, or the one that another optimizer has used before it; where no batch is left,
        it is one more step on the last. Returns whether it counts.
        """
        has_used = not backends.current().has_extra_steps() or self._used.get(optimizer, 0) == self._num_used
        if self._ahead and has_used:  # where Keras reads ahead, what lies there may be of the next step
            self._counts, self._num_used = self._ahead.popleft(), self._num_used + 1
            if self._counts:
                self._loop.hand_out()
        self._used[optimizer] = self._num_used
        return self._counts

    @property
    def has_several(self) -> bool:
        """Whether more than one optimizer has made a step."""
        return len(self._used) > 1

    @property
    def is_open(self) -> bool:
        """Also behind its end, while a batch that Keras has read ahead is in no step yet."""
        return not self._is_over or bool(self._ahead)

    @property
    def comes_again(self) -> bool:
        """Whether the next step does not count."""
        return bool(self._ahead) and not self._ahead[0]

    def leave(self) -> None:
        """The script goes on without the rest of the epoch."""
        if not self._is_over:
            self._end(GeneratorExit)

    def _end(self, kind: type[BaseException] | None) -> None:
        was_over, self._is_over = self._is_over, True
        if self._is_entered and not was_over:
            self._loop.__exit__(kind, None, None)


class Unread:
    """An epoch that is not read. If Keras needs a batch nevertheless, its step does not count."""

    reader = "fit"
    is_open = comes_again = True
    has_several = False
    num_samples = 0
    failure: BaseException | None = None

    def hand_out(self, optimizer: Hashable) -> bool:
        return False

    def leave(self) -> None:
        """There is nothing to give back."""


def begin_unread(job: Job) -> None:
    """`fit` goes through one more epoch, and ends."""
    leave(job)
    _passes[job] = Unread()


def begin(job: Job, dataset: Reads, loop: Loop, reader: str, end: Exception) -> Pass:
    """The next epoch; what is left of the one before is given back."""
    leave(job)
    found = _passes[job] = Pass(dataset, loop, reader, end)
    return found


def hand_out(job: Job, optimizer: Hashable) -> bool:
    """A step begins: its batch counts with it. Returns False for a batch that has come again, without a step.

    `optimizer`: identifies the one that steps.
    """
    found = _passes.get(job)
    if found is not None and found.is_open:
        taken = job.samples_taken
        counts = found.hand_out(optimizer)
        found.num_samples = job.samples_taken - taken or found.num_samples
        return counts
    if found is not None:
        found.num_samples = 0  # it is over
    if job.world_size > 1 and not job.exchange.lease_acks.has_position:
        job.notice(
            "the data comes from no syncline dataset, so the job does not split it. If every worker reads all of "
            "it, give syncline.keras.dataset((x, y), batch_size)"
        )
    return True


def is_read(job: Job) -> str:
    """What reads an epoch of a dataset now: `fit`, or a `loop` of the script; empty: nothing."""
    found = _passes.get(job)
    return (found.reader or "loop") if found is not None and found.is_open else ""


def weight(job: Job) -> float | None:
    """Of a step that has begun: the samples of its batch, also if it was used before; None: there is no dataset."""
    found = _passes.get(job)
    return float(found.num_samples) if found is not None and found.num_samples else None


def has_several(job: Job) -> bool:
    """Whether more than one optimizer steps in the epoch that is read now."""
    found = _passes.get(job)
    return found is not None and found.has_several


def comes_again(job: Job) -> bool:
    """Whether the next step uses a batch that has come again."""
    found = _passes.get(job)
    return found is not None and found.comes_again


def has_failed(job: Job) -> bool:
    """Whether the script's thread has yet to raise an error."""
    found = _passes.get(job)
    return found is not None and found.failure is not None


def failed(job: Job, error: BaseException) -> None:
    """A step failed in another thread: the script's thread raises it when it asks for the next batch."""
    found = _passes.get(job)
    if found is not None and found.is_open:
        found.failure = error


def leave(job: Job) -> None:
    """`fit` has ended."""
    found = _passes.pop(job, None)
    if found is not None:
        found.leave()
