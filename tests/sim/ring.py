"""A server's twin in a ring: it has every slice, holds what others sum up, and applies what all have voted for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from syncline.core.reconfigure import Reconfiguration
from syncline.core.replica_sets import ReplicaSet
from syncline.core.ring import Ballot, Votes, ballot_of
from syncline.core.slice_state import highest_clocks, least_clocks
from syncline.core.wire.control import Install, Prepare, Prepared

from .hosting import Hosted, Identity, Part
from .server import Server
from .world import Frame, Session

if TYPE_CHECKING:
    from .job import Job

#: Until a copy that was not taken in is given again.
SUPPLY_SECONDS = 0.02


class SliceTask:
    """A round that is whole here, until all have voted for it."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts, self.is_said = parts, False
        self.sent: set[tuple[int, str]] = set()  # slice, life: who was given the sum
        self.acks: set[tuple[int, str]] = set()  # who holds it


class RingServer(Server):
    """Its worker is in the same process."""

    def __init__(self, job: Job, name: str) -> None:
        super().__init__(job, name)
        self.votes, self.is_frozen = Votes(), False
        self.works: dict[Ballot, SliceTask] = {}
        self.holding: dict[int, tuple[Ballot, tuple[Part, ...]]] = {}  # of slices of others
        self.letters: set[tuple[str, Ballot]] = set()  # votes that are not acknowledged: whose
        self.settled: dict[Identity, int] = {}
        self.lacking: dict[int, set[str]] = {}  # slices here, and who is to be given a copy: lives
        self.answering: tuple[Session, int] | None = None  # when all have their copies

    # -- rounds -------------------------------------------------------------------------------------------

    def answered_for(self) -> list[int]:
        return list(self.hosted)

    def on_their_way(self) -> list[tuple[Part, ...]]:
        return [work.parts for work in self.works.values()]

    def _enqueue(self, updates: Iterable[tuple[Part, ...]]) -> None:
        for parts in updates:
            commits = [(*who, clock) for who, clock, _, _ in parts]
            self.works[ballot_of(self.votes.generation, commits)] = SliceTask(parts)
        self.pump()

    def pump(self) -> None:
        while self.works and not self.is_frozen:
            ballot, work = next(iter(self.works.items()))
            self._give_sums(ballot, work)
            self._vote(ballot, work)
            if not self._is_decided(ballot):
                break
            self._count(ballot, work)
        if self.waiting:
            self._answer()
        self._go_on()

    def _give_sums(self, ballot: Ballot, work: SliceTask) -> None:
        for number in self.primaries():
            hosted = self.hosted[number]
            for life in hosted.targets:
                if (number, life) not in work.sent:
                    work.sent.add((number, life))
                    body = (number, hosted.state.version, self._fresh(hosted, work), hosted.epoch, ballot)
                    self.send(life, self.frame("replicate", body))

    @staticmethod
    def _fresh(hosted: Hosted, work: SliceTask) -> tuple[Part, ...]:
        return tuple(part for part in work.parts if part[1] > hosted.state.clocks.get(part[0], 0))

    def _vote(self, ballot: Ballot, work: SliceTask) -> None:
        """When all others hold the sums of all slices whose primary this is."""
        wanted = {(number, life) for number in self.primaries() for life in self.hosted[number].targets}
        if work.is_said or not (wanted <= work.acks or "vote_unheld" in self.job.bugs):
            return
        work.is_said = True
        self.votes.vote(ballot, self.name)
        for name in sorted(self.votes.voters - {self.name}):
            address = self.members[name].address
            assert address is not None
            self.letters.add((address.unix, ballot))
            self.send(address.unix, self.frame("vote", ballot))

    def _is_decided(self, ballot: Ballot) -> bool:
        missing = self.votes.missing(ballot)
        if "most_votes" in self.job.bugs:
            return 2 * len(missing) < len(self.votes.voters)
        if "dead_have_voted" in self.job.bugs:
            missing = [name for name in missing if self._is_there(name)]
            return not missing
        return self.votes.is_decided(ballot)

    def _is_there(self, name: str) -> bool:
        address = self.members[name].address
        return address is not None and self.world.processes[address.unix].is_alive

    def _count(self, ballot: Ballot, work: SliceTask) -> None:
        """On every copy here, and on its own slices."""
        del self.works[ballot]
        self.votes.forget(ballot)
        mine = self.primaries()
        for number, hosted in self.hosted.items():
            is_held = number in self.holding and self.holding[number][0] == ballot
            if number not in mine and not is_held and "vote_unheld" not in self.job.bugs:
                self.job.ledger.fail(f"{self.life} applies {ballot}, of which it does not hold slice {number}")
            if is_held:
                self._apply(number, hosted, self.holding.pop(number)[1], is_primary=False)
            elif number in mine:
                self._apply(number, hosted, self._fresh(hosted, work), is_primary=True)

    # -- what others say ----------------------------------------------------------------------------------

    def on_replicate(self, session: Session, frame: Frame) -> None:
        number, version, fresh, epoch, ballot = frame.body
        hosted = self.hosted.get(number)
        replica_set = self.replica_sets.get(number)
        is_out = (
            (frame.name, frame.incarnation) in self.out or replica_set is None or replica_set.primary != frame.name
        )
        is_later = self.is_frozen or ballot.generation > self.votes.generation
        if hosted is None or hosted.epoch != epoch:
            self.reply(session, "not_replicated", (number,))
            return
        if fresh and all(clock <= hosted.state.clocks.get(who, 0) for who, clock, _, _ in fresh):
            self.reply(session, "replicated", (number, ballot))  # it is in: the answer was lost
            return
        held = self.holding.get(number)
        is_over = ballot.generation < self.votes.generation and "old_ballots" not in self.job.bugs
        if is_out or is_later or is_over or version != hosted.state.version or (held and held[0] != ballot):
            self.reply(session, "not_replicated", (number,))
            return
        self.holding[number] = (ballot, fresh)
        self.reply(session, "replicated", (number, ballot))
        self.pump()

    def on_replicated(self, session: Session, frame: Frame) -> None:
        number, ballot = frame.body
        work = self.works.get(ballot)
        if work is not None:
            work.acks.add((number, session.other(self).life))
            self.pump()

    def on_vote(self, session: Session, frame: Frame) -> None:
        self.votes.vote(frame.body, frame.name)
        self.reply(session, "vote_heard", frame.body)
        self.pump()

    def on_vote_heard(self, session: Session, frame: Frame) -> None:
        self.letters.discard((session.other(self).life, frame.body))

    def _repeat(self, life: str) -> None:
        for work in self.works.values():
            work.sent = {one for one in work.sent if one[1] != life or one in work.acks}
        for to, ballot in sorted(self.letters) if "vote_once" not in self.job.bugs else ():
            if to == life:
                self.send(life, self.frame("vote", ballot))

    # -- changes ------------------------------------------------------------------------------------------

    def freeze(self, change: Prepare) -> None:
        self.is_frozen = change.moves and not self.job.bugs & {"no_freeze", "freeze_late"}

    def _hold_ends(self) -> None:
        super()._hold_ends()
        if not self._holds() and self.is_frozen:
            self.is_frozen = False
            self.pump()

    def _is_idle(self) -> bool:
        moves = self.change is not None and self.change.moves
        return moves or all(work.is_said for work in self.works.values())

    def _standing_of_all(self, change: Prepare) -> Prepared:
        answer = super()._standing_of_all(change)
        if "freeze_late" in self.job.bugs:
            self.is_frozen = change.moves
        if self.name not in self.votes.voters:
            return answer
        if "silent_voter" not in self.job.bugs:
            answer = msgspec.structs.replace(answer, is_primary=True)
        if not change.moves:
            return answer
        if not self._has_all() and "joiner_speaks" not in self.job.bugs:
            return answer
        held = highest_clocks(hosted.state.clocks for hosted in self.hosted.values())
        for ballot, work in self.works.items():
            if self._is_whole(ballot) or "holds_unheld" in self.job.bugs:
                held.update({who: clock for who, clock, _, _ in work.parts})
        holds = [(*who, clock) for who, clock in held.items()]
        return msgspec.structs.replace(answer, holds=holds, is_primary=True)

    def _has_all(self) -> bool:
        return all(
            number in self.hosted
            for number, replica_set in self.replica_sets.items()
            if self.name in replica_set.names
        )

    def _is_whole(self, ballot: Ballot) -> bool:
        others = set(self.hosted) - set(self.primaries())
        return others == {number for number, (known, _) in self.holding.items() if known == ballot}

    def on_install(self, session: Session, frame: Frame) -> None:
        install: Install = frame.body
        moves = self.change is not None and self.change.moves and self.change.generation == install.generation
        if not moves or install.generation == self.generation:
            if self.answering is not None and install.generation == self.generation:
                self.answering = (session, install.generation)  # said again: not all have their copies yet
            else:
                super().on_install(session, frame)
            return
        if not self.heed(session, frame):
            return
        if install.generation != self.prepared or not self._holds():
            self.reply(session, "not_held", (install.generation,))
            return
        self.installing, self.preparing = (session, install), None
        clocks = {(name, incarnation): clock for name, incarnation, clock in install.settle}
        for ballot, work in list(self.works.items()):
            counts = all(clock <= clocks.get(who, 0) for who, clock, _, _ in work.parts)
            if counts and self._is_whole(ballot):
                self._count(ballot, work)
        self.works.clear()
        if "keep_held" not in self.job.bugs:
            self.holding.clear()
        self.settled = clocks
        self._switch()

    def _switch(self) -> None:
        assert self.installing is not None and self.change is not None
        change, (session, install) = self.change, self.installing
        if change.moves:
            self.is_frozen = False
            voters = {name for replica_set in change.replica_sets for name in replica_set.names}
            self.votes.begin(install.generation, voters)
            self.letters.clear()
            self.answering = (session, install.generation)
        super()._switch()
        if change.moves:
            self._supply()

    def say_installed(self, session: Session, generation: int) -> None:
        """Where primaries change: when those who were named have what was here."""
        if self.answering is None:
            super().say_installed(session, generation)

    def _host(self, change: Prepare) -> None:
        before = dict(self.replica_sets_before)
        is_first = self.job.is_new or change.generation <= self.job.first_generation
        lives = {m.name: m.address.unix for m in self.members.values() if m.address is not None}
        for replica_set in change.replica_sets:
            if self.name not in replica_set.names:
                self.hosted.pop(replica_set.slice, None)
                self.lacking.pop(replica_set.slice, None)
                continue
            if replica_set.slice not in self.hosted:
                if is_first:
                    self.hosted[replica_set.slice] = Hosted()
                elif replica_set.primary == self.name:
                    self.job.ledger.fail(f"{self.life} gets slice {replica_set.slice}, which it does not have")
                else:
                    continue  # its primary gives it to us
            hosted = self.hosted[replica_set.slice]
            hosted.targets = {lives[n]: n for n in replica_set.backups if replica_set.primary == self.name}
            if "skip_fence" not in self.job.bugs:
                for worker in change.fenced:
                    hosted.state.fence(worker)
            self._name_lacking(replica_set, before.get(replica_set.slice), is_first)

    def _name_lacking(self, replica_set: ReplicaSet, before: ReplicaSet | None, is_first: bool) -> None:
        targets = self.hosted[replica_set.slice].targets
        known = self.lacking.get(replica_set.slice, set())
        new = {life for life, name in targets.items() if before is None or name not in before.names}
        self.lacking[replica_set.slice] = set() if is_first else (known | new) & set(targets)

    def _reset(self) -> None:
        super()._reset()
        states = [self.hosted[n].state for n in self.primaries()]
        clocks = {**least_clocks(states), **self.settled}
        self.rounds.reset([msgspec.structs.replace(s) for s in self.standings], clocks)

    # -- copies -------------------------------------------------------------------------------------------

    def _supply(self) -> None:
        """All that those lack who were named; said again until they have heard of the change themselves."""
        if self.answering is None:
            return
        if not any(self.lacking.values()):
            (session, generation), self.answering = self.answering, None
            self.reply(session, "installed", (generation,))
            return
        if self.prepared > self.generation:
            return  # another change is on its way
        for number, lives in sorted(self.lacking.items()):
            hosted = self.hosted[number]
            state = hosted.state
            body = (number, state.version, state.clock_entries(), state.fence_entries(), dict(hosted.ledger),
                    hosted.epoch, hosted.digest, state.ack_entries(), state.late_entries())  # fmt: skip
            for life in sorted(lives):
                self.send(life, self.frame("supply", body))
        self.after(SUPPLY_SECONDS, self._supply)

    def on_supply(self, session: Session, frame: Frame) -> None:
        number, version, clocks, fences, ledger, epoch, digest, acks, late = frame.body
        replica_set = self.replica_sets.get(number)
        is_mine = replica_set is not None and self.name in replica_set.backups and replica_set.primary == frame.name
        if frame.generation != self.generation or not is_mine or (frame.name, frame.incarnation) in self.out:
            return
        if number not in self.hosted:
            hosted = self.hosted[number] = Hosted(epoch)
            hosted.state.take_over(version, clocks, fences, acks, late)
            hosted.ledger, hosted.digest = dict(ledger), digest
        self.reply(session, "supplied", (number, frame.generation))

    def on_supplied(self, session: Session, frame: Frame) -> None:
        number, generation = frame.body
        if generation == self.generation and number in self.lacking:
            self.lacking[number].discard(session.other(self).life)
            if not any(self.lacking.values()):
                self._supply()


def check_copies(fail: Any, state: Any, processes: dict[str, Any]) -> None:
    """A generation is everywhere: all who are named have every slice, all with the same steps in it."""
    found: dict[int, tuple[str, Any]] = {}
    for number, replica_set in state.replica_sets.items():
        for name in replica_set.names:
            member = state.members.get(name)
            if member is None or member.address is None:
                continue
            server = processes[member.address.unix]
            hosted = server.hosted.get(number)
            if hosted is None:
                fail(f"{server.life} is named for slice {number}, and does not have it")
                return
            at = (hosted.state.version, hosted.digest)
            if found.setdefault(number, (server.life, at))[1] != at:
                fail(f"slice {number} is {at} on {server.life} and {found[number][1]} on {found[number][0]}")
    contents = {number: frozenset(processes_ledger(state, processes, number)) for number in state.replica_sets}
    if len(set(contents.values())) > 1:
        fail(f"a step is on some slices and not on others: { ({n: len(c) for n, c in contents.items()}) }")


def processes_ledger(state: Any, processes: dict[str, Any], number: int) -> Iterable[Any]:
    member = state.members.get(state.replica_sets[number].primary)
    if member is None or member.address is None:
        return ()
    hosted = processes[member.address.unix].hosted.get(number)
    return hosted.ledger if hosted is not None else ()


def settled_otherwise(change: Reconfiguration, bugs: Iterable[str]) -> list[tuple[str, int, int]]:
    """A planted bug: a round counts that most hold, or any, and not all."""
    answers = [{(n, i): c for n, i, c in a.holds} for a in change.answers.values() if a.holds is not None]
    if not answers:
        return Reconfiguration.settle(change)
    place = len(answers) // 2 if "settle_by_most" in bugs else 0
    return [
        (*who, sorted((answer.get(who, 0) for answer in answers), reverse=True)[place])
        for who in {**change.staying, **change.fenced}.items()
    ]
