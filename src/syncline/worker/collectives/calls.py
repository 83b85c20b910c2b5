"""Making a call: by the script's own thread or by that of tickets, again when members have come or left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

from syncline.core.collectives import disagreement
from syncline.core.members import Member
from syncline.core.wire.collectives import Goodbye
from syncline.core.wire.control import Roster
from syncline.errors import CollectiveError, ConfigError
from syncline.stats import WireStats
from syncline.worker.arrays import Array
from syncline.worker.collectives.groups import Group, World
from syncline.worker.collectives.habits import Habit
from syncline.worker.collectives.meeting import Again, Begun, Call, Make, Meeting
from syncline.worker.collectives.meetings import Meetings
from syncline.worker.collectives.memories import Memories
from syncline.worker.collectives.party import Party
from syncline.worker.collectives.repeating import repeat
from syncline.worker.collectives.tickets import Lane, Ticket
from syncline.worker.collectives.waiting import LOOK_SECONDS, Waiting
from syncline.worker.hearing import FromCoordinator
from syncline.worker.peers import Peers

if TYPE_CHECKING:
    from syncline.worker.job import Job

T = TypeVar("T")


class Calls:
    """Of one worker. Its calls are made one after the other, in the order in which its script makes them."""

    def __init__(self, job: Job, me: Member, hearing: FromCoordinator, peers: Peers | None) -> None:
        self.job, self._me, self._hearing, self._peers = job, me, hearing, peers
        self.world = World(me, hearing.rosters)
        self.lane = Lane("collectives")
        self._busy = threading.Lock()
        self._roster: Roster | None = None
        self._version = 0  # of the attempt that the parties were made in
        self._parties: dict[Group | None, Party] = {}
        self._meetings: Meetings | None = None
        self._memories: Memories | None = None
        if peers is not None:
            self._memories = Memories(peers.create_memory)
            self._meetings = Meetings(peers, self._memories, me.name)

    @property
    def peers(self) -> Peers:
        if self._peers is None:
            raise ConfigError("this job has no ways between its workers")
        return self._peers

    @property
    def incarnation(self) -> int:
        return self._me.incarnation

    @property
    def memories(self) -> Memories:
        assert self.peers is not None and self._memories is not None
        return self._memories

    @property
    def meetings(self) -> Meetings:
        assert self.peers is not None and self._meetings is not None
        return self._meetings

    @property
    def there(self) -> frozenset[int]:
        """The incarnations of all workers that are there now."""
        return frozenset(member.incarnation for member in self.world.members(None)[0])

    def waiting(self, what: str, *, is_script: bool) -> Waiting:
        return Waiting(self.job, self._hearing, self.peers, what, is_script=is_script)

    def again(self, kind: Hashable, numbers: Array, group: Group | None) -> tuple[Begun | None, Habit | None]:
        """Makes a call that all have made before, as far as all are there at once; `meet` does the rest of it."""
        self.job.leave_if_asked()
        party, meetings = self._parties.get(group) if self._is_current else None, self._meetings
        habit = party.habits.get(kind) if party is not None else None
        if party is None or meetings is None or habit is None or not self.lane.is_idle:
            return None, None
        if not self._busy.acquire(False):
            return None, None
        try:
            meetings.tidy()
            return repeat(meetings, party, habit, numbers), habit
        finally:
            self._busy.release()

    def go(
        self, what: str, work: Callable[[bool], T], wait: bool, lane: Lane | None = None, begun: Begun | None = None
    ) -> Any:
        """Does the work now, or gives a ticket for it. What was called before on the same lane is done before."""
        lane = lane or self.lane
        if not wait:
            return lane.add(Ticket(what, lambda: work(False)))
        if begun is None:
            self.job.leave_if_asked()
        if not lane.is_idle:
            return lane.add(Ticket(what, lambda: work(False))).wait()
        if not self._busy.acquire(blocking=False):
            raise CollectiveError(
                f"{what}: another thread is in a collective; call them from one, or with wait=False"
            )
        try:
            return work(True)
        finally:
            self._busy.release()

    def meet(
        self, make: Make, body: Callable[[Meeting], T], group: Group | None, is_script: bool,
        begun: Begun | None = None,
    ) -> T:  # fmt: skip
        """`body`: what is done when all have made the call."""
        meetings = self.meetings
        while True:
            party = self._party(group) if begun is None else begun.party
            waiting = self.waiting("a collective", is_script=is_script)
            if len(party) == 1:
                return self._call_alone(make, body, party, waiting)
            meetings.tidy()
            try:
                with meetings.meet(make, party, waiting, begun) as meeting:
                    return body(meeting)
            except Again:
                begun = None
                self._await_others(party, waiting)

    def _call_alone(self, make: Make, body: Callable[[Meeting], T], party: Party, waiting: Waiting) -> T:
        number = self.meetings.begin(party)
        try:
            return body(_alone(make(party, number), party, waiting))
        finally:
            self.meetings.end(party)
            self.meetings.finish((party.group, number))

    @property
    def _is_current(self) -> bool:
        """Whether the parties are still as they were made."""
        return self._roster is self.world.roster and self._version == self.meetings.heard.attempt.version

    def _party(self, group: Group | None) -> Party:
        """Who takes part: as before, while nobody has come or gone."""
        if not self._is_current:
            self._roster, self._version, self._parties = self.world.roster, self.meetings.heard.attempt.version, {}
        found = self._parties.get(group)
        if found is None:
            members, generation = self.world.members(group)
            found = Party(members, self._me.incarnation, generation, self.there)
            self.meetings.prepare(found)
            self._parties[group] = found
        return found

    def _await_others(self, party: Party, waiting: Waiting) -> None:
        """Until the roster says who takes part now. Who is gone without a word has died in it."""
        before = party.members

        def changed() -> list[Member] | None:
            now = self.world.members(None)[0]
            return now if now != before else None

        try:
            now = {member.incarnation for member in waiting.until_any(changed, [self._me.name])}
        finally:
            waiting.end()
        for member in before:
            if member.incarnation not in now and not self._has_left(member):
                self.meetings.end(party, has_failed=True)
                raise CollectiveError(f"{member.name} is gone while {waiting.what} was under way")

    def _has_left(self, member: Member) -> bool:
        if any(one.incarnation == member.incarnation for one in self.world.roster.finished):
            return True
        way = self.peers.last_way(member.incarnation)
        while way is not None and not way.has_left and way.read(0.0):
            pass
        return way is not None and way.has_left

    def pause(self) -> None:
        """Until something is heard, or a moment: before a call is made again."""
        with self.peers.change:
            self.peers.change.wait(LOOK_SECONDS)

    def stats(self) -> WireStats:
        return self._peers.stats() if self._peers is not None else WireStats()

    # -- the end ------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Finishes what is open, and says goodbye: whoever calls a collective next does it without this one."""
        self.lane.settle()
        if self._peers is not None:
            self._peers.tell_all(Goodbye())

    def close(self) -> None:
        self.lane.close()
        if self._memories is not None:
            self._memories.close()


def _alone(call: Call, party: Party, waiting: Waiting) -> Meeting:
    meeting = Meeting(party, 0, waiting)
    meeting.data, meeting.is_own, meeting.said = call.data, call.is_own, [call.said]
    reason = disagreement(party.names, meeting.said)
    if reason:
        raise CollectiveError(reason)
    return meeting
