"""A ring server's sums: gives rounds to the reducer of its generation, and holds the sums that come back.

The only file that knows both sides: servers (rounds, slices, votes) and `syncline.reduce`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from syncline.config import JobConfig
from syncline.core.members import Member, by_name
from syncline.core.ring import HostLeaders
from syncline.core.slice_state import Identity
from syncline.errors import SynclineError
from syncline.net.reliable_send import Partner
from syncline.net.transport import Memory
from syncline.reduce.kernels import Numbers
from syncline.reduce.reducer import ReducerFactory, RoundReducer
from syncline.reduce.rounds import Round, SliceSum
from syncline.reduce.slices import Contribution, SliceReduction
from syncline.server.backups import Backups
from syncline.server.commits import Commits
from syncline.server.hosting import Hosting
from syncline.server.pool import Pool
from syncline.server.replicate import Region, replicate_message
from syncline.server.ring import Voting
from syncline.server.slices import HostedSlice, RoundSums
from syncline.server.tasks import RoundTask, StagedCommit

#: At the end of a server: for the threads of reducers to end.
CLOSE_SECONDS = 5.0


class RingParticipant:
    """This server, as its reducers see it (`reduce.reducer.Participant`)."""

    def __init__(self, config: JobConfig, hosting: Hosting, pool: Pool) -> None:
        self._config, self._hosting, self._pool = config, hosting, pool
        self._known: dict[int, SliceReduction] = {}

    @property
    def name(self) -> str:
        return self._hosting.name

    @property
    def num_slices(self) -> int:
        return self._hosting.num_slices

    @property
    def num_servers(self) -> int:
        return len(self._hosting.servers())

    @property
    def device(self) -> str:
        device_channel = self._hosting.storage.device_channel
        return device_channel.device if device_channel is not None else "cpu"

    def find(self, number: int) -> SliceReduction:
        segment, part = self._hosting.find(number)
        known = self._known.get(number)
        if known is None or known.part != part:
            known = self._known[number] = SliceReduction(segment, part)
        return known

    def slices(self) -> list[SliceReduction]:
        return [slot.reduction for slot in self._hosting.copies()]

    def has_all(self) -> bool:
        return self._hosting.has_all()

    def members(self, names: Collection[str]) -> list[Member]:
        return self._hosting.members_named(names)

    def partners(self, names: Collection[str]) -> list[Partner]:
        return self._hosting.partners_named(names)

    def host_leaders(self) -> HostLeaders | None:
        return self._hosting.host_leaders_by(self._config)

    def create_memory(self, num_bytes: int) -> Memory:
        return self._hosting.create_memory(num_bytes)

    def submit(self, task: Callable[[], None]) -> None:
        self._pool.submit(task)

    def at_work(self) -> AbstractContextManager[object]:
        return self._hosting.storage.at_work()

    def settle(self) -> None:
        self._hosting.storage.settle()


class TensorRegion(Region):
    """Slice-shaped memory that is not shared, on any device."""

    def __init__(self, flat: Numbers) -> None:
        self.array, self.flat, self._memory = np.empty(0, np.uint8), flat, None


class RingReducer:
    """The reducer of the current generation, and the sums that arrive while a reconfiguration is prepared."""

    def __init__(self, factory: ReducerFactory, commits: Commits, voting: Voting, hosting: Hosting) -> None:
        self._factory, self._commits, self._voting, self._hosting = factory, commits, voting, hosting
        self._flow = commits.flow
        self._state_lock: threading.RLock = self._flow.state_lock
        self._reducer: RoundReducer | None = None
        self._ended: list[RoundReducer] = []
        self._rounds: dict[RoundTask, Round] = {}  # given to the reducer, and not applied yet
        self._regions: dict[int, tuple[Numbers, Region]] = {}  # by slice; rules cache views of them
        # Rounds that go on when the reconfiguration is cancelled, each with its next action.
        self._frozen: list[tuple[RoundTask, Callable[[RoundTask], None]]] = []

    @property
    def is_on(self) -> bool:
        """Under `state_lock`: whether rounds of this generation go to a reducer."""
        return self._reducer is not None

    def begin(self, generation: int, names: Collection[str]) -> None:
        """Under `state_lock`: replica sets have changed."""
        self.end()
        self._frozen.clear()
        self._regions = {}
        for slot in self._hosting.copies():
            slot.rules.forget_staged()  # regions of the generation before
        reducer = self._reducer = self._factory.begin(generation, sorted(names, key=by_name))
        self._commits.decoding.takes_all = reducer is not None
        staged_by = functools.partial(self._staged_by, reducer) if reducer is not None else None
        self._commits.worker_removal.stage_by(staged_by)

    def _staged_by(self, reducer: RoundReducer, worker: str) -> Iterable[HostedSlice]:
        """The slices whose pushes this worker sends here."""
        return [slot for slot in self._hosting.copies() if reducer.is_staged_here(worker, slot.part.id)]

    def supplied(self) -> None:
        """The other servers have received what they lacked of the slices here."""
        reducer = self._reducer
        if reducer is not None:
            reducer.supplied()

    def waiting_for(self) -> list[tuple[RoundTask, list[str]]]:
        """Under `state_lock`: the round that is being added up, and the servers that it waits for."""
        found = self._reducer.waiting_for() if self._reducer is not None else None
        if found is None or not found[1]:
            return []
        return [(work, found[1]) for work, given in list(self._rounds.items()) if given is found[0]]

    def is_through(self, work: RoundTask) -> None:
        """The round is applied, or was dropped."""
        reducer, given = self._reducer, self._rounds.pop(work, None)
        if reducer is not None and given is not None:
            reducer.release(given)

    def end(self) -> None:
        """Under `state_lock`, before slices move: closes the reducer. It is kept until its threads have ended."""
        reducer, self._reducer = self._reducer, None
        self._rounds.clear()
        if reducer is not None:
            reducer.close()
            self._ended = [*(old for old in self._ended if old.is_alive), reducer]

    def close(self) -> None:
        with self._state_lock:
            self.end()
            ended, self._ended = self._ended, []
            self._commits.worker_removal.stage_by(None)
        self._factory.close()
        for reducer in ended:
            reducer.join(CLOSE_SECONDS)

    # -- rounds -------------------------------------------------------------------------------------------

    def stage_early(self, worker: Identity, clock: int, staged: StagedCommit, slices: set[int]) -> None:
        """Not under `state_lock`."""
        reducer = self._reducer
        if reducer is not None:
            reducer.stage_early(worker, clock, staged.arrays, slices)

    def submit(self, work: RoundTask) -> None:
        """A round is complete here. Until it has its sums it counts as waiting: other servers may not know it yet."""
        with self._state_lock:
            if not self._voting.expects(work):
                return
            self._flow.waits(work)
            reducer = self._reducer
            assert reducer is not None
            given = self._rounds[work] = self._round_of(work)
        reducer.reduce(given)

    def _round_of(self, work: RoundTask) -> Round:
        items = [commit.item for commit in work.commits]
        return Round(
            contributions=tuple(
                Contribution(c.worker, c.item.incarnation, c.clock, c.item.weight, c.item.pushed, c.item.arrays)
                for c in work.commits
            ),
            skip=work.skip,
            is_early=all(item.is_early for item in items),
            is_edited=any(item.is_edited for item in items),
            summed=functools.partial(self._summed, work),
            failed=functools.partial(self._failed, work),
        )

    def _summed(self, work: RoundTask, sums: Sequence[SliceSum]) -> None:
        given = self._rounds.get(work)
        if given is None:
            return  # dropped
        found, counted = RoundSums(), given.counted
        for reduction, numbers in sums:
            region = self._region(reduction, numbers)
            found.put(reduction.number, region, reduction.pushed_pieces(counted))
        with self._state_lock:
            if not self._voting.expects(work):
                return  # dropped
            work.sums = found
            if self._voting.is_frozen:
                self._frozen.append((work, self._flow.summed))
                return
            self._flow.resumes(work)
        self._flow.summed(work)

    def _region(self, reduction: SliceReduction, numbers: Numbers) -> Region:
        known = self._regions.get(reduction.number)
        if known is None or known[0] is not numbers:
            is_bytes = isinstance(numbers, np.ndarray)
            region = Region(numbers, reduction.part.dtype) if is_bytes else TensorRegion(numbers)
            known = self._regions[reduction.number] = (numbers, region)
        return known[1]

    def _failed(self, work: RoundTask, error: Exception) -> None:
        with self._state_lock:
            if not self._voting.expects(work):
                return
        names = ", ".join(self._reducer.names) if self._reducer is not None else "servers"
        text = f"{self._factory.what} could not add up gradients among {names}: {type(error).__name__}: {error}"
        self._flow.fail(work, SynclineError(text))

    def thaw(self) -> None:
        """The reconfiguration was cancelled."""
        with self._state_lock:
            frozen, self._frozen = self._frozen, []
            frozen = [(work, go_on) for work, go_on in frozen if self._voting.expects(work)]
            for work, _ in frozen:
                self._flow.resumes(work)
        for work, go_on in frozen:
            go_on(work)

    def hold(self, work: RoundTask) -> bool:
        """Holds the sums of other servers' slices, and then queues the round at the slices here: a server votes when
        it holds all sums. False while a reconfiguration is prepared; the round then waits for its end.
        """
        with self._state_lock:
            if not self._voting.expects(work):
                return False
            if self._voting.is_frozen:
                self._flow.waits(work)
                self._frozen.append((work, self._flow.go_through))
                return False
            hold_sums(self._hosting.backups, work)
            for slot in work.slots:
                slot.put(work)
            return True


def hold_sums(backups: Backups, work: RoundTask) -> None:
    """Holds the sum of every backup here, as if its primary had sent the update."""
    sums = work.sums
    assert sums is not None and work.ballot is not None
    for backup in list(backups.backups.values()):
        slot = backup.slot
        if slot is None:
            continue
        with slot.lock:
            commits, scale = slot.admitted(work)
            has = sums.has(slot) if commits and not work.is_beyond(slot.state.version) else []
            message = replicate_message(slot, work, commits, has, scale, work.ballot)
        backup.held = (message, sums.region(slot) if has else None)
