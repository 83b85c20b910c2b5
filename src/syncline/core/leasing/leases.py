"""Leasing: who reads what next, in every epoch of every loader. `LeaseState` is the persistent part.

Outside of rounds a free worker takes the next lease, sized by its speed. In rounds global batches are dealt to all
participants, so that a round's content does not depend on timing. When a worker has nothing to do, others give back
what they have not started. An epoch ends for all workers when everything in it is done.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from syncline.core.leasing.ledger import Epoch, Lease
from syncline.core.leasing.loader import Loader
from syncline.core.leasing.ranges import Places, Span, merged, without
from syncline.core.leasing.shares import (
    all_known,
    deal_rounds,
    equal_parts,
    lease_samples,
    widths,
    worth_a_change,
)
from syncline.core.slice_state import Identity
from syncline.errors import ConfigError

#: Positions reserved for each shard of unknown length.
SHARD_POSITIONS = 1 << 40
#: Orders use 64 bits of a seed.
MOST_SEEDS = 1 << 64
#: The weight of a new speed measurement.
_FRESH = 0.3


class LeaseState(msgspec.Struct):
    """Everything that must outlive the coordinator."""

    next_lease: int = 1
    loaders: dict[str, Loader] = {}
    epochs: dict[str, dict[int, Epoch]] = {}  # in progress
    finished: dict[str, list[Places]] = {}  # ranges of epoch numbers
    unshared: list[str] = []  # loaders that some workers did not open while others read
    seeds: dict[str, int] = {}  # of loaders' orders, the same in all workers and lives
    resumed: list[str] = []  # loaders known from a checkpoint, with an epoch in progress
    unheard: dict[str, int] = {}  # incarnations of workers that must report their acks, since servers have lost them
    sharing: dict[int, dict[str, int]] = {}  # common leases: the incarnations that were given each


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a request: a lease, the end of the epoch, or the workers to recall from."""

    lease: Lease | None = None
    begin: int = 0  # the place in the lease to begin at
    is_finished: bool = False
    recall: tuple[Identity, ...] = ()
    is_coming: bool = False  # more may come once others have answered


class Leasing:
    """Decisions about all loaders of a job."""

    def __init__(self, state: LeaseState, *, in_rounds: bool, is_exact: bool = False) -> None:
        """`is_exact`: while membership is stable, assignments do not depend on timing, even with shards."""
        self.state, self._in_rounds, self._is_exact = state, in_rounds, is_exact
        self.speeds: dict[str, float] = {}  # samples in a second of work
        self._widths: dict[tuple[str, int], dict[str, int]] = {}  # shares of a global batch, as last dealt
        self._first_dealt: dict[tuple[str, int], frozenset[Identity]] = {}  # the workers present when an epoch began
        self.recalled: dict[Identity, set[tuple[str, int]]] = {}  # recalled, not answered yet
        #: Workers with nothing to give back, and the lease up to which that is known.
        self._dry: dict[tuple[Identity, str, int], int] = {}
        self._held: dict[tuple[Identity, str, int], list[tuple[int, int, int]]] = {}  # read, waiting for a commit
        self._opened: set[tuple[Identity, str, int]] = set()
        self._described: dict[str, set[str]] = {}  # workers that have opened a loader with the known description
        self._gone: set[tuple[Identity, str, int]] = set()  # have left the loop over this epoch
        self._absent: set[tuple[Identity, str]] = set()  # did not open an epoch of this loader that others read
        self._quarantined: set[Identity] = set()

    # -- epochs -------------------------------------------------------------------------------------------

    def open(self, owner: Identity, name: str, number: int, loader: Loader, num_workers: int) -> bool:
        """Opens an epoch; returns whether anything is left in it. A loader that differs from the known one is
        refused.
        """
        worker = owner[0]
        loader.check()
        known = self.state.loaders.setdefault(name, loader)
        if known != loader:
            raise ConfigError(self._differs(worker, name, loader, known))
        self._described.setdefault(name, set()).add(worker)
        self._gone.discard((owner, name, number))
        self._absent.discard((owner, name))
        self._opened.add((owner, name, number))
        if self._has_finished(name, number):
            return False
        epochs = self.state.epochs.setdefault(name, {})
        if number not in epochs:
            epochs[number] = self._begin(loader, num_workers)
        if loader.is_steps and self._in_rounds and epochs[number].todo:  # it begins, or is resumed
            epochs[number].share(self.state.next_lease)
            self.state.next_lease += 1
        return not epochs[number].is_finished

    def _differs(self, worker: str, name: str, loader: Loader, known: Loader) -> str:
        """Describes the difference to the known loader, where that is from, and what to do."""
        others, own = sorted(self._described.get(name, set()) - {worker}), f"{worker} has {loader.describe()}"
        if others:
            who = f"{others[0]} has" if len(others) == 1 else f"{others[0]} and {len(others) - 1} more have"
            return (
                f"{own} in {name!r}, {who} {known.describe()}: all workers must read the same data; loaders are told "
                "apart by the order in which they are made, or by name="
            )
        if name in self.state.resumed:
            return (
                f"{own} in {name!r}, and the checkpoint that this job goes on from has {known.describe()}, in the "
                "middle of an epoch: finish that epoch with the same data and batch size, or start over with --fresh"
            )
        return (
            f"{own} in {name!r}, and earlier in this job the same loader had {known.describe()}: a loader keeps its "
            "data and batch size while the job lasts; give another loader a name= of its own"
        )

    def seed(self, name: str, seed: int, *, counts: bool) -> int | None:
        """The seed of this loader's order in the whole job: the first one that `counts`. None if there is none
        yet.
        """
        if counts:
            self.state.seeds.setdefault(name, seed % MOST_SEEDS)
        return self.state.seeds.get(name)

    def _begin(self, loader: Loader, num_workers: int) -> Epoch:
        batch = math.ceil(loader.batch / num_workers) if loader.is_global else loader.batch
        if loader.num_shards:
            return Epoch(0, batch, [Span(0, loader.num_shards * SHARD_POSITIONS)])
        wide = loader.batch * (num_workers if self._in_rounds and not loader.is_global else 1)
        size = loader.num_samples - (loader.num_samples % wide if loader.drop_last else 0)
        return Epoch(size, batch, [Span(0, size)] if size else [])

    def epoch(self, name: str, number: int) -> Epoch | None:
        return self.state.epochs.get(name, {}).get(number)

    def is_shared(self, name: str) -> bool:
        """Whether all workers read this loader's epochs, as far as known."""
        return name not in self.state.unshared

    def _has_finished(self, name: str, number: int) -> bool:
        return any(begin <= number < end for begin, end in self.state.finished.get(name, []))

    def _finish(self, name: str, number: int) -> None:
        self.state.finished[name] = merged([*self.state.finished.get(name, []), (number, number + 1)])

    # -- handing out --------------------------------------------------------------------------------------

    def ask(
        self,
        owner: Identity,
        name: str,
        number: int,
        participants: Sequence[Identity],
        held: Iterable[tuple[int, int, int]] = (),
        *,
        is_idle: bool = True,
        newest: int | None = None,
        given: Iterable[tuple[int, int]] = (),
        is_late: bool = False,
    ) -> Answer:
        """A worker requests more. `held`: lease ranges it has read and not committed. `is_idle`: it has nothing
        left to read. `newest`: the last lease it knows of; later ones were lost on the way. `given`: leases it has
        given back, from which place on. `is_late`: it joined a running job.
        """
        epoch = self.epoch(name, number)
        self._held[owner, name, number] = list(held)
        self._opened.add((owner, name, number))  # a restarted coordinator does not know it
        self._absent.discard((owner, name))
        if newest is not None and newest > self._dry.get((owner, name, number), newest):
            del self._dry[owner, name, number]  # a lease was on its way when it gave back
        if epoch is not None:
            self._give_back(epoch, owner, given)
        if epoch is None or self._is_through(name, number, epoch):
            return Answer(is_finished=True)
        if epoch.common is not None:
            return self._ask_common(owner, name, number, epoch.common, participants, newest, is_late)
        self._lost_on_the_way(epoch, owner, newest)
        if recall := self._recall_for(owner, name, number, epoch):
            return Answer(recall=recall, is_coming=True)
        lease, left = self._untold(epoch, owner), epoch.num_todo + 1
        while lease is None and epoch.num_todo < left:  # odd pieces of what is dealt may all go to others
            left = epoch.num_todo
            lease = self._hand_out(owner, name, number, epoch, participants)
        if lease is not None:
            lease.is_told = True
            self._dry.pop((owner, name, number), None)
            self._held.pop((owner, name, number), None)
            return Answer(lease)
        is_barred = self._is_barred(owner, participants) or not self._widths.get((name, number), {}).get(owner[0], 1)
        may_recall = is_idle and not is_barred and not self._has_its_part(owner, name, number)
        recall = self._whom_to_ask(owner, name, number, epoch) if may_recall else ()
        is_coming = not is_barred and (bool(epoch.todo) or self._is_recalling(name, number))
        return Answer(recall=recall, is_coming=is_coming)

    def _ask_common(
        self,
        owner: Identity,
        name: str,
        number: int,
        lease: Lease,
        participants: Sequence[Identity],
        newest: int | None,
        is_late: bool,
    ) -> Answer:
        """Every worker makes every remaining step, starting with the same one.

        A late worker starts one step after the last known one, which may be in progress. It never makes more steps
        than the others.
        """
        if newest == lease.number:
            return Answer()  # it has the lease and waits for the others
        given = self.state.sharing.setdefault(lease.number, {})
        beside = [
            one for one in participants if given.get(one[0]) == one[1] and (one, name, number) not in self._gone
        ]
        given[owner[0]] = owner[1]
        may_be_under_way = (lease.first_left or is_late) and any(one != owner for one in beside)
        begin = lease.first_left + (1 if may_be_under_way else 0)
        return Answer(lease, begin=min(begin, lease.end))

    def is_common(self, name: str, number: int) -> bool:
        """Whether all workers make this epoch's steps together."""
        epoch = self.epoch(name, number)
        return epoch is not None and epoch.common is not None

    def _is_through(self, name: str, number: int, epoch: Epoch) -> bool:
        """Whether everything is done, except samples that wait for their readers' next commits."""
        if self._has_finished(name, number):
            return True
        if epoch.todo or not all(self._is_held(name, number, lease) for lease in epoch.leases.values()):
            return False
        self._finish(name, number)
        return True

    def _is_held(self, name: str, number: int, lease: Lease) -> bool:
        told = self._held.get((lease.owner, name, number), [])
        if lease.is_common:
            told = [use for (_, *epoch), acks in self._held.items() if epoch == [name, number] for use in acks]
        left: list[Places] = [(0, lease.end)]
        for places in [*lease.done, *((begin, end) for n, begin, end in told if n == lease.number)]:
            left = without(left, places)
        return not left

    @staticmethod
    def _untold(epoch: Epoch, owner: Identity) -> Lease | None:
        return min((one for one in epoch.of(owner) if not one.is_told), key=lambda one: one.number, default=None)

    @staticmethod
    def _lost_on_the_way(epoch: Epoch, owner: Identity, newest: int | None) -> None:
        if newest is not None:
            for lease in epoch.of(owner):
                lease.is_told = lease.is_told and lease.number <= newest

    def _hand_out(
        self, owner: Identity, name: str, number: int, epoch: Epoch, participants: Sequence[Identity]
    ) -> Lease | None:
        if not epoch.todo or self._is_recalling(name, number) or self._is_barred(owner, participants):
            return None
        if self.state.loaders[name].num_shards:
            owners = self._reading(owner, name, number, participants)
            for one in owners if self._has_its_part(owner, name, number) else [owner]:
                self._lease_shard(epoch, one)
            return self._untold(epoch, owner)
        first = self.state.next_lease
        names = [one for one, _ in participants] or [owner[0]]
        if not self._in_rounds:
            self.state.next_lease += 1
            speeds = [self.speeds.get(one, 0.0) for one in names]
            mine, loader = self.speeds.get(owner[0], 0.0), self.state.loaders[name]
            step = math.ceil(loader.batch / len(names)) if loader.is_global else 0
            size = lease_samples(step or epoch.batch, epoch.num_todo, mine, sum(speeds), len(names))
            pace = self._pace(owner[0], names)
            origin, together = self._num_done_before(owner, epoch, pace), round((step or epoch.batch) * pace)
            return epoch.lease(first, owner, size, step, origin=origin, wide=together)
        owners = self._reading(owner, name, number, participants)
        wide = self.widths(name, [one for one, _ in owners])
        self._widths[name, number] = wide
        if not wide[owner[0]]:
            return None  # more workers than samples in a global batch
        self.state.next_lease += len(owners)
        rounds = deal_rounds(sum(wide.values()), sum(self.speeds.get(one, 0.0) for one, _ in owners))
        data = self.state.loaders[name]
        # With drop_last no batch is smaller; shares of a global batch may still differ.
        unit = data.batch if data.drop_last and not data.is_auto and not data.is_global else 1
        epoch.deal(first, [(one, wide[one[0]]) for one in owners if wide[one[0]]], rounds, unit)
        return self._untold(epoch, owner)

    def _reading(self, owner: Identity, name: str, number: int, participants: Sequence[Identity]) -> list[Identity]:
        """The workers that are dealt samples of this epoch, by rank, including the one that asks."""
        owners = [one for one in participants if one == owner or not self._is_elsewhere(one, name, number)]
        owners += [owner] if owner not in owners else []
        self._first_dealt.setdefault((name, number), frozenset(owners))
        return owners

    def _has_its_part(self, owner: Identity, name: str, number: int) -> bool:
        """Whether it got its share when the epoch began. Taking more from others would depend on timing."""
        return self._is_exact and owner in self._first_dealt.get((name, number), ())

    def _lease_shard(self, epoch: Epoch, owner: Identity) -> None:
        """Leases the next shard, or the rest of one."""
        if epoch.todo:
            number, self.state.next_lease = self.state.next_lease, self.state.next_lease + 1
            epoch.lease(number, owner, SHARD_POSITIONS - epoch.todo[0].start % SHARD_POSITIONS)

    def _is_elsewhere(self, owner: Identity, name: str, number: int) -> bool:
        return (owner, name, number) in self._gone or (owner, name) in self._absent or owner in self._quarantined

    def _is_barred(self, owner: Identity, participants: Sequence[Identity]) -> bool:
        """Whether a quarantined worker gets no samples because other workers are there."""
        return owner in self._quarantined and any(one not in self._quarantined for one in participants)

    def quarantine(self, owner: Identity) -> list[tuple[str, int]]:
        """This worker's pushes no longer count. Returns the epochs from which it must give back."""
        if owner in self._quarantined:
            return []
        self._quarantined.add(owner)
        known = [(name, n, epoch) for name, epochs in self.state.epochs.items() for n, epoch in epochs.items()]
        return [(name, n) for name, n, epoch in known if epoch.of(owner) and self._recall([owner], name, n)]

    def widths(self, name: str, workers: Sequence[str]) -> dict[str, int]:
        """Each worker's current share of a global batch."""
        loader = self.state.loaders[name]
        if loader.is_auto:
            return widths(loader.batch * (1 if loader.is_global else len(workers)), self._speeds_of(workers))
        if loader.is_global:
            return dict(zip(workers, equal_parts(loader.batch, len(workers)), strict=True))
        return dict.fromkeys(workers, loader.batch)

    def _pace(self, worker: str, workers: Sequence[str]) -> float:
        """Samples that all workers read while this one reads one."""
        known = all_known(self._speeds_of([*workers, worker]))
        return sum(known.values()) / known[worker]

    @staticmethod
    def _num_done_before(owner: Identity, epoch: Epoch, pace: float) -> int:
        """About how many samples are done when this worker begins its next lease."""
        num_done = epoch.num_samples - epoch.num_todo - sum(lease.num_left for lease in epoch.leases.values())
        return max(0, num_done) + round(pace * sum(lease.num_left for lease in epoch.of(owner)))

    def _speeds_of(self, workers: Iterable[str]) -> dict[str, float]:
        return {worker: self.speeds.get(worker, 0.0) for worker in workers}

    # -- giving back --------------------------------------------------------------------------------------

    def _whom_to_ask(self, owner: Identity, name: str, number: int, epoch: Epoch) -> tuple[Identity, ...]:
        """The worker that would be busy longest; none if it has a batch or less."""
        left: dict[Identity, float] = {}
        for lease in epoch.leases.values():
            other = lease.owner if lease.is_told else owner
            if other != owner and (other, name, number) not in self._dry and lease.num_left > epoch.batch:
                speed = self.speeds.get(other[0], 0.0) or 1.0
                left[other] = left.get(other, 0.0) + lease.num_left / speed
        if not left:
            return ()
        slowest = max(left, key=lambda one: (left[one], one))
        return self._recall([slowest], name, number)

    def _recall_for(self, owner: Identity, name: str, number: int, epoch: Epoch) -> tuple[Identity, ...]:
        """The workers that must give back before a new worker gets its share: their shares shrink, and the global
        batch stays the same.
        """
        known = self._widths.get((name, number))
        is_new = known is not None and owner[0] not in known and not self._is_elsewhere(owner, name, number)
        if known is None or not is_new or not self.state.loaders[name].is_global:
            return ()
        known[owner[0]] = 1  # it counts now; its share is dealt when the others have given back
        holders = {lease.owner for lease in epoch.leases.values() if lease.owner != owner}
        return self._recall(sorted(holders), name, number)

    def _recall(self, owners: Iterable[Identity], name: str, number: int) -> tuple[Identity, ...]:
        fresh = [one for one in owners if (name, number) not in self.recalled.get(one, set())]
        for one in fresh:
            self.recalled.setdefault(one, set()).add((name, number))
        return tuple(fresh)

    def not_recalled(self, owner: Identity, name: str, number: int) -> None:
        """The recall failed or its answer was lost: it is repeated when needed."""
        self.recalled.get(owner, set()).discard((name, number))

    def _is_recalling(self, name: str, number: int) -> bool:
        return any((name, number) in asked for asked in self.recalled.values())

    def gave_back(
        self,
        owner: Identity,
        name: str,
        number: int,
        leases: Iterable[tuple[int, int]],
        newest: int | None = None,
    ) -> int:
        """A worker gives back these leases from these places on. Returns the samples that are to do again.

        `newest`: the last lease it knew of; later ones are not given back.
        """
        self.recalled.get(owner, set()).discard((name, number))
        epoch = self.epoch(name, number)
        if epoch is None:
            return 0
        told = max((one.number for one in epoch.of(owner) if one.is_told), default=0)
        self._dry[owner, name, number] = told if newest is None else newest
        untold = [(lease.number, 0) for lease in epoch.of(owner) if not lease.is_told]
        return self._give_back(epoch, owner, [*leases, *untold])

    @staticmethod
    def _give_back(epoch: Epoch, owner: Identity, leases: Iterable[tuple[int, int]]) -> int:
        mine = {lease.number for lease in epoch.of(owner)}
        return sum(epoch.give_back(lease, begin) for lease, begin in leases if lease in mine)

    def leave(
        self, owner: Identity, name: str, number: int, leases: Iterable[tuple[int, int]], newest: int | None = None
    ) -> int:
        """A worker has left the loop over this epoch: takes back everything and deals it no more."""
        self._gone.add((owner, name, number))
        if (epoch := self.epoch(name, number)) is not None:
            self._lost_on_the_way(epoch, owner, newest)
        return self.gave_back(owner, name, number, leases)

    def reclaim(self, name: str, number: int) -> int:
        """Takes back what was dealt to workers that have not opened this epoch, because another worker waits."""
        epoch = self.epoch(name, number)
        owners = {lease.owner for lease in epoch.leases.values() if not lease.is_told} if epoch else set()
        absent = [one for one in owners if (one, name, number) not in self._opened]
        self._absent.update((one, name) for one in absent)
        if absent and name not in self.state.unshared:
            self.state.unshared.append(name)
        return sum(self.gave_back(one, name, number, []) for one in absent)

    def recut(self, name: str, number: int, participants: Sequence[Identity]) -> tuple[Identity, ...]:
        """Workers to recall from, since the shares by speed or the members have changed."""
        epoch, known = self.epoch(name, number), self._widths.get((name, number))
        if epoch is None or known is None or not self._in_rounds or self._is_recalling(name, number):
            return ()
        names = [one[0] for one in participants if not self._is_elsewhere(one, name, number)]
        # A worker with a lease that has not entered yet will enter with its first commit.
        names += sorted({lease.worker for lease in epoch.leases.values() if lease.worker in known} - set(names))
        wanted, is_auto = self.widths(name, names), self.state.loaders[name].is_auto
        if known.keys() == wanted.keys() and not (is_auto and worth_a_change(known, wanted, self._speeds_of(names))):
            return ()
        self._widths[name, number] = wanted
        return self._recall(sorted({lease.owner for lease in epoch.leases.values()}), name, number)

    # -- what is said of leases ---------------------------------------------------------------------------

    def used(self, acks: Iterable[tuple[int, int, int]]) -> int:
        """Commits have used these ranges. Returns the newly done samples."""
        by_lease = {
            n: epoch for epochs in self.state.epochs.values() for epoch in epochs.values() for n in epoch.leases
        }
        return sum(by_lease[lease].used(lease, begin, end) for lease, begin, end in acks if lease in by_lease)

    def late(self, acks: Iterable[tuple[int, int, int]]) -> int:
        """Late commits have used these ranges. Returns the samples that are to do again.

        If the epoch is finished except for held samples, they are skipped, since no worker reads it any more.
        """
        found = 0
        for lease, begin, end in acks:
            for name, epochs in self.state.epochs.items():
                for number, epoch in epochs.items():
                    if lease in epoch.leases and self._has_finished(name, number):
                        epoch.pass_over(lease, begin, end)
                    elif lease in epoch.leases:
                        found += epoch.late(lease, begin, end)
        return found

    def out(self, owner: Identity, *, failed: bool) -> int:
        """A worker's incarnation is over and its commits are settled: takes back its leases."""
        self.recalled.pop(owner, None)
        self._forget(lambda key: key[0] == owner)
        self._absent = {one for one in self._absent if one[0] != owner}
        self._quarantined.discard(owner)
        self.speeds.pop(owner[0], None)
        found = 0
        for name, epochs in self.state.epochs.items():
            for number, epoch in epochs.items():
                back = epoch.out(owner, failed=failed)
                if self._has_finished(name, number):
                    epoch.give_up()  # read and held, and the others went on without waiting
                else:
                    found += back
        return found

    def measured(self, worker: str, samples: int, seconds: float) -> None:
        """A worker has done this many samples in this working time."""
        if samples > 0 and 0 < seconds < math.inf:
            speed, known = samples / seconds, self.speeds.get(worker, 0.0)
            self.speeds[worker] = known + _FRESH * (speed - known) if known else speed

    @property
    def is_any_through(self) -> bool:
        return any(epoch.is_finished for epochs in self.state.epochs.values() for epoch in epochs.values())

    def forget_finished(self) -> list[tuple[str, int, Epoch]]:
        """Removes and returns finished epochs."""
        found = []
        for name, epochs in self.state.epochs.items():
            for number in [n for n, epoch in epochs.items() if epoch.is_finished]:
                self._finish(name, number)
                self._widths.pop((name, number), None)
                self._first_dealt.pop((name, number), None)
                self._forget_epoch(name, number)
                found.append((name, number, epochs.pop(number)))
        leases = {
            lease for epochs in self.state.epochs.values() for epoch in epochs.values() for lease in epoch.leases
        }
        self.state.sharing = {lease: lives for lease, lives in self.state.sharing.items() if lease in leases}
        return found

    def _forget_epoch(self, name: str, number: int) -> None:
        self._forget(lambda key: key[1:] == (name, number))

    def _forget(self, matches: Callable[[tuple[Identity, str, int]], bool]) -> None:
        self._held = {key: told for key, told in self._held.items() if not matches(key)}
        self._dry = {key: newest for key, newest in self._dry.items() if not matches(key)}
        for known in (self._opened, self._gone):
            known.difference_update([key for key in known if matches(key)])
