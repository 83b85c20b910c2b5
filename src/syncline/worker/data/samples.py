"""A worker's samples: its loaders, how many samples it has read, and recalls by the coordinator."""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
import time
import weakref
from collections.abc import Callable, Hashable

from syncline.core.leasing.loader import Loader
from syncline.core.wire.leases import GaveBack, LeaseAck, Recall
from syncline.core.wire.message import Message
from syncline.errors import ConfigError
from syncline.net.link import Link
from syncline.worker.checkpoint.boundary import Boundary
from syncline.worker.data.leases import AsksCoordinator, BatchRange, EpochLeases, LeaseAcks, Pauses
from syncline.worker.waits import StepClock

_Key = tuple[int, str]  # the id of a source and its name


@dataclasses.dataclass
class _Known:
    source: object  # a weak reference; or the source itself if it has none, which keeps its id reserved
    name: str
    kind: Hashable
    num_begun: int = 0


class Passes:
    """Counts passes from 0, for each source and name."""

    def __init__(self) -> None:
        self._known: dict[_Key, _Known] = {}
        self._gone: set[Hashable] = set()  # kinds of sources that were read and deleted

    def next(
        self,
        source: object,
        name: str = "",
        epoch: int | None = None,
        *,
        kind: Hashable = None,
        named: Callable[[str], str] = str,
    ) -> tuple[str, int]:
        """Returns the name that `named` gave the source when it was new, and the number of this pass, or `epoch`."""
        key = (id(source), name)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known(self._held(source, key), named(name), kind)
        number = known.num_begun if epoch is None else epoch
        known.num_begun = number + 1
        return known.name, number

    def is_gone(self, kind: Hashable) -> bool:
        """Whether a source of this kind was read and deleted."""
        return kind in self._gone

    def _held(self, source: object, key: _Key) -> object:
        try:
            return weakref.ref(source, functools.partial(_forget, self._known, self._gone, key))
        except TypeError:
            return source


def _forget(known: dict[_Key, _Known], gone: set[Hashable], key: _Key, _: object) -> None:
    """The source is deleted; its id may be reused."""
    if (entry := known.pop(key, None)) is not None and entry.kind is not None:
        gone.add(entry.kind)


class CoordinatorAsks:
    """Asks the coordinator, waiting like the job does, or once."""

    def __init__(self, ask: Callable[[Message], Message], link: Link) -> None:
        self.ask, self.try_ask = ask, link.try_call


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopHooks:
    """What a job does around the loops of its script."""

    begins_training: Callable[[], None] = lambda: None  #: before anything is read for a loop
    between: Callable[[], None] = lambda: None  #: between two batches, when everything read is in steps
    behind_epoch: Callable[[str, int], None] = lambda loader, epoch: None  #: a loop has ended


class WorkerSamples:
    """What all loaders of a job share."""

    def __init__(
        self, asks: AsksCoordinator, lease_acks: LeaseAcks, times: StepClock, worker: Pauses, boundary: Boundary,
        hooks: LoopHooks = LoopHooks(),
    ) -> None:  # fmt: skip
        """`boundary`: the script's boundaries between batches."""
        self._asks, self.lease_acks, self._times, self._worker = asks, lease_acks, times, worker
        self.boundary, self.hooks = boundary, hooks
        self.rests_first = False  #: a loop was left by an error: rest first, so that all workers are level
        self.has_unused = False  #: a loop read samples without a step, and the user must be told
        self.is_over = False  #: the worker has left; the coordinator handles its leases
        self.batch_size = 0  #: of this worker in the last epoch that a loader began
        self.taken = 0  #: handed out to this worker's training so far
        self.seconds = 0.0  #: from the first one to the last
        self.progress = (0, 0, 0)  #: epoch, batches of it so far, and in all
        self.num_skipped = 0  #: epochs that `epochs(n)` skipped because the job had finished them
        self.is_in_epoch = False  #: the script is inside an epoch of `epochs(n)`
        self._runs: dict[str, tuple[int, int]] = {}  # loaders whose epochs make up the run: first epoch and number
        self._run_by, self.run_done = "", -1.0  #: fraction of the run that is done; negative: unknown
        self._first_at = 0.0
        self._lock = threading.Lock()
        self._readings: dict[tuple[str, int], EpochLeases] = {}
        self._failed: list[tuple[EpochLeases, BatchRange]] = []  # batches that could not be read
        self._left: list[EpochLeases] = []  # finished loops that the coordinator does not know of yet
        self._names: set[str] = set()
        self._begun: set[object] = set()
        self._num_step_loops = 0
        self._before_batch: list[Callable[[], None]] = []
        self.passes = Passes()  #: over sources that are read without a loader

    def before_batch(self, action: Callable[[], None]) -> None:
        """Something to be done before the script gets its next batch: steps that run in other threads end first, so
        that their commits acknowledge their own batches only.
        """
        self._before_batch.append(action)

    def drain(self) -> None:
        """The script asks for its next batch, or leaves its loop."""
        for action in self._before_batch:
            action()

    def name_loader(self, name: str) -> str:
        """The loader's name in all workers: given, or numbered in order of creation."""
        if not name:
            name = next(n for k in range(len(self._names) + 1) if (n := f"loader-{k}") not in self._names)
        elif name in self._names:
            raise ConfigError(f"there are two loaders called {name!r}; give each its own name=")
        self._names.add(name)
        return name

    def name_steps(self) -> str:
        """The name of the next loop over steps, numbered in order of creation."""
        self._num_step_loops += 1
        return f"steps-{self._num_step_loops - 1}"

    def has_begun(self, kind: object) -> bool:
        """Whether a loader over such data has begun an epoch before."""
        known = kind in self._begun
        self._begun.add(kind)
        return known

    def open(self, loader: str, epoch: int, data: Loader, seed: int | None = None) -> EpochLeases:
        """This worker begins its loop over an epoch."""
        seed = None if seed is None else _checked(seed)
        self.let_go()
        if self.rests_first:
            self.rests_first = False
            self._worker.rest()
        reading = EpochLeases(
            self._asks, self.lease_acks, loader, epoch, data, times=self._times, worker=self._worker, seed=seed
        )
        with self._lock:
            self._readings[loader, epoch] = reading
        return reading

    def close(
        self, reading: EpochLeases, unread: list[BatchRange], *, passes_over: bool, failed: bool = False
    ) -> None:
        """Leaves the loop over an epoch. `failed`: the first unread batch could not be read.

        That batch is kept for now: if this worker dies of it, the job knows which batch it was.
        """
        with self._lock:
            self._readings.pop((reading.loader, reading.epoch), None)
            self.lease_acks.leave_loop()
        if self.is_over:
            return
        if failed and unread:
            self._failed.append((reading, unread[0]))
        self.took(-reading.leave(unread[1:] if failed else unread, passes_over=passes_over))
        self._left.append(reading)
        self._tell_left()

    def let_go(self) -> None:
        """This worker goes on: gives back the batches that it could not read."""
        while self._failed:
            reading, piece = self._failed.pop()
            reading.leave([piece], passes_over=False)
            self._left.append(reading)
        self._tell_left()

    def _tell_left(self) -> None:
        """Tells the coordinator of finished loops, as soon as it can be reached."""
        while self._left:
            self._left[0].tell_left()
            del self._left[0]

    def give_back(self, recall: Recall) -> GaveBack:
        """In the thread that reads from the coordinator: gives back what is not started."""
        with self._lock:
            reading = self._readings.get((recall.loader, recall.epoch))
        return reading.give_back() if reading is not None else GaveBack([])

    def used(self) -> list[LeaseAck]:
        """Ranges used by this worker's commits, of leases that it may still hold."""
        return self.lease_acks.committed()

    def late(self) -> list[LeaseAck]:
        """Ranges of late commits."""
        return self.lease_acks.late()

    def are_told(self) -> bool:
        """Whether the answers of `used` and `late`, if asked after this, are final."""
        return self.lease_acks.are_told()

    # -- counting -----------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, num_batches: int) -> None:
        """A loader begins epoch number `epoch` (from 0), with about this many batches for this worker."""
        self.progress = (epoch, 0, num_batches)

    def begin_run(self, loader: str, first_epoch: int, num_epochs: int) -> None:
        """The run consists of this many epochs of this loader."""
        self._runs[loader] = (first_epoch, num_epochs)
        self.note_place(loader, first_epoch)

    def note_place(self, loader: str, epoch: int, fraction: float = 0.0) -> None:
        """Notes this worker's place in an epoch."""
        run = self._runs.get(loader)
        if run is not None and epoch < sum(run):
            first, num_epochs = run
            self.note_progress((epoch - first + fraction) / num_epochs, by=loader)

    def note_progress(self, fraction: float, *, by: str) -> None:
        """Notes the fraction of the run that is done, by this loop. It never decreases; each loop has its own
        count.
        """
        self.run_done = max(fraction, self.run_done) if by == self._run_by else fraction
        self._run_by = by

    def asks(self) -> None:
        """The script asks for its next batch."""
        self._times.begins_reading()

    def gets(self) -> None:
        """The script receives it."""
        self._times.has_read()

    def read(self, piece: BatchRange) -> None:
        """The script has received this batch; the next commit acknowledges it."""
        self.lease_acks.read(piece)
        self.took(len(piece))

    def took(self, num_samples: int) -> None:
        """A loader has handed out a batch of this many samples."""
        now = time.monotonic()
        self._first_at = self._first_at or now
        self.seconds = now - self._first_at
        self.taken += num_samples
        epoch, step, steps = self.progress
        self.progress = (epoch, step + 1, steps)


def _checked(seed: object) -> int:
    """A seed as the coordinator takes it; it would send a worker away that says anything else."""
    try:
        found = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"seed = {seed!r}: must be a whole number") from None
    return found if 0 <= found < 2**64 else found % 2**64  # the order depends on 64 bits
