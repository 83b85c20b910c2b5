"""A worker's loop over an epoch: what the script has received, and what happens to the rest at the end.

`LeasedNumbers` and `LeasedShards` yield the samples of each batch: by number in the epoch's order, or from shards
read in sequence.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from syncline.core.leasing.leases import SHARD_POSITIONS
from syncline.core.leasing.loader import Loader
from syncline.core.leasing.order import ChunkedOrder, Order
from syncline.errors import SynclineError
from syncline.worker.checkpoint.boundary import Position
from syncline.worker.data.leases import BatchRange, EpochLeases
from syncline.worker.data.samples import WorkerSamples


class TakesSamples(Protocol):
    """What a loader needs of a job."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def own_step(self) -> int: ...
    @property
    def in_rounds(self) -> bool: ...
    @property
    def samples(self) -> WorkerSamples: ...
    @property
    def should_stop(self) -> bool: ...
    def rest(self, *, leaves: bool = True) -> None: ...
    def script_went_on(self) -> None: ...
    def notice(self, text: str, *, is_own: bool = False) -> None: ...


class Loop:
    """Opened with the epoch; a context manager around the loop, which ends when `next` returns None.

    Leaving it early gives unread batches back; at its end the worker rests. A loop without a step was an evaluation:
    its samples are skipped and have no weight; if other workers had no such loop, the worker does not rest after it.
    """

    def __init__(self, job: TakesSamples, loader: str, epoch: int, data: Loader, seed: int | None = None) -> None:
        self._job, self._data = job, data
        tell_unused(job)
        job.samples.hooks.begins_training()
        self.reading: EpochLeases = job.samples.open(loader, epoch, data, seed)
        self._cut: collections.deque[BatchRange] = collections.deque()  # being read; not yet given to the script
        self._ahead: BatchRange | None = None  # the first of them, awaited before the loop began
        self._taken, self._first_step = 0, job.own_step
        self._position: Position = ("loop", loader, epoch)
        self._is_left_out = False  # the script does not see this epoch, and does nothing between it and the next

    def has_batch(self) -> bool:
        """Waits for a batch and keeps it; False if the epoch ends without one."""
        self.comes_back()
        self._ahead = self.next()
        self._is_left_out = self._ahead is None
        return self._ahead is not None

    def next(self) -> BatchRange | None:
        """The next batch to read; None at the end of the epoch, or if other workers may wait for what is being
        read.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return ahead
        piece = self.reading.next(may_wait=not self._cut)
        if piece is not None:
            self._cut.append(piece)
        return piece

    def ends_shard(self, num_read: int) -> bool:
        """The shard ended within the last batch after `num_read` samples. Returns whether any are left."""
        piece = self.reading.end_shard(self._cut.pop(), num_read)
        if piece is not None:
            self._cut.append(piece)
        return piece is not None

    @property
    def is_empty(self) -> bool:
        """Whether the script has received nothing."""
        return not self._taken

    @property
    def is_over(self) -> bool:
        """Whether a rule has ended training; then read-ahead batches are given back."""
        return self._job.should_stop

    def hand_out(self) -> None:
        """The script receives the oldest batch that was read."""
        piece = self._cut.popleft()
        self._job.samples.gets()
        self._job.samples.boundary.hands_out()
        if self._data.is_steps:
            self._job.samples.lease_acks.read(piece)
        else:
            self._taken += len(piece)
            self._job.samples.read(piece)
        self._job.samples.note_place(self.reading.loader, self.reading.epoch, self._fraction(piece.at))

    def _fraction(self, position: int) -> float:
        """The fraction of the epoch before this position; of shards, by their number."""
        if self._data.num_shards:
            return position // SHARD_POSITIONS / self._data.num_shards
        return min(1.0, position / self._data.num_samples)

    def comes_back(self) -> None:
        """The script asks for its next batch, which is not read yet: a boundary."""
        self._job.samples.drain()
        self._job.samples.boundary.passed(self._position)
        self._job.samples.hooks.between()
        if self.is_over:
            self._job.samples.boundary.stops(self._position)
        self._job.samples.asks()

    def __enter__(self) -> Loop:
        self.reading.resume()
        if not self._is_left_out:
            self._job.samples.boundary.begins_epoch()
        self.comes_back()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind in (None, GeneratorExit):
            self._job.samples.drain()
        without_a_step = self._job.own_step == self._first_step
        failed = kind is not None and issubclass(kind, Exception)
        is_left_early = kind is not None
        with contextlib.suppress(SynclineError):  # the job may be over
            self._job.samples.close(
                self.reading, list(self._cut), passes_over=without_a_step or is_left_early, failed=failed
            )
        if without_a_step and self._taken and kind in (None, GeneratorExit) and not self.is_over:
            self._job.samples.has_unused = True
            if kind is None:  # after an error of the script, the next loop or the end reports it
                tell_unused(self._job)
        if without_a_step and not self.reading.is_shared:
            return
        if not is_left_early:
            self._job.rest()  # also without a step: after the loop all workers are level
            self._job.samples.hooks.behind_epoch(self.reading.loader, self.reading.epoch)
        elif failed:
            # if the script goes on; otherwise its batch stays assigned to the end
            self._job.samples.rests_first = True
        elif not self._job.samples.is_over:
            with contextlib.suppress(SynclineError):
                self._job.rest(leaves=False)  # a loop left by `break` may end in the middle of an iteration


def tell_unused(job: TakesSamples) -> None:
    """Warns once that samples were read without a step. A single worker loses nothing by it."""
    if job.samples.has_unused and job.world_size > 1:
        job.notice(
            "a loop read samples with gradients enabled, and no step used them: each worker saw only its part, "
            "and these samples count as read in this epoch. To evaluate, loop under torch.no_grad() (NumPy: "
            "batches(alone=True)); to train, call step() inside the loop"
        )
    job.samples.has_unused = False


#: Samples for which the order is computed at once: enough to amortize NumPy's overhead, few enough that the first
#: batch does not wait (1 ms per block).
BLOCK_SAMPLES = 4096


class LeasedNumbers:
    """The sample numbers of each batch; None if there are no more, for now or at all."""

    def __init__(self, loop: Loop, order: Order | ChunkedOrder) -> None:
        self._loop, self._order = loop, order
        self._lease = self._begin = 0
        self._samples = np.empty(0, dtype=np.int64)  # of that lease, from that place on

    def next(self) -> npt.NDArray[np.int64] | None:
        piece = self._loop.next()
        if piece is None:
            return None
        at = piece.begin - self._begin
        if piece.lease != self._lease or at + len(piece) > len(self._samples):
            self._lease, self._begin, at = piece.lease, piece.begin, 0
            upto = min(len(piece.span), max(piece.end, piece.begin + BLOCK_SAMPLES))
            self._samples = self._order.at(piece.span.positions(piece.begin, upto))
        return self._samples[at : at + len(piece)]


T = TypeVar("T")
#: Opens the samples of a shard, starting at a sample.
OpenShard = Callable[[int, int], Iterator[T]]


class LeasedShards(Generic[T]):
    """The samples of each batch; None if there are no more, for now or at all. Batches do not cross shards."""

    def __init__(self, loop: Loop, open_shard: OpenShard[T]) -> None:
        self._loop, self._open_shard = loop, open_shard
        self._samples: Iterator[T] = iter(())
        self._at = (0, 0)  # lease and place of the next sample

    def next(self) -> list[T] | None:
        while (piece := self._loop.next()) is not None:
            samples = self._read(piece)
            if len(samples) == len(piece) or self._loop.ends_shard(len(samples)):
                return samples
        return None

    def _read(self, piece: BatchRange) -> list[T]:
        if (piece.lease, piece.begin) != self._at:
            self._samples = self._open_shard(*divmod(piece.span.start + piece.begin, SHARD_POSITIONS))
        self._at = (piece.lease, piece.end)
        return list(itertools.islice(self._samples, len(piece)))
