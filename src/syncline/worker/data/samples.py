"""The samples of a worker: its loaders and what they read, how many it has had, what the coordinator recalls."""

from __future__ import annotations

import dataclasses
import functools
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

_Key = tuple[int, str]  # the id of a source and the name that was given with it


@dataclasses.dataclass
class _Known:
    source: object  # a weak reference; or itself where there is none, so that its id stays its own
    name: str
    kind: Hashable
    num_begun: int = 0


class Passes:
    """Counts from 0, for each source and each name that it is read by."""

    def __init__(self) -> None:
        self._known: dict[_Key, _Known] = {}
        self._gone: set[Hashable] = set()  # kinds of sources that were read, and are there no more

    def next(
        self,
        source: object,
        name: str = "",
        epoch: int | None = None,
        *,
        kind: Hashable = None,
        named: Callable[[str], str] = str,
    ) -> tuple[str, int]:
        """What `named` made of the name when the source was new under it, and the number of this pass, or `epoch`."""
        key = (id(source), name)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known(self._held(source, key), named(name), kind)
        number = known.num_begun if epoch is None else epoch
        known.num_begun = number + 1
        return known.name, number

    def is_gone(self, kind: Hashable) -> bool:
        """Whether a source of this kind was read and let go."""
        return kind in self._gone

    def _held(self, source: object, key: _Key) -> object:
        try:
            return weakref.ref(source, functools.partial(_forget, self._known, self._gone, key))
        except TypeError:
            return source


def _forget(known: dict[_Key, _Known], gone: set[Hashable], key: _Key, _: object) -> None:
    """The source is gone, and its id may be another's next."""
    if (entry := known.pop(key, None)) is not None and entry.kind is not None:
        gone.add(entry.kind)


class CoordinatorAsks:
    """The way to the coordinator: a job's own, with its words about waits; or one attempt."""

    def __init__(self, ask: Callable[[Message], Message], link: Link) -> None:
        self.ask, self.try_ask = ask, link.try_call


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopHooks:
    """What a job does around the loops of its script."""

    begins_training: Callable[[], None] = lambda: None  #: before anything is read for a loop
    between: Callable[[], None] = lambda: None  #: between two batches, with all that was read in steps
    behind_epoch: Callable[[str, int], None] = lambda loader, epoch: None  #: a loop has come to its end


class WorkerSamples:
    """All that a job's loaders have in common."""

    def __init__(
        self, asks: AsksCoordinator, lease_acks: LeaseAcks, times: StepClock, worker: Pauses, boundary: Boundary,
        hooks: LoopHooks = LoopHooks(),
    ) -> None:  # fmt: skip
        """`boundary`: where the script stands between two batches."""
        self._asks, self.lease_acks, self._times, self._worker = asks, lease_acks, times, worker
        self.boundary, self.hooks = boundary, hooks
        self.rests_first = False  #: a loop was left by an error: behind it all are level again
        self.has_unused = False  #: a loop read samples, no step used them, and the user is still to be told
        self.is_over = False  #: the job is left: the coordinator knows what to do with its leases
        self.taken = 0  #: handed out to this worker's training so far
        self.seconds = 0.0  #: from the first one to the last
        self.progress = (0, 0, 0)  #: epoch, batches of it so far, and in all
        self.num_skipped = 0  #: epochs that the script was not given by `epochs(n)`: the job had finished them
        self.is_in_epoch = False  #: the script is inside an epoch that `epochs(n)` has given it
        self._runs: dict[str, tuple[int, int]] = {}  # loaders whose epochs are the run: the first of them, how many
        self._run_by, self.run_done = "", -1.0  #: how much of the run is done, 0 to 1; before that it is not known
        self._first_at = 0.0
        self._lock = threading.Lock()
        self._readings: dict[tuple[str, int], EpochLeases] = {}
        self._failed: list[tuple[EpochLeases, BatchRange]] = []  # batches that could not be read
        self._left: list[EpochLeases] = []  # loops that are over, which the coordinator has not heard yet
        self._names: set[str] = set()
        self._begun: set[object] = set()
        self._num_step_loops = 0
        self.passes = Passes()  #: over sources that are read by themselves, without a loader

    def name_loader(self, name: str) -> str:
        """The name that a loader has in all workers: its own, or its number in the order in which they are made."""
        if not name:
            name = next(n for k in range(len(self._names) + 1) if (n := f"loader-{k}") not in self._names)
        elif name in self._names:
            raise ConfigError(f"there are two loaders called {name!r}; give each its own name=")
        self._names.add(name)
        return name

    def name_steps(self) -> str:
        """The name of the next loop over steps, by the order in which a script makes them."""
        self._num_step_loops += 1
        return f"steps-{self._num_step_loops - 1}"

    def has_begun(self, kind: object) -> bool:
        """Whether a loader over such data has begun its first epoch before."""
        known = kind in self._begun
        self._begun.add(kind)
        return known

    def open(self, loader: str, epoch: int, data: Loader, seed: int | None = None) -> EpochLeases:
        """This worker begins its loop over an epoch."""
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
        """The loop over an epoch is left. `failed`: the first of what is unread could not be read.

        Then that batch is kept for now: should this worker end by it, the job knows at which batch.
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
        """This worker goes on: what it could not read is for others to try."""
        while self._failed:
            reading, piece = self._failed.pop()
            reading.leave([piece], passes_over=False)
            self._left.append(reading)
        self._tell_left()

    def _tell_left(self) -> None:
        """Of loops that are left the coordinator hears, sooner or later: it may be away for longer than one waits."""
        while self._left:
            self._left[0].tell_left()
            del self._left[0]

    def give_back(self, recall: Recall) -> GaveBack:
        """In the thread that hears the coordinator: what is not begun is others'."""
        with self._lock:
            reading = self._readings.get((recall.loader, recall.epoch))
        return reading.give_back() if reading is not None else GaveBack([])

    def used(self) -> list[LeaseAck]:
        """What commits of this worker have used so far, of leases that it may still have."""
        return self.lease_acks.committed()

    def late(self) -> list[LeaseAck]:
        """Likewise, of commits that were late."""
        return self.lease_acks.late()

    def are_told(self) -> bool:
        """Whether that was all, once these two are asked for after this."""
        return self.lease_acks.are_told()

    # -- counting -----------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, num_batches: int) -> None:
        """A loader begins epoch number `epoch` (from 0), with about this many batches for this worker."""
        self.progress = (epoch, 0, num_batches)

    def begin_run(self, loader: str, first_epoch: int, num_epochs: int) -> None:
        """The run has so many epochs of this loader."""
        self._runs[loader] = (first_epoch, num_epochs)
        self.note_place(loader, first_epoch)

    def note_place(self, loader: str, epoch: int, fraction: float = 0.0) -> None:
        """This worker comes to this place of an epoch."""
        run = self._runs.get(loader)
        if run is not None and epoch < sum(run):
            first, num_epochs = run
            self.note_progress((epoch - first + fraction) / num_epochs, by=loader)

    def note_progress(self, fraction: float, *, by: str) -> None:
        """How much of the run is done, 0 to 1, by this loop. It never goes back; another loop has its own count."""
        self.run_done = max(fraction, self.run_done) if by == self._run_by else fraction
        self._run_by = by

    def read(self, piece: BatchRange) -> None:
        """The script has got this batch: the next commit says so."""
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
