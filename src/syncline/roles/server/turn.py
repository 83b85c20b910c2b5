"""A round's turn at a relay: what of it is added up where, and what is still to come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from syncline.net.rpc import Request
from syncline.net.transport import Buffer, buffer_of
from syncline.roles.server.hosted import HostedSlice
from syncline.roles.server.replication import Region
from syncline.roles.server.rules import Bytes
from syncline.roles.server.saying import Saying
from syncline.roles.server.sums import RoundSums, counted_in, equal_weight, wide_type
from syncline.roles.server.work import RoundWork


class Place:
    """One slice at one server, as long as a generation lasts: where it is added up, and where its sum lies then."""

    def __init__(self, slot: HostedSlice, deputies: Mapping[str, str], region: Region | None) -> None:
        """`region`: of a deputy, which its neighbours read too."""
        self.slot, self.number, self.deputies = slot, slot.part.id, deputies
        self.region, self.is_own = region, region is not None  # None: where neighbours have it, or made when it comes
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


class Turn:
    """One round's."""

    def __init__(self, work: RoundWork, places: Iterable[Place], host_of: Callable[[str], str]) -> None:
        assert work.ballot is not None
        self.work, self.ballot = work, work.ballot
        self.counted, self.equal = counted_in(work), equal_weight(work)
        self.hosts: dict[int, set[str]] = {}  # by slice that anybody has pushed anything of: who has
        self.by_number: dict[int, Place] = {}
        for place in places:
            pushed = {host_of(c.worker) for c in self.counted if place.slot.touched_by(c.item.pushed)}
            if pushed:
                self.hosts[place.number], self.by_number[place.number] = pushed, place
        self.places = list(self.by_number.values())
        self.missing = {number: set(hosts) for number, hosts in self.hosts.items()}  # at primaries
        self.left, self.awaited = set(self.hosts), set(self.hosts)  # whose sum is not here; has not come
        self.sums = RoundSums()
        self.sayings: list[Saying] = []
        self.unanswered: list[Request] = []
