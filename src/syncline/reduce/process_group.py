"""A reducer that uses torch.distributed: a process group of our own for each generation of a ring.

The only file of this package that imports torch.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import functools
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

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
from syncline.reduce.reducer import Participant
from syncline.reduce.rounds import EarlyStages, NextRound, Round, SliceSum, equal_weight, total_weight
from syncline.reduce.slices import Contributions, FindNumbers, SliceReduction

dist: Any = torch.distributed  # its types are incomplete
#: Limits for the store of a process group: gloo stores its addresses, nccl an id, each some hundred bytes.
MOST_BYTES, MOST_KEYS = 1 << 16, 1 << 12


class StoreKeys:
    """The keys that servers have set in the stores of process groups, by generation. Other servers may be ahead."""

    def __init__(self) -> None:
        self.change = threading.Condition()
        self._values: dict[int, dict[str, bytes]] = {}
        self._generation = 0

    def begin(self, generation: int) -> None:
        """Drops the keys of earlier generations. Threads that wait for these get an error."""
        with self.change:
            self._generation = generation
            self._values = {g: values for g, values in self._values.items() if g >= generation}
            self.change.notify_all()

    def put(self, generation: int, key: str, value: bytes) -> None:
        if len(value) > MOST_BYTES or len(key) > MOST_BYTES:
            raise ProtocolError(
                f"a key of a process group of {len(key)} and {len(value)} bytes; at most {MOST_BYTES}"
            )
        with self.change:
            if generation < self._generation:
                return
            values = self._values.setdefault(generation, {})
            if len(values) >= MOST_KEYS:
                raise ProtocolError(f"more than {MOST_KEYS} keys of a process group")
            values[key] = value
            self.change.notify_all()

    def of(self, generation: int) -> dict[str, bytes]:
        """Under `change`."""
        if generation < self._generation:
            raise RuntimeError(f"generation {generation} is over")
        return self._values.get(generation, {})

    def generations(self) -> list[int]:
        """The generations with keys."""
        with self.change:
            return sorted(self._values)


class GroupStore(Store):
    """The store of one process group. torch sets keys and waits for keys of other servers; it uses nothing else."""

    def __init__(
        self, generation: int, keys: StoreKeys, tell: Callable[[str, bytes], None], timeout_seconds: float
    ) -> None:
        """`tell` sends a key to the other servers."""
        super().__init__()
        self._generation, self._keys, self._tell, self._seconds = generation, keys, tell, timeout_seconds

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._keys.put(self._generation, key, data)
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._keys.change:
            return self._keys.of(self._generation)[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Waits as long as the generation lasts. torch's own timeout is ignored: other servers set their keys when
        their first round is complete.
        """
        with self._keys.change:
            if not self._keys.change.wait_for(lambda: self._has(keys), self._seconds):
                raise RuntimeError(f"nothing was heard of {', '.join(keys)} within {self._seconds:g} s")

    def check(self, keys: list[str]) -> bool:
        with self._keys.change:
            return self._has(keys)

    def _has(self, keys: list[str]) -> bool:
        known = self._keys.of(self._generation)
        return all(key in known for key in keys)

    def num_keys(self) -> int:
        with self._keys.change:
            return len(self._keys.of(self._generation))


# -- buckets --------------------------------------------------------------------------------------------------

#: Slices up to this size together are one all-reduce: every call has a fixed cost.
BUCKET_BYTES = 16 << 20


class Pending(Protocol):
    """An all-reduce that has begun."""

    def wait(self) -> object: ...


#: Begins the all-reduce of a tensor, in place.
AllReduce = Callable[[torch.Tensor], Pending]


class _Memory(NamedTuple):
    """Where a slice is added up, and where its sum is then, in the dtype of the slice."""

    wide: torch.Tensor
    sum: torch.Tensor


class Bucket:
    """Slices of one segment that are added up together."""

    def __init__(self, slices: Sequence[SliceReduction], device: str) -> None:
        kind = getattr(torch, slices[0].wide_dtype)
        self.flat = torch.zeros(sum(each.num_items for each in slices), dtype=kind, device=device)
        self._slices: list[tuple[SliceReduction, _Memory]] = []
        begin = 0
        for each in slices:
            wide, own = self.flat[begin : begin + each.num_items], getattr(torch, each.part.dtype)
            narrow = wide if kind == own else torch.zeros(each.num_items, dtype=own, device=device)
            self._slices.append((each, _Memory(wide, narrow)))
            begin += each.num_items

    def fill(self, own: Contributions, equal: float | None) -> None:
        """Writes the weighted gradients of this server's worker into the bucket."""
        for each, memory in self._slices:
            each.add_up(own, memory.wide, equal)

    def touched_by(self, own: Contributions) -> list[int]:
        """The slices that these contributions touch."""
        return [s.number for s, _ in self._slices if any(s.touched_by(each.pushed) for each in own)]

    def finish(self, counted: Contributions, equal: float | None) -> list[SliceSum]:
        """The bucket is added up: makes the sums of its slices."""
        weight = total_weight(counted)
        for each, memory in self._slices:
            each.finish(counted, memory.wide, memory.sum, weight, equal)
        return [SliceSum(each, memory.sum) for each, memory in self._slices]


class Buckets:
    """All buckets of one process group. Each group has its own: an all-reduce of an earlier one may still run."""

    def __init__(self, server: Participant) -> None:
        self._server = server
        self._by_segment: dict[int, list[Bucket]] = {}

    def of(self, counted: Contributions) -> list[Bucket]:
        """The buckets of the segments that these contributions touch: the same on all servers, in the same order. The
        last slices come first, because backward reaches them first.
        """
        if not counted:
            return []
        by_segment: dict[int, list[SliceReduction]] = collections.defaultdict(list)
        for each in self._server.slices():
            by_segment[each.part.segment].append(each)
        found = list[Bucket]()
        for segment, slices in sorted(by_segment.items(), key=_readiness, reverse=True):
            if any(each.touched_by(contribution.pushed) for contribution in counted for each in slices):
                found += self._of_segment(segment, slices)
        return found

    def _of_segment(self, segment: int, slices: Iterable[SliceReduction]) -> list[Bucket]:
        if segment not in self._by_segment:
            groups: list[list[SliceReduction]] = []
            for each in sorted(slices, key=lambda each: each.number, reverse=True):
                last = groups[-1] if groups else []
                size = sum(other.part.num_bytes for other in last) + each.part.num_bytes
                if last and last[0].wide_dtype == each.wide_dtype and size <= BUCKET_BYTES:
                    last.append(each)
                else:
                    groups.append([each])
            self._by_segment[segment] = [Bucket(group, self._server.device) for group in groups]
        return self._by_segment[segment]


def _readiness(item: tuple[int, list[SliceReduction]]) -> tuple[bool, int]:
    """Buffers come last: they are pushed at the step."""
    segment, slices = item
    return not all(each.is_assigned for each in slices), segment


# -- rounds ---------------------------------------------------------------------------------------------------


class GroupRound:
    """The sums of one round, in the thread of its process group."""

    def __init__(self, buckets: Buckets, expected: Contributions, own_worker: str, all_reduce: AllReduce) -> None:
        """`expected`: its contributions; empty if nothing is added up before the round is complete."""
        self._all_buckets, self.own_worker, self._all_reduce = buckets, own_worker, all_reduce
        self._expected, self._pending = expected, list[Pending]()
        self._buckets = buckets.of(expected)

    @property
    def num_begun(self) -> int:
        """The buckets whose all-reduce has begun."""
        return len(self._pending)

    @property
    def num_expected(self) -> int:
        """The buckets of the expected round."""
        return len(self._buckets)

    def advance(self, staged: EarlyStages) -> None:
        """Begins the next buckets, as far as this server's worker has staged all their slices."""
        own, equal = self._own(self._expected), equal_weight(self._expected)
        with contextlib.suppress(KeyError):  # the worker has left: the round will be another one
            for bucket in self._buckets[self.num_begun :]:
                if not all(staged.has_all(own, number) for number in bucket.touched_by(own)):
                    break
                self._begin(bucket, staged.with_numbers(own), equal)  # looked up after the check, not before

    def _own(self, contributions: Contributions) -> Contributions:
        return [each for each in contributions if each.worker == self.own_worker]

    def _begin(self, bucket: Bucket, own: Contributions, equal: float | None) -> None:
        bucket.fill(own, equal)
        self._pending.append(self._all_reduce(bucket.flat))

    def finish(self, complete: Round, is_as_expected: bool) -> list[SliceSum]:
        """The round is complete.

        All servers make the calls of the expected round, even if the round turned out to be another one, and then
        those of the round itself. So the order of calls is the same everywhere.
        """
        counted = complete.counted
        own, equal, buckets = self._own(counted), equal_weight(counted), self._buckets
        for bucket in buckets[self.num_begun :]:
            self._begin(bucket, own if is_as_expected else (), equal)
        self._wait()
        if not is_as_expected:
            buckets = self._all_buckets.of(counted)
            for bucket in buckets:
                self._begin(bucket, own, equal)
            self._wait()
        return [found for bucket in buckets for found in bucket.finish(counted, equal)]

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()


# -- process groups -------------------------------------------------------------------------------------------

#: How long an error of torch waits for a reconfiguration that explains it. Then the round fails.
PATIENCE_SECONDS = 30.0
_LOOK_SECONDS = 0.005
#: For all servers of a group to connect to each other.
CONNECT_SECONDS = 5.0
#: The time limit of an all-reduce: other servers may be far behind in backward. None: nccl uses that of its group.
LIMITS = {"gloo": datetime.timedelta(days=365), "nccl": None}


def gloo_group(store: Store, rank: int, size: int, timeout_seconds: float, address: str) -> Any:
    """gloo, on this address only. Servers that have set their key are about to connect, so the timeout is short."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=CONNECT_SECONDS)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl_group(store: Store, rank: int, size: int, timeout_seconds: float, address: str) -> Any:
    """nccl finds its addresses itself, and connects with the first sum. The timeout ends a deadlock: one script
    synchronizes its whole GPU between backward and step, and another one has nothing left to add up.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=timeout_seconds)
    return dist.ProcessGroupNCCL(store, rank, size, options)


GROUPS: dict[str, Callable[[Store, int, int, float, str], Any]] = {"gloo": gloo_group, "nccl": nccl_group}


class ConnectedGroup(NamedTuple):
    """A process group and its store, which torch uses later too, but without keeping the Python object alive."""

    group: Any
    store: Store
    limit: datetime.timedelta | None = None  #: of each all-reduce, if it differs from that of the group


class _Staged:
    """In the queue: slices were staged early, or memory was released."""


class ProcessGroupReducer:
    """One server's reducer of one generation. Its thread makes all calls of torch.distributed, in order."""

    def __init__(
        self, names: Sequence[str], connect: Callable[[], ConnectedGroup], server: Participant, own_worker: str
    ) -> None:
        """`connect` makes the process group; all servers call it at their first complete round."""
        self.names, self._connect, self._server, self.own_worker = names, connect, server, own_worker
        self._next_round, self._staged, self._buckets = NextRound(), EarlyStages(), Buckets(server)
        self._group_round: GroupRound | None = None  # the next round, or the one that is added up
        self._is_free = True  # the round before is applied: its memory may be reused
        self._broken: Exception | None = None  # raised by early sums
        self._is_supplied, self._closed = threading.Event(), threading.Event()
        self._connected: ConnectedGroup | None = None
        self._queue: queue.SimpleQueue[Round | _Staged | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending: threading.Thread | None = None

    def reduce(self, complete: Round) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sums", daemon=True)
            self._thread.start()
        self._queue.put(complete)

    def is_staged_here(self, worker: str, number: int) -> bool:
        """A worker stages all slices at the server of its process."""
        return worker == self.own_worker

    def stage_early(self, worker: Identity, clock: int, numbers: FindNumbers, slices: set[int]) -> None:
        self._staged.note(worker, clock, numbers, slices)
        self._queue.put(_Staged())

    def supplied(self) -> None:
        self._is_supplied.set()

    def release(self, complete: Round) -> None:
        self._is_free = True
        self._queue.put(_Staged())

    def waiting_for(self) -> None:
        """torch.distributed does not say."""

    def _set_up(self) -> None:
        """Before the first sum: waits until no slice is being copied from or to this server, then connects."""
        while not self._closed.is_set() and not (self._is_supplied.is_set() and self._server.has_all()):
            self._closed.wait(_LOOK_SECONDS)
        if not self._closed.is_set():
            self._connected = self._connect()

    def close(self) -> None:
        self._closed.set()
        self._queue.put(None)
        if self._thread is not None and self._ending is None:
            self._ending = threading.Thread(target=self._abort, name="end of sums", daemon=True)
            self._ending.start()

    @property
    def is_alive(self) -> bool:
        return any(thread is not None and thread.is_alive() for thread in (self._thread, self._ending))

    def join(self, seconds: float) -> None:
        """Waits for threads in torch: a process that exits meanwhile would be aborted."""
        for thread in (self._thread, self._ending):
            if thread is not None and thread is not threading.current_thread():
                thread.join(seconds)

    def _abort(self) -> None:
        connected = self._connected
        if connected is not None:
            with contextlib.suppress(Exception):
                connected.group.abort()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None and not self._closed.is_set():
            if isinstance(item, _Staged):
                self._add_up_early()
                continue
            try:
                if self._connected is None:
                    self._set_up()
                if self._closed.is_set():
                    break
                found = self._add_up(item)
            except Exception as error:  # of torch, in any form: the workers that wait must get it
                if not self._closed.wait(PATIENCE_SECONDS):
                    item.failed(error)
                break
            if not self._closed.is_set():
                item.summed(found)
        self._connected = self._group_round = None  # both keep sockets of the group open

    def _current(self) -> GroupRound:
        if self._group_round is None:
            expected = self._next_round.expected
            self._group_round = GroupRound(self._buckets, expected, self.own_worker, self.all_reduce)
        return self._group_round

    def _add_up_early(self) -> None:
        """Errors are reported when the round is complete: a reconfiguration may come before that."""
        is_ready = self._connected is not None and self._is_free and self._broken is None
        if not is_ready or not self._next_round.expected:
            return
        try:
            with self._server.at_work():
                self._current().advance(self._staged)
        except Exception as error:  # of torch, in any form
            self._broken = error

    def _add_up(self, complete: Round) -> list[SliceSum]:
        if self._broken is not None:
            raise self._broken
        with self._server.at_work():
            current, self._group_round, self._is_free = self._current(), None, False
            found = current.finish(complete, self._next_round.settle(complete))
            self._server.settle()
        return found

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Raises ConnectionLost when the reducer is closed: slices move then, so buckets may differ in size from
        those of other servers, and gloo ends a process that receives more bytes than it expects.
        """
        if self._closed.is_set():
            raise ConnectionLost("the generation of these sums is over")
        options = dist.AllreduceOptions()
        assert self._connected is not None
        options.reduceOp = dist.ReduceOp.SUM
        if self._connected.limit is not None:
            options.timeout = self._connected.limit
        pending: Pending = self._connected.group.allreduce([tensor], options)
        return pending


_LOOPBACK = "127.0.0.1"


class ProcessGroupReducers:
    """Makes the process groups of one server, and receives the keys of their stores."""

    def __init__(self, config: JobConfig, server: Participant) -> None:
        self._config, self._server = config, server
        self.keys = StoreKeys()

    @property
    def what(self) -> str:
        return self._config.sums

    def begin(self, generation: int, names: Sequence[str]) -> ProcessGroupReducer | None:
        self.keys.begin(generation)
        if len(names) < 2:
            return None
        connect = functools.partial(self._connect, generation, names)
        return ProcessGroupReducer(names, connect, self._server, partner_of(self._server.name))

    def _connect(self, generation: int, names: Sequence[str]) -> ConnectedGroup:
        members = self._server.members(names)
        check_process_group_hosts(self._config, [member.host for member in members])
        others = self._server.partners(names)
        for partner in others:
            with contextlib.suppress(SynclineError, OSError):  # sends are repeated
                partner.connect()

        def tell(key: str, value: bytes) -> None:
            for partner in others:
                ReliableSend(partner, GroupStoreKey(generation, key, value)).send()

        seconds = self._config.wait_seconds
        store = GroupStore(generation, self.keys, tell, seconds)
        rank, address = names.index(self._server.name), self._address(members)
        made = GROUPS[self._config.sums](store, rank, len(names), seconds, address)
        return ConnectedGroup(made, store, LIMITS[self._config.sums])

    def _address(self, members: Collection[Member]) -> str:
        """Of this server; on a single host the loopback, where other hosts cannot connect."""
        if len({member.host for member in members}) == 1:
            return _LOOPBACK
        mine = next(member for member in members if member.name == self._server.name)
        return mine.address.host if mine.address is not None else _LOOPBACK

    def receive(self, request: Request, message: GroupStoreKey) -> None:
        self.keys.put(message.generation, message.key, message.value)
        request.reply(Done())

    def close(self) -> None:
        """Threads that wait for keys get an error."""
        self.keys.begin(1 << 62)
