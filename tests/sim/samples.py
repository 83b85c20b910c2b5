"""What must hold of samples: each is applied once per epoch, whoever reads it; and of the leases they are read by."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING

from syncline.core.leasing.ledger import SuspectBatch
from syncline.core.leasing.ranges import Span

if TYPE_CHECKING:
    from .hosting import Hosted

Entry = tuple[str, int, int]  # name, incarnation, clock
Sample = tuple[int, int]  # epoch, position


class Samples:
    """Which step has read which samples, and what of it is in the slices."""

    def __init__(self, fail: Callable[[str], None], epochs: int, num_samples: int) -> None:
        self.fail, self.epochs, self.num_samples = fail, epochs, num_samples
        self.read: dict[Entry, tuple[Sample, ...]] = {}
        self.before: set[Sample] = set()  # done in the checkpoint that this job has taken up
        self.late: set[Entry] = set()  # steps that count for nothing
        self.excused: set[Sample] = set()  # by what the coordinator has reported, or quarantined
        self.revoked_on: dict[int, set[Sample]] = {}  # by slice: of steps that are not on it, as reported
        self._leases: dict[int, tuple[str, int, Span]] = {}

    def resume(self, done: Iterable[Sample], excused: Iterable[Sample]) -> None:
        """What a checkpoint says is done, and what was in doubt there."""
        self.before.update(done)
        self.excused.update(excused)

    # -- events -------------------------------------------------------------------------------------------

    def step_sent(self, entry: Entry, samples: tuple[Sample, ...]) -> None:
        if samples:
            self.read[entry] = samples

    def lease_given(self, number: int, name: str, incarnation: int, span: Span) -> None:
        """A number is never used twice."""
        known = self._leases.setdefault(number, (name, incarnation, span))
        if known != (name, incarnation, span):
            self.fail(f"lease {number} is given to {name}, {incarnation}, for {span}; it was {known} before")

    def reported(self, entries: Iterable[Entry], among: Container[Sample] | None = None) -> None:
        """What these steps have used is reported, `among` others or as it is: it may be in no step, or in two."""
        for entry in entries:
            used = self.read.get(entry, ())
            self.excused.update(sample for sample in used if among is None or sample in among)

    def revoked(self, number: int, entries: Iterable[Entry]) -> None:
        """A slice came back from a copy without these steps."""
        self.revoked_on.setdefault(number, set()).update(s for entry in entries for s in self.read.get(entry, ()))

    def quarantine(self, epoch: int, suspect_batches: Iterable[SuspectBatch]) -> None:
        for suspect_batch in suspect_batches:
            self.excused.update((epoch, int(position)) for position in suspect_batch.span.positions())

    def applied(self, number: int, hosted: Hosted, fresh: Iterable[Entry]) -> None:
        """After each apply, on primary and backup: no sample twice in an epoch."""
        if not self.read:
            return
        if hosted.samples is None:
            hosted.samples = {}
            fresh = hosted.ledger
        for entry in fresh:
            for sample in self.read.get(entry, ()) if entry not in self.late else ():
                other = hosted.samples.setdefault(sample, entry)
                if sample in self.before and sample not in self.excused:
                    self.fail(f"sample {sample} is applied by {entry}, and was in the checkpoint that was taken up")
                if other != entry and sample not in self.excused:
                    self.fail(f"sample {sample} is applied twice on slice {number}: by {other} and {entry}")

    # -- the end ------------------------------------------------------------------------------------------

    def final(self, primaries: dict[int, Hosted | None]) -> None:
        """Every sample of every epoch is applied, or revoked on this slice."""
        wanted = {(epoch, position) for epoch in range(self.epochs) for position in range(self.num_samples)}
        for number, hosted in primaries.items():
            if hosted is None:
                continue
            self.applied(number, hosted, hosted.ledger)
            there = set(hosted.samples or ()) | self.before | self.revoked_on.get(number, set())
            missing = sorted(wanted - there - self.excused)
            if missing:
                self.fail(f"{len(missing)} samples are not applied on slice {number}: {missing[:5]}")
