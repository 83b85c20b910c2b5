"""The lease queue: open lease requests, their answers, and acks that are not journaled yet.

Pure: every decision is in the job's state. Its owner journals the state before a lease is sent, and before servers
drop acks. The deterministic simulator runs the same code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Generic, NamedTuple, TypeVar

from syncline.core.leasing.leases import Leasing
from syncline.core.leasing.ledger import Epoch
from syncline.core.leasing.loader import VALIDATES
from syncline.core.leasing.ranges import Span, joined
from syncline.core.membership import Membership
from syncline.core.policy import policy_of
from syncline.core.slice_state import Identity
from syncline.core.wire.leases import AskLease, GivenLease, LeaseAck, LeaveEpoch, OpenEpoch, Recall

R = TypeVar("R")
_NOTHING = Span(0, 0)
#: How many lost ranges are named.
MOST_SPANS = 8


class Asked(NamedTuple, Generic[R]):
    """An unanswered request; `request`: how to answer it."""

    owner: Identity
    message: AskLease
    since: float
    request: R


class LeaseQueue(Generic[R]):
    """All loaders of a job."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._leasing: Leasing | None = None  # once the policy is known
        self.asking: dict[str, Asked[R]] = {}
        self._used: set[LeaseAck] = set()  # known, not journaled yet
        self._late: set[LeaseAck] = set()  # likewise, of late commits

    @property
    def is_open(self) -> bool:
        """Whether any worker has opened an epoch."""
        return self._leasing is not None

    @property
    def num_unsaved_uses(self) -> int:
        """Uses that are known here and not kept yet."""
        return len(self._used)

    @property
    def leasing(self) -> Leasing:
        if self._leasing is None:
            state, policy = self._membership.state, policy_of(self._membership.state.config)
            is_exact = policy.stands_still and not state.config.steps_locally
            self._leasing = Leasing(state.leases, in_rounds=policy.in_rounds, is_exact=is_exact)
        return self._leasing

    def participants(self) -> list[Identity]:
        entered, finishing = self._membership.state.entered, self._membership.finishing
        names = [name for name in self._membership.workers() if name in entered and name not in finishing]
        return [(name, entered[name]) for name in names]

    # -- what workers say ---------------------------------------------------------------------------------

    def seed(self, worker: str, message: OpenEpoch) -> int | None:
        """The seed of this loader's order; None while the chief's is still to come.

        All workers must use one order, and scripts may seed by rank: the chief's seed counts, while there is a chief.
        """
        assert message.seed is not None
        finishing = self._membership.finishing
        chief = next((name for name in self._membership.workers() if name not in finishing), worker)
        return self.leasing.seed(message.loader, message.seed, counts=message.insists or worker == chief)

    def ask(self, owner: Identity, message: AskLease, request: R, now: float) -> None:
        """Queues a request. Requests of replaced connections do not arrive here."""
        self.leasing.measured(owner[0], message.samples, message.seconds)
        self.asking[owner[0]] = Asked(owner, message, now, request)

    def leave(self, owner: Identity, message: LeaveEpoch) -> None:
        """A worker has left its loop."""
        self.asking.pop(owner[0], None)
        epoch = self.leasing.epoch(message.loader, message.epoch)
        for use in message.passed_over if epoch is not None else ():
            assert epoch is not None
            epoch.pass_over(*use)
        self.leasing.leave(owner, message.loader, message.epoch, message.leases, message.newest)

    # -- answering ----------------------------------------------------------------------------------------

    def answers(self) -> tuple[list[tuple[Asked[R], GivenLease]], list[tuple[Identity, Recall]]]:
        """The requests that can be answered, and the workers to recall from.

        Leases are journaled before they are sent.
        """
        answers, recalls = [], []
        for name, asked in list(self.asking.items()):
            given, recalled = self._decide(asked.owner, asked.message)
            recalls += recalled
            if given is not None:
                answers.append((asked, given))
                del self.asking[name]
        return answers, recalls

    def is_over(self, loader: str) -> bool:
        """Whether a rule has stopped training: nothing is leased any more, except for validation."""
        return self._membership.state.steering.stop is not None and not loader.startswith(VALIDATES)

    def _decide(self, owner: Identity, message: AskLease) -> tuple[GivenLease | None, list[tuple[Identity, Recall]]]:
        if self.is_over(message.loader):
            return GivenLease(0, _NOTHING), []  # it learns of the stop earlier
        answer = self.leasing.ask(
            owner, message.loader, message.epoch, self.participants(), message.held,
            is_idle=not message.left, newest=message.newest, given=message.given, is_late=self._came_late(owner),
        )  # fmt: skip
        recalls = [(other, Recall(message.loader, message.epoch)) for other in answer.recall]
        if answer.lease is not None:
            lease = answer.lease
            given = GivenLease(
                lease.number, lease.span, step=lease.step, begin=answer.begin, is_common=lease.is_common,
                origin=lease.origin, wide=lease.wide,
            )  # fmt: skip
            return given, recalls
        if answer.is_finished or not (message.waits or answer.is_coming):
            is_shared = self.leasing.is_shared(message.loader)
            return GivenLease(0, _NOTHING, answer.is_finished, is_shared=is_shared), recalls
        return None, recalls

    def _came_late(self, owner: Identity) -> bool:
        """Whether this worker joined a running job."""
        member = self._membership.state.members.get(owner[0])
        return member is not None and member.since > 1

    def not_kept(self, answers: Iterable[tuple[Asked[R], GivenLease]]) -> None:
        """These answers were not sent: they are given once they can be journaled."""
        for asked, given in answers:
            self.asking.setdefault(asked.owner[0], asked)
            epoch = self.leasing.epoch(asked.message.loader, asked.message.epoch)
            if epoch is not None and given.lease in epoch.leases:
                epoch.leases[given.lease].is_told = False

    # -- now and then -------------------------------------------------------------------------------------

    def recut(self) -> list[tuple[Identity, Recall]]:
        """Workers to recall from, because shares must be dealt again."""
        if not self.leasing.state.epochs:
            return []
        participants = self.participants()
        return [
            (owner, Recall(name, number))
            for name, epochs in self.leasing.state.epochs.items()
            for number in epochs
            for owner in self.leasing.recut(name, number, participants)
        ]

    def reclaim(self, now: float, after_seconds: float) -> list[tuple[AskLease, int]]:
        """Reassigns what was dealt to absent workers to those that have waited this long. Returns samples by
        epoch.
        """
        waiting = [one.message for one in self.asking.values() if now - one.since > after_seconds]
        counts = [(m, self.leasing.reclaim(m.loader, m.epoch)) for m in waiting if m.waits]
        return [(message, count) for message, count in counts if count]

    @property
    def somebody_waits(self) -> bool:
        return any(one.message.waits for one in self.asking.values())

    # -- what was used ------------------------------------------------------------------------------------

    def use(self, acks: Iterable[LeaseAck], late: Iterable[LeaseAck] = ()) -> None:
        """Takes acks reported by the server of slice 0."""
        self._used.update(fresh := list(acks))
        self.leasing.used(fresh)
        self._late.update(back := list(late))
        self.leasing.late(back)

    @property
    def has_news(self) -> bool:
        """Whether there are acks to journal and confirm."""
        return bool(self._used or self._late or self.leasing.is_any_through)

    def take_news(self) -> tuple[list[LeaseAck], list[LeaseAck], list[tuple[str, int, Epoch]]]:
        """The acks to journal and then confirm: used and late ranges, and the epochs finished by them."""
        used, self._used = sorted(self._used), set()
        late, self._late = sorted(self._late), set()
        return used, late, self.leasing.forget_finished()

    def put_back_news(self, used: Iterable[LeaseAck], late: Iterable[LeaseAck]) -> None:
        """Journaling failed: queues the acks again."""
        self._used.update(used)
        self._late.update(late)

    # -- uses that were lost ------------------------------------------------------------------------------

    def acks_are_lost(self) -> str:
        """Slice 0 was restored from a worker's copy without its acks: live workers must report them. Returns the
        affected ranges in words.

        Journal this together with the restored slice.
        """
        leases = self._membership.state.leases
        if leases.epochs:
            members = self._membership.state.members
            leases.unheard = {n: members[n].incarnation for n in self._membership.workers()}
        found = []
        for name, epochs in leases.epochs.items():
            for number, epoch in epochs.items():
                rest = joined([span for lease in epoch.leases.values() for span in lease.rest()])
                places = ", ".join(f"{span.start} to {span.stop - 1}" for span in rest[:MOST_SPANS])
                more = f" and {len(rest) - MOST_SPANS} more" if len(rest) > MOST_SPANS else ""
                found.append(f"epoch {number + 1} of {name!r}, among positions {places}{more}")
        return "; ".join(found)

    def unheard(self) -> list[Identity]:
        """Workers that must still report their acks."""
        members, unheard = self._membership.state.members, self._membership.state.leases.unheard
        return [(n, number) for n, number in unheard.items() if n in members and members[n].incarnation == number]

    def heard(self, owner: Identity, acks: Iterable[LeaseAck], late: Iterable[LeaseAck], *, is_all: bool) -> None:
        """A worker has reported its acks. Not `is_all`: it will be asked again."""
        self.use(acks, late)
        if is_all and self._membership.state.leases.unheard.get(owner[0]) == owner[1]:
            del self._membership.state.leases.unheard[owner[0]]

    # -- the dead -----------------------------------------------------------------------------------------

    def gone(self) -> dict[Identity, bool]:
        """Owners of leases that are no longer members and are fenced everywhere; True: it died."""
        state = self._membership.state
        found = {}
        for epochs in state.leases.epochs.values():
            for lease in (lease for epoch in epochs.values() for lease in epoch.leases.values()):
                if lease.is_common:
                    continue
                name, incarnation = lease.owner
                member = state.members.get(name)
                is_fencing = state.fencing.get(name, (0, ""))[0] >= incarnation
                if (member is None or member.incarnation != incarnation) and not is_fencing:
                    found[lease.owner] = name not in state.left
        return found

    def out(self, gone: dict[Identity, bool], waiting: Collection[Identity]) -> None:
        """The commits of dead workers are settled by the server of slice 0: takes back the rest of their leases.

        Not for workers with commits `waiting` there: these may still be applied with their round, or dropped by a
        change of primaries.
        """
        for owner, failed in gone.items():
            if owner in waiting:
                continue
            asked = self.asking.get(owner[0])
            if asked is not None and asked.owner == owner:  # a later life of it may have asked already
                del self.asking[owner[0]]
            self.leasing.out(owner, failed=failed)
