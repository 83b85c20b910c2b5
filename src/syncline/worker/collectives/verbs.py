"""The verbs, as one worker's script calls them; see docs/collectives.md."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

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
from syncline.stats import WireStats
from syncline.worker.arrays import Array, Bytes, from_bytes, is_torch
from syncline.worker.collectives import ring
from syncline.worker.collectives.calls import Calls
from syncline.worker.collectives.groups import Group, choose
from syncline.worker.collectives.habits import kind_of, plain
from syncline.worker.collectives.meeting import Begun, Call, Make, Meeting
from syncline.worker.collectives.moving import exchange, make_room
from syncline.worker.collectives.pairs import Pairs
from syncline.worker.collectives.party import Party
from syncline.worker.collectives.reducing import Reducer
from syncline.worker.collectives.repeating import gathered
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
from syncline.worker.hearing import FromCoordinator
from syncline.worker.peers import Peers

if TYPE_CHECKING:
    from syncline.worker.job import Job


class Collectives:
    """`job.collectives`: what the workers of a job do together, with no server between them."""

    def __init__(self, job: Job, me: Member, hearing: FromCoordinator, peers: Peers | None) -> None:
        self._calls = Calls(job, me, hearing, peers)
        self._pairs = Pairs(self._calls, me) if peers is not None else None

    def group(self, ranks: Iterable[int]) -> Group:
        """The workers that have these ranks now."""
        return choose(ranks, self._calls.world.roster)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """An array of zeros in memory that the workers of this host share; a tensor for a dtype of torch."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        name = str(dtype).removeprefix("torch.") if str(dtype).startswith("torch.") else ""
        of_torch, name = bool(name), name or _numpy_name(dtype)
        if name not in ITEM_BYTES:
            raise CollectiveError(f"empty: no dtype {name}; there are {', '.join(ITEM_BYTES)}")
        data = self._calls.memories.empty(num_bytes(name, sizes))
        return made(data, name, sizes, None, of_torch=of_torch)

    # -- reductions ---------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, op: str, group: Group | None, wait: bool, *, in_place: bool = False) -> Any:
        numbers = plain(x) if wait else None
        if numbers is None:
            return self._reduce("all_reduce", x, op, None, group, wait, in_place)
        of_torch = type(x) is not np.ndarray
        kind = kind_of("all_reduce", op, numbers, of_torch=of_torch)
        begun, habit = self._calls.again(kind, numbers, group)
        if begun is None or habit is None or habit.reducer is None or not begun.is_whole:
            return self._reduce("all_reduce", x, op, None, group, wait, in_place, kind, begun)
        flat = numbers.reshape(-1)
        total = habit.reducer.few(gathered(begun, flat), flat if in_place else None)
        if in_place:
            return x
        return from_bytes(total.view(np.uint8), str(total.dtype), x.shape, as_torch=of_torch)

    def reduce(self, x: Any, root: int, op: str, group: Group | None, wait: bool, *, in_place: bool = False) -> Any:
        return self._reduce("reduce", x, op, root, group, wait, in_place)

    def _reduce(
        self, verb: str, x: Any, op: str, root: int | None, group: Group | None, wait: bool, in_place: bool,
        kind: Hashable = None, begun: Begun | None = None,
    ) -> Any:  # fmt: skip
        value = value_of(x)
        check_op(op, value.dtype)
        if in_place:
            _check_in_place(verb, x)

        def make(party: Party, number: int) -> Call:
            said = party.describe(
                number,
                verb,
                dtype=value.dtype,
                shape=value.shape,
                op=op,
                root=self._root(verb, root, party),
                waits=wait,
                of_torch=value.of_torch,
            )
            return Call(said, value.data, is_own=value.is_view and not (in_place and root is None))

        def body(meeting: Meeting) -> Any:
            is_wanted = root is None or meeting.is_root
            result = self._reduced(meeting, value, op, is_copied=is_wanted and not in_place)
            if kind is not None:
                meeting.party.learn(kind, meeting.mine, Reducer(value.dtype, op, len(meeting.party)))
            if in_place:
                return put(x, result, verb) if is_wanted else x
            return made(result, value.dtype, value.shape, x, of_torch=value.of_torch) if is_wanted else None

        return self._go(verb, make, body, group, wait, begun)

    def _reduced(self, meeting: Meeting, value: Value, op: str, *, is_copied: bool) -> Bytes:
        reducer = Reducer(value.dtype, op, len(meeting.party))
        if is_inline(meeting.mine, meeting.place):
            views = exchange(self._calls.meetings, meeting)
            return reducer.small(views) if len(views[0]) == len(value.data) else value.data  # this is not the root
        if meeting.is_own:
            meeting.data = meeting.data.copy()
        ring.all_reduce(self._calls.meetings, meeting, reducer)
        return meeting.data.copy() if is_copied and meeting.is_staged else meeting.data

    def reduce_scatter(
        self, x: Any, op: str, splits: Sequence[int] | None, out: Any, group: Group | None, wait: bool
    ) -> Any:
        value = value_of(x)
        check_op(op, value.dtype)

        def make(party: Party, number: int) -> Call:
            said = party.describe(
                number,
                "reduce_scatter",
                dtype=value.dtype,
                shape=value.shape,
                parts=parts_of(value.shape, splits, len(party)),
                op=op,
                waits=wait,
                into=place_of(out),
            )
            return Call(said, value.data, is_own=value.is_view)

        def body(meeting: Meeting) -> Any:
            shape = meeting.mine.parts[meeting.place]
            result = self._place_for(out, value.dtype, shape)
            views = exchange(self._calls.meetings, meeting)
            Reducer(value.dtype, op, len(views)).reduce(views, [result])
            self._calls.meetings.leave_memory(meeting)
            return _given(out, result, value.dtype, shape, x, of_torch=value.of_torch)

        return self._go("reduce_scatter", make, body, group, wait)

    # -- gathering ----------------------------------------------------------------------------------------

    def all_gather(self, x: Any, out: Any, group: Group | None, wait: bool) -> Any:
        return self._gather("all_gather", x, None, out, group, wait)

    def gather(self, x: Any, root: int, out: Any, group: Group | None, wait: bool) -> Any:
        return self._gather("gather", x, root, out, group, wait)

    def _gather(self, verb: str, x: Any, root: int | None, out: Any, group: Group | None, wait: bool) -> Any:
        value = value_of(x)

        def make(party: Party, number: int) -> Call:
            said = party.describe(
                number,
                verb,
                dtype=value.dtype,
                shape=value.shape,
                root=self._root(verb, root, party),
                waits=wait,
                into=place_of(out),
            )
            return Call(said, value.data, is_own=value.is_view)

        def body(meeting: Meeting) -> Any:
            if root is not None and not meeting.is_root:
                exchange(self._calls.meetings, meeting)
                self._calls.meetings.leave_memory(meeting)
                return None
            _, shape = result_of(meeting.said, meeting.place)
            result = self._place_for(out, value.dtype, shape)
            self._fill(meeting, result)
            return _given(out, result, value.dtype, shape, x, of_torch=value.of_torch)

        return self._go(verb, make, body, group, wait)

    def _fill(self, meeting: Meeting, result: Bytes) -> None:
        """What all ranks have for this one, one behind the other."""
        ends = list(itertools.accumulate(wanted(said, k, meeting.place)[1] for k, said in enumerate(meeting.said)))
        places = {k: result[(ends[k - 1] if k else 0) : end] for k, end in enumerate(ends)}
        for k, view in enumerate(exchange(self._calls.meetings, meeting, places)):
            if view is not places[k]:
                places[k][...] = view
        self._calls.meetings.leave_memory(meeting)

    # -- from one to all, from all to all -----------------------------------------------------------------

    def broadcast(self, x: Any, root: int, group: Group | None, wait: bool, *, in_place: bool = False) -> Any:
        value = NOTHING if x is None else value_of(x)
        if in_place:
            _check_in_place("broadcast", x)

        def make(party: Party, number: int) -> Call:
            said = party.describe(
                number,
                "broadcast",
                dtype=value.dtype,
                shape=value.shape,
                root=self._root("broadcast", root, party),
                waits=wait,
                of_torch=value.of_torch,
            )
            return Call(said, value.data, is_own=value.is_view)

        def body(meeting: Meeting) -> Any:
            return self._from_root(meeting, value, x if in_place else None)

        return self._go("broadcast", make, body, group, wait)

    def scatter(
        self, x: Any, root: int, splits: Sequence[int] | None, out: Any, group: Group | None, wait: bool
    ) -> Any:
        values = [] if x is None else _values(x)
        place = NOTHING if out is None else value_of(out)

        def make(party: Party, number: int) -> Call:
            chosen = self._root("scatter", root, party)
            if chosen != self._calls.incarnation:
                said = party.describe(
                    number,
                    "scatter",
                    dtype=place.dtype,
                    shape=place.shape,
                    root=chosen,
                )
                return Call(said, NOTHING.data)
            if not values:
                raise CollectiveError("scatter: the root gives an array, or as many arrays as there are ranks")
            first, parts = values[0], _parts(x, values, splits, len(party))
            said = party.describe(
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
            return Call(said, joined(values), is_own=first.is_view)

        def body(meeting: Meeting) -> Any:
            return self._from_root(meeting, values[0] if values else place, out)

        return self._go("scatter", make, body, group, wait)

    def _from_root(self, meeting: Meeting, value: Value, out: Any) -> Any:
        place = meeting.group.index(meeting.mine.root)
        root = meeting.said[place]
        shape = root.parts[meeting.place] if root.parts else root.shape
        if meeting.is_root and root.verb == "broadcast":
            exchange(self._calls.meetings, meeting)
            self._calls.meetings.leave_memory(meeting)
            return value.array
        result = self._place_for(out, root.dtype, shape)
        self._fill(meeting, result)
        of_torch = value.of_torch if value.dtype else root.of_torch
        return _given(out, result, root.dtype, shape, value.array, of_torch=of_torch)

    def all_to_all(self, x: Any, splits: Sequence[int] | None, group: Group | None, wait: bool) -> Any:
        values = _values(x)
        data, dtype, of_torch = joined(values), values[0].dtype, values[0].of_torch

        def make(party: Party, number: int) -> Call:
            parts = _parts(x, values, splits, len(party))
            said = party.describe(number, "all_to_all", dtype=dtype, parts=parts, waits=wait)
            return Call(said, data, is_own=values[0].is_view)

        def body(meeting: Meeting) -> Any:
            shapes = [said.parts[meeting.place] for said in meeting.said]
            result = make_room(sum(num_bytes(dtype, shape) for shape in shapes))
            self._fill(meeting, result)
            pieces, end = [], 0
            for shape in shapes:
                start, end = end, end + num_bytes(dtype, shape)
                pieces.append(made(result[start:end], dtype, shape, values[0].array, of_torch=of_torch))
            return pieces

        return self._go("all_to_all", make, body, group, wait)

    def barrier(self, group: Group | None, wait: bool) -> Any:
        def make(party: Party, number: int) -> Call:
            return Call(party.describe(number, "barrier", waits=wait), NOTHING.data)

        def body(meeting: Meeting) -> None:
            if wait:
                meeting.party.learn("barrier", meeting.mine)

        begun = self._calls.again("barrier", NOTHING.data, group)[0] if wait else None
        if begun is not None and begun.is_whole:
            return None
        return self._go("barrier", make, body, group, wait, begun)

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
        deadline = time.monotonic() + self._calls.job.config.wait_seconds

        def make(party: Party, number: int) -> Call:
            said = party.describe(number, "restart", dtype=value.dtype, shape=value.shape)
            return Call(said, value.data, is_own=True)

        def body(meeting: Meeting) -> tuple[int, int]:
            steps = [int(data.view(np.int64)[0]) for data in exchange(self._calls.meetings, meeting)]
            newest = max(steps)
            attempt = 1 + max(said.attempt for said in meeting.said)
            agreed.append((attempt, meeting.group))
            return meeting.group[steps.index(newest)], newest

        while True:
            agreed: list[tuple[int, tuple[int, ...]]] = []
            try:
                found: tuple[int, int] = self._go("restart", make, body, None, True)
            except CollectiveError:
                if time.monotonic() > deadline:
                    raise
                self._calls.pause()
            else:
                self._calls.meetings.heard.restart(*agreed[-1])
                return found

    def _copy_of(self, x: Any, root: int) -> Bytes:
        """What the worker of this incarnation has in x, as bytes."""
        value = value_of(x)

        def make(party: Party, number: int) -> Call:
            if root not in party.group:
                raise CollectiveError("restart: the worker whose state is taken is gone; call restart() again")
            said = party.describe(number, "broadcast", dtype=value.dtype, shape=value.shape, root=root)
            return Call(said, value.data, is_own=value.is_view)

        def body(meeting: Meeting) -> Bytes:
            if meeting.is_root:
                exchange(self._calls.meetings, meeting)
                self._calls.meetings.leave_memory(meeting)
                return value.data
            result = make_room(len(value.data))
            self._fill(meeting, result)
            return result

        copy: Bytes = self._go("restart", make, body, None, True)
        return copy

    # -- from one to one ----------------------------------------------------------------------------------

    @property
    def pairs(self) -> Pairs:
        """`send` and `recv`."""
        assert self._calls.peers is not None and self._pairs is not None
        return self._pairs

    # -- how ----------------------------------------------------------------------------------------------

    def _go(
        self, verb: str, make: Make, body: Callable[[Meeting], Any],
        group: Group | None, wait: bool, begun: Begun | None = None,
    ) -> Any:  # fmt: skip
        return self._calls.go(
            verb, lambda is_script: self._calls.meet(make, body, group, is_script, begun), wait, begun=begun
        )

    def _root(self, verb: str, rank: int | None, party: Party) -> int:
        return 0 if rank is None else self._calls.world.root(rank, party.group, verb)

    @staticmethod
    def _place_for(out: Any, dtype: str, shape: Shape) -> Bytes:
        """Where a result comes to be: in the caller's array if it can, or in new memory."""
        own = own_bytes(out) if out is not None else None
        return make_room(num_bytes(dtype, shape)) if own is None else own

    def stats(self) -> WireStats:
        """What went between this worker and others, so far."""
        return self._calls.stats()

    # -- the end ------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Finishes what is open, and says goodbye to the other workers."""
        if self._pairs is not None:
            self._pairs.settle()
        self._calls.leave()

    def close(self) -> None:
        if self._pairs is not None:
            self._pairs.close()
        self._calls.close()


def _given(out: Any, result: Bytes, dtype: str, shape: Shape, like: Any, *, of_torch: bool) -> Array:
    if out is not None:
        return put(out, result, "out")
    return made(result, dtype, shape, like, of_torch=of_torch)


def _check_in_place(verb: str, x: Any) -> None:
    if not (is_torch(x) or (isinstance(x, np.ndarray) and x.flags.writeable)):
        raise CollectiveError(f"{verb}_: the result cannot be written into a {type(x).__name__}; use {verb}")


def _values(x: Any) -> list[Value]:
    """The pieces of a list, or one array that is to be cut."""
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
