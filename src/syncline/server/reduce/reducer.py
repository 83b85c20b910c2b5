"""The reducer of one generation of a ring, and what it has added up while a reconfiguration is on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import torch

from syncline.core.layout import Ranges, Slice
from syncline.core.members import by_name
from syncline.core.rounds import Commit
from syncline.core.slice_state import Identity
from syncline.errors import SynclineError
from syncline.server.backups import Backups
from syncline.server.executor import RoundExecutor
from syncline.server.replicate import replicate_message
from syncline.server.ring import Voting
from syncline.server.slices import RoundSums
from syncline.server.tasks import RoundTask, StagedCommit, key_of

Counted = Sequence[Commit[StagedCommit]]


class _Staged(NamedTuple):
    clock: int
    arrays: Callable[[Slice], torch.Tensor | None]
    slices: set[int]


class Early:
    """Of each worker, what belongs to the clock that it spoke of last. One thread notes while another looks: what is
    noted is never changed, only replaced."""

    def __init__(self) -> None:
        self._staged: dict[Identity, _Staged] = {}

    def note(self, worker: Identity, clock: int, contribution: StagedCommit, slices: set[int]) -> None:
        known = self._staged.get(worker)
        before = known.slices if known is not None and known.clock == clock else set[int]()
        self._staged[worker] = _Staged(clock, contribution.arrays, before | slices)

    def has_all(self, commits: Counted, number: int) -> bool:
        """Whether all of these have staged this slice."""
        return all(number in self._of(commit).slices for commit in commits)

    def _of(self, commit: Commit[StagedCommit]) -> _Staged:
        found = self._staged.get((commit.worker, commit.incarnation))
        return found if found is not None and found.clock == commit.clock else _NONE

    def with_arrays(self, commits: Counted) -> Counted:
        """These commits, which are expected, with what they have staged."""
        for commit in commits:
            commit.item.arrays = self._of(commit).arrays
        return commits


_NONE = _Staged(0, lambda part: None, set())


class CommitShare(NamedTuple):
    """One commit of a round, as far as sums depend on it."""

    worker: str
    incarnation: int
    clock: int
    weight: float
    pushed: Ranges


class NextRound:
    """The next round of a generation, and whether its sums begin during backward.

    They do after two rounds in a row with the same workers, weights and parameters, whose gradients were staged
    during backward and not edited after it. The next round is expected to be like these two, and its gradients are
    added up as they become ready. If it turns out to be another round, all of it is added up again. All servers see
    the same rounds in the same order, so all of them expect the same.
    """

    def __init__(self) -> None:
        self.number = 0  #: of this round, in its generation
        self.expected: tuple[CommitShare, ...] = ()  #: its commits; empty: sums begin when the round is complete
        self._like_last: tuple[CommitShare, ...] = ()

    def settle(self, work: RoundTask) -> bool:
        """The round is complete. Returns whether sums that began for the expected round count."""
        shares = tuple(
            CommitShare(*key_of(commit), commit.item.weight, commit.item.pushed) for commit in work.commits
        )
        items = [commit.item for commit in work.commits]
        is_plain = not work.skip and not any(item.is_edited for item in items)
        is_like_last = is_plain and shares == self._like_last
        holds = is_like_last and bool(self.expected)
        following = tuple(share._replace(clock=share.clock + 1) for share in shares)
        self._like_last = following if is_plain else ()
        is_early = is_like_last and all(item.is_early for item in items)
        self.expected = following if is_early and any(share.weight > 0 for share in shares) else ()
        self.number += 1
        return holds


def expected_commits(shares: Sequence[CommitShare]) -> Counted:
    """The commits of an expected round, as far as they count."""
    counted = []
    for share in shares:
        item = StagedCommit(share.incarnation, 0, 0)
        item.pushed, item.weight = share.pushed, share.weight
        if share.weight > 0:
            counted.append(Commit(share.worker, share.incarnation, share.clock, item))
    return counted


#: For what made sums in a generation that is over to be out of it, at the end of a server.
CLOSE_SECONDS = 5.0
Summed = Callable[[RoundTask, RoundSums], None]
Failed = Callable[[RoundTask, Exception], None]


class RoundReducer(Protocol):
    """What makes the sums of one generation: a process group, or a hierarchical reducer."""

    names: Sequence[str]

    def submit(self, work: RoundTask) -> None:
        """A round is whole here."""

    def stage_early(self, worker: Identity, clock: int, contribution: StagedCommit, slices: set[int]) -> None:
        """What a worker has staged before its commit: it may be added up already."""

    def supplied(self) -> None:
        """The others have had from here what they lacked: from now on slices may change."""

    def is_through(self, work: RoundTask) -> None:
        """A round is applied here, or never will be."""

    def awaited(self) -> tuple[RoundTask, list[str]] | None:
        """The round that is added up, and the servers of whom something is missing here, where that is known."""

    def close(self) -> None:
        """Its generation is over, under `state_lock`: whatever is on its way goes nowhere. Nobody waits for that."""

    @property
    def is_alive(self) -> bool:
        """Whether any of its threads may still be at it."""

    def join(self, seconds: float) -> None:
        """Waits for them."""


class Reducers(Protocol):
    """Makes an adder for each generation."""

    @property
    def what(self) -> str:
        """In words."""

    def begin(self, generation: int, names: Sequence[str], summed: Summed, failed: Failed) -> RoundReducer | None:
        """Under `state_lock`: replica sets have changed. None where sums are made by primaries, in this
        generation."""

    def close(self) -> None:
        """The server ends."""


class RingReducer:
    """What adds up in the current generation, and what has come of it while a change is on its way."""

    def __init__(self, adders: Reducers, flow: RoundExecutor, voting: Voting, backups: Backups) -> None:
        self._adders, self._flow, self._voting, self._backups = adders, flow, voting, backups
        self._state_lock: threading.RLock = flow.state_lock
        self._adder: RoundReducer | None = None
        self._ended: list[RoundReducer] = []
        # Summed while a change was on its way, and what was to come next.
        self._unheld: list[tuple[RoundTask, Callable[[RoundTask], None]]] = []

    @property
    def is_on(self) -> bool:
        """Under `state_lock`: whether rounds of this generation are added up this way."""
        return self._adder is not None

    def begin(self, generation: int, names: Collection[str]) -> None:
        """Under `state_lock`: replica sets have changed."""
        self.end()
        self._unheld.clear()
        self._adder = self._adders.begin(generation, sorted(names, key=by_name), self._summed, self._failed)

    def supplied(self) -> None:
        adder = self._adder
        if adder is not None:
            adder.supplied()

    def awaited(self) -> list[tuple[RoundTask, list[str]]]:
        """Under `state_lock`: for whom a round waits to be added up."""
        found = self._adder.awaited() if self._adder is not None else None
        return [found] if found is not None and found[1] else []

    def is_through(self, work: RoundTask) -> None:
        adder = self._adder
        if adder is not None and work.is_summed:
            adder.is_through(work)

    def end(self) -> None:
        """Under `state_lock`, before slices move: nothing more is added up in this generation. The adder is kept
        until its threads have ended."""
        adder, self._adder = self._adder, None
        if adder is not None:
            adder.close()
            self._ended = [*(old for old in self._ended if old.is_alive), adder]

    def close(self) -> None:
        with self._state_lock:
            self.end()
            ended, self._ended = self._ended, []
        self._adders.close()
        for adder in ended:
            adder.join(CLOSE_SECONDS)

    # -- rounds -------------------------------------------------------------------------------------------

    def stage_early(self, worker: Identity, clock: int, contribution: StagedCommit, slices: set[int]) -> None:
        """Not under `state_lock`."""
        adder = self._adder
        if adder is not None:
            adder.stage_early(worker, clock, contribution, slices)

    def submit(self, work: RoundTask) -> None:
        """A round is whole here. Until it has its sums it is on no way: others may not even have heard of it."""
        with self._state_lock:
            if not self._voting.expects(work):
                return
            self._flow.waits(work)
            adder = self._adder
        assert adder is not None
        adder.submit(work)

    def _summed(self, work: RoundTask, sums: RoundSums) -> None:
        with self._state_lock:
            if not self._voting.expects(work):
                return  # dropped
            work.sums = sums
            if self._voting.is_frozen:
                self._unheld.append((work, self._flow.summed))
                return
            self._flow.resumes(work)
        self._flow.summed(work)

    def _failed(self, work: RoundTask, error: Exception) -> None:
        with self._state_lock:
            if not self._voting.expects(work):
                return
        names = ", ".join(self._adder.names) if self._adder is not None else "servers"
        text = f"{self._adders.what} could not add up gradients among {names}: {type(error).__name__}: {error}"
        self._flow.fail(work, SynclineError(text))

    def thaw(self) -> None:
        """The change is not to be."""
        with self._state_lock:
            unheld, self._unheld = self._unheld, []
            unheld = [(work, go_on) for work, go_on in unheld if self._voting.expects(work)]
            for work, _ in unheld:
                self._flow.resumes(work)
        for work, go_on in unheld:
            go_on(work)

    def hold(self, work: RoundTask) -> bool:
        """All sums of other servers' slices are here too: they are held, and then the slices here get theirs, never
        before: this server's vote says that it holds all. False while a change is on its way: it waits for that."""
        with self._state_lock:
            if not self._voting.expects(work):
                return False
            if self._voting.is_frozen:
                self._flow.waits(work)
                self._unheld.append((work, self._flow.go_through))
                return False
            hold_sums(self._backups, work)
            for slot in work.slots:
                slot.queue.append(work)
            return True


def hold_sums(backups: Backups, work: RoundTask) -> None:
    """As if every primary had said: the same round, with the same numbers."""
    sums = work.sums
    assert sums is not None and work.ballot is not None
    for backup in list(backups.backups.values()):
        slot = backup.slot
        if slot is None:
            continue
        with slot.lock:
            commits, scale = slot.admitted(work)
            has = sums.has(slot) if commits and not work.is_beyond(slot.state.version) else []
            message = replicate_message(slot, work, commits, has, scale, work.ballot)
        backup.held = (message, sums.region(slot) if has else None)
