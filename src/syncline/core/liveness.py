"""Liveness: when each member was last heard from, and when it counts as dead.

The allowed silence follows from a member's recent pauses: a busy machine gets more time, a regular one the minimum.
A process that has yet to make its first step gets the most: loading a framework's libraries holds the interpreter's
lock, for seconds where they come from a cold disk, and no thread can send a heartbeat meanwhile.
Time in which the coordinator itself did not run does not count.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import msgspec

from syncline.config import JobConfig
from syncline.core.members import by_name
from syncline.stats import Wait

# A sample is the longest silence within a quarter of the minimal deadline: a burst of messages cannot push out a
# member's usual pauses, and one long pause does not stay for ever.
_NUM_SAMPLES = 32
_STRETCHES = 4
# Factor on the longest recent silence. It exceeds the mean plus six deviations of any samples, which are at most 3.55
# times it.
_TIMES_LONGEST = 4.0


@dataclasses.dataclass(slots=True)
class _Watched:
    """One member. `since`: the start of its silence, shifted by time that does not count."""

    since: float
    phase: float
    not_before: float = -math.inf
    heard: float | None = None
    suspected: float | None = None
    gone: float | None = None
    reason: str = ""
    longest: float = 0.0
    samples: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_NUM_SAMPLES)
    )
    longest_sample: float = 0.0  # of these
    is_starting: bool = False

    def sample(self) -> None:
        """The longest silence of this stretch is a sample."""
        self.samples.append(self.longest)
        self.longest, self.longest_sample = 0.0, max(self.samples)

    def shift(self, seconds: float, now: float) -> None:
        """Removes time that does not count; nothing moves into the future."""
        self.since = min(self.since + seconds, now)
        self.phase = min(self.phase + seconds, now)
        if self.suspected is not None:
            self.suspected = min(self.suspected + seconds, now)
        if self.heard is not None:
            self.heard = min(self.heard, now)
        self.not_before += seconds


class Liveness:
    """When each member was last heard from, and when it counts as dead.

    Call `dead` at `next_deadline` at the latest. A gap of `asleep_seconds` between calls means that the coordinator
    did not run (stopped, or out of processor time); that time does not count.
    """

    def __init__(
        self, *, least_seconds: float, most_seconds: float, suspect_seconds: float, asleep_seconds: float
    ) -> None:
        assert 0 < least_seconds <= most_seconds, (least_seconds, most_seconds)
        # A shorter sleep is not noticed; it must leave a member most of its time.
        assert 0 < asleep_seconds <= min(least_seconds, suspect_seconds) / 2, (asleep_seconds, suspect_seconds)
        self._least = least_seconds
        self._most = most_seconds
        self._suspect = suspect_seconds
        self._asleep = asleep_seconds
        self.members: dict[str, _Watched] = {}
        self._checked: float | None = None
        self._woken = False  # since the last call
        self._late = False  # between the last two calls
        self._patient_until = -math.inf  # after a long sleep: time for members that gave up on us to reconnect
        self._safe_until = -math.inf  # before this no member can be dead: `dead` is asked often, of hundreds of them

    def watch(self, name: str, now: float, *, full: bool = False, starting: bool = False) -> None:
        """Watches this member from now on; a watched name starts over.

        starting: its process runs a script that has made no step yet; until `has_stepped` it may be silent for the
        longest time.

        full: the coordinator has restarted, and the member must reconnect first. Its rhythm is kept, and until it is
        heard from, a closed connection does not shorten its full deadline.
        """
        self._wake(now)
        self._safe_until = -math.inf
        before = self.members.get(name)
        member = _Watched(since=now, phase=now, is_starting=starting)
        if full:
            if before is not None:
                member.samples, member.longest_sample = before.samples, before.longest_sample
                member.heard = before.heard
            member.not_before = now + self._allowed(member)
        self.members[name] = member

    def forget(self, name: str) -> None:
        """It has left, or its death was handled: removes it."""
        self.members.pop(name, None)

    def heard(self, name: str, now: float) -> None:
        """A sign of life. It clears a suspicion; from an ended process it is only a late message."""
        self._wake(now)
        member = self.members.get(name)
        if member is None or member.gone is not None:
            return
        member.longest = max(member.longest, now - member.since)
        # Threads may deliver their clock readings slightly out of order.
        member.since = max(member.since, now)
        member.heard = max(member.heard, now) if member.heard is not None else now
        member.suspected, member.not_before = None, -math.inf
        if now - member.phase >= self._least / _STRETCHES:
            member.sample()
            member.phase = now

    def has_stepped(self, name: str) -> bool:
        """Its script has made a step: the usual deadline from now on. Returns whether this is news."""
        member = self.members.get(name)
        if member is None or not member.is_starting:
            return False
        member.is_starting = False
        return True

    def suspect(self, name: str, now: float, reason: str) -> None:
        """Its connection closed: it has `suspect_seconds` to return. Further closed connections do not extend
        that.
        """
        self._wake(now)
        member = self.members.get(name)
        if member is not None and member.suspected is None and member.gone is None:
            member.suspected, member.reason = now, reason
            self._safe_until = -math.inf

    def gone(self, name: str, now: float, reason: str) -> None:
        """Its process is known to have ended: dead at once, for good.

        The simulator calls this. The coordinator evicts such a member directly (`MemberService.died`).
        """
        self._wake(now)
        member = self.members.get(name)
        if member is not None and member.gone is None:
            member.gone, member.reason = now, reason
            self._safe_until = -math.inf

    def last_heard(self, name: str) -> float | None:
        """The time of the last sign of life; None if there was none."""
        member = self.members.get(name)
        return None if member is None else member.heard

    def deadline(self, name: str) -> float:
        """When it counts as dead if nothing happens."""
        member = self.members[name]
        if member.gone is not None:
            return member.gone
        if member.suspected is None:
            return member.since + self._allowed(member)
        return max(member.suspected + self._suspect, member.not_before, self._patient_until)

    def dead(self, now: float) -> list[tuple[str, str]]:
        """The members that count as dead now, with reasons; repeated until they are forgotten or heard from."""
        self._wake(now)
        self._late, self._woken = self._woken, False
        assert self._checked is not None
        self._checked = max(self._checked, now)
        if now < self._safe_until:
            return []
        found = [
            (name, self._reason(member, now))
            for name, member in self.members.items()
            if member.gone is not None or now >= self.deadline(name)
        ]
        if not found and not any(member.suspected is not None for member in self.members.values()):
            # A silence only begins later from now on, and the least deadline is the least that any may have.
            began = min((member.since for member in self.members.values()), default=now)
            self._safe_until = began + self._least
        return found

    def next_deadline(self) -> float | None:
        """When to call `dead` again at the latest. None if no member is watched."""
        if not self.members:
            return None
        assert self._checked is not None
        return min(self._checked + self._asleep / 2, *(self.deadline(name) for name in self.members))

    def _allowed(self, member: _Watched) -> float:
        """The seconds for which this member may be silent."""
        if member.is_starting:
            return self._most
        # A relevant silence is longer than a sampling phase, so it is among the samples at once.
        return min(max(_TIMES_LONGEST * member.longest_sample, self._least), self._most)

    def _reason(self, member: _Watched, now: float) -> str:
        if member.gone is not None:
            return member.reason
        if member.suspected is not None:
            return f"its connection closed and it did not come back within {self._suspect:g} s: {member.reason}"
        silence = f"not heard of for {now - member.since:.1f} s (deadline {self._allowed(member):.1f} s)"
        return f"{silence}; if it was only slow, allow more with --deadline-seconds"

    def _wake(self, now: float) -> None:
        """Removes a jump of time: forward, we did not run; backward, the clock is wrong.

        Every event checks, so that a message right after a sleep does not count as a member's long pause.
        """
        if self._checked is None:
            self._checked = now
        jump = now - self._checked
        if abs(jump) <= self._asleep:
            return
        if jump >= self._least / 2 and not self._late:
            self._patient_until = now + self._least
        # Repeated lateness is overload, not sleep. Part of it counts; otherwise no member would ever be found dead.
        counted = self._asleep if self._late and jump > 0 else 0.0
        self._safe_until = -math.inf
        for member in self.members.values():
            member.shift(jump - counted, now)
        self._checked, self._woken = now, True


#: Of hundreds of members a coordinator hears so many signs of life in a second, if deadlines allow it.
MOST_BEATS_PER_SECOND = 400.0
#: Signs of life within the shortest deadline, at least.
LEAST_BEATS = 4


def beat_seconds(config: JobConfig, num_members: int) -> float:
    """Between two signs of life of a member: longer in a large job, where each one costs the coordinator."""
    longest = max(config.beat_seconds, config.deadline_seconds / LEAST_BEATS)
    return min(longest, max(config.beat_seconds, num_members / MOST_BEATS_PER_SECOND))


#: A wait of the processes of one worker for each other.
PIPELINE_OF = "the pipeline of "
#: A member heard from within this time is not the silent one.
FRESH_SECONDS = 1.0


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a member that others wait for."""

    host: str
    heard_seconds: float  # since it was last heard of
    left_seconds: float  # until it is evicted for silence
    state: str = ""  # anything notable: its process ended, it is being restarted


def causes(waits: Mapping[str, Sequence[Wait]]) -> list[Wait]:
    """All waits by reporter, without those that others explain: a worker's wait for a server that itself waits, a
    server's for a backup that waits for a worker, and a server's for a worker that waits at another server.
    """
    found = []
    for teller, wait in ((teller, wait) for teller, told in waits.items() for wait in told):
        rest = [name for name in wait.for_whom if not _is_explained(wait, teller, name, waits)]
        if rest:
            found.append(Wait(wait.who, wait.step, rest, wait.seconds, wait.what))
    return found


def _is_explained(wait: Wait, teller: str, name: str, waits: Mapping[str, Sequence[Wait]]) -> bool:
    by = waits.get(name, ())
    if wait.what == "server":
        return any(wait.who or other.what != "server" for other in by)
    servers = {server for other in by if other.what == "server" for server in other.for_whom} - {teller}
    further = [one.for_whom for server in servers for one in waits.get(server, ()) if name not in one.for_whom]
    # One of them waits for no one; otherwise it may be a circular wait, and all are named.
    return any(not waits.get(last) for names in further for last in names)


def why(
    waits: Sequence[Wait], known: Mapping[str, Known], *, who: str = "", step: int = 0, stuck_seconds: float = 600.0
) -> str:
    """Describes the longest wait; with `who`, that worker's wait at this step."""
    mine = [wait for wait in waits if wait.who == who or (not wait.who and who not in wait.for_whom)]
    ranked = sorted(mine if who else waits, key=lambda wait: -wait.seconds)
    if not ranked:
        return "no member waits for another"
    wait = ranked[0]
    names = sorted(wait.for_whom, key=by_name)
    told = ", ".join(_told(name, known.get(name), wait, stuck_seconds) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{_what(wait, who, step)} has waited {wait.seconds:.1f} s for {told}{more}"


def _what(wait: Wait, who: str, step: int) -> str:
    """A round's step is the job's. Outside of rounds each worker counts its own, and the sentence says whose."""
    if wait.what not in ("round", "lag", "server"):
        return wait.what
    number = step or wait.step
    of_whom = f" of {wait.who}" if wait.who and wait.who != who else ""
    return f"step {number}{of_whom}" if number else f"a step{of_whom}"


def _told(name: str, known: Known | None, wait: Wait, stuck_seconds: float) -> str:
    if known is None:
        return name if wait.what.startswith(PIPELINE_OF) else f"{name} (not there)"
    words = []
    if known.state:
        words.append(known.state)
    elif known.heard_seconds >= FRESH_SECONDS:
        words.append(f"last heard of {known.heard_seconds:.1f} s ago")
        words.append(f"evicted in {max(0.0, known.left_seconds):.1f} s")
    else:
        words.append(f"last heard of {known.heard_seconds:.1f} s ago")
        if wait.what in ("round", "lag"):
            words.append(f"evicted in {max(0.0, stuck_seconds - wait.seconds):.0f} s if it does not advance")
    return f"{name} on host {known.host} ({'; '.join(words)})"
