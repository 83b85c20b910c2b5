"""Tasks for a server's slices: a round on its way through all of them, or a fence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from syncline.core.layout import Ranges, Slice
from syncline.core.policy import Policy
from syncline.core.ring import Ballot
from syncline.core.rounds import Commit, RoundMembership
from syncline.core.rule import Option
from syncline.core.slice_state import Identity
from syncline.core.wire.leases import Use
from syncline.errors import RuleError, SynclineError
from syncline.net.rpc import Request

if TYPE_CHECKING:
    from syncline.server.slices import HostedSlice, RoundSums, Snapshot


#: Name, incarnation and clock: one commit, and no other that there will ever be.
Key = tuple[str, int, int]


def key_of(commit: Commit[StagedCommit]) -> Key:
    return (commit.worker, commit.item.incarnation, commit.clock)


class RingRounds(Protocol):
    """What a server of a ring asks of its votes (`ring.Voting`)."""

    @property
    def generation(self) -> int: ...

    def expect(self, work: RoundTask) -> None:
        """The round is complete here: it waits for the other servers."""

    def expects(self, work: RoundTask) -> bool:
        """Whether the round still waits here, and was not dropped."""

    def reduce(self, work: RoundTask) -> None:
        """Adds the gradients of the round up."""

    def hold_sums(self, work: RoundTask) -> bool:
        """Holds the sums of all slices; False while a reconfiguration is on its way."""

    def sum_up_spread(self, work: RoundTask) -> None:
        """Adds up the spread slices whose primary is on another server."""

    def held(self, work: RoundTask) -> None:
        """All other servers hold the sums of the slices here."""

    def holds(self, ballot: Ballot, take: Callable[[], None]) -> Literal["held", "later", "over"]:
        """A backup has an update of the round `ballot`."""

    def look(self) -> None:
        """What kept rounds from being applied may be over."""

    def stage_early(self, worker: Identity, clock: int, staged: StagedCommit, slices: set[int]) -> None:
        """A worker has staged these slices before its commit. Not under `state_lock`."""

    def is_through(self, work: RoundTask) -> None:
        """The round is applied, or was dropped. Not under `state_lock`."""

    def missing(self, now: float) -> list[tuple[int, list[str], float]]:
        """The rounds that wait for votes: clock, the servers that have not voted, and for how many seconds."""


class Progress(Protocol):
    """Hears of slices as they are applied, and how it ended."""

    def count(self, num_bytes: int) -> None:
        """So much was copied for it, and for others."""

    @property
    def copies(self) -> bool:
        """Whether it sends copies of slices, since others may write them meanwhile."""

    def applied(self, slot: HostedSlice, *, snapshot: Snapshot | None = None, locked: bool = False) -> None:
        """This slice is as the commit left it, or newer; `locked`: the caller holds its lock."""

    def hear(self, item: StagedCommit, roll: RoundMembership | None) -> None:
        """What goes with the end of the answer."""

    def finish(self, end: Callable[[], None] | None = None) -> None:
        """The round is applied, or ends otherwise."""


class StagedCommit:
    """One worker's staged commit at this server: what it says, where its bytes lie, who wants the answer."""

    __slots__ = (
        "again",
        "answer",
        "arrays",
        "back_at",
        "clip_norm",
        "clocks",
        "incarnation",
        "is_early",
        "is_edited",
        "is_fenced",
        "is_late",
        "is_skipped",
        "is_told",
        "overrides",
        "phase",
        "pushed",
        "request",
        "since",
        "skip",
        "slot",
        "uses",
        "weight",
    )  # fmt: skip

    def __init__(self, incarnation: int, phase: int, slot: int) -> None:
        self.incarnation, self.phase, self.slot = incarnation, phase, slot
        self.pushed: Ranges = ()
        self.weight, self.skip = 1.0, False
        self.back_at: int | None = None
        self.clip_norm: float | None = None
        self.overrides: list[tuple[int, int, dict[str, Option]]] = []
        self.arrays: Callable[[Slice], torch.Tensor | None] = lambda part: None
        self.is_early = False  # slices were staged before it, to be added up
        self.is_edited = False  # some of them have changed since
        self.request: Request | None = None
        self.answer: Progress | None = None  # where the answer goes out slice by slice
        self.again: list[StagedCommit] = []  # the same commit, said more than once: each saying is answered
        self.clocks: dict[str, int] = {}  # that go with its answer
        self.uses: Sequence[Use] = ()  # of leases
        self.since = 0.0  # when it was committed
        self.is_told = False  # what it says is known, not only bytes that went ahead
        self.is_fenced = False  # its worker is out, and it counts all the same
        self.is_late = False  # its round was closed before
        self.is_skipped = False  # its round has changed nothing: an overflow

    def void(self) -> None:
        """It was late: nothing of it counts, but its clock advances."""
        self.is_late, self.skip = True, True
        self.pushed, self.clip_norm, self.overrides = (), None, []

    def sayings(self) -> list[StagedCommit]:
        """Those who are to be answered: the first, and who said it again."""
        return [item for item in (self, *self.again) if item.request is not None]

    def say_again(self, other: StagedCommit) -> None:
        """Whoever made `other`, the same commit, is answered with this one too."""
        for item in other.sayings():
            kept = StagedCommit(item.incarnation, item.phase, item.slot)
            kept.request, kept.answer = item.request, item.answer
            self.again.append(kept)


Round = tuple[Commit[StagedCommit], ...]
#: Hears of slices that a worker has staged before its commit: who, for which clock, where they lie, and which.
StagedEarly = Callable[[Identity, int, StagedCommit, set[int]], None]


def uses_of(commits: Iterable[Commit[StagedCommit]]) -> list[Use]:
    """What these commits have used of leases."""
    return [use for commit in commits if not commit.item.is_late for use in commit.item.uses]


def late_of(commits: Iterable[Commit[StagedCommit]]) -> list[Use]:
    """What those of these commits that were late have used of leases, and nobody has read by that."""
    return [use for commit in commits if commit.item.is_late for use in commit.item.uses]


class SliceTask:
    """Something on its way through all slices of a server. The last slice to finish reports it."""

    commits: Round = ()
    fences: Sequence[Identity] = ()
    skip, in_rounds = True, False
    weight = scale = 1.0
    policy: Policy | None = None
    clip_norm: float | None = None
    overrides: Sequence[tuple[int, int, dict[str, Option]]] = ()
    roll: RoundMembership | None = None  # with spare workers: of the round that it is, or that its commit was late by
    ballot: Ballot | None = None  # in a ring: what is voted on
    waits_for_votes = False
    is_summed = False  # by a process group: every server comes to all sums itself
    sums: RoundSums | None = None
    copies: Sequence[HostedSlice] = ()  # in a ring: of others' slices, for which it is summed up here

    def __init__(self, slots: Sequence[HostedSlice], finished: Callable[[SliceTask], None]) -> None:
        self.slots = slots
        self.error: Exception | None = None  # raised while it was applied
        self.began = time.perf_counter()
        self._left = len(slots)
        self._lock = threading.Lock()
        self._finished = finished

    def answers(self) -> list[Progress]:
        """Those who want to hear of slices as they are applied."""
        return []

    def slice_done(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._finished(self)

    @property
    def has_more(self) -> bool:
        """Whether any slice has still to take it in."""
        return self._left > 0

    def slice_held(self) -> None:
        """In a ring: all others have what this slice is to get."""

    def end(self) -> None:
        """There was no slice to go through."""
        self._finished(self)

    def is_beyond(self, version: int) -> bool:
        """Whether a slice of this version has had all rounds that there are to be: a round that was begun by somebody
        who did not know yet changes nothing."""
        most = self.policy.most_rounds if self.policy is not None else 0
        return bool(most) and version >= most

    def scale_for(self, staleness: int) -> float:
        """What its gradient counts on a slice on which it is so stale: clipped, and damped by the policy."""
        return self.scale if self.policy is None else self.scale * self.policy.damping(staleness)

    def overrides_for(self, segment: int) -> dict[int, dict[str, Option]]:
        return {group: options for index, group, options in self.overrides if index == segment}


class FenceTask(SliceTask):
    """Nothing more of these workers; without any, a word that only makes sure that backups are up to date."""

    def __init__(
        self, fences: Sequence[Identity], slots: Sequence[HostedSlice], finished: Callable[[SliceTask], None]
    ) -> None:
        super().__init__(slots, finished)
        self.fences = fences


#: Of a worker's life: the generation with which it came, and its name. It never changes.
Seniority = tuple[int, tuple[str, int, str]]
_LAST: Seniority = (1 << 62, ("", 0, ""))


def leading(commits: Round, seniority: Mapping[Identity, Seniority]) -> Commit[StagedCommit]:
    """Whose hyperparameters count: of those in the round the one that has been there longest. Not whoever is the
    chief now: that may be another one when the same round comes to another server."""
    if len(commits) == 1:
        return commits[0]
    return min(commits, key=lambda c: seniority.get((c.worker, c.item.incarnation), _LAST))


class RoundTask(SliceTask):
    """A round, or what is applied on arrival: a round of one. `leading`: whose hyperparameters count in it."""

    def __init__(
        self,
        commits: Round,
        slots: Sequence[HostedSlice],
        leading: Commit[StagedCommit],
        policy: Policy,
        finished: Callable[[SliceTask], None],
        held: Callable[[RoundTask], None] = lambda work: None,
    ) -> None:
        """`held`: what to do in a ring when all others have what its slices are to get."""
        super().__init__(slots, finished)
        self._held, self._num_unheld = held, len(slots)
        self.commits, self.policy, self.in_rounds = commits, policy, policy.in_rounds
        self._answers_early = policy.kind != "bounded"  # there, the answer may have to wait for slower workers
        if len(commits) == 1:
            self.skip, self.weight = leading.item.skip, leading.item.weight
        else:
            self.skip = any(commit.item.skip for commit in commits)
            self.weight = sum(commit.item.weight for commit in commits)
        self.clip_norm = leading.item.clip_norm
        self.overrides = leading.item.overrides
        self.squared_norms: dict[int, float] = {}
        self.clocks: dict[str, int] = {}  # of all workers, as this round leaves them
        self.applied = False
        self.failed: RuleError | None = None  # what everyone is answered when it could not be applied
        self.share = 0.0  # of the squared norm, where several servers have one
        self.scaled = False  # whether the norm over all servers is known

    def slice_held(self) -> None:
        with self._lock:
            self._num_unheld -= 1
            last = self._num_unheld == 0
        if last:
            self._held(self)

    def is_for_copies(self, copies: Sequence[HostedSlice]) -> None:
        """In a ring: sums are made for these too before this server votes."""
        self.copies = copies
        self._num_unheld += len(copies)

    def also(self, number: int) -> None:
        """In a ring: so many more slices take it in here, whose primaries are elsewhere."""
        with self._lock:
            self._left += number

    def answers(self) -> list[Progress]:
        if not self._answers_early or self.error is not None:
            return []
        return [commit.item.answer for commit in self.commits if commit.item.answer is not None]

    def norm_done(self, slice_id: int, squared_norm: float) -> bool:
        """Whether this was the last slice whose share of the norm was missing."""
        with self._lock:
            self.squared_norms[slice_id] = squared_norm
            return len(self.squared_norms) == len(self.slots)


def respond(request: Request, action: Callable[[], None]) -> None:
    """Does what was put off; an error is the answer, as it would have been then."""
    try:
        action()
    except SynclineError as error:
        request.refuse(error)


def in_thread(name: str, request: Request, action: Callable[[], None]) -> None:
    """What lasts must not keep whoever reads the connection. An error is the answer."""

    def run() -> None:
        try:
            action()
        except SynclineError as error:
            request.refuse(error)
        except Exception as error:  # a bug of ours must end in an answer, not in silence
            request.refuse(error)
            raise

    threading.Thread(target=run, name=name, daemon=True).start()
