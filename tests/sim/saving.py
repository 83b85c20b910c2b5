"""What a coordinator's twin does about saves: the cut, by the core; and what must hold of every cut that is made."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from syncline.core.checkpoint.snapshot import MOST_TRIES, SnapshotAttempt, ledger_at
from syncline.core.leasing.leases import LeaseState
from syncline.core.membership import JobState
from syncline.core.slice_state import Identity
from syncline.core.wire.checkpoints import SnapshotBarrierClosed

from .gating import Marked
from .leasing import LOADER, Leasing
from .ledger import Ledger
from .samples import Entry, Sample
from .world import Frame, Session

if TYPE_CHECKING:
    from .job import Job

#: As long as commits wait for a cut; for the marks after it; until it is tried again.
SNAPSHOT_SECONDS, MARK_SECONDS, AGAIN_SECONDS, URGENT_SECONDS = 0.4, 0.3, 0.05, 0.01


@dataclasses.dataclass(frozen=True)
class Taken:
    """A cut that was made."""

    leases: LeaseState
    done: frozenset[Sample]
    excused: frozenset[Sample]


class Saving(Leasing):
    """One save at a time, when nothing else is to be done; it gives way to every change."""

    job: Job

    def open_desk(self) -> None:
        super().open_desk()
        self.cut: SnapshotAttempt | None = None
        self.closed: dict[str, SnapshotBarrierClosed] = {}
        self.marks: dict[str, dict[int, Marked]] | None = None  # while servers mark
        self.leases_at_cut = LeaseState()
        self.is_wanted, self.num_tries, self.not_before = False, 0, 0.0
        self.took_over = bool(self.state.saves.open)

    def want_save(self) -> None:
        self.is_wanted = True
        self.pump()

    def _let_go(self) -> None:
        """Nothing is urgent."""
        super()._let_go()
        if self.is_dirty or self.cut is not None:
            return
        if self.took_over:
            self._tell_all("open_gate", self.state.saves.open, self.membership.servers())
            self.took_over, self.is_wanted = False, True
        if self.is_wanted and self.world.now >= self.not_before:
            self._begin_cut()

    def _begin_cut(self) -> None:
        saves = self.state.saves
        primaries = {replica_set.primary for replica_set in self.state.replica_sets.values()}
        is_in_doubt = bool(self.lease_queue.unheard()) and "cut_in_doubt" not in self.job.bugs
        if self.state.lost or is_in_doubt or not primaries <= set(self.membership.servers()):
            return
        before = (saves.num_begun, saves.open)
        saves.num_begun += 1
        saves.open = saves.num_begun
        if not self.keep():
            saves.num_begun, saves.open = before
            self._later(0.05)
            return
        self.cut = SnapshotAttempt(saves.open, primaries, self.world.now + SNAPSHOT_SECONDS)
        self.job.saves.num_begun += 1
        self._close_all(self.cut)
        self.after(SNAPSHOT_SECONDS, lambda cut=self.cut: self._is_late(cut))

    def _is_late(self, cut: SnapshotAttempt) -> None:
        if self.marks is None:
            self._stop(cut)

    def _close_all(self, cut: SnapshotAttempt) -> None:
        self.closed = {}
        for server in cut.servers:
            self.say(server, "close_gate", cut.close())

    def on_gate_closed(self, session: Session, frame: Frame) -> None:
        number, turn, answer = frame.body
        cut = self.cut
        is_asked = cut is not None and (cut.number, cut.turn) == (number, turn) and frame.name in cut.servers
        if cut is None or not is_asked or self.marks is not None or not self._is_member(frame):
            return
        self.closed[frame.name] = answer
        if self.closed.keys() != set(cut.servers):
            return
        verdict = cut.decide(self.closed, self.world.now)
        if verdict == "level" or "no_levelling" in self.job.bugs:
            self._mark(cut)
        elif verdict == "further":
            self.job.saves.num_further += 1
            self._close_all(cut)
        else:
            self._stop(cut)

    def _mark(self, cut: SnapshotAttempt) -> None:
        self.marks = {}
        self.leases_at_cut = self._ledger_at(cut)
        for server in cut.servers:
            self.say(server, "mark", (cut.number,))
        self.after(MARK_SECONDS, lambda: self._stop(cut))

    def _ledger_at(self, cut: SnapshotAttempt) -> LeaseState:
        acks, late = ([], []) if "uses_not_in_cut" in self.job.bugs else (cut.acks, cut.late)
        return ledger_at(self.state.leases, acks, late)

    def on_marked(self, session: Session, frame: Frame) -> None:
        number, marked = frame.body
        cut = self.cut
        if cut is None or cut.number != number or self.marks is None or not self._is_member(frame):
            return
        self.marks[frame.name] = marked
        if self.marks.keys() != set(cut.servers):
            return
        if "ledger_after_mark" in self.job.bugs:
            self.leases_at_cut = self._ledger_at(cut)
        slices = {n: one for each in self.marks.values() for n, one in each.items()}
        self.job.saves.made(cut, slices, self.leases_at_cut, self.state)
        self.cut, self.marks, self.is_wanted, self.num_tries = None, None, False, 0
        self.state.saves.open = 0
        self.keep()
        self.pump()

    def on_gate_refused(self, session: Session, frame: Frame) -> None:
        if self.cut is not None and self.cut.number == frame.body[0]:
            self._stop(self.cut)

    def is_cutting(self) -> bool:
        """Whether anything else waits for the cut; it gives way to what is urgent, until servers mark."""
        cut = self.cut
        if cut is None:
            return False
        is_urgent = self.is_dirty or self.deciding.is_urgent
        is_out = not set(cut.servers) <= set(self.membership.servers())
        if is_out or (is_urgent and self.marks is None):
            self._stop(cut, is_urgent=True)
        return self.cut is not None

    def _stop(self, cut: SnapshotAttempt, *, is_urgent: bool = False) -> None:
        """This try is over, and commits go on."""
        if self.cut is not cut:
            return
        self.cut = self.marks = None
        self._tell_all("open_gate", cut.number, cut.servers)
        self.num_tries += not is_urgent
        if self.num_tries >= MOST_TRIES:
            self.is_wanted, self.num_tries = False, 0
            self.job.saves.num_given_up += 1
        self._later(URGENT_SECONDS if is_urgent else AGAIN_SECONDS)

    def _later(self, seconds: float) -> None:
        self.not_before = self.world.now + seconds
        self.after(seconds + 1e-6, self.pump)

    def _tell_all(self, kind: str, number: int, servers: list[str]) -> None:
        for server in servers:
            self.say(server, kind, (number,))


class Saves:
    """All cuts of a job, and what must hold of each."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.num_begun = self.num_further = self.num_given_up = 0
        self.taken: list[Taken] = []

    def made(self, cut: SnapshotAttempt, slices: dict[int, Marked], leases: LeaseState, state: JobState) -> None:
        """Every server has marked its slices."""
        if slices.keys() != set(state.replica_sets):
            self.ledger.fail(f"save {cut.number} has slices {sorted(slices)} of {sorted(state.replica_sets)}")
        there = {(m.name, m.incarnation) for m in state.members.values() if m.role == "worker"}
        for number, marked in slices.items():
            self._check_clocks(cut, number, marked, there - self.ledger.fenced | cut.clocks.keys())
        self.ledger._all_or_none(slices, None)
        done = done_in(leases, self.ledger.samples.epochs, self.ledger.samples.num_samples)
        self._check_samples(cut, slices[0], done, there)
        self.taken.append(Taken(leases, frozenset(done), frozenset(self.ledger.samples.excused)))

    def _check_clocks(self, cut: SnapshotAttempt, number: int, marked: Marked, there: set[Identity]) -> None:
        """Of each worker exactly its steps up to the clock of the cut, each once."""
        ledger, highest = self.ledger, {}
        for (name, incarnation, clock), times in marked.ledger.items():
            who = (name, incarnation)
            highest[who] = max(clock, highest.get(who, 0))
            if times != 1:
                ledger.fail(f"save {cut.number}: {(*who, clock)} is {times} times in slice {number}")
        for who in sorted(there):
            clock = cut.clocks.get(who, 0)
            if marked.clocks.get(who, 0) != clock or highest.get(who, 0) > clock:
                ledger.fail(
                    f"save {cut.number}: slice {number} has {who} at {marked.clocks.get(who, 0)}, with steps up to "
                    f"{highest.get(who, 0)}; the cut is at {clock}"
                )
            for entry in ((*who, n) for n in range(1, clock + 1)):
                if entry not in marked.ledger and not ledger.is_revoked(number, ledger.sent.get(entry, 0.0)):
                    ledger.fail(f"save {cut.number}: {entry} is not in slice {number}; the cut is at {clock}")

    def _check_samples(self, cut: SnapshotAttempt, first: Marked, done: set[Sample], there: set[Identity]) -> None:
        """What is done is what the steps in the cut have used, each once."""
        samples = self.ledger.samples
        used: dict[Sample, Entry] = {}
        for entry in first.ledger:
            for sample in samples.read.get(entry, ()) if entry not in samples.late else ():
                if used.setdefault(sample, entry) != entry and sample not in samples.excused:
                    self.ledger.fail(f"save {cut.number}: sample {sample} is in {used[sample]} and {entry}")
        revoked = samples.revoked_on.get(0, set())
        lost = sorted(done - used.keys() - samples.before - samples.excused - revoked)
        # What is reported to be in doubt, those who live know.
        known = {sample for sample, entry in used.items() if entry[:2] in there}
        again = sorted((used.keys() | samples.before) - done - (samples.excused - known))
        if lost or again:
            self.ledger.fail(f"save {cut.number}: done and in no step {lost[:5]}, in a step and not done {again[:5]}")


def done_in(leases: LeaseState, epochs: int, num_samples: int) -> set[Sample]:
    """What is neither to do nor leased."""
    found = set()
    for number in range(epochs):
        epoch = leases.epochs.get(LOADER, {}).get(number)
        is_over = any(begin <= number < end for begin, end in leases.finished.get(LOADER, []))
        if epoch is None and not is_over:
            continue
        spans = [] if epoch is None else [*epoch.todo, *(s for one in epoch.leases.values() for s in one.rest())]
        left = {int(position) for span in spans for position in span.positions()}
        found |= {(number, position) for position in range(num_samples) if position not in left}
    return found
