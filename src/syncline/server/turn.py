"""A round's turn at a relay: what of it is added up where, and what is still to come.

A turn begins with the forecast of its round, so that sums begin with what is staged early. When the round is whole
the turn takes it up: what was added up early counts where the forecast has held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from syncline.core.forecast import Outcome
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, buffer_of
from syncline.server.early import Counted
from syncline.server.hosted import HostedSlice
from syncline.server.replication import Region
from syncline.server.rules import Bytes
from syncline.server.saying import Saying
from syncline.server.sums import RoundSums, counted_in, equal_weight, wide_type
from syncline.server.work import RoundWork


class Place:
    """One slice at one server, as long as a generation lasts: where it is added up, and where its sum lies then."""

    def __init__(self, slot: HostedSlice, host_leaders: Mapping[str, str], region: Region | None) -> None:
        """`region`: of a host leader, which its neighbours read too."""
        self.slot, self.number, self.host_leaders = slot, slot.part.id, host_leaders
        self.region, self.is_own = region, region is not None  # None: where neighbours have it, or made when it comes
        self.lock = threading.Lock()  # whoever writes the region has it
        self._wide: torch.Tensor | None = None
        self.parts: dict[str, Bytes] = {}  # at its primary: sums of other hosts
        self.spare: list[Bytes] = []  # memory of such
        self.given: Sequence[Saying] = ()  # to neighbours, which read the region until they have answered
        self.waiting: list[Callable[[], None]] = []  # for that

    @property
    def wide(self) -> torch.Tensor:
        """In which this host's gradients are added up: the region itself, where that is as wide."""
        assert self.region is not None
        if self._wide is None:
            kind, flat = wide_type(self.slot), self.region.flat
            self._wide = flat if flat.dtype == kind else torch.zeros(flat.numel(), dtype=kind)
        return self._wide

    @property
    def wide_bytes(self) -> Buffer:
        return buffer_of(self.wide.view(torch.uint8).numpy())

    def add(self, parts: Iterable[Bytes], *, is_first: bool) -> None:
        """Other hosts' sums, in their order; `is_first`: there are none of this host."""
        for part in parts:
            numbers = torch.from_numpy(part).view(self.wide.dtype)
            if is_first:
                self.wide.copy_(numbers)
            else:
                self.wide.add_(numbers)
            is_first = False

    def read_in(self, view: Bytes) -> None:
        """A neighbour's memory, where the sum lies."""
        if self.region is None or self.region.array.ctypes.data != view.ctypes.data:
            self.region, self.is_own = Region(view, self.slot.part.dtype), False

    def take(self, data: Bytes) -> None:
        """A sum that has come as bytes."""
        if self.region is None or not self.is_own:
            self.region = Region(np.zeros(self.slot.part.num_bytes, np.uint8), self.slot.part.dtype)
            self.is_own = True
        if self.region.array.ctypes.data != data.ctypes.data:
            self.region.array[:] = data

    def empty(self) -> None:
        """What has come for a forecast that did not hold is nothing."""
        self.spare += self.parts.values()
        self.parts.clear()


class Turn:
    """One round's. All under the relay's lock."""

    def __init__(self, number: int, counted: Counted, places: Iterable[Place], host_of: Callable[[str], str]) -> None:
        """`number`: of the round, in its generation; `counted`: its commits, or those of its forecast."""
        self.number, self._places, self._host_of = number, list(places), host_of
        self.work: RoundWork | None = None  # when it is whole
        self.errors: dict[int, Exception] = {}  # by slice: of what was done early
        self._outcome: Outcome | None = None
        self.sayings: list[tuple[int, Saying]] = []  # by slice
        self.unanswered: list[tuple[int, Request]] = []  # of slices that are read where they lie
        self._count(counted)

    def _count(self, counted: Counted) -> None:
        self.counted, self.equal = counted, equal_weight(counted)
        self.hosts: dict[int, set[str]] = {}  # by slice that anybody has pushed anything of: who has
        self.by_number: dict[int, Place] = {}
        for place in self._places:
            pushed = {self._host_of(c.worker) for c in counted if place.slot.touched_by(c.item.pushed)}
            if pushed:
                self.hosts[place.number], self.by_number[place.number] = pushed, place
        self.missing = {number: set(hosts) for number, hosts in self.hosts.items()}  # at primaries
        self.left, self.awaited = set(self.hosts), set(self.hosts)  # whose sum is not here; has not come
        self.begun: set[int] = set()  # slices of which this host's sum is being made here, or is
        self.sums = RoundSums()

    @property
    def weight(self) -> float:
        """Of the whole round."""
        return sum(commit.item.weight for commit in self.counted)

    def is_anew(self, number: int) -> bool:
        """Whether this slice is added up again: what was made of it early counts for nothing."""
        return self._outcome is not None and self._outcome.is_anew(number)

    def take_up(self, work: RoundWork, outcome: Outcome) -> list[Request]:
        """Its round is whole. Returns whom to tell that what they have lent is not read any more."""
        early = list(self.by_number.values())
        self.work, self._outcome = work, outcome
        if outcome.was_forecast and not outcome.held:
            self._count(counted_in(work))
        else:
            self.counted = counted_in(work)
        anew = [place for place in early if outcome.is_anew(place.number)]
        for place in anew:
            place.empty()
            self.errors.pop(place.number, None)
            self._begin_anew(place.number)
        numbers = {place.number for place in anew}
        for number, saying in self.sayings:
            if number in numbers:
                saying.take_back()
        answered = [request for number, request in self.unanswered if number in numbers]
        self.unanswered = [(number, request) for number, request in self.unanswered if number not in numbers]
        return answered

    def _begin_anew(self, number: int) -> None:
        if number in self.hosts:
            self.missing[number] = set(self.hosts[number])
            self.left.add(number)
            self.awaited.add(number)
            self.begun.discard(number)
