"""Making a call: by the script's own thread, or later by the thread of a queue of tickets. A call is retried when
members have joined or left.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from syncline.core.collectives import disagreement
from syncline.core.members import Member
from syncline.core.wire.collectives import Goodbye
from syncline.core.wire.control import Roster
from syncline.errors import CollectiveError, ConfigError, SynclineError, WaitTimeout
from syncline.stats import WireStats
from syncline.worker.arrays import Array
from syncline.worker.collectives.groups import CachedCall, Group, GroupLinks, World
from syncline.worker.collectives.incoming import LOOK_SECONDS, CallingJob, PeerWait
from syncline.worker.collectives.peers import Peers
from syncline.worker.collectives.rendezvous import (
    JointCall,
    LocalCall,
    Make,
    Rendezvous,
    RetryCall,
    StartedCall,
    repeat,
)
from syncline.worker.collectives.shared_memory import SharedMemories
from syncline.worker.session import CoordinatorHandlers


class Ticket:
    """A call under way."""

    def __init__(self, what: str, work: Callable[[], Any]) -> None:
        self._what, self._work = what, work
        self._over = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def wait(self, timeout_seconds: float | None = None) -> Any:
        """The result, or what went wrong. A WaitTimeout leaves it under way; the job's own deadline ends it."""
        if not self._over.wait(timeout_seconds):
            raise WaitTimeout(f"{self._what} is not done within {timeout_seconds:g} s")
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def give_up(self, error: SynclineError) -> None:
        self._error = error
        self._over.set()


class TicketQueue:
    """Runs tickets in their order. The thread is there while there is something to do, and a moment longer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._change = threading.Condition()
        self._open: collections.deque[Ticket] = collections.deque()
        self._is_running = self._closed = False

    @property
    def is_idle(self) -> bool:
        return not self._open

    def add(self, ticket: Ticket) -> Ticket:
        with self._change:
            if self._closed:
                raise SynclineError("this worker has left the job")
            self._open.append(ticket)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._change.notify_all()
        return ticket

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._open or self._closed, 0.1)
                if not self._open:
                    self._is_running = False
                    return
                ticket = self._open[0]
            ticket.run()
            with self._change:
                if self._open:
                    self._open.popleft()
                self._change.notify_all()

    def settle(self) -> None:
        """Returns when all is done; each has its own deadline."""
        with self._change:
            self._change.wait_for(lambda: not self._open)

    def close(self) -> None:
        """What has not begun is given up."""
        with self._change:
            self._closed = True
            waiting = list(self._open)[1:]
            while len(self._open) > 1:
                self._open.pop()
            self._change.notify_all()
        for ticket in waiting:
            ticket.give_up(SynclineError("this worker has left the job before its turn"))


T = TypeVar("T")


class Calls:
    """The calls of one worker, made one after the other, in the order in which its script makes them."""

    def __init__(self, job: CallingJob, me: Member, handlers: CoordinatorHandlers, peers: Peers | None) -> None:
        self.job, self._me, self._handlers, self._peers = job, me, handlers, peers
        self.world = World(me, handlers.rosters)
        self.queue = TicketQueue("collectives")
        self._busy = threading.Lock()
        self._roster: Roster | None = None
        self._version = 0  # of the attempt that the parties were made in
        self._groups: dict[Group | None, GroupLinks] = {}
        self._rendezvous: Rendezvous | None = None
        self._memories: SharedMemories | None = None
        if peers is not None:
            self._memories = SharedMemories(peers.create_memory)
            self._rendezvous = Rendezvous(peers, self._memories, me.name)

    @property
    def peers(self) -> Peers:
        if self._peers is None:
            raise ConfigError("this job has no links between its workers")
        return self._peers

    @property
    def incarnation(self) -> int:
        return self._me.incarnation

    @property
    def memories(self) -> SharedMemories:
        assert self.peers is not None and self._memories is not None
        return self._memories

    @property
    def rendezvous(self) -> Rendezvous:
        assert self.peers is not None and self._rendezvous is not None
        return self._rendezvous

    @property
    def there(self) -> frozenset[int]:
        """The incarnations of all workers that are there now."""
        return frozenset(member.incarnation for member in self.world.members(None)[0])

    def waiting(self, what: str, *, is_script: bool) -> PeerWait:
        return PeerWait(self.job, self._handlers, self.peers, what, is_script=is_script)

    def again(
        self, kind: Hashable, numbers: Array, group: Group | None
    ) -> tuple[StartedCall | None, CachedCall | None]:
        """Makes a call that all have made before, as far as all are there at once; `meet` does the rest of it."""
        self.job.leave_if_asked()
        group_links, rendezvous = self._groups.get(group) if self._is_current else None, self._rendezvous
        cached = group_links.cached_calls.get(kind) if group_links is not None else None
        if group_links is None or rendezvous is None or cached is None or not self.queue.is_idle:
            return None, None
        if not self._busy.acquire(False):
            return None, None
        try:
            rendezvous.tidy()
            return repeat(rendezvous, group_links, cached, numbers), cached
        finally:
            self._busy.release()

    def go(
        self,
        what: str,
        work: Callable[[bool], T],
        wait: bool,
        queue: TicketQueue | None = None,
        started: StartedCall | None = None,
    ) -> Any:
        """Does the work now, or gives a ticket for it. What was called before on the same queue is done first."""
        queue = queue or self.queue
        if not wait:
            return queue.add(Ticket(what, lambda: work(False)))
        if started is None:
            self.job.leave_if_asked()
        if not queue.is_idle:
            return queue.add(Ticket(what, lambda: work(False))).wait()
        if not self._busy.acquire(blocking=False):
            raise CollectiveError(
                f"{what}: another thread is in a collective; call them from one, or with wait=False"
            )
        try:
            return work(True)
        finally:
            self._busy.release()

    def meet(
        self, make: Make, body: Callable[[JointCall], T], group: Group | None, is_script: bool,
        started: StartedCall | None = None,
    ) -> T:  # fmt: skip
        """`body`: what is done when all have made the call."""
        rendezvous = self.rendezvous
        while True:
            group_links = self.links_of(group) if started is None else started.group_links
            waiting = self.waiting("a collective", is_script=is_script)
            if len(group_links) == 1:
                return self._call_alone(make, body, group_links, waiting)
            rendezvous.tidy()
            try:
                with rendezvous.meet(make, group_links, waiting, started) as joint:
                    return body(joint)
            except RetryCall:
                started = None
                self._await_others(group_links, waiting)

    def _call_alone(
        self, make: Make, body: Callable[[JointCall], T], group_links: GroupLinks, waiting: PeerWait
    ) -> T:
        number = self.rendezvous.begin(group_links)
        try:
            return body(_alone(make(group_links, number), group_links, waiting))
        finally:
            self.rendezvous.end(group_links)
            self.rendezvous.finish((group_links.group, number))

    @property
    def _is_current(self) -> bool:
        """Whether the parties are still as they were made."""
        return self._roster is self.world.roster and self._version == self.rendezvous.heard.attempt.version

    def links_of(self, group: Group | None) -> GroupLinks:
        """The members that take part; the same object while no worker has joined or left."""
        if not self._is_current:
            self._roster, self._version, self._groups = self.world.roster, self.rendezvous.heard.attempt.version, {}
        found = self._groups.get(group)
        if found is None:
            members, generation = self.world.members(group)
            found = GroupLinks(members, self._me.incarnation, generation, self.there)
            self.rendezvous.prepare(found)
            self._groups[group] = found
        return found

    def _await_others(self, group_links: GroupLinks, waiting: PeerWait) -> None:
        """Until the roster says which workers take part now. A worker that is gone without a goodbye has died in the
        call."""
        before = group_links.members

        def changed() -> list[Member] | None:
            now = self.world.members(None)[0]
            return now if now != before else None

        try:
            now = {member.incarnation for member in waiting.until_any(changed, [self._me.name])}
        finally:
            waiting.end()
        for member in before:
            if member.incarnation not in now and not self._has_left(member):
                self.rendezvous.end(group_links, has_failed=True)
                raise CollectiveError(f"{member.name} is gone while {waiting.what} was under way")

    def _has_left(self, member: Member) -> bool:
        if any(one.incarnation == member.incarnation for one in self.world.roster.finished):
            return True
        link = self.peers.last_link(member.incarnation)
        while link is not None and not link.has_left and link.read(0.0):
            pass
        return link is not None and link.has_left

    def pause(self) -> None:
        """Until something is heard, or a moment: before a call is made again."""
        with self.peers.change:
            self.peers.change.wait(LOOK_SECONDS)

    def stats(self) -> WireStats:
        return self._peers.stats() if self._peers is not None else WireStats()

    # -- the end ------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Finishes what is open, and says goodbye: later collectives go without this worker."""
        self.queue.settle()
        if self._peers is not None:
            self._peers.tell_all(Goodbye())

    def close(self) -> None:
        self.queue.close()
        if self._memories is not None:
            self._memories.close()


def _alone(call: LocalCall, group_links: GroupLinks, waiting: PeerWait) -> JointCall:
    joint = JointCall(group_links, 0, waiting)
    joint.data, joint.is_own, joint.said = call.data, call.is_own, [call.said]
    reason = disagreement(group_links.names, joint.said)
    if reason:
        raise CollectiveError(reason)
    return joint
