"""Who takes part in a call, and what is kept for them.

A `Group` is chosen by ranks; `World` is all workers. `Attempt` decides which calls may meet. `GroupLinks` has the
links to all members of a group and is reused until a member joins or leaves. A `CachedCall` is a small call that a
script repeats: its message is kept as bytes and compared as bytes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from syncline.core.collectives import INLINE_BYTES
from syncline.core.members import Member
from syncline.core.units import listed
from syncline.core.wire.collectives import STRANGER, Describe
from syncline.core.wire.control import Roster
from syncline.errors import CollectiveError
from syncline.net import frame
from syncline.net.rpc import Endpoint
from syncline.reduce.kernels import Reducer
from syncline.worker.collectives.peers import PeerLink, PeerStream
from syncline.worker.session import Rosters, ranked


@dataclasses.dataclass(frozen=True)
class Group:
    """Some workers of the job, as they were when the group was made: a worker that dies or leaves stays in it."""

    members: tuple[Member, ...]

    def __hash__(self) -> int:
        return hash(tuple(member.incarnation for member in self.members))

    def __repr__(self) -> str:
        return f"Group({', '.join(self.names)})"

    def __len__(self) -> int:
        return len(self.members)

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]


def choose(ranks: Iterable[int], roster: Roster) -> Group:
    """The workers that have these ranks now."""
    workers, wanted = ranked(roster), sorted(set(ranks))
    for rank in wanted:
        if not 0 <= rank < len(workers):
            raise CollectiveError(f"group({wanted}): there is no rank {rank}, the job has {len(workers)} workers")
    if not wanted:
        raise CollectiveError("group([]): a group has at least one rank")
    return Group(tuple(workers[rank] for rank in wanted))


class World:
    """All workers that are there, by the newest roster."""

    def __init__(self, me: Member, rosters: Rosters) -> None:
        self._me, self._rosters = me, rosters

    @property
    def roster(self) -> Roster:
        return self._rosters.newest

    def members(self, group: Group | None) -> tuple[list[Member], int]:
        """The members that take part in a call, in the order of ranks; and the generation, if these are all
        workers."""
        if group is None:
            roster = self.roster
            live = {member.incarnation for member in roster.members}
            members = [one for one in ranked(roster) if one.incarnation in live]
            return (members or [self._me], max(1, roster.generation))
        if self._me.incarnation not in [member.incarnation for member in group.members]:
            raise CollectiveError(f"{self._me.name} is not in this group: {listed(group.names)}")
        live = {member.incarnation for member in self.roster.members}
        gone = [member.name for member in group.members if member.incarnation not in live]
        if gone:
            raise CollectiveError(
                f"{listed(gone)} of this group is gone; make a new group of the workers that are left"
            )
        return list(group.members), 0

    def root(self, rank: int, group: Sequence[int], what: str) -> int:
        """The incarnation of the worker of this rank, which must take part."""
        workers = ranked(self.roster)
        if not 0 <= rank < len(workers):
            raise CollectiveError(f"{what}: there is no rank {rank}, the job has {len(workers)} workers")
        found = workers[rank]
        if found.incarnation not in group:
            raise CollectiveError(f"{what}: rank {rank}, {found.name}, is not in this group")
        return found.incarnation


class Attempt:
    """The attempt of one worker: how often all have restarted together, and which calls failed since. Everything in
    it is changed and read under the lock of all links."""

    def __init__(self, me: int) -> None:
        self._me = me
        self.number = 0  # of restarts together with the others
        self.version = 0  # changes whenever what is described changes
        self._known: frozenset[int] | None = None  # incarnations that were there at the first call; None: none made
        self._failures: dict[int, int] = {}  # by incarnation: of calls with this one

    def failures(self, group: Sequence[int]) -> tuple[int, ...]:
        """What a description says of every member; empty, if there is nothing to say.

        The own entry is the largest of the others: where all have seen the same, all say it in the same bytes.
        """
        counts = {one: self._count(one) for one in group if one != self._me}
        if not any(counts.values()):
            return ()
        counts[self._me] = max(0, *counts.values())
        return tuple(counts[one] for one in group)

    def is_stranger(self, incarnation: int) -> bool:
        """Whether this worker began its script after the own one had made its first call."""
        return self._known is not None and incarnation not in self._known

    def _count(self, incarnation: int) -> int:
        return STRANGER if self.is_stranger(incarnation) else self._failures.get(incarnation, 0)

    def end(self, there: frozenset[int]) -> None:
        """A call has ended, well or not; `there`: who was there when it began. The first one decides who is known."""
        if self._known is None:
            self._known = there | {self._me}

    def fail(self, group: Sequence[int], count: int = 1) -> None:
        """Calls of this group have failed here, or will never be made here."""
        if count > 0 and self._me in group:
            for one in group:
                self._failures[one] = self._failures.get(one, 0) + count
            self.version += 1

    def restart(self, number: int, group: Sequence[int]) -> None:
        """All of this group begin again together; `number`: the attempt that they have agreed on."""
        self.number = number
        self._known = frozenset(group) | (self._known or frozenset())
        self._failures.clear()
        self.version += 1


#: Of one group; a script has few.
MOST_CACHED_CALLS = 256
_encode = msgspec.msgpack.Encoder().encode


class CachedCall:
    """The description of a repeated call, but for its number: all ranks send the same bytes, or they disagree."""

    def __init__(self, said: Describe, reducer: Reducer | None = None) -> None:
        self.reducer = reducer
        body, group = frame.encode(msgspec.structs.replace(said, number=0)), _encode(said.group)
        at = body.index(group) + len(group)
        assert body[at] == 0, "the number comes behind the group"
        self._before, self._after = body[:at], body[at + 1 :]

    def body(self, number: int) -> bytes:
        """Of the call of this number, as it goes over the wire."""
        return self._before + _encode(number) + self._after


def plain(x: Any) -> np.ndarray[Any, Any] | None:
    """The numbers of an array or tensor in place, if they are few and NumPy has their dtype."""
    if type(x) is not np.ndarray:
        torch = sys.modules.get("torch")
        if torch is None or type(x) is not torch.Tensor or not x.is_cpu or x.layout is not torch.strided:
            return None
        if x.dtype in (torch.bfloat16, torch.float16) or x.is_conj() or x.is_neg():
            return None
        x = x.detach().numpy()
    if not 0 < x.nbytes <= INLINE_BYTES:
        return None
    flags, dtype = x.flags, x.dtype
    return x if flags.c_contiguous and flags.writeable and dtype.isnative and dtype.char != "e" else None


def kind_of(verb: str, op: str, numbers: np.ndarray[Any, Any], *, of_torch: bool) -> Hashable:
    """A key of a call's description: equal descriptions have equal keys."""
    return verb, op, numbers.dtype, numbers.shape, of_torch


class GroupLinks:
    """The members of a group and the links to them, by their places in it."""

    def __init__(self, members: Sequence[Member], me: int, generation: int, there: frozenset[int]) -> None:
        """`me`: an incarnation. `generation`: of the roster, if these are all workers; else 0. `there`: the
        incarnations of all workers."""
        self.members, self.generation = list(members), generation
        self.there = there
        self.attempt, self.num_calls = 0, 0
        self.failures: tuple[int, ...] = ()
        self.names = [member.name for member in members]
        self.group = tuple(member.incarnation for member in members)
        self.place = self.group.index(me)
        self.links: dict[int, PeerLink] = {}
        self.streams: dict[int, PeerStream] = {}
        self.host = me  # the first that shares memory with this one
        self.sharing: list[int] = [self.place]
        self.cached_calls: dict[Hashable, CachedCall] = {}
        self.local_peers: list[
            tuple[int, Endpoint, PeerStream]
        ] = []  # the others, if none is heard until this one reads

    def __len__(self) -> int:
        return len(self.members)

    @property
    def is_open(self) -> bool:
        """Whether there are links to all others."""
        for link in self.links.values():
            if link.lost:
                return False
        return len(self.links) == len(self.members) - 1

    def open(self, links: dict[int, PeerLink], streams: dict[int, PeerStream]) -> None:
        self.links, self.streams = links, streams
        self.sharing = sorted([self.place, *(place for place, link in links.items() if link.shares_memory)])
        self.host = self.group[self.sharing[0]]
        is_near = all(link.waiter_reads for link in links.values())
        found = [(place, link.endpoint, streams[place]) for place, link in links.items() if is_near]
        self.cached_calls, self.local_peers = {}, found

    def cache_call(self, kind: Hashable, said: Describe, reducer: Reducer | None = None) -> None:
        """All have called this, and may do so again."""
        if self.local_peers:
            if len(self.cached_calls) >= MOST_CACHED_CALLS:
                self.cached_calls.clear()
            self.cached_calls[kind] = CachedCall(said, reducer)

    def describe(self, number: int, verb: str, **fields: Any) -> Describe:
        """A call of this group."""
        return Describe(
            self.group, number, verb, generation=self.generation, host=self.host, sharing=len(self.sharing),
            attempt=self.attempt, failures=self.failures, num_calls=self.num_calls, **fields,
        )  # fmt: skip
