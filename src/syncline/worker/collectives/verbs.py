"""The verbs, as one worker's script calls them; see docs/guides/collectives.md."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from syncline.core.collectives import (
    ITEM_BYTES,
    check_op,
    is_inline,
    num_bytes,
    parts_of,
    result_of,
    wanted,
)
from syncline.core.members import Member
from syncline.core.wire.collectives import Shape
from syncline.errors import CollectiveError
from syncline.reduce.kernels import Reducer
from syncline.stats import WireStats
from syncline.worker.arrays import Array, Bytes, from_bytes, is_torch
from syncline.worker.collectives import transfer
from syncline.worker.collectives.calls import Calls
from syncline.worker.collectives.groups import Group, GroupLinks, choose, kind_of, plain
from syncline.worker.collectives.incoming import CallingJob
from syncline.worker.collectives.pairs import Pairs
from syncline.worker.collectives.peers import Peers
from syncline.worker.collectives.rendezvous import JointCall, LocalCall, Make, StartedCall, gathered
from syncline.worker.collectives.transfer import exchange, make_room
from syncline.worker.collectives.values import (
    NOTHING,
    Value,
    joined,
    made,
    own_bytes,
    place_of,
    put,
    value_of,
)
from syncline.worker.session import CoordinatorHandlers


class Collectives:
    """`job.collectives`: what the workers of a job do together, with no server between them."""

    def __init__(self, job: CallingJob, me: Member, handlers: CoordinatorHandlers, peers: Peers | None) -> None:
        self.calls = Calls(job, me, handlers, peers)
        self._pairs = Pairs(self.calls, me) if peers is not None else None

    def group(self, ranks: Iterable[int]) -> Group:
        """The workers that have these ranks now."""
        return choose(ranks, self.calls.world.roster)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """An array of zeros in memory that the workers of this host share; a tensor for a dtype of torch."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        name = str(dtype).removeprefix("torch.") if str(dtype).startswith("torch.") else ""
        of_torch, name = bool(name), name or _numpy_name(dtype)
        if name not in ITEM_BYTES:
            raise CollectiveError(f"empty: no dtype {name}; there are {', '.join(ITEM_BYTES)}")
        data = self.calls.memories.empty(num_bytes(name, sizes))
        return made(data, name, sizes, None, of_torch=of_torch)

    # -- reductions ---------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, op: str, group: Group | None, wait: bool, *, in_place: bool = False) -> Any:
        numbers = plain(x) if wait else None
        if numbers is None:
            return self._reduce("all_reduce", x, op, None, group, wait, in_place)
        of_torch = type(x) is not np.ndarray
        kind = kind_of("all_reduce", op, numbers, of_torch=of_torch)
        started, cached = self.calls.again(kind, numbers, group)
        if started is None or cached is None or cached.reducer is None or not started.is_whole:
            return self._reduce("all_reduce", x, op, None, group, wait, in_place, kind, started)
        flat = numbers.reshape(-1)
        total = cached.reducer.few(gathered(started, flat), flat if in_place else None)
        if in_place:
            return x
        return from_bytes(total.view(np.uint8), str(total.dtype), x.shape, as_torch=of_torch)

    def reduce(self, x: Any, root: int, op: str, group: Group | None, wait: bool, *, in_place: bool = False) -> Any:
        return self._reduce("reduce", x, op, root, group, wait, in_place)

    def _reduce(
        self, verb: str, x: Any, op: str, root: int | None, group: Group | None, wait: bool, in_place: bool,
        kind: Hashable = None, started: StartedCall | None = None,
    ) -> Any:  # fmt: skip
        value = value_of(x)
        check_op(op, value.dtype)
        if in_place:
            _check_in_place(verb, x)

        def make(group_links: GroupLinks, number: int) -> LocalCall:
            said = group_links.describe(
                number,
                verb,
                dtype=value.dtype,
                shape=value.shape,
                op=op,
                root=self._root(verb, root, group_links),
                waits=wait,
                of_torch=value.of_torch,
            )
            return LocalCall(said, value.data, is_own=value.is_view and not (in_place and root is None))

        def body(joint: JointCall) -> Any:
            is_wanted = root is None or joint.is_root
            result = self._reduced(joint, value, op, is_copied=is_wanted and not in_place)
            if kind is not None:
                joint.group_links.cache_call(kind, joint.mine, Reducer(value.dtype, op, len(joint.group_links)))
            if in_place:
                return put(x, result, verb) if is_wanted else x
            return made(result, value.dtype, value.shape, x, of_torch=value.of_torch) if is_wanted else None

        return self._go(verb, make, body, group, wait, started)

    def _reduced(self, joint: JointCall, value: Value, op: str, *, is_copied: bool) -> Bytes:
        reducer = Reducer(value.dtype, op, len(joint.group_links))
        if is_inline(joint.mine, joint.place):
            views = exchange(self.calls.rendezvous, joint)
            return reducer.small(views) if len(views[0]) == len(value.data) else value.data  # this is not the root
        if joint.is_own:
            joint.data = joint.data.copy()
        transfer.all_reduce(self.calls.rendezvous, joint, reducer)
        return joint.data.copy() if is_copied and joint.is_staged else joint.data

    def reduce_scatter(
        self, x: Any, op: str, splits: Sequence[int] | None, out: Any, group: Group | None, wait: bool
    ) -> Any:
        value = value_of(x)
        check_op(op, value.dtype)

        def make(group_links: GroupLinks, number: int) -> LocalCall:
            said = group_links.describe(
                number,
                "reduce_scatter",
                dtype=value.dtype,
                shape=value.shape,
                parts=parts_of(value.shape, splits, len(group_links)),
                op=op,
                waits=wait,
                into=place_of(out),
            )
            return LocalCall(said, value.data, is_own=value.is_view)

        def body(joint: JointCall) -> Any:
            shape = joint.mine.parts[joint.place]
            result = self._place_for(out, value.dtype, shape)
            views = exchange(self.calls.rendezvous, joint)
            Reducer(value.dtype, op, len(views)).reduce(views, [result])
            self.calls.rendezvous.leave_memory(joint)
            return _given(out, result, value.dtype, shape, x, of_torch=value.of_torch)

        return self._go("reduce_scatter", make, body, group, wait)

    # -- gathering ----------------------------------------------------------------------------------------

    def all_gather(self, x: Any, out: Any, group: Group | None, wait: bool) -> Any:
        return self._gather("all_gather", x, None, out, group, wait)

    def gather(self, x: Any, root: int, out: Any, group: Group | None, wait: bool) -> Any:
        return self._gather("gather", x, root, out, group, wait)

    def _gather(self, verb: str, x: Any, root: int | None, out: Any, group: Group | None, wait: bool) -> Any:
        value = value_of(x)

        def make(group_links: GroupLinks, number: int) -> LocalCall:
            said = group_links.describe(
                number,
                verb,
                dtype=value.dtype,
                shape=value.shape,
                root=self._root(verb, root, group_links),
                waits=wait,
                into=place_of(out),
            )
            return LocalCall(said, value.data, is_own=value.is_view)

        def body(joint: JointCall) -> Any:
            if root is not None and not joint.is_root:
                exchange(self.calls.rendezvous, joint)
                self.calls.rendezvous.leave_memory(joint)
                return None
            _, shape = result_of(joint.said, joint.place)
            result = self._place_for(out, value.dtype, shape)
            self._fill(joint, result)
            return _given(out, result, value.dtype, shape, x, of_torch=value.of_torch)

        return self._go(verb, make, body, group, wait)

    def _fill(self, joint: JointCall, result: Bytes) -> None:
        """What all ranks have for this one, one behind the other."""
        ends = list(itertools.accumulate(wanted(said, k, joint.place)[1] for k, said in enumerate(joint.said)))
        places = {k: result[(ends[k - 1] if k else 0) : end] for k, end in enumerate(ends)}
        for k, view in enumerate(exchange(self.calls.rendezvous, joint, places)):
            if view is not places[k]:
                places[k][...] = view
        self.calls.rendezvous.leave_memory(joint)

    # -- from one to all, from all to all -----------------------------------------------------------------

    def broadcast(self, x: Any, root: int, group: Group | None, wait: bool, *, in_place: bool = False) -> Any:
        value = NOTHING if x is None else value_of(x)
        if in_place:
            _check_in_place("broadcast", x)

        def make(group_links: GroupLinks, number: int) -> LocalCall:
            said = group_links.describe(
                number,
                "broadcast",
                dtype=value.dtype,
                shape=value.shape,
                root=self._root("broadcast", root, group_links),
                waits=wait,
                of_torch=value.of_torch,
            )
            return LocalCall(said, value.data, is_own=value.is_view)

        def body(joint: JointCall) -> Any:
            return self._from_root(joint, value, x if in_place else None)

        return self._go("broadcast", make, body, group, wait)

    def scatter(
        self, x: Any, root: int, splits: Sequence[int] | None, out: Any, group: Group | None, wait: bool
    ) -> Any:
        values = [] if x is None else _values(x)
        place = NOTHING if out is None else value_of(out)

        def make(group_links: GroupLinks, number: int) -> LocalCall:
            chosen = self._root("scatter", root, group_links)
            if chosen != self.calls.incarnation:
                said = group_links.describe(
                    number,
                    "scatter",
                    dtype=place.dtype,
                    shape=place.shape,
                    root=chosen,
                )
                return LocalCall(said, NOTHING.data)
            if not values:
                raise CollectiveError("scatter: the root gives an array, or as many arrays as there are ranks")
            first, parts = values[0], _parts(x, values, splits, len(group_links))
            said = group_links.describe(
                number,
                "scatter",
                dtype=first.dtype,
                shape=first.shape,
                parts=parts,
                root=chosen,
                waits=wait,
                of_torch=first.of_torch,
                into=place_of(out),
            )
            return LocalCall(said, joined(values), is_own=first.is_view)

        def body(joint: JointCall) -> Any:
            return self._from_root(joint, values[0] if values else place, out)

        return self._go("scatter", make, body, group, wait)

    def _from_root(self, joint: JointCall, value: Value, out: Any) -> Any:
        place = joint.group.index(joint.mine.root)
        root = joint.said[place]
        shape = root.parts[joint.place] if root.parts else root.shape
        if joint.is_root and root.verb == "broadcast":
            exchange(self.calls.rendezvous, joint)
            self.calls.rendezvous.leave_memory(joint)
            return value.array
        result = self._place_for(out, root.dtype, shape)
        self._fill(joint, result)
        of_torch = value.of_torch if value.dtype else root.of_torch
        return _given(out, result, root.dtype, shape, value.array, of_torch=of_torch)

    def all_to_all(self, x: Any, splits: Sequence[int] | None, group: Group | None, wait: bool) -> Any:
        values = _values(x)
        data, dtype, of_torch = joined(values), values[0].dtype, values[0].of_torch

        def make(group_links: GroupLinks, number: int) -> LocalCall:
            parts = _parts(x, values, splits, len(group_links))
            said = group_links.describe(number, "all_to_all", dtype=dtype, parts=parts, waits=wait)
            return LocalCall(said, data, is_own=values[0].is_view)

        def body(joint: JointCall) -> Any:
            shapes = [said.parts[joint.place] for said in joint.said]
            result = make_room(sum(num_bytes(dtype, shape) for shape in shapes))
            self._fill(joint, result)
            pieces, end = [], 0
            for shape in shapes:
                start, end = end, end + num_bytes(dtype, shape)
                pieces.append(made(result[start:end], dtype, shape, values[0].array, of_torch=of_torch))
            return pieces

        return self._go("all_to_all", make, body, group, wait)

    def barrier(self, group: Group | None, wait: bool) -> Any:
        def make(group_links: GroupLinks, number: int) -> LocalCall:
            return LocalCall(group_links.describe(number, "barrier", waits=wait), NOTHING.data)

        def body(joint: JointCall) -> None:
            if wait:
                joint.group_links.cache_call("barrier", joint.mine)

        started = self.calls.again("barrier", NOTHING.data, group)[0] if wait else None
        if started is not None and started.is_whole:
            return None
        return self._go("barrier", make, body, group, wait, started)

    # -- beginning again ----------------------------------------------------------------------------------

    def restart(self, step: int, state: Iterable[Any]) -> int:
        """All workers begin again together, from the state of the one that has come furthest; its step."""
        places = list(state)
        for x in places:
            _check_in_place("restart", x)
        root, newest = self._agree(step)
        copies = [self._copy_of(x, root) for x in places]
        for x, copy in zip(places, copies, strict=True):
            put(x, copy, "restart")
        return newest

    def _agree(self, step: int) -> tuple[int, int]:
        """Returns when every worker has called this: the incarnation of the first that has come furthest, its step.

        The calls that others make instead fail there, and this one is made again, as it is when a worker dies.
        """
        value = value_of(np.array(step, np.int64))
        deadline = time.monotonic() + self.calls.job.config.wait_seconds

        def make(group_links: GroupLinks, number: int) -> LocalCall:
            said = group_links.describe(number, "restart", dtype=value.dtype, shape=value.shape)
            return LocalCall(said, value.data, is_own=True)

        def body(joint: JointCall) -> tuple[int, int]:
            steps = [int(data.view(np.int64)[0]) for data in exchange(self.calls.rendezvous, joint)]
            newest = max(steps)
            attempt = 1 + max(said.attempt for said in joint.said)
            agreed.append((attempt, joint.group))
            return joint.group[steps.index(newest)], newest

        while True:
            agreed: list[tuple[int, tuple[int, ...]]] = []
            try:
                found: tuple[int, int] = self._go("restart", make, body, None, True)
            except CollectiveError:
                if time.monotonic() > deadline:
                    raise
                self.calls.pause()
            else:
                self.calls.rendezvous.heard.restart(*agreed[-1])
                return found

    def _copy_of(self, x: Any, root: int) -> Bytes:
        """What the worker of this incarnation has in x, as bytes."""
        value = value_of(x)

        def make(group_links: GroupLinks, number: int) -> LocalCall:
            if root not in group_links.group:
                raise CollectiveError("restart: the worker whose state is taken is gone; call restart() again")
            said = group_links.describe(number, "broadcast", dtype=value.dtype, shape=value.shape, root=root)
            return LocalCall(said, value.data, is_own=value.is_view)

        def body(joint: JointCall) -> Bytes:
            if joint.is_root:
                exchange(self.calls.rendezvous, joint)
                self.calls.rendezvous.leave_memory(joint)
                return value.data
            result = make_room(len(value.data))
            self._fill(joint, result)
            return result

        copy: Bytes = self._go("restart", make, body, None, True)
        return copy

    # -- from one to one ----------------------------------------------------------------------------------

    @property
    def pairs(self) -> Pairs:
        """`send` and `recv`."""
        assert self.calls.peers is not None and self._pairs is not None
        return self._pairs

    # -- how ----------------------------------------------------------------------------------------------

    def _go(
        self, verb: str, make: Make, body: Callable[[JointCall], Any],
        group: Group | None, wait: bool, started: StartedCall | None = None,
    ) -> Any:  # fmt: skip
        return self.calls.go(
            verb, lambda is_script: self.calls.meet(make, body, group, is_script, started), wait, started=started
        )

    def _root(self, verb: str, rank: int | None, group_links: GroupLinks) -> int:
        return 0 if rank is None else self.calls.world.root(rank, group_links.group, verb)

    @staticmethod
    def _place_for(out: Any, dtype: str, shape: Shape) -> Bytes:
        """Where a result comes to be: in the caller's array if it can, or in new memory."""
        own = own_bytes(out) if out is not None else None
        return make_room(num_bytes(dtype, shape)) if own is None else own

    def stats(self) -> WireStats:
        """What went between this worker and others, so far."""
        return self.calls.stats()

    # -- the end ------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Finishes what is open, and says goodbye to the other workers."""
        if self._pairs is not None:
            self._pairs.settle()
        self.calls.leave()

    def close(self) -> None:
        if self._pairs is not None:
            self._pairs.close()
        self.calls.close()


def _given(out: Any, result: Bytes, dtype: str, shape: Shape, like: Any, *, of_torch: bool) -> Array:
    if out is not None:
        return put(out, result, "out")
    return made(result, dtype, shape, like, of_torch=of_torch)


def _check_in_place(verb: str, x: Any) -> None:
    if not (is_torch(x) or (isinstance(x, np.ndarray) and x.flags.writeable)):
        raise CollectiveError(f"{verb}_: the result cannot be written into a {type(x).__name__}; use {verb}")


def _values(x: Any) -> list[Value]:
    """The pieces of a list, or one array that the call cuts into pieces."""
    values = [value_of(one) for one in x] if isinstance(x, list | tuple) else [value_of(x)]
    if len({value.dtype for value in values}) != 1:
        raise CollectiveError(f"arrays of {', '.join(value.dtype for value in values)} in one call; use one dtype")
    return values


def _parts(x: Any, values: list[Value], splits: Sequence[int] | None, count: int) -> tuple[Shape, ...]:
    if not isinstance(x, list | tuple):
        return parts_of(values[0].shape, splits, count)
    if len(values) != count:
        raise CollectiveError(f"{len(values)} arrays for {count} ranks; give one for each")
    return tuple(value.shape for value in values)


def _numpy_name(dtype: Any) -> str:
    return "bfloat16" if dtype == "bfloat16" else str(np.dtype(dtype))
