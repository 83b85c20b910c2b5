"""Tasks for a server's slices: a round on its way through all of them, or a fence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from syncline.core.aggregate import Aggregate
from syncline.core.layout import Ranges
from syncline.core.policy import Policy
from syncline.core.ring import Ballot
from syncline.core.rounds import Commit, RoundMembership
from syncline.core.rule import Option
from syncline.core.slice_state import Identity
from syncline.core.wire.leases import LeaseAck
from syncline.errors import RuleError, SynclineError
from syncline.net.rpc import Request
from syncline.reduce.slices import FindNumbers, nothing_staged

if TYPE_CHECKING:
    from syncline.server.slices import HostedSlice, RoundSums, Snapshot


#: Name, incarnation and clock identify one commit for ever.
Key = tuple[str, int, int]


def key_of(commit: Commit[StagedCommit]) -> Key:
    return (commit.worker, commit.item.incarnation, commit.clock)


class RingRounds(Protocol):
    """What a server of a ring asks of its votes (`ring.Voting`)."""

    @property
    def generation(self) -> int: ...

    @property
    def is_on(self) -> bool:
        """Whether there are other servers to wait for."""

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

    def missing(self, now: float) -> list[tuple[list[str], float]]:
        """The rounds that wait for votes: clock, the servers that have not voted, and for how many seconds."""


class Progress(Protocol):
    """Receives slices as they are applied, and the end of the round."""

    def count(self, num_bytes: int) -> None:
        """Counts bytes that were copied for this reply."""

    @property
    def copies(self) -> bool:
        """Whether it sends copies of slices, because other rounds may write them meanwhile."""

    def applied(self, slot: HostedSlice, *, snapshot: Snapshot | None = None, locked: bool = False) -> None:
        """The slice includes this commit. `locked`: the caller holds the slice's lock."""

    def hear(self, item: StagedCommit, round_membership: RoundMembership | None) -> None:
        """Sets what the end of the reply contains."""

    def finish(self, end: Callable[[], None] | None = None) -> None:
        """The round is applied, or ended otherwise."""


# Never changed.
_NO_CLOCKS: dict[str, int] = {}
_NO_OVERRIDES: list[tuple[int, int, dict[str, Option]]] = []


class StagedCommit:
    """One worker's staged commit: its options, its bytes, and the pending reply.

    Defaults are the class's: one is made for every commit, and most of them stay.
    """

    pushed: Ranges = ()
    weight, skip = 1.0, False
    nominal = 1.0  # the weight of a push that counts in full, in `bounded` and `async`
    squared_norm = 0.0  # of its gradients over all servers, with --aggregate norm-clipped
    back_at: int | None = None
    clip_norm: float | None = None
    overrides: list[tuple[int, int, dict[str, Option]]] = _NO_OVERRIDES
    is_early = False  # slices were staged before it, to be added up
    is_edited = False  # some of them have changed since
    request: Request | None = None
    answer: Progress | None = None  # set if the reply goes out slice by slice
    again: Sequence[StagedCommit] = ()  # repetitions of the same commit, each with its own reply
    clocks: dict[str, int] = _NO_CLOCKS  # sent with the reply
    acks: Sequence[LeaseAck] = ()  # of leases
    since = 0.0  # when it was committed
    is_told = False  # the options are known, not only early bytes
    is_fenced = False  # its worker was removed, and the commit still counts
    is_late = False  # its round was closed before it arrived
    is_skipped = False  # its round changed nothing: an overflow

    def __init__(self, incarnation: int, phase: int, slot: int) -> None:
        self.incarnation, self.phase, self.slot = incarnation, phase, slot
        self.arrays: FindNumbers = nothing_staged

    def void(self) -> None:
        """The commit was late: its gradients do not count, but its clock advances."""
        self.is_late, self.skip = True, True
        self.pushed, self.clip_norm, self.overrides = (), None, _NO_OVERRIDES

    def to_answer(self) -> list[StagedCommit]:
        """All requests to reply to: the first one and its repetitions."""
        if not self.again:
            return [self] if self.request is not None else []
        return [item for item in (self, *self.again) if item.request is not None]

    def say_again(self, other: StagedCommit) -> None:
        """Replies to `other`, the same commit, together with this one."""
        for item in other.to_answer():
            kept = StagedCommit(item.incarnation, item.phase, item.slot)
            kept.request, kept.answer = item.request, item.answer
            self.again = (*self.again, kept)


Round = tuple[Commit[StagedCommit], ...]
#: Called for slices staged before the commit: worker, clock, commit, slices.
StagedEarly = Callable[[Identity, int, StagedCommit, set[int]], None]


def acks_of(commits: Iterable[Commit[StagedCommit]]) -> list[LeaseAck]:
    """Lease ranges consumed by commits that are not late."""
    return [use for commit in commits if not commit.item.is_late for use in commit.item.acks]


def late_of(commits: Iterable[Commit[StagedCommit]]) -> list[LeaseAck]:
    """Lease ranges consumed by late commits; they must be issued again."""
    return [use for commit in commits if commit.item.is_late for use in commit.item.acks]


class SliceTask:
    """Work for all slices of a server. The last slice to finish completes it."""

    commits: Round = ()
    fences: Sequence[Identity] = ()
    skip, in_rounds = True, False
    weight = scale = 1.0
    counts = 1.0  # how much the update counts: weight over nominal weight
    gather = 0  # so many pushes make a group; 1 without commits: what is held is applied; 0: nothing is held
    policy: Policy | None = None
    weighs = True  # whether a commit counts by its weight
    aggregate: Aggregate | None = None  # how the gradients of its commits become one; None: by their mean or sum
    clip_norm: float | None = None
    overrides: Sequence[tuple[int, int, dict[str, Option]]] = ()
    # with spare workers: the membership of this round, or of the round that the commit missed
    round_membership: RoundMembership | None = None
    ballot: Ballot | None = None  # in a ring: what is voted on
    waits_for_votes = False
    is_summed = False  # by a process group: every server computes all sums itself
    sums: RoundSums | None = None
    copies: Sequence[HostedSlice] = ()  # in a ring: copies of other servers' slices whose sums are made here

    def __init__(self, slots: Sequence[HostedSlice], finished: Callable[[SliceTask], None]) -> None:
        self.slots = slots
        self.error: Exception | None = None  # raised while applying
        self.began = time.perf_counter()
        self._left = len(slots)
        self._lock = threading.Lock()
        self._finished = finished

    def answers(self) -> list[Progress]:
        """The replies that report slices as they are applied."""
        return []

    def slice_done(self) -> None:
        """A slice has processed it."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._finished(self)

    @property
    def has_more(self) -> bool:
        """Whether any slice has yet to process it."""
        return self._left > 0

    def slice_held(self) -> None:
        """In a ring: all replicas hold the update of this slice."""

    def end(self) -> None:
        """There are no slices to process."""
        self._finished(self)

    def is_beyond(self, version: int) -> bool:
        """Whether a slice of this version has reached `max_steps`. A round started by a worker that did not know yet
        changes nothing.
        """
        most = self.policy.most_rounds if self.policy is not None else 0
        return bool(most) and version >= most

    def scale_for(self, staleness: int) -> float:
        """The factor on the gradient: clipping, and the policy's damping for this staleness."""
        return self.scale if self.policy is None else self.scale * self.policy.damping(staleness)

    def overrides_for(self, segment: int) -> dict[int, dict[str, Option]]:
        return {group: options for index, group, options in self.overrides if index == segment}

    def rates(self, segment: int, group: int, default: float) -> dict[Key, float]:
        """The learning rate of each commit that counts, for one group of parameters; see `--lr-per-worker`."""
        found = {}
        for commit in self.commits:
            if commit.item.weight > 0:
                said = (o for index, number, o in commit.item.overrides if (index, number) == (segment, group))
                found[key_of(commit)] = float(next(said, {}).get("lr", default))  # type: ignore[arg-type]
        return found


class FenceTask(SliceTask):
    """Fences these workers. With an empty list it only makes sure that backups are up to date."""

    def __init__(
        self, fences: Sequence[Identity], slots: Sequence[HostedSlice], finished: Callable[[SliceTask], None]
    ) -> None:
        super().__init__(slots, finished)
        self.fences = fences


class FlushTask(SliceTask):
    """Applies the pushes that slices hold (`async:gather=N`)."""

    gather = 1


def answers_early(policy: Policy) -> bool:
    """Whether replies name slices as they are applied. Under `bounded` one may have to wait for slower workers."""
    return policy.kind != "bounded"


#: The generation in which a worker came, and its name. It never changes.
Seniority = tuple[int, tuple[str, int, str]]
_LAST: Seniority = (1 << 62, ("", 0, ""))


def leading(commits: Round, seniority: Mapping[Identity, Seniority]) -> Commit[StagedCommit]:
    """The commit whose hyperparameters count: that of the most senior worker in the round. The current chief is no
    substitute, because it may differ by the time the round reaches another server.
    """
    if len(commits) == 1:
        return commits[0]
    return min(commits, key=lambda c: seniority.get((c.worker, c.item.incarnation), _LAST))


class RoundTask(SliceTask):
    """A round, or a single commit under `async`. `leading`: the commit whose hyperparameters count."""

    def __init__(
        self,
        commits: Round,
        slots: Sequence[HostedSlice],
        leading: Commit[StagedCommit],
        policy: Policy,
        finished: Callable[[SliceTask], None],
        held: Callable[[RoundTask], None] = lambda work: None,
        failed: Callable[[RoundTask, Exception], None] = lambda work, error: None,
    ) -> None:
        """In a ring, `held` is called when all others have the sums of its slices, `failed` when a sum cannot be
        made."""
        super().__init__(slots, finished)
        self._held, self._failed, self._num_unheld = held, failed, len(slots)
        self.commits, self.policy, self.in_rounds = commits, policy, policy.in_rounds
        self.weighs, self.aggregate = self.in_rounds or policy.weighs, policy.aggregate
        self._answers_early = answers_early(policy)
        if len(commits) == 1:
            self.skip, self.weight = leading.item.skip, leading.item.weight
        else:
            self.skip = any(commit.item.skip for commit in commits)
            self.weight = sum(commit.item.weight for commit in commits)
        if not self.in_rounds:
            # The mean of a group is weighted by the samples; without a group there is only one push.
            nominal = 1.0 if policy.gather else leading.item.nominal
            self.counts = leading.item.weight / nominal if policy.weighs else 1.0
            self.gather = policy.gather
        self.clip_norm = leading.item.clip_norm
        self.overrides = leading.item.overrides
        self.squared_norms: dict[int, float] = {}
        self.clocks: dict[str, int] = {}  # every worker's clock after this round
        self.applied = False
        self.failed: RuleError | None = None  # the error for all its workers, if the round failed
        self.share = 0.0  # of the squared norm, if several servers have a share
        self.scaled = False  # whether the norm over all servers is known

    def slice_done(self) -> None:
        if self.error is not None and self.waits_for_votes:
            self._failed(self, self.error)  # this server will not vote for it
        super().slice_done()

    def slice_held(self) -> None:
        with self._lock:
            self._num_unheld -= 1
            last = self._num_unheld == 0
        if last:
            self._held(self)

    def is_for_copies(self, copies: Sequence[HostedSlice]) -> None:
        """In a ring: sums are made for these copies before this server votes."""
        self.copies = copies
        self._num_unheld += len(copies)

    def also(self, number: int) -> None:
        """In a ring: this many more slices here apply the round; their primaries are on other servers."""
        with self._lock:
            self._left += number

    def answers(self) -> list[Progress]:
        if not self._answers_early or self.error is not None:
            return []
        return [commit.item.answer for commit in self.commits if commit.item.answer is not None]

    def norm_done(self, slice_id: int, squared_norm: float) -> bool:
        """Adds a slice's share of the norm. Returns whether it was the last one."""
        with self._lock:
            self.squared_norms[slice_id] = squared_norm
            return len(self.squared_norms) == len(self.slots)


def respond(request: Request, action: Callable[[], None]) -> None:
    """Runs a deferred action. An error becomes the reply."""
    try:
        action()
    except SynclineError as error:
        request.refuse(error)


def in_thread(name: str, request: Request, action: Callable[[], None]) -> None:
    """Runs a slow action in its own thread, to keep the connection's reader free. An error becomes the reply."""

    def run() -> None:
        try:
            action()
        except (SynclineError, OSError) as error:
            request.refuse(error)
        except Exception as error:  # a bug must end in a reply, not in a hang
            request.refuse(error)
            raise

    threading.Thread(target=run, name=name, daemon=True).start()
