"""Generations at a server: prepared, held, installed. See "Members come, go, die and return" in the design."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import msgspec

from syncline import faults
from syncline.core.wire.control import Install, Leave, LetGo, Prepare, Prepared, Roster
from syncline.core.wire.message import Done
from syncline.errors import FencedError, ProtocolError, Refresh
from syncline.net.rpc import Latch, Request
from syncline.server.commits import Commits
from syncline.server.hosting import Hosting
from syncline.server.pulls import Pulls
from syncline.server.ring import Voting
from syncline.server.tasks import RoundTask, SliceTask, in_thread

#: A hold without an Install ends after this time, or a multiple that Prepare names: a dead coordinator must not block
#: the job.
HOLD_SECONDS = 0.15
#: How long a new reconfiguration waits for the supply of the previous one.
_SUPPLY_SECONDS = 2.0
_LOOK_SECONDS = 0.2


class _Hold:
    """A prepared generation, until its Install or until the hold expires."""

    def __init__(self, message: Prepare) -> None:
        self.message = message
        self.is_answered = self.is_installing = False
        self.ended = threading.Event()


class ServerReconfiguration:
    """The server's side of a reconfiguration. Each request is handled in its own thread."""

    def __init__(
        self,
        name: str,
        commits: Commits,
        hosting: Hosting,
        pulls: Pulls,
        *,
        generation: int,
        is_late: bool,
        replicas: int,
        log: Callable[[str], None],
        hold_seconds: float = HOLD_SECONDS,
        cut_off: Callable[[str, int], None] = lambda name, incarnation: None,
        voting: Voting | None = None,
    ) -> None:
        """`cut_off` closes the connections of a removed worker, which releases its pins."""
        self._voting = voting  # in a ring
        self._name, self._commits, self._hosting, self._pulls = name, commits, hosting, pulls
        self._flow, self._worker_removal, self._state_lock = commits.flow, commits.worker_removal, commits.state_lock
        self.installed, self._is_late = generation if not is_late else 0, is_late
        self._replicas, self._log, self.hold_seconds = replicas, log, hold_seconds
        self._supplying = threading.Lock()
        self._hold: _Hold | None = None
        self.is_half_way = False  # a move has begun: leaving slices take no more updates
        self._cut_off, self._is_closed = cut_off, False
        self._through = Latch()  # of the last Install: set when its fences are on every slice
        self._through.open()

    def close(self) -> None:
        self._is_closed = True
        if self._voting is not None:
            self._voting.close()
        hold = self._hold
        if hold is not None:
            hold.ended.set()  # no caller waits for it

    def hear(self, roster: Roster) -> None:
        """Updates the roster. Servers may join without a reconfiguration, and leave when they host nothing."""
        servers = {member.name for member in roster.members if member.role == "server"}
        number = len(servers.union(replica_set.primary for replica_set in roster.replica_sets if replica_set.primary))
        with self._state_lock:
            if roster.generation >= self.installed:  # still
                self._flow.num_servers, self._commits.rounds.is_alone = number, number == 1

    # -- prepare ------------------------------------------------------------------------------------------

    def prepare(self, request: Request, message: Prepare) -> None:
        in_thread("prepare", request, lambda: self._prepare(request, message))

    def _prepare(self, request: Request, message: Prepare) -> None:
        """Holds further commits, fences removed workers and servers, finishes what is being applied, and reports."""
        with self._state_lock:
            self._check_newer(message)
            before, hold = self._hold, _Hold(message)
            self._hold = hold
            self._commits.admission_queue.hold()
            told = [self._worker_removal.fence(*worker) for worker in message.fenced]
            if self._voting is not None and message.moves:
                self._voting.freeze()  # before backups are released: leaving servers still vote
        if before is not None:
            before.ended.set()
        if self._voting is not None and not message.moves and not self.is_half_way:
            self._voting.thaw()  # the generation prepared before this was superseded
        # Wait for the supply of the previous generation. It ends when it sees this one, unless its receiver hangs.
        if self._supplying.acquire(timeout=_SUPPLY_SECONDS):
            self._supplying.release()
        for asked in told:
            self._flow.refuse(asked, FencedError(f"this worker was evicted before generation {message.generation}"))
        for worker in message.fenced:
            self._cut_off(*worker)
        self._hosting.fence_servers(message.servers, message.generation)
        self._hosting.release_backups(message.replica_sets)
        if message.moves and self._voting is not None:
            self._wait_applied(hold)
        else:
            self._wait_idle(hold)
        with self._state_lock:
            self._check_current(hold)
            hold.is_answered = True
            answer = self._prepared(message)
        faults.reach("prepare.held")
        request.reply(answer)
        hold.ended.wait(self.hold_seconds * message.times)
        self._end_by_itself(hold)

    def let_go(self, message: LetGo) -> None:
        """The coordinator has cancelled the generation."""
        hold = self._hold
        if hold is not None and hold.message.generation == message.generation:
            hold.ended.set()

    def _check_newer(self, message: Prepare) -> None:
        newest = self.installed if self._hold is None else max(self.installed + 1, self._hold.message.generation)
        if message.generation <= self.installed or message.generation < newest:
            raise ProtocolError(
                f"{self._name} is asked to prepare generation {message.generation}; it is at {self.installed}, "
                f"and has heard of {newest}"
            )

    def _check_current(self, hold: _Hold) -> None:
        if self._hold is not hold:
            raise ProtocolError(f"generation {hold.message.generation} was superseded by another one")

    def _wait_idle(self, hold: _Hold) -> None:
        """Waits until all updates in flight are applied, here and from other primaries."""
        with self._state_lock:
            while self._hold is hold and not self._flow.is_idle and not self._is_closed:
                self._flow.idle.wait(0.5)
        self._hosting.backups.wait_idle(lambda: self._hold is hold and not self._is_closed)

    def _wait_applied(self, hold: _Hold) -> None:
        """In a ring: waits only for updates that are being applied. Install settles what all servers hold."""
        with self._state_lock:
            while self._hold is hold and self._flow.is_applying and not self._is_closed:
                self._flow.idle.wait(0.5)

    def _prepared(self, message: Prepare) -> Prepared:
        rounds = self._commits.rounds
        # A server that joined late and hosts nothing does not know the clocks.
        knows = not self._is_late or bool(self._hosting.slices)
        standings = [msgspec.structs.replace(s) for s in rounds.standings.values()] if knows else []
        num_orphans = rounds.num_orphans() + self._flow.clipping.num_orphans()
        clocks = [(*worker, clock) for worker, clock in self._hosting.highest_clocks().items()]
        reach = self._hosting.reach(
            message.replica_sets, message.fenced, lambda who: self._worker_removal.reach(*who, moves=message.moves)
        )
        self._commits.learn_held()
        round_memberships = rounds.round_memberships.entries()
        is_voter = self._voting is not None and self._name in self._voting.votes.voters
        # A server that is not fully supplied has not voted: the other servers' reports count.
        holds = self._holds(clocks) if is_voter and message.moves and self._hosting.has_all() else None
        is_primary = bool(self._hosting.slices) or is_voter  # it receives all commits and opens rounds
        updates = self._hosting.most_updates()
        return Prepared(
            standings, num_orphans, clocks, reach, is_primary, round_memberships, holds, updates, rounds.num_open
        )

    def _holds(self, applied: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
        """In a ring: the clock of each worker up to which everything is here."""
        assert self._voting is not None
        found = {(name, incarnation): clock for name, incarnation, clock in applied}
        for name, incarnation, clock in self._voting.reach():
            found[name, incarnation] = max(clock, found.get((name, incarnation), 0))
        return [(*worker, clock) for worker, clock in found.items()]

    def _end_by_itself(self, hold: _Hold) -> None:
        with self._state_lock:
            if self._hold is not hold or hold.is_installing or self.is_half_way or self._is_closed:
                return
            self._hold = None
            self._commits.admission_queue.let_go()
        if self._voting is not None:
            self._voting.thaw()
        self._commits.admission_queue.decide()

    # -- install ------------------------------------------------------------------------------------------

    def install(self, request: Request, message: Install) -> None:
        in_thread("install", request, lambda: self._install(request, message))

    def _install(self, request: Request, message: Install) -> None:
        """Activates a prepared generation: `_move` if a server died or primaries change, else `_change`."""
        with self._state_lock:
            if message.generation == self.installed:
                through = self._through  # repeated
                hold = None
            else:
                hold = self._hold
                if hold is None or hold.message.generation != message.generation or not hold.is_answered:
                    raise ProtocolError(f"generation {message.generation} was superseded")
                hold.is_installing = True
                through = Latch()
        faults.reach("install.begun")
        refuse: Callable[[], None] | None = None
        if hold is not None:
            hold.ended.set()
            if hold.message.moves:
                refuse = self._move(hold, message, through)
                try:
                    if self._voting is not None:
                        self._supply(message.generation)
                        self._voting.supplied()
                except BaseException:
                    refuse()  # the open commits are dropped already and must be refused
                    raise
                through.open()
            else:
                self._change(hold, message, through)
        while not through.wait(_LOOK_SECONDS):  # a fence may wait for a dead backup until the next Prepare
            if self._is_closed:
                raise ProtocolError(f"{self._name} is closing")
        faults.reach("install.done")
        request.reply(Done())
        if refuse is not None:  # last: in an embedded job the refused worker replays its commits in this thread
            refuse()

    def _supply(self, generation: int) -> None:
        """In a ring: supplies the other servers. The next reconfiguration waits for it, because a late seed would set
        a copy back.
        """
        with self._supplying:
            self._hosting.supply(lambda: self._hold is None and self.installed == generation and not self._is_closed)

    def _change(self, hold: _Hold, message: Install, through: Latch) -> None:
        """Installs a generation with the same primaries: settles and removes fenced workers, lets others enter, and
        continues.
        """
        fenced = hold.message.fenced
        works: list[SliceTask] = []
        with self._state_lock:
            self._check_current(hold)
            for round_membership in message.round_memberships:
                self._commits.learn(round_membership)
            for entry in message.settle:
                works += self._worker_removal.settle(*entry)
            for worker in fenced:
                works += self._worker_removal.let_out(*worker)
            lost = self._flow.clipping.forget_orphans()
            for standing in message.standings:
                self._commits.rounds.enter(standing)
                self._commits.entered[standing.name] = message.generation
            works += self._flow.enqueue(self._commits.rounds.release())
            ways = self._hosting.take_replica_sets(hold.message.replica_sets, message.members)
            self._begin(message, through)
            works += self._flow.fence(fenced, through.open) if fenced else []
            self._commits.admission_queue.let_go()
        if not fenced:
            through.open()
        for line in lost:
            self._log(line)
        for way in ways:
            way.close()
        self._flow.run(works)
        self._commits.admission_queue.decide()

    def _move(self, hold: _Hold, message: Install, through: Latch) -> Callable[[], None]:
        """Installs a generation with new primaries: open commits are dropped and must be replayed; the slices' clocks
        tell which are new. Returns an action that refuses the waiting workers.
        """
        fenced, replica_sets = hold.message.fenced, hold.message.replica_sets
        works: list[RoundTask] = []
        run: Callable[[], None]
        with self._state_lock:
            self._check_current(hold)
            for round_membership in message.round_memberships:
                self._commits.learn(round_membership)
            # A step that any server has counts everywhere if its bytes are here. Leaving slices take no more updates:
            # their new primaries may be active and see by the clocks what they lack.
            self._commits.rounds.decides = False  # other servers may have dropped the bytes of open rounds
            if self._voting is None:
                self._flow.hosts_others(self._hosting.leaving(replica_sets))
                for entry in message.settle:
                    works += self._worker_removal.settle(*entry)
                run = functools.partial(self._flow.run, works)
            else:
                clocks = {(name, incarnation): clock for name, incarnation, clock in message.settle}
                works, run = self._voting.settle(clocks)
            settled = self._flow.take_requests_in(works)
            self.is_half_way = True  # from here on only an Install ends the hold
        run()
        self._wait_settled(hold)
        refresh = Refresh(f"primaries have changed with generation {message.generation}: to be made again")
        with self._state_lock:
            if self._hold is not hold:
                self._flow.refuse(settled, refresh)
            self._check_current(hold)
            if self._voting is not None:
                self._flow.drop(self._voting.drop())
            # First: requests without `state_lock` for a slice that has left must get a Refresh.
            self._commits.moved = message.generation
            ways = self._hosting.take_replica_sets(replica_sets, message.members)
            staying = [(name, incarnation) for name, incarnation, _ in message.settle]
            in_rounds = self._commits.rounds.policy.in_rounds
            clocks = self._hosting.clocks(message.standings, staying, in_rounds)
            if self._voting is not None:  # also if the slices' data is still on its way here
                clocks |= {(name, incarnation): clock for name, incarnation, clock in message.settle}
            asked, held = self._commits.reset(message.generation, message.standings, clocks)
            for worker in fenced:
                self._worker_removal.let_go(worker)
            self._begin(message, through)
            # Directly, not through primaries: new primaries may be active before their backups know them.
            self._hosting.fence(fenced)
            waiting = self._pulls.reset()
            self._is_late = False
        for way in ways:
            way.close()

        def refuse() -> None:
            self._flow.refuse([*settled, *asked], refresh)
            for request in held:
                if isinstance(request.message, Leave):
                    self._commits.leave(request)  # a leaving worker has nothing to replay
                else:
                    request.refuse(refresh)
            self._pulls.refuse(waiting, refresh)

        return refuse

    def _wait_settled(self, hold: _Hold) -> None:
        if self._voting is None:
            self._wait_idle(hold)
        else:
            self._wait_applied(hold)

    def _begin(self, message: Install, through: Latch) -> None:
        """Under `state_lock`: activates the generation."""
        if self._voting is not None and self._hold is not None and self._hold.message.moves:
            names = {name for replica_set in self._hold.message.replica_sets for name in replica_set.names}
            self._voting.begin(message.generation, names)
        self.installed, self._hold, self._through = message.generation, None, through
        self.is_half_way = False
        self._flow.num_servers = sum(member.role == "server" for member in message.members)
        self._flow.hosts_others()
        self._commits.ranks.hear(message.members)
        self._flow.count_workers(self._replicas)
