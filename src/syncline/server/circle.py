"""A circle: the servers of one generation of a ring, as a process group of torch.distributed that is ours alone.

No default group is made, so that a script's own use of torch.distributed is not disturbed. A circle has a thread of
its own: where somebody is gone its sums may never come, and nobody waits for it but the next change. Nor do they come
before the slowest worker is as far as the first: what is begun early has no limit of time but the change.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch._C._distributed_c10d import Store

from syncline.core.forecast import Forecasts
from syncline.core.slice_state import Identity
from syncline.errors import ConnectionLost
from syncline.server.circling import Circling
from syncline.server.early import Early, forecast_commits, settle_forecast
from syncline.server.homes import Home
from syncline.server.sums import Pending, RoundSums, Sums, counted_in
from syncline.server.work import Contribution, RoundWork

dist: Any = torch.distributed  # which types know little of
#: For the change that follows when somebody is gone; without one, the round fails.
PATIENCE_SECONDS = 30.0
_LOOK_SECONDS = 0.005
#: For all that have introduced themselves to be connected with each other.
CONNECT_SECONDS = 5.0
#: By what adds up: others may be far behind in their backward, or rest. nccl has that of its group.
LIMITS = {"gloo": datetime.timedelta(days=365), "nccl": None}


def gloo_group(store: Store, rank: int, size: int, timeout_seconds: float, address: str) -> Any:
    """Speaks and listens at this address only. Whoever is introduced is about to connect."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=CONNECT_SECONDS)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl_group(store: Store, rank: int, size: int, timeout_seconds: float, address: str) -> Any:
    """nccl finds its own addresses; it is made with the first sum. A script that waits for its whole GPU between
    backward and step, beside one that has nothing more to add, would wait for ever: nccl ends it after the limit."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=timeout_seconds)
    return dist.ProcessGroupNCCL(store, rank, size, options)


GROUPS: dict[str, Callable[[Store, int, int, float, str], Any]] = {"gloo": gloo_group, "nccl": nccl_group}


class Formed(NamedTuple):
    """A process group, and its store: torch asks that later too, and does not keep what is Python's of it. `limit`:
    of each sum, where the group has another one for itself."""

    group: Any
    store: Store
    limit: datetime.timedelta | None = None


class Circle:
    """Makes the sums of rounds, one after the other, each from what its own worker has staged early on."""

    def __init__(
        self,
        names: Sequence[str],
        form: Callable[[], Formed],
        sums: Sums,
        home: Home,
        own_worker: str,
        *,
        is_whole: Callable[[], bool],
        summed: Callable[[RoundWork, RoundSums], None],
        failed: Callable[[RoundWork, Exception], None],
    ) -> None:
        """`form` makes the process group, when all others do; `is_whole`: all slices that are to be here are;
        `failed`: no change has followed what went wrong."""
        self.names, self._is_whole = names, is_whole
        self._own_worker, self._forecasts = own_worker, Forecasts()
        self._staged = Early()
        self._circling: Circling | None = None  # the next round, or the one that is added up
        self._is_free = True  # the round before is applied: its memory may be used again
        self._broken: Exception | None = None  # what was begun early
        self._is_supplied = threading.Event()
        self._form, self._sums, self._home, self._summed, self._failed = form, sums, home, summed, failed
        self._formed: Formed | None = None
        self._works: queue.SimpleQueue[RoundWork | _Look | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._ending: threading.Thread | None = None

    def submit(self, work: RoundWork) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sums", daemon=True)
            self._thread.start()
        self._works.put(work)

    def stage_early(self, worker: Identity, clock: int, contribution: Contribution, slices: set[int]) -> None:
        """What the worker of this process has staged before its commit."""
        self._staged.note(worker, clock, contribution, slices)
        self._works.put(_Look())

    def supplied(self) -> None:
        """The others have had from here what they lacked: from now on slices may change."""
        self._is_supplied.set()

    def is_through(self, work: RoundWork) -> None:
        """Its memory may be used again."""
        self._is_free = True
        self._works.put(_Look())

    def awaited(self) -> None:
        """torch.distributed does not say."""

    def _begin(self) -> None:
        """Before the first sum: nobody's copy is on its way any more, from here or to here."""
        while not self._closed.is_set() and not (self._is_supplied.is_set() and self._is_whole()):
            self._closed.wait(_LOOK_SECONDS)
        if not self._closed.is_set():
            self._formed = self._form()

    def close(self) -> None:
        """Its generation is over: whatever is on its way goes nowhere. Nobody waits for that."""
        self._closed.set()
        self._works.put(None)
        if self._thread is not None and self._ending is None:
            self._ending = threading.Thread(target=self._abort, name="end of sums", daemon=True)
            self._ending.start()

    @property
    def is_alive(self) -> bool:
        """Whether any of its threads may still be in torch."""
        return any(thread is not None and thread.is_alive() for thread in (self._thread, self._ending))

    def join(self, seconds: float) -> None:
        """Waits for its threads to be out of torch: a process that ends meanwhile would be aborted."""
        for thread in (self._thread, self._ending):
            if thread is not None and thread is not threading.current_thread():
                thread.join(seconds)

    def _abort(self) -> None:
        formed = self._formed
        if formed is not None:
            with contextlib.suppress(Exception):
                formed.group.abort()

    def _run(self) -> None:
        while (work := self._works.get()) is not None and not self._closed.is_set():
            if isinstance(work, _Look):
                self._go_early()
                continue
            try:
                if self._formed is None:
                    self._begin()
                if self._closed.is_set():
                    break
                found = self._make(work)
            except Exception as error:  # of torch, in whatever form: whoever waits must hear of it
                if not self._closed.wait(PATIENCE_SECONDS):
                    self._failed(work, error)
                break
            if not self._closed.is_set():
                self._summed(work, found)
        self._formed = None

    def _next(self) -> Circling:
        if self._circling is None:
            forecast = forecast_commits(self._forecasts.next)
            self._circling = Circling(self._sums, forecast, self._own_worker, self._reduce)
        return self._circling

    def _go_early(self) -> None:
        """What goes wrong is told when the round is whole: until then a change may follow."""
        if self._formed is None or not self._is_free or self._broken is not None or not self._forecasts.next:
            return
        try:
            with self._home.at_work():
                self._next().go_on(self._staged)
        except Exception as error:  # of torch, in whatever form
            self._broken = error

    def _make(self, work: RoundWork) -> RoundSums:
        if self._broken is not None:
            raise self._broken
        with self._home.at_work():
            circling, self._circling, self._is_free = self._next(), None, False
            num_slices = sum(len(bucket.numbers) for bucket in self._sums.buckets(counted_in(work)))
            found = circling.make(work, settle_forecast(self._forecasts, work, num_slices))
            self._home.settle()
        return found

    def _reduce(self, tensor: torch.Tensor) -> Pending:
        """Not once it is closed. Slices move then, so that buckets may have other sizes than the peers' buckets, and
        gloo ends a process that receives more bytes than it expects."""
        if self._closed.is_set():
            raise ConnectionLost("the generation of these sums is over")
        options = dist.AllreduceOptions()
        assert self._formed is not None
        options.reduceOp = dist.ReduceOp.SUM
        if self._formed.limit is not None:
            options.timeout = self._formed.limit
        pending: Pending = self._formed.group.allreduce([tensor], options)
        return pending


class _Look:
    """There may be something to begin early."""
