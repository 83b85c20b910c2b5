"""What a server's twin does with commits and updates: the core's rounds and slice states, and little around them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from syncline.core.members import Standing
from syncline.core.replica_sets import ReplicaSet
from syncline.core.rounds import RoundMembership, Rounds, Verdict
from syncline.core.slice_state import SliceState
from syncline.core.wire.control import Install, Prepare
from syncline.core.wire.leases import LeaseAck
from syncline.errors import FencedError, ProtocolError

from .member import SimMember
from .world import Frame, Session

if TYPE_CHECKING:
    from .job import Job

AGAIN_SECONDS = 0.03

Identity = tuple[str, int]
Part = tuple[
    Identity, int, tuple[LeaseAck, ...], bool
]  # whose, clock, what it has used of leases, whether it was late


class Item:
    """What is staged for a clock."""

    __slots__ = ("acks", "back_at", "incarnation", "phase", "slices")

    def __init__(
        self,
        incarnation: int,
        phase: int,
        slices: frozenset[int],
        back_at: int | None,
        acks: tuple[LeaseAck, ...] = (),
    ) -> None:
        self.incarnation, self.phase, self.slices, self.back_at = incarnation, phase, slices, back_at
        self.acks = acks


class Hosted:
    """One slice: its state, its ledger in the place of parameters, the updates that wait."""

    __slots__ = ("acks", "digest", "epoch", "ledger", "queue", "samples", "sent", "since", "state", "targets")

    def __init__(self, epoch: int = 0) -> None:
        self.state, self.ledger, self.epoch, self.digest = SliceState(), {}, epoch, 0
        self.queue: deque[tuple[Part, ...]] = deque()
        self.targets: dict[str, str] = {}  # life: name, of the servers that have every update first
        self.since = 0  # generation in which a worker brought it
        self.sent: set[str] = set()
        self.acks: set[str] = set()
        self.ledger: dict[tuple[str, int, int], int]
        self.samples: dict[tuple[int, int], tuple[str, int, int]] | None = None  # applied, by which step


class Host(SimMember):
    """Takes commits as the primary of some slices, and updates as the backup of others."""

    role = "server"

    def __init__(self, job: Job, name: str) -> None:
        super().__init__(job, name)
        self.prepared, self.opened = 0, True
        self.rounds: Rounds[Item] = Rounds(job.policy, [])
        self.hosted: dict[int, Hosted] = {}
        self.replica_sets: dict[int, ReplicaSet] = {}
        self.replica_sets_before: dict[int, ReplicaSet] = {}
        self.hold_until = 0.0
        self.held: list[tuple[Session, Frame]] = []
        self.preparing: tuple[Session, Prepare] | None = None
        self.change: Prepare | None = None
        self.installing: tuple[Session, Install] | None = None
        self.staged: dict[Identity, dict[int, Item]] = {}
        self.waiting: dict[tuple[Identity, int], list[tuple[Session, Any]]] = {}
        self.limits: dict[Identity, int] = {}  # of the fenced: what was settled
        self.fences: dict[str, int] = {}
        self.entered_in: dict[str, int] = {}  # workers: generation in which they entered last
        self.out: set[Identity] = set()  # servers of which nothing is taken any more
        self.seeding: dict[str, Any] | None = None
        self.standings: list[Standing] = []
        self.is_settling = False
        self.retrying: set[str] = set()

    def primaries(self) -> list[int]:
        return [
            n for n, replica_set in self.replica_sets.items() if replica_set.primary == self.name and n in self.hosted
        ]

    # -- workers ------------------------------------------------------------------------------------------

    def _is_welcome(self, session: Session, frame: Frame) -> bool:
        request, evicted = frame.body[0], self.rounds.standings.get(frame.name)
        skips_fence = "skip_fence" in self.job.bugs and evicted is not None and evicted.left
        if skips_fence and evicted is not None and evicted.incarnation == frame.incarnation:
            evicted.left = evicted.fenced = False
        takes_old = skips_fence or "accept_stale_generation" in self.job.bugs
        if frame.generation != self.generation and not takes_old:
            self.reply(session, "refresh" if frame.generation < self.generation else "behind", (request,))
            return False
        if not self.opened:
            self.opened = True
            self._reset()
        try:
            self.rounds.standing(frame.name, frame.incarnation)
        except FencedError:
            self.reply(session, "fenced", (request,))
            return False
        except ProtocolError:
            self.reply(session, "behind", (request,))
            return False
        return True

    def on_stage(self, session: Session, frame: Frame) -> None:
        if not self._is_welcome(session, frame):
            return
        request, clock, phase, slices, back_at, commit, acks = frame.body
        item = Item(frame.incarnation, phase, slices, back_at, acks)
        self.staged.setdefault((frame.name, frame.incarnation), {})[clock] = item
        if commit:
            self.on_commit(session, frame_of_commit(frame, request, clock, None))
        else:
            self.reply(session, "staged", (request, clock))

    def on_commit(self, session: Session, frame: Frame) -> None:
        if not self._is_welcome(session, frame):
            return
        if not self.keeps(session, frame):
            self._commit(session, frame)

    def _commit(self, session: Session, frame: Frame) -> None:
        who, (request, clock, round_membership) = (frame.name, frame.incarnation), frame.body
        evicted = self.rounds.standings.get(frame.name)
        if "skip_fence" in self.job.bugs and evicted is not None and evicted.incarnation == frame.incarnation:
            evicted.left = evicted.fenced = False
        try:
            standing = self.rounds.standing(*who)
        except FencedError:
            self.reply(session, "fenced", (request,))
            return
        item = self.staged.get(who, {}).get(clock)
        if clock > standing.clock and (item is None or not item.slices.issuperset(self.primaries())):
            self.reply(session, "restage", (request, clock))
            return
        if item is None:
            item = Item(who[1], standing.phase, frozenset(), None)
        if round_membership is not None:
            self.rounds.learn(round_membership)
        if "any_order" in self.job.bugs:
            self.rounds.round_memberships.newest = None
        try:
            verdict = self.rounds.commit(frame.name, frame.incarnation, clock, item.phase, item, item.back_at)
        except ProtocolError as error:
            if not session.is_broken:
                self.job.ledger.fail(f"{self.life} refuses {who}: {error}")
            return
        if verdict.kind == "open" and "forget_open" in self.job.bugs:
            self._enqueue((((who, clock, (), False),),))
        self.waiting.setdefault((who, clock), []).append((session, request))
        first = self.hosted.get(0) if 0 in self.primaries() else None
        is_there = first is not None and first.epoch and first.state.clocks.get(who, 0) >= clock
        if first is not None and is_there and verdict.kind != "late":
            first.state.used(item.acks)  # it came from a copy, without what was used; other slices may lack this step
        self._take(verdict)

    def _take(self, verdict: Verdict[Item]) -> None:
        is_late = verdict.kind == "late"
        self._enqueue(
            tuple(((c.worker, c.item.incarnation), c.clock, c.item.acks, is_late) for c in commits)
            for commits in verdict.apply
        )

    def _enqueue(self, updates: Iterable[tuple[Part, ...]]) -> None:
        updates = list(updates)
        mine = self.primaries()
        for number in mine:
            self.hosted[number].queue.extend(updates)
        self.pump()

    def on_rest(self, session: Session, frame: Frame) -> None:
        if self._is_welcome(session, frame) and not self.keeps(session, frame):
            self._rest(session, frame)

    def _rest(self, session: Session, frame: Frame) -> None:
        request, phase, at_barrier = frame.body
        if frame.generation < self.entered_in.get(frame.name, 0):  # since it said this
            self.reply(session, "refresh", (request,))
            return
        try:
            verdict = self.rounds.rest(frame.name, frame.incarnation, phase, at_barrier)
        except FencedError:
            self.reply(session, "fenced", (request,))
            return
        self._take(verdict)
        self.reply(session, "rested", (request,))

    def on_place(self, session: Session, frame: Frame) -> None:
        if self._is_welcome(session, frame):
            self.reply(session, "placed", (frame.body[0], self.rounds.slowest()))

    def _answer(self) -> None:
        """Whoever's step is on all slices here, and may go on, hears so."""
        states = [self.hosted[n].state for n in self.answered_for()]
        for (who, clock), requests in list(self.waiting.items()):
            if any(state.clocks.get(who, 0) < clock for state in states):
                continue
            standing = self.rounds.standings.get(who[0])
            if standing is None or standing.incarnation != who[1]:
                del self.waiting[who, clock]
                continue
            if not self.rounds.may_answer(who[0], clock)[0]:
                continue
            del self.waiting[who, clock]
            for known in [c for c in self.staged.get(who, ()) if c <= clock]:
                del self.staged[who][known]
            given = tuple(self._shown(number) for number in self.primaries())
            round_membership = self.rounds.membership_to_tell(*who, clock)
            for session, request in requests:
                self.reply(session, "committed", (request, clock, given, standing.late == clock, round_membership))

    def answered_for(self) -> list[int]:
        """The slices here that have to have a step before it is answered."""
        return self.primaries()

    def on_their_way(self) -> list[tuple[Part, ...]]:
        """What is not applied yet on slice 0."""
        return list(self.hosted[0].queue)

    def _shown(self, number: int) -> tuple[int, int, int, dict[Identity, int], dict[Any, int]]:
        hosted = self.hosted[number]
        return (number, hosted.epoch, hosted.state.version, dict(hosted.state.clocks), dict(hosted.ledger))

    # -- updates ------------------------------------------------------------------------------------------

    def pump(self) -> None:
        for number in self.primaries():
            self._pump(number, self.hosted[number])
        if self.waiting:
            self._answer()
        self._go_on()

    def _pump(self, number: int, hosted: Hosted) -> None:
        """The backup has an update first; then it is applied here."""
        state = hosted.state
        while hosted.queue:
            fresh = [part for part in hosted.queue[0] if part[1] > state.clocks.get(part[0], 0)]
            if "forget_open" in self.job.bugs and not fresh and len(hosted.queue[0]) == 1:
                fresh = list(hosted.queue[0])
            if fresh:
                for life in hosted.targets:
                    if life not in hosted.sent:
                        hosted.sent.add(life)
                        round_membership = self.rounds.round_memberships.find(*fresh[0][0], fresh[0][1])
                        if "membership_unreplicated" in self.job.bugs:
                            round_membership = None
                        body = (number, state.version, tuple(fresh), hosted.epoch, round_membership)
                        self.send(life, self.frame("replicate", body, generation=max(self.prepared, self.generation)))
                if not hosted.acks.issuperset(hosted.targets) and "early_ack" not in self.job.bugs:
                    return
                self._apply(number, hosted, fresh, is_primary=True)
            hosted.queue.popleft()
            hosted.sent.clear()
            hosted.acks.clear()

    def _apply(self, number: int, hosted: Hosted, fresh: Iterable[Part], is_primary: bool) -> None:
        entries = [(who[0], who[1], clock) for who, clock, _, _ in fresh]
        for entry in entries:
            hosted.ledger[entry] = hosted.ledger.get(entry, 0) + 1
        hosted.state.applied([(who, clock) for who, clock, _, _ in fresh], changed=True)
        if number == 0 and (is_primary or "uses_unreplicated" not in self.job.bugs):
            counts = "late_counts" in self.job.bugs
            hosted.state.used(
                [use for _, _, acks, is_late in fresh if not is_late or counts for use in acks],
                [use for _, _, acks, is_late in fresh if is_late and not counts for use in acks],
            )
        for who, clock, _, is_late in fresh:
            self.job.ledger.decided((*who, clock), is_late)
        self.job.ledger.applied(self, number, hosted, entries, is_primary)

    # -- uses ---------------------------------------------------------------------------------------------

    def beat(self) -> Any:
        return self._acks_here()[:2]

    def _acks_here(self) -> tuple[list[LeaseAck], list[LeaseAck], list[Identity]]:
        """What is not confirmed yet, where slice 0 is; and who is out and has commits that are not applied yet."""
        if 0 not in self.primaries():
            return [], [], []
        hosted = self.hosted[0]
        waiting = {part[0] for update in self.on_their_way() for part in update}
        waiting |= {(c.worker, c.incarnation) for c in self.rounds.open_commits()}
        fenced = sorted(who for who in waiting if self._is_out(who))
        acks = hosted.state.ack_entries()
        if "open_is_done" in self.job.bugs:
            acks += [
                u for c in self.rounds.open_commits() if (c.worker, c.incarnation) in fenced for u in c.item.acks
            ]
            fenced = []
        return acks, hosted.state.late_entries(), fenced

    def _is_out(self, who: Identity) -> bool:
        standing = self.rounds.standings.get(who[0])
        return standing is None or standing.incarnation != who[1] or standing.left or standing.fenced

    def on_ask_uses(self, session: Session, frame: Frame) -> None:
        if self.heed(session, frame):
            self.reply(session, "acks", (frame.body[0], *self._acks_here()))

    def on_confirm(self, session: Session, frame: Frame) -> None:
        if self.heed(session, frame) and 0 in self.hosted:
            self.hosted[0].state.confirmed(*frame.body)

    # -- backups ------------------------------------------------------------------------------------------

    def on_replicate(self, session: Session, frame: Frame) -> None:
        number, version, fresh, epoch, round_membership = frame.body
        hosted = self.hosted.get(number)
        stale = (frame.name, frame.incarnation) in self.out and "accept_stale_replica" not in self.job.bugs
        if stale or hosted is None or hosted.epoch != epoch or version > hosted.state.version:
            self.reply(session, "not_replicated", (number,))
            return
        if round_membership is not None:
            self.rounds.learn(round_membership)
        replica_set = self.replica_sets.get(number)
        if version == hosted.state.version:
            if replica_set is not None and replica_set.primary == self.name and self.opened and self.rounds.standings:
                self.reply(session, "not_replicated", (number,))
                return
            new = [part for part in fresh if part[1] > hosted.state.clocks.get(part[0], 0)]
            self._apply(number, hosted, new, is_primary=False)
        self.reply(session, "replicated", (number, version + 1))

    def on_replicated(self, session: Session, frame: Frame) -> None:
        number, version = frame.body
        hosted = self.hosted.get(number)
        if hosted is not None and hosted.queue and version == hosted.state.version + 1:
            hosted.acks.add(session.other(self).life)
            self.pump()

    def on_not_replicated(self, session: Session, frame: Frame) -> None:
        self._again(session.other(self).life)

    def _again(self, life: str) -> None:
        if life in self.retrying:
            return
        self.retrying.add(life)

        def again() -> None:
            self.retrying.discard(life)
            for hosted in self.hosted.values():
                hosted.sent.discard(life)
            self._repeat(life)
            self.pump()

        self.after(AGAIN_SECONDS, again)

    def _repeat(self, life: str) -> None:
        """What else this server has to hear."""

    def lost(self, session: Session) -> None:
        super().lost(session)
        life = session.other(self).life
        if session.ends[0] is not self:
            return
        if self.seeding is not None and self.seeding["life"] == life:
            self._seed_failed()
        if "alone_without_word" in self.job.bugs:
            for hosted in self.hosted.values():
                hosted.targets.pop(life, None)
        self._again(life)

    # -- what the gate and the changes of a server add -------------------------------------------------------

    def keeps(self, session: Session, frame: Frame) -> bool: ...  # type: ignore[empty-body]

    def _holds(self) -> bool: ...  # type: ignore[empty-body]

    def _go_on(self) -> None: ...

    def _reset(self) -> None: ...

    def _seed_failed(self) -> None: ...


def frame_of_commit(frame: Frame, request: Any, clock: int, round_membership: RoundMembership | None) -> Frame:
    return Frame(
        "commit", frame.name, frame.incarnation, frame.generation, frame.term, (request, clock, round_membership)
    )
