"""A hosted slice: bytes, state, rules, lock, and the queue of rounds."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from syncline import faults
from syncline.core.codecs.pieces import Encoded, SliceCoder
from syncline.core.layout import INTEGERS, Piece, Ranges, Segment, Slice
from syncline.core.rounds import Commit
from syncline.core.rule import Option
from syncline.core.slice_state import CommonClocks, Identity, SliceState
from syncline.core.wire.leases import LeaseAck
from syncline.net.reliable_send import Partner
from syncline.net.transport import buffer_of
from syncline.reduce.kernels import Numbers
from syncline.reduce.slices import SliceReduction
from syncline.server.replicate import Region, Replica, Update, region_of, update_of
from syncline.server.rules import PushedSlice, SliceRules
from syncline.server.storage import DeviceArena, SliceStorage
from syncline.server.tasks import Key, Progress, SliceTask, StagedCommit, acks_of, key_of, late_of

Bytes = npt.NDArray[np.uint8]
#: Snapshot buffers that a slice keeps for reuse.
MOST_SPARE = 2
#: Counts of staleness: 0, 1, 2-3, 4-7, …; the last one has all that is larger.
NUM_STALENESS_COUNTS = 12


class Snapshot:
    """One version of a slice, copied once for several replies. The buffer is reused when all are sent."""

    def __init__(self, slot: HostedSlice, num_users: int) -> None:
        self._slot, self._num_users = slot, num_users
        self._lock = threading.Lock()
        self._array = slot.spare.pop() if slot.spare else np.empty(slot.part.num_bytes, np.uint8)
        self.buffer = buffer_of(self._array)
        self.version = slot.copy_locked(self.buffer)

    def sent(self) -> None:
        """One reply has sent it."""
        with self._lock:
            self._num_users -= 1
            last = self._num_users == 0
        if last and len(self._slot.spare) < MOST_SPARE:
            self._slot.spare.append(self._array)


class HowApplied(NamedTuple):
    """How an update is applied, on the primary and on its backups alike."""

    overrides: Mapping[int, Mapping[str, Option]]
    scale: float = 1.0  # the factor on the gradient
    counts: float = 1.0  # how much it counts: see SliceTask
    gather: int = 0


class HostedSlice:
    """One slice at its server. Methods that change it hold its lock; nothing is sent under it.

    With backups (`replicas`), an update is sent first. It is *in flight* until all backups have acknowledged it (in a
    ring, until all servers have voted for its round), then it is applied here. Only one update is in flight at a
    time.
    """

    def __init__(self, segment: Segment, part: Slice, memory: Bytes, storage: SliceStorage) -> None:
        self.part, self.segment = part, segment
        self._memory, self.storage = memory, storage
        self.rules = SliceRules(segment, part, memory, storage)
        self.state = SliceState()
        self.lock = threading.Lock()
        self.uploaded = False
        # restored from a worker's copy with these clocks; later updates are lost
        self.copied: dict[str, int] | None = None
        self.spare: list[Bytes] = []  # buffers of sent snapshots
        self._encoded: tuple[int, Encoded] | None = None  # version and data, shared by replies
        self.queue: collections.deque[SliceTask] = collections.deque()
        self.replicas: list[Replica] = []
        self._own_region: Region | None = None
        self.in_flight: Update | None = None
        self.is_sending = False  # the sending thread itself will check for the acknowledgement
        self.is_spread = False  # in a ring: backups compute their own sums
        self.sum_coder: SliceCoder | None = None  # in a ring: encodes sums for other servers
        self.reduction = SliceReduction(segment, part)
        self.num_updates, self.apply_seconds = 0, 0.0
        self.staleness_sum, self.staleness_max, self.staleness_count = 0, 0, 0
        self.staleness_counts = [0] * NUM_STALENESS_COUNTS
        self.damping_sum = 0.0

    @property
    def memory(self) -> Bytes:
        """Its bytes, as mapped by workers."""
        self.storage.refresh(self.rules.flat, self.rules.host)
        return self._memory

    def shown(self) -> int:
        """Its published version: mapped memory holds this version or a newer one."""
        if self.storage.is_lazy:
            with self.lock:
                self.storage.refresh(self.rules.flat, self.rules.host)
                return self.state.version
        return self.state.version

    def show(self) -> None:
        """Brings mapped memory up to date, for workers of other processes."""
        if self.storage.device_channel is None:
            self.storage.refresh(self.rules.flat, self.rules.host)

    def mapped_version(self) -> int:
        """The version that workers of other processes find in mapped memory."""
        return self.state.version if self.storage.device_channel is not None else self.shown()

    def land(self, arena: DeviceArena) -> int:
        """Queues a copy to a worker's arena on the GPU; returns its version."""
        with self.lock:
            arena.land(self.part, self.rules.flat)
            return self.state.version

    def held(self) -> dict[str, int]:
        """How many there are of everything that commits bring."""
        known = len(self.state.clocks) + len(self.state.fences) + self.state.num_readers
        return {"workers": known, "views": self.rules.num_views, "queue": len(self.queue)}

    @property
    def pieces(self) -> Sequence[Piece]:
        return self.rules.pieces

    # -- what waits is applied ----------------------------------------------------------------------------

    def put(self, work: SliceTask) -> None:
        """Queues a task. What is queued happens to this slice alone."""
        self.state.stand_apart()
        self.queue.append(work)

    def passes(self, workers: list[tuple[Identity, int]], common: CommonClocks) -> bool:
        """Under `state_lock`: counts a round that has no gradient for this slice, and shares `common` if it can.
        False if anything else is under way here, or if the round must be queued to find out what is wrong with it.
        """
        if self.replicas or not self.lock.acquire(blocking=False):
            return False
        try:
            if self.state.pins or self.in_flight is not None or self.queue or not self.state.lacks(workers):
                return False
            self.state.applied(workers, False)
            self.state.join(common)
            return True
        finally:
            self.lock.release()

    def drain(self) -> None:
        """Applies the tasks that wait, in order, unless a reader has pinned the slice. Called without its lock."""
        for work in self._apply_queued():
            work.slice_done()

    def _apply_queued(self) -> list[SliceTask]:
        """Returns the tasks that are done with this slice."""
        done: list[SliceTask] = []
        with self.lock:
            if not self.replicas and self.in_flight is None:
                queue, state = self.queue, self.state
                while queue and not state.pins and not queue[0].waits_for_votes:
                    done.append(self._apply_alone(queue.popleft()))
                self._tell_of(done)
                if not (queue and queue[0].waits_for_votes):
                    return done
        return done + self._drain_with_backups()

    def _is_voted_on(self) -> bool:
        """In a ring: whether the next task waits for votes."""
        return bool(self.queue) and self.queue[0].waits_for_votes

    def _apply_alone(self, work: SliceTask) -> SliceTask:
        """Under the lock, without backups: sums the gradients of a round and applies the rule."""
        try:
            with self.storage.at_work():
                commits = self._admitted(work)
                self._take_in(work, commits, self._gradients_of(work, commits), self._scale_of(work, commits))
        except Exception as error:  # callers must get an error, whatever it is
            work.error = work.error or error
        return work

    def _drain_with_backups(self) -> list[SliceTask]:
        """Sends one update after the other to the backups. Each is applied here when all backups have it."""
        done: list[SliceTask] = []
        while True:
            with self.lock:
                began, held = len(done), list[SliceTask]()
                update = self._advance(done, held)
                self._tell_of(done[began:])
            for work in held:
                work.slice_held()
            if update is None:
                return done
            self.is_sending = True
            try:
                for send in update.sends:
                    send.send()
            finally:
                # Either the acknowledging thread sees this flag, or this thread sees the acknowledgement.
                self.is_sending = False

    def _advance(self, done: list[SliceTask], held: list[SliceTask]) -> Update | None:
        """Under the lock: applies the acknowledged update and returns the next one to send, if any. `held`: in a
        ring, rounds that are held by all and wait for votes.
        """
        while not self.state.pins:
            update = self.in_flight
            if update is not None:
                if not update.is_acknowledged:
                    return None
                if update.work.waits_for_votes:
                    if not update.is_told:
                        update.is_told = True
                        held.append(update.work)
                    return None
                self.in_flight = None
                self._finish(update)
                done.append(update.work)
            elif not self.queue:
                return None
            elif not self.replicas and not self._is_voted_on():
                done.append(self._apply_alone(self.queue.popleft()))
            else:
                work = self.queue.popleft()
                try:
                    with self.storage.at_work():
                        commits = self._admitted(work)
                        region = region_of(self)
                        gradients = self._gradients_of(work, commits, region.flat)
                        made = update_of(self, work, commits, gradients, self._scale_of(work, commits))
                except Exception as error:  # as above
                    work.error = work.error or error
                    done.append(work)
                    continue
                if made.sends or work.waits_for_votes:
                    self.in_flight = made
                    if made.sends:
                        return made
                else:
                    self._finish(made)
                    done.append(work)
        return None

    def _finish(self, update: Update) -> None:
        """The backups have the update: applies the same numbers here."""
        try:
            for replica in self.replicas:
                if replica.is_seeding:
                    replica.gather(self, update)
            with self.storage.at_work():
                self._take_in(update.work, update.commits, update.gradients(self), update.scale)
                update.compare(self)
        except Exception as error:
            update.work.error = update.work.error or error

    def _tell_of(self, done: Sequence[SliceTask]) -> None:
        """Under the lock: copies the slice for the replies that want its bytes. They share one copy."""
        answers: list[Progress] = [answer for work in done for answer in work.answers()]
        if not answers:
            return
        sharing = [answer for answer in answers if answer.copies]
        snapshot = Snapshot(self, len(sharing)) if len(sharing) > 1 else None
        if snapshot is not None:
            sharing[0].count(self.part.num_bytes)
        for answer in answers:
            answer.applied(self, snapshot=snapshot if answer.copies else None, locked=True)

    def _admitted(self, work: SliceTask) -> list[Commit[StagedCommit]]:
        """The commits of a round that this slice lacks."""
        return [commit for commit in work.commits if self._admits(commit)]

    def _admits(self, commit: Commit[StagedCommit]) -> bool:
        worker = (commit.worker, commit.item.incarnation)
        if commit.item.is_fenced and self.state.is_fenced(worker):
            # Committed before the fence, which did not wait for this round.
            return commit.clock > self.state.clocks.get(worker, 0)
        return self.state.admit(worker, commit.clock) == "new"

    def admitted(self, work: SliceTask) -> tuple[list[Commit[StagedCommit]], float]:
        """Under the lock: the commits of a round that this slice lacks, and the factor on their gradient."""
        commits = self._admitted(work)
        return commits, self._scale_of(work, commits)

    def _gradients_of(
        self, work: SliceTask, commits: Sequence[Commit[StagedCommit]], into: Numbers | None = None
    ) -> list[Numbers | None]:
        has_any = commits and not work.skip and not work.is_beyond(self.state.version)
        return self.gradients(commits, work, into) if has_any else []

    def _scale_of(self, work: SliceTask, commits: Sequence[Commit[StagedCommit]]) -> float:
        """Computed once: the worker may pull while the backup applies the update."""
        if work.policy is None or not work.policy.is_damped:
            return work.scale
        return work.scale_for(max((self.state.staleness(c.worker) for c in commits), default=0))

    def _take_in(
        self,
        work: SliceTask,
        commits: Sequence[Commit[StagedCommit]],
        gradients: Sequence[Numbers | None],
        scale: float,
    ) -> None:
        """Under the lock: applies a round's gradients here, and counts what they were."""
        began = time.perf_counter()
        if _has_any(gradients):
            for commit in commits:
                self._measure(self.state.staleness(commit.worker))
            self.damping_sum += len(commits) * (1.0 if work.in_rounds or not work.scale else scale / work.scale)
        clocks = [((c.worker, c.item.incarnation), c.clock) for c in commits]
        acks, late = (acks_of(commits), late_of(commits)) if self.part.id == 0 else ([], [])
        how = HowApplied(self.overrides_of(work), scale, work.counts, work.gather)
        self.apply_update(gradients, how, clocks, acks, late, work.fences)
        self.apply_seconds += time.perf_counter() - began
        if faults.armed is not None:
            faults.reach("slice.applied")

    def apply_update(
        self,
        gradients: Sequence[Numbers | None],
        how: HowApplied,
        clocks: list[tuple[Identity, int]],
        acks: Sequence[LeaseAck],
        late: Sequence[LeaseAck],
        fences: Iterable[Identity],
    ) -> None:
        """Under the lock: applies one update, on the primary and on its backups alike."""
        state, overrides, scale, counts = self.state, how.overrides, how.scale, how.counts
        if how.gather:
            gradients, overrides = self.rules.gather(gradients, overrides, scale, counts, how.gather)
            scale = counts = 1.0
        changed = _has_any(gradients)
        if changed:
            state.writing = True
            try:
                self.rules.apply(gradients, overrides, scale, counts)
            finally:
                # A rule that raised may have changed the slice: this is a new version.
                state.applied([], True)
                state.writing = False
        state.applied(clocks, False)
        if acks or late:
            state.used(acks, late)
        for worker in fences:
            state.fence(worker)
        self.num_updates += changed

    def _measure(self, staleness: int) -> None:
        self.staleness_sum += staleness
        self.staleness_count += 1
        self.staleness_max = max(self.staleness_max, staleness)
        self.staleness_counts[min(staleness.bit_length(), NUM_STALENESS_COUNTS - 1)] += 1

    def gradients(
        self, commits: Sequence[Commit[StagedCommit]], work: SliceTask, into: Numbers | None = None
    ) -> list[Numbers | None]:
        """The round's gradient for each piece. `into`: memory for the result."""
        if work.sums is not None:
            return work.sums.gradients(self)
        sources: list[PushedSlice] = []
        for commit in commits:
            has = self.has(commit.item.pushed)
            if any(has) and (commit.item.weight > 0 or not work.weighs):
                array = commit.item.arrays(self.part)
                assert array is not None, "pushed, and not staged"
                sources.append(PushedSlice(array, commit.item.weight, has, self._factors(commit, work)))
        if not sources:
            return [None] * len(self.rules.pieces)
        num_rows = sum(commit.item.weight > 0 for commit in commits) if work.aggregate is not None else 0
        return self.rules.reduced(sources, work.weight, into, work.aggregate, num_rows)

    def _factors(self, commit: Commit[StagedCommit], work: SliceTask) -> Sequence[float] | None:
        """The factors on the pieces of one worker's gradient: by its norm, and by its own learning rate."""
        how, policy = work.aggregate, work.policy
        is_clipped = how is not None and self.part.dtype not in INTEGERS
        factor = how.factor(commit.item.squared_norm) if how is not None and is_clipped else 1.0
        if policy is not None and policy.lr_per_worker:
            found = []
            for group in self.rules.groups:
                rates = self._rates(work, group)
                highest = max(rates.values(), default=0.0)
                found.append(factor * rates[key_of(commit)] / highest if highest > 0 else factor)
            return found if any(each != 1.0 for each in found) else None
        return None if factor == 1.0 else [factor] * len(self.rules.pieces)

    def _rates(self, work: SliceTask, group: int) -> dict[Key, float]:
        default = self.rules.default_rate(group)
        return work.rates(self.part.segment, group, default) if default is not None else {}

    def overrides_of(self, work: SliceTask) -> dict[int, dict[str, Option]]:
        """The hyperparameters of a round here. With `--lr-per-worker` its rate is the highest of its workers."""
        overrides = work.overrides_for(self.part.segment) if work.overrides else {}
        if work.policy is not None and work.policy.lr_per_worker:
            for group in set(self.rules.groups):
                if rates := self._rates(work, group):
                    overrides[group] = {**overrides.get(group, {}), "lr": max(rates.values())}
        return overrides

    def has(self, pushed: Ranges) -> Sequence[bool]:
        """Which pieces of this slice are pushed."""
        return self.reduction.has(pushed)

    def touched_by(self, pushed: Ranges) -> bool:
        return self.reduction.touched_by(pushed)

    def norm(self, work: SliceTask) -> float:
        """This slice's share of the squared norm of a round."""
        with self.storage.at_work():
            return self.rules.squared_norm(self.gradients(work.commits, work))

    # -- its backups --------------------------------------------------------------------------------------

    def own_region(self) -> Region:
        """Memory for an update that is not replicated."""
        if self._own_region is None:
            self._own_region = Region(np.zeros(self.part.num_bytes, np.uint8), self.part.dtype)
        return self._own_region

    def replica_on(self, server: str) -> Replica | None:
        return next((replica for replica in self.replicas if replica.partner.name == server), None)

    def stand_alone(self, partner: Partner | None = None) -> None:
        """Removes the backup on `partner`, or all. Updates in flight no longer wait for it. Drain afterwards."""
        with self.lock:
            update = self.in_flight
            for send in update.sends if update is not None else ():
                if partner in (None, send.partner):
                    send.take_back()
            self.replicas = [r for r in self.replicas if partner is not None and r.partner is not partner]

    def renew_backups(self) -> None:
        """Under the lock: sends the whole slice to its backups again. Drain afterwards."""
        for replica in self.replicas:
            replica.renew(self)

    def summed(self, work: SliceTask, region: Region) -> Update:
        """In a ring, under the lock of a copy: adds a sum computed here."""
        commits = self._admitted(work)
        has = self.rules.lay_down(self._gradients_of(work, commits, region.flat), region.flat)
        return Update(work, commits, region, has, self._scale_of(work, commits))

    def is_summing(self, work: SliceTask) -> bool:
        """In a ring: whether this round's sum is here and not applied yet."""
        with self.lock:
            return self.in_flight is not None and self.in_flight.work is work

    def count_on_nobody(self) -> None:
        """Updates in flight no longer wait for acknowledgements. Drain afterwards."""
        with self.lock:
            for send in self.in_flight.sends if self.in_flight is not None else ():
                send.take_back()

    def drop(self, works: Collection[SliceTask]) -> None:
        """In a ring: drops these rounds; workers replay them."""
        with self.lock:
            self.queue = collections.deque(work for work in self.queue if work not in works)
            update = self.in_flight
            if update is not None and update.work in works:
                self.in_flight = None
                for send in update.sends:
                    send.take_back()

    # -- readers ------------------------------------------------------------------------------------------

    def copy_into(self, target: memoryview) -> int:
        """Makes a consistent copy; returns its version."""
        with self.lock:
            return self.copy_locked(target)

    def copy_locked(self, target: memoryview) -> int:
        """Like `copy_into`, for a caller that holds the lock."""
        target[:] = buffer_of(self.memory)
        return self.state.version

    def encoded(self, coder: SliceCoder, *, locked: bool) -> tuple[int, Encoded]:
        """The encoded slice and its version; encoded once per version."""
        with contextlib.nullcontext() if locked else self.lock:
            known = self._encoded
            if known is None or known[0] != self.state.version:
                known = self._encoded = (self.state.version, coder.encode(self.segment, self.part, self.memory))
            return known

    def pin(self) -> int:
        with self.lock:
            self.storage.refresh(self.rules.flat, self.rules.host)
            self.state.pins += 1
            return self.state.version

    def unpin(self) -> None:
        with self.lock:
            self.state.pins -= 1


def _has_any(gradients: Sequence[Numbers | None]) -> bool:
    for gradient in gradients:  # noqa: SIM110 - `any` of a generator takes longer than the few there are
        if gradient is not None:
            return True
    return False


class RoundSums:
    """The sums of one round, by slice."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Region, list[int]]] = {}

    def put(self, number: int, region: Region, has: list[int]) -> None:
        """`has`: the pieces of slice `number` that any worker has pushed."""
        self._found[number] = (region, has)

    def region(self, slot: HostedSlice) -> Region | None:
        found = self._found.get(slot.part.id)
        return found[0] if found is not None else None

    def has(self, slot: HostedSlice) -> list[int]:
        """The pieces of a slice that any worker has pushed."""
        found = self._found.get(slot.part.id)
        return found[1] if found is not None else []

    def gradients(self, slot: HostedSlice) -> list[Numbers | None]:
        region = self.region(slot)
        return slot.rules.as_pieces(region.flat, self.has(slot)) if region is not None else [None] * len(slot.pieces)
