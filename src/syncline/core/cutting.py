"""The cut: where a save goes through a job that goes on, and what of the samples is done there.

Every server with slices closes its gate, lets what has begun come to its end, and says of every worker how far its
slices are. When all say the same, and that of all their slices, the job is *level* there: no step is on some slices
only. Else each is told the highest that any of them has, and lets that in; a rest that comes in with it may take
others further. Where a script makes several commits of a batch, a level place among them is no cut: all are told its
next boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from syncline.core.handing import Use
from syncline.core.leasing import LeaseState, Leasing
from syncline.core.places import without
from syncline.core.saving import CloseGate, GateClosed, Noted
from syncline.core.slices import Identity, highest_clocks

#: Commits wait while gates are closed: a job that is not level after so long is tried again later.
CUT_SECONDS = 2.0
#: Until then; and how often a save is tried before it is given up.
AGAIN_SECONDS = 1.0
MOST_TRIES = 3


class Cut:
    """One try to find all servers level."""

    def __init__(
        self, number: int, servers: Iterable[str], until: float, noted: Mapping[Identity, Noted] | None = None
    ) -> None:
        """`noted`: where boundaries of workers are, by what they said of them."""
        self._noted = noted or {}
        # Of one in its first batch it is not known: all run the same script.
        self._usual = max([1, *(known.num_commits for known in self._noted.values())])
        self.number, self.servers, self.until = number, sorted(servers), until
        self.turn = 0
        self.clocks: dict[Identity, int] = {}  # the highest that any server has
        self._answers: dict[str, GateClosed] = {}

    def close(self) -> CloseGate:
        """What every server is told now."""
        behind = self.behind()
        through = [
            (*life, clock)
            for life, clock in sorted(self.clocks.items())
            # Who waits for what is not for it waits for nothing.
            if life[0] in behind or not any(self._is_elsewhere(life, answer) for answer in self._answers.values())
        ]
        return CloseGate(self.number, self.turn, through)

    def decide(self, answers: Mapping[str, GateClosed], now: float) -> Literal["level", "further", "late"]:
        """Of all servers' answers: the job is level; or they are to be told anew; or commits have waited enough."""
        self._answers = {server: answers[server] for server in self.servers}
        told = [_clocks(answer) for answer in self._answers.values() if answer.has_slices]
        self.clocks = {life: clock for life, clock in highest_clocks(told).items() if clock}
        if not self.behind():
            further = {life: self._boundary(life, clock) for life, clock in self.clocks.items()}
            if further == self.clocks or now >= self.until:
                return "level"
            self.clocks = further
        self.turn += 1
        return "further" if now < self.until else "late"

    def _boundary(self, life: Identity, clock: int) -> int:
        """The first one of this worker's from here on, if its batches go on as they did."""
        noted = self._noted.get(life)
        if noted is None:
            return clock
        return max(noted.clock, clock + (noted.clock - clock) % (noted.num_commits or self._usual))

    @property
    def uses(self) -> list[Use]:
        """What commits that are in have used, and the coordinator had not confirmed."""
        return [use for answer in self._answers.values() for use in answer.uses]

    @property
    def late(self) -> list[Use]:
        return [use for answer in self._answers.values() for use in answer.late]

    @property
    def num_updates(self) -> int:
        """Of the slice that has had the most."""
        return max((answer.num_updates for answer in self._answers.values()), default=0)

    @property
    def versions(self) -> int:
        """Of all slices together: nothing comes into any of them without a change of it."""
        return sum(answer.versions for answer in self._answers.values())

    def behind(self) -> list[str]:
        """Workers whose commits are on some servers only, by the last answers."""
        found = {name for answer in self._answers.values() for name, _, _ in answer.behind}
        for answer in [answer for answer in self._answers.values() if answer.has_slices]:
            told = _clocks(answer)
            lacking = [life for life, clock in self.clocks.items() if told.get(life, 0) != clock]
            found |= {life[0] for life in lacking if not self._is_elsewhere(life, answer)}
        return sorted(found)

    def _is_elsewhere(self, life: Identity, answer: GateClosed) -> bool:
        """Whether this server's slices came later than this worker's last commit, which was not for them."""
        if life in _clocks(answer) or not answer.has_slices:
            return False
        known = [number for one in self._answers.values() for *who, number in one.registered if tuple(who) == life]
        return 0 < max(known, default=0) <= answer.first_segment


def _clocks(answer: GateClosed) -> dict[Identity, int]:
    return {(name, incarnation): clock for name, incarnation, clock in answer.clocks if clock}


def ledger_at(leases: LeaseState, uses: Iterable[Use], late: Iterable[Use]) -> LeaseState:
    """The ledger as it is at a cut: what is known, and what servers said there. A copy."""
    copied = _copy(leases)
    leasing = Leasing(copied, in_rounds=False)
    leasing.used(uses)
    for use in late:
        for epochs in copied.epochs.values():
            for epoch in epochs.values():
                epoch.late(*use)  # also in an epoch that others have left: whoever takes it up reads it
    leasing.forget_finished()
    return copied


def taken_up(leases: LeaseState) -> LeaseState:
    """The ledger with which another job goes on: what was leased is to do, numbers of leases go on. A copy.

    An epoch that all but who held something had left is read on: what was held is in no step of the checkpoint.
    """
    copied = _copy(leases)
    for name, epochs in copied.epochs.items():
        for number, epoch in epochs.items():
            for owner in {lease.owner for lease in epoch.leases.values()}:
                epoch.out(owner, failed=False)
            if epoch.todo:
                copied.finished[name] = without(copied.finished.get(name, []), (number, number + 1))
    Leasing(copied, in_rounds=False).forget_finished()
    copied.unheard, copied.sharing = {}, {}
    # Of an epoch in the middle nothing may be another; the next one may have batches of another size.
    copied.loaders = {name: loader for name, loader in copied.loaders.items() if copied.epochs.get(name)}
    copied.resumed = sorted(copied.loaders)
    return copied


def _copy(leases: LeaseState) -> LeaseState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(leases), type=LeaseState)
