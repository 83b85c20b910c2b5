"""The ledger of an epoch: what is to do, leased and done. Spans, never lists of samples.

`todo → leased → done`. Only committed samples are done, and only servers report that. What a worker gives back, or
leaves behind when it dies, is to do again. Lease numbers are never reused, so that late messages are unambiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from syncline.core.leasing.ranges import Places, Span, comb, count, joined, merged, without
from syncline.core.slice_state import Identity

#: This many different workers must fail on a batch before it is quarantined.
MOST_FAILURES = 3


#: The owner of a lease common to all workers: in rounds they make every step together.
EVERYONE: Identity = ("", 0)


class Lease(msgspec.Struct, array_like=True):
    """The right of one worker's incarnation, or of all workers together, to read a span in order."""

    number: int
    worker: str
    incarnation: int
    span: Span
    end: int  # places from here on belong to others
    done: list[Places] = []  # sorted, disjoint
    is_told: bool = False  # whether the worker knows of it
    step: int = 0  # samples per step: the worker's share of a global batch; 0: the loader's batch
    origin: int = 0  # samples of the epoch done before its first step; of shards, its position
    wide: int = 0  # samples per step of all workers together

    @property
    def owner(self) -> Identity:
        return (self.worker, self.incarnation)

    @property
    def is_common(self) -> bool:
        return self.owner == EVERYONE

    @property
    def num_left(self) -> int:
        return self.end - sum(end - begin for begin, end in self.done)

    @property
    def first_left(self) -> int:
        """The first place that is not done."""
        return self.done[0][1] if self.done and self.done[0][0] == 0 else 0

    def mark(self, begin: int, end: int) -> int:
        """Marks these places as done. Returns how many were not before."""
        before = self.num_left
        self.done = merged([*self.done, (max(0, begin), min(end, self.end))])
        return before - self.num_left

    def rest(self, begin: int = 0) -> list[Span]:
        """The spans that are not done, from this place on."""
        found, at = [], begin
        for first, last in [*self.done, (self.end, self.end)]:
            found += self.span.cut(max(at, begin), first)
            at = max(at, last)
        return found


class SuspectBatch(msgspec.Struct, array_like=True):
    """A batch on which workers failed."""

    span: Span
    workers: list[str]


class Epoch(msgspec.Struct):
    """One pass of a loader over its samples."""

    num_samples: int
    batch: int  # samples of one worker's step
    todo: list[Span]
    leases: dict[int, Lease] = {}
    num_done: int = 0
    num_passed_over: int = 0  # read without a step
    suspect_batches: list[SuspectBatch] = []
    # Checkpoints and journals keep the older name: a reader drops unknown ones without a word.
    quarantined: list[SuspectBatch] = msgspec.field(default_factory=list, name="aside")

    @property
    def num_todo(self) -> int:
        return count(self.todo)

    @property
    def is_finished(self) -> bool:
        return not self.todo and not self.leases

    @property
    def common(self) -> Lease | None:
        """The common lease, if there is one; it is then the only one."""
        return next((lease for lease in self.leases.values() if lease.is_common), None)

    def share(self, number: int) -> None:
        """Leases everything to do to all workers in common, renumbered from the start."""
        left, self.todo = self.num_todo, []
        first = self.num_samples - left
        self._add(number, EVERYONE, Span(first, self.num_samples), 1, first, 1).is_told = True

    def of(self, owner: Identity) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.owner == owner]

    # -- handing out --------------------------------------------------------------------------------------

    def lease(
        self, number: int, owner: Identity, most: int, step: int = 0, *, origin: int | None = None, wide: int = 0
    ) -> Lease | None:
        """Leases the next span, at most `most` samples, in batches of `step`. A suspect batch is leased alone."""
        if not self.todo:
            return None
        suspect_batch = next((one.span for one in self.suspect_batches if one.span in self.todo), None)
        first = suspect_batch or self.todo[0]
        self.todo.remove(first)
        size = len(first) if suspect_batch else min(most, len(first))
        taken, *pieces = first.cut(0, size) + first.cut(size, len(first))
        self.todo = sorted([*pieces, *self.todo])
        origin = taken.start if origin is None else origin
        return self._add(number, owner, taken, len(taken) if suspect_batch else step, origin, wide)

    def deal(
        self, first_number: int, parts: Sequence[tuple[Identity, int]], most_rounds: int, unit: int = 1
    ) -> list[Lease]:
        """Deals the next global batches: of each, every worker gets its share.

        A remainder smaller than a global batch is split by the same shares, in multiples of `unit` if possible. Of
        odd pieces every worker gets one, so that rounds are as wide as possible.
        """
        if not self.todo:
            return []
        first, period = self.todo[0], sum(width for _, width in parts)
        if any(one.span == first for one in self.suspect_batches):
            owner = parts[first_number % len(parts)][0]
            return [lease] if (lease := self.lease(first_number, owner, len(first))) else []
        if len(first) < period and len(self.todo) > 1:
            return self._deal_pieces(first_number, parts)
        rounds = 0 if first.period else min(most_rounds, len(first) // period)
        size = rounds * period or min(len(first), most_rounds * period)
        self.todo = sorted([*first.cut(size, len(first)), *self.todo[1:]])
        unit = unit if size % unit == 0 else 1
        found, at, num_units = [], 0, size // unit
        for number, (owner, width) in enumerate(parts):
            if rounds:
                spans = [comb(first.start + at, rounds, period, width)]
            else:
                spans = first.cut(num_units * at // period * unit, num_units * (at + width) // period * unit)
            at += width
            if spans:
                found.append(self._add(first_number + number, owner, spans[0], width, first.start, period))
                self.todo = sorted([*spans[1:], *self.todo])
        return found

    def _deal_pieces(self, first_number: int, parts: Sequence[tuple[Identity, int]]) -> list[Lease]:
        found, apart = [], {one.span for one in self.suspect_batches}
        origin, period = self.todo[0].start, sum(width for _, width in parts)
        for number, (owner, width) in enumerate(parts, first_number):
            first = next((span for span in self.todo if span not in apart), None)
            if first is None:
                break
            taken = first.cut(0, width)[0]
            self.todo.remove(first)
            self.todo = sorted([*first.cut(len(taken), len(first)), *self.todo])
            found.append(self._add(number, owner, taken, width, origin, period))
        return found

    def _add(self, number: int, owner: Identity, span: Span, step: int, origin: int, wide: int) -> Lease:
        assert number not in self.leases
        lease = Lease(number, *owner, span, len(span), step=step, origin=origin, wide=wide)
        self.leases[number] = lease
        return lease

    # -- what becomes of it -------------------------------------------------------------------------------

    def used(self, number: int, begin: int, end: int) -> int:
        """A commit has used these places. Returns the newly done samples."""
        lease = self.leases.get(number)
        if lease is None:
            return 0
        fresh = lease.mark(begin, end)
        self.num_done += fresh
        if not lease.num_left:
            del self.leases[number]
        return fresh

    def pass_over(self, number: int, begin: int, end: int) -> int:
        """A worker has read these places without a step: they count as read."""
        fresh = self.used(number, begin, end)
        self.num_done -= fresh
        self.num_passed_over += fresh
        return fresh

    def give_up(self) -> None:
        """What is left to do is skipped: no worker reads this epoch any more."""
        self.num_passed_over += self.num_todo
        self.todo = []

    def late(self, number: int, begin: int, end: int) -> int:
        """A late commit had these places: they are to do again. Returns their number."""
        lease = self.leases.get(number)
        if lease is None or lease.is_common:  # the other workers of that round have made the step
            return 0
        places = [(max(0, begin), min(end, lease.end))]
        for done in lease.done:
            places = without(places, done)
        back = [span for first, last in places if first < last for span in lease.span.cut(first, last)]
        lease.mark(begin, end)
        self._put_back(back)
        if not lease.num_left:
            del self.leases[number]
        return count(back)

    def give_back(self, number: int, begin: int) -> int:
        """The worker gives back this lease from this place on."""
        lease = self.leases.get(number)
        if lease is None:
            return 0
        begin = max([0, begin, *(end for _, end in lease.done)])
        back = lease.rest(begin)
        self._put_back(back)
        lease.end = min(lease.end, begin)
        if not lease.num_left:
            del self.leases[number]
        return count(back)

    def out(self, owner: Identity, *, failed: bool) -> int:
        """A worker's incarnation is over and its commits are settled: takes back its leases.

        `failed`: it died on the next batch of its oldest lease, which becomes suspect.
        """
        mine = sorted((lease for lease in self.of(owner)), key=lambda lease: lease.number)
        back: list[Span] = []
        for lease in mine:
            rest = lease.rest()
            if failed and lease.is_told and rest:
                rest = self._mark_suspect(owner[0], rest, lease.step or self.batch)
                failed = False
            back += rest
            del self.leases[lease.number]
        self._put_back(back)
        return count(back)

    def _put_back(self, spans: Sequence[Span]) -> None:
        apart = {one.span for one in self.suspect_batches}
        whole = joined([span for span in [*self.todo, *spans] if span not in apart])
        self.todo = sorted([*whole, *(span for span in [*self.todo, *spans] if span in apart)])

    def _mark_suspect(self, worker: str, rest: list[Span], step: int) -> list[Span]:
        """Records a failure on the next batch. It becomes suspect, and is quarantined after too many failures."""
        head, *others = rest
        batch = head if any(one.span == head for one in self.suspect_batches) else head.cut(0, step)[0]
        others = head.cut(len(batch), len(head)) + others
        known = next((one for one in self.suspect_batches if one.span == batch), None)
        if known is None:
            self.suspect_batches.append(known := SuspectBatch(batch, []))
        if worker not in known.workers:
            known.workers.append(worker)
        if len(known.workers) < MOST_FAILURES:
            return [batch, *others]
        self.suspect_batches.remove(known)
        self.quarantined.append(known)
        return others

    def shorten(self, position: int, stop: int) -> None:
        """A shard ended at this position: frees the positions reserved for it up to `stop`."""
        for lease in list(self.leases.values()):
            if lease.span.start < stop and lease.span.stop > position:
                lease.span = Span(lease.span.start, max(lease.span.start, position))
                lease.end = min(lease.end, len(lease.span))
                if not lease.num_left:
                    del self.leases[lease.number]
        ranges = [(s, position - s.start, stop - s.start) for s in self.todo]
        self.todo = [piece for s, begin, end in ranges for piece in s.cut(0, begin) + s.cut(end, len(s))]
