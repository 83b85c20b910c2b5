"""Sums by torch.distributed: a process group of our own for each generation of a ring."""

from __future__ import annotations

import contextlib
import datetime
import functools
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch._C._distributed_c10d import Store

from syncline.config import JobConfig
from syncline.core.members import Member
from syncline.core.ring import check_process_group_hosts, partner_of
from syncline.core.slice_state import Identity
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import GroupStoreKey
from syncline.errors import ConnectionLost, ProtocolError, SynclineError
from syncline.net.reliable_send import ReliableSend
from syncline.net.rpc import Request
from syncline.server.hosting import Hosting
from syncline.server.reduce.reducer import Counted, Early, Failed, NextRound, Summed, expected_commits
from syncline.server.reduce.sums import Bucket, Pending, Reduce, Sums, counted_in, equal_weight
from syncline.server.slices import RoundSums
from syncline.server.storage import SliceStorage
from syncline.server.tasks import RoundTask, StagedCommit

#: gloo tells the others of a process group where it listens, nccl a name for it: each once, some hundred bytes.
MOST_BYTES, MOST_KEYS = 1 << 16, 1 << 12


class Heard:
    """What servers have said of themselves, by generation; others may have begun one before us."""

    def __init__(self) -> None:
        self.change = threading.Condition()
        self._values: dict[int, dict[str, bytes]] = {}
        self._generation = 0

    def begin(self, generation: int) -> None:
        """What was said for those before is nothing any more; whoever waits for it hears so."""
        with self.change:
            self._generation = generation
            self._values = {g: values for g, values in self._values.items() if g >= generation}
            self.change.notify_all()

    def hear(self, generation: int, key: str, value: bytes) -> None:
        if len(value) > MOST_BYTES or len(key) > MOST_BYTES:
            raise ProtocolError(f"an introduction of {len(key)} and {len(value)} bytes; at most {MOST_BYTES}")
        with self.change:
            if generation < self._generation:
                return
            values = self._values.setdefault(generation, {})
            if len(values) >= MOST_KEYS:
                raise ProtocolError(f"more than {MOST_KEYS} introductions")
            values[key] = value
            self.change.notify_all()

    def of(self, generation: int) -> dict[str, bytes]:
        """Under `change`."""
        if generation < self._generation:
            raise RuntimeError(f"generation {generation} is over")
        return self._values.get(generation, {})


class GroupStore(Store):
    """The store of one process group. torch sets keys and waits for those of others; it asks for nothing else of
    it."""

    def __init__(
        self, generation: int, heard: Heard, tell: Callable[[str, bytes], None], timeout_seconds: float
    ) -> None:
        super().__init__()
        self._generation, self._heard, self._tell, self._seconds = generation, heard, tell, timeout_seconds

    def set(self, key: str, value: str | bytes) -> None:
        said = value.encode() if isinstance(value, str) else bytes(value)
        self._heard.hear(self._generation, key, said)
        self._tell(key, said)

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._heard.change:
            return self._heard.of(self._generation)[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """As long as the generation lasts, whatever torch says: others come when their round is whole."""
        with self._heard.change:
            if not self._heard.change.wait_for(lambda: self._has(keys), self._seconds):
                raise RuntimeError(f"nothing was heard of {', '.join(keys)} within {self._seconds:g} s")

    def check(self, keys: list[str]) -> bool:
        with self._heard.change:
            return self._has(keys)

    def _has(self, keys: list[str]) -> bool:
        known = self._heard.of(self._generation)
        return all(key in known for key in keys)

    def num_keys(self) -> int:
        with self._heard.change:
            return len(self._heard.of(self._generation))


class GroupRound:
    """One round's, in the thread of its process group."""

    def __init__(self, sums: Sums, expected: Counted, own_worker: str, reduce: Reduce) -> None:
        """`expected`: its commits; none: nothing is added up before it is complete."""
        self._sums, self._own_worker, self._reduce = sums, own_worker, reduce
        self._expected, self._pending = expected, list[Pending]()
        self._buckets = sums.buckets(expected)

    @property
    def num_begun(self) -> int:
        """Buckets, so far."""
        return len(self._pending)

    def go_on(self, staged: Early) -> None:
        """With what this server's worker has staged: as many buckets as are whole by that, the next one first."""
        own = self._own(self._expected)

        def is_ready(bucket: Bucket) -> bool:
            if not all(staged.has_all(own, number) for number in bucket.awaits(own)):
                return False
            staged.with_arrays(own)  # after it: it may have been staged in this moment
            return True

        with contextlib.suppress(KeyError):  # that worker has left: the round will be another one
            self._enter(own, self._expected, is_ready)

    def _own(self, commits: Counted) -> Counted:
        return [commit for commit in commits if commit.worker == self._own_worker]

    def _enter(self, own: Counted, counted: Counted, is_ready: Callable[[Bucket], bool]) -> None:
        equal = equal_weight(counted)
        for bucket in self._buckets[len(self._pending) :]:
            if not is_ready(bucket):
                break
            bucket.lay(own, equal)
            self._pending.append(self._reduce(bucket.flat))

    def make(self, work: RoundTask, holds: bool) -> RoundSums:
        """The round is complete. `holds`: it is the one that was expected.

        All servers make the calls of the expected round, whatever the round turned out to be, and then those of the
        round itself. So the order of calls is the same everywhere.
        """
        counted = counted_in(work)
        self._enter(self._own(counted) if holds else (), counted, lambda bucket: True)
        for under_way in self._pending:
            under_way.wait()
        buckets = self._buckets
        if not holds:
            buckets = self._sums.buckets(counted)
            self._add_up(buckets, counted)
        found = RoundSums()
        for bucket in buckets:
            bucket.read(counted, work.weight, equal_weight(counted), found)
        return found

    def _add_up(self, buckets: Sequence[Bucket], counted: Counted) -> None:
        own, equal, pending = self._own(counted), equal_weight(counted), list[Pending]()
        for bucket in buckets:
            bucket.lay(own, equal)
            pending.append(self._reduce(bucket.flat))
        for under_way in pending:
            under_way.wait()


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


class ProcessGroupReducer:
    """Makes the sums of rounds, one after the other, each from what its own worker has staged early on."""

    def __init__(
        self,
        names: Sequence[str],
        form: Callable[[], Formed],
        sums: Sums,
        home: SliceStorage,
        own_worker: str,
        *,
        is_whole: Callable[[], bool],
        summed: Callable[[RoundTask, RoundSums], None],
        failed: Callable[[RoundTask, Exception], None],
    ) -> None:
        """`form` makes the process group, when all others do; `is_whole`: all slices that are to be here are;
        `failed`: no change has followed what went wrong."""
        self.names, self._is_whole = names, is_whole
        self._own_worker, self._next_round = own_worker, NextRound()
        self._staged = Early()
        self._circling: GroupRound | None = None  # the next round, or the one that is added up
        self._is_free = True  # the round before is applied: its memory may be used again
        self._broken: Exception | None = None  # what was begun early
        self._is_supplied = threading.Event()
        self._form, self._sums, self._home, self._summed, self._failed = form, sums, home, summed, failed
        self._formed: Formed | None = None
        self._works: queue.SimpleQueue[RoundTask | _Look | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._ending: threading.Thread | None = None

    def submit(self, work: RoundTask) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sums", daemon=True)
            self._thread.start()
        self._works.put(work)

    def stage_early(self, worker: Identity, clock: int, contribution: StagedCommit, slices: set[int]) -> None:
        """What the worker of this process has staged before its commit."""
        self._staged.note(worker, clock, contribution, slices)
        self._works.put(_Look())

    def supplied(self) -> None:
        """The others have had from here what they lacked: from now on slices may change."""
        self._is_supplied.set()

    def is_through(self, work: RoundTask) -> None:
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

    def _next(self) -> GroupRound:
        if self._circling is None:
            expected = expected_commits(self._next_round.expected)
            self._circling = GroupRound(self._sums, expected, self._own_worker, self._reduce)
        return self._circling

    def _go_early(self) -> None:
        """What goes wrong is told when the round is whole: until then a change may follow."""
        if self._formed is None or not self._is_free or self._broken is not None or not self._next_round.expected:
            return
        try:
            with self._home.at_work():
                self._next().go_on(self._staged)
        except Exception as error:  # of torch, in whatever form
            self._broken = error

    def _make(self, work: RoundTask) -> RoundSums:
        if self._broken is not None:
            raise self._broken
        with self._home.at_work():
            circling, self._circling, self._is_free = self._next(), None, False
            found = circling.make(work, self._next_round.settle(work))
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


_LOOPBACK = "127.0.0.1"


class ProcessGroupReducers:
    """Of one server."""

    def __init__(self, config: JobConfig, hosting: Hosting) -> None:
        self._config, self._hosting = config, hosting
        self.heard = Heard()

    @property
    def what(self) -> str:
        return self._config.sums

    def begin(
        self, generation: int, names: Sequence[str], summed: Summed, failed: Failed
    ) -> ProcessGroupReducer | None:
        """All servers make the same process group, when a round is whole."""
        self.heard.begin(generation)
        if len(names) < 2:
            return None
        return ProcessGroupReducer(
            names, functools.partial(self._form, generation, names),
            Sums(self._hosting.copies), self._hosting.home, partner_of(self._hosting.name),
            is_whole=self._hosting.has_all, summed=summed, failed=failed,
        )  # fmt: skip

    def _form(self, generation: int, names: Sequence[str]) -> Formed:
        members = self._hosting.members_named(names)
        check_process_group_hosts(self._config, [member.host for member in members])
        others = self._hosting.partners_named(names)
        for partner in others:
            with contextlib.suppress(SynclineError, OSError):  # what is said to it is said again
                partner.connect()

        def tell(key: str, value: bytes) -> None:
            for partner in others:
                ReliableSend(partner, GroupStoreKey(generation, key, value)).send()

        seconds = self._config.wait_seconds
        store = GroupStore(generation, self.heard, tell, seconds)
        rank, address = names.index(self._hosting.name), self._address(members)
        made = GROUPS[self._config.sums](store, rank, len(names), seconds, address)
        return Formed(made, store, LIMITS[self._config.sums])

    def _address(self, members: Collection[Member]) -> str:
        """On one host nobody outside of it can connect."""
        if len({member.host for member in members}) == 1:
            return _LOOPBACK
        mine = next(member for member in members if member.name == self._hosting.name)
        return mine.address.host if mine.address is not None else _LOOPBACK

    def hear(self, request: Request, message: GroupStoreKey) -> None:
        self.heard.hear(message.generation, message.key, message.value)
        request.reply(Done())

    def close(self) -> None:
        """Whoever waits for introductions does not any more."""
        self.heard.begin(1 << 62)
