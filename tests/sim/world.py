"""The simulated world: a virtual clock, processes that die, pause and return, a network of sessions, a disk.

Everything is a function of the seed. A message's fate is drawn from a hash of (seed, link, number of the message on
that link), so that taking one fault away does not move the others.
"""

from __future__ import annotations

import dataclasses
import heapq
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

MASK = (1 << 64) - 1
#: So many broken connections to a coordinator are read to their end late, when there is another one already.
SLOW = 0.4


class Violation(AssertionError):
    """An invariant does not hold."""


class StoreFull(Exception):
    """Nothing was written, and nothing changed."""


class Superseded(Exception):
    """A later term owns the store."""


class Crashed(Exception):
    """The process died in the middle of what it did."""


def draw(seed: int, *key: object) -> float:
    """A number in [0, 1) that depends on the key alone."""
    z = (zlib.crc32(repr(key).encode()) * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """What goes over the wire: who says it, with which numbers, and what."""

    kind: str
    name: str
    incarnation: int
    generation: int
    term: int
    body: Any


class Flight:
    """A message on its way."""

    __slots__ = ("frame", "ghost", "lost", "session", "target")

    def __init__(self, session: Session, target: Process, frame: Frame, ghost: bool = False) -> None:
        self.session, self.target, self.frame, self.ghost, self.lost = session, target, frame, ghost, False


class Session:
    """A connection that one process has made to another; in order within each direction, like TCP."""

    __slots__ = ("ends", "flying", "heard", "is_broken", "is_ghost", "last", "log", "slow_seconds")

    def __init__(self, initiator: Process, target: Process) -> None:
        self.ends = (initiator, target)
        self.is_broken, self.is_ghost = False, False
        self.heard: set[Process] = set()  # ends that know that it is broken
        self.last = [0.0, 0.0]
        self.slow_seconds = 0.0  # how much later than it came, when it is broken, the target reads what it was told
        self.flying: tuple[deque[Flight], deque[Flight]] = (deque(), deque())
        self.log: deque[Frame] = deque(maxlen=24)  # what the initiator said last

    def other(self, end: Process) -> Process:
        return self.ends[1] if self.ends[0] is end else self.ends[0]


class Process:
    """One life of a member. What it remembers ends with it."""

    role = ""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        world.num_lives += 1
        self.life = f"{name}#{world.num_lives}"
        self.is_alive, self.is_paused = True, False
        self.backlog: list[Callable[[], None]] = []
        world.processes[self.life] = self

    # what a process does
    def begin(self) -> None: ...

    def receive(self, session: Session, frame: Frame) -> None:
        handler: Callable[[Session, Frame], None] | None = getattr(self, "on_" + frame.kind, None)
        if handler is not None:
            handler(session, frame)

    def lost(self, session: Session) -> None: ...

    # what it uses
    def send(self, life: str, frame: Frame) -> Session | None:
        return self.world.send(self, life, frame)

    def answer(self, session: Session, frame: Frame) -> None:
        self.world.transmit(session, self, frame)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.world.at(self.world.now + seconds, lambda: self.run(act))

    def run(self, act: Callable[[], None]) -> None:
        if not self.is_alive:
            return
        if self.is_paused:
            self.backlog.append(act)
            return
        try:
            act()
        except Crashed:
            self.world.crash(self)

    def end(self) -> None:
        """Ends itself."""
        self.world.crash(self, restart=True)


class Disk:
    """The coordinator's store: one transaction, there whole or not at all, owned by the latest term."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.term, self.num_saves = 0, 0
        self.data: bytes | None = None
        self.full_until = 0.0
        self.torn: dict[int, bool] = {}  # number of a save at which the power goes: whether it got there

    def open(self) -> tuple[int, bytes | None]:
        self.term += 1
        return self.term, self.data

    def save(self, term: int, data: bytes) -> None:
        if term < self.term and "accept_old_term" not in self.world.bugs:
            raise Superseded
        if self.world.now < self.full_until:
            raise StoreFull
        self.num_saves += 1
        torn = self.torn.pop(self.num_saves, None)
        if torn is not False:
            self.data = data
        if torn is not None:
            self.world.note("torn", self.num_saves, torn)
            raise Crashed


class World:
    """Clock, queue, network."""

    def __init__(self, seed: int, bugs: frozenset[str] = frozenset(), *, verbose: bool = False) -> None:
        self.seed, self.bugs, self.verbose = seed, bugs, verbose
        self.now, self.num_events, self.num_lives = 0.0, 0, 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = 0
        self.processes: dict[str, Process] = {}
        self.current: dict[str, Process] = {}  # by name
        self.sessions: dict[tuple[str, str], Session] = {}
        self.old: deque[Session] = deque(maxlen=16)  # sessions, for replays
        self._numbers: dict[str, int] = {}
        self.walls: dict[tuple[str, str], float] = {}  # names: until when nothing gets from one to the other
        self.disk = Disk(self)
        self.trace = 0
        self.lines: list[str] = []
        self.restart: Callable[[Process], None] = lambda process: None
        self.ended = False

    # -- clock --------------------------------------------------------------------------------------------

    def at(self, when: float, act: Callable[[], None]) -> None:
        self._counter += 1
        heapq.heappush(self._queue, (when, self._counter, act))

    def run(self, until: float) -> None:
        queue = self._queue
        while queue and not self.ended and queue[0][0] <= until:
            self.now, _, act = heapq.heappop(queue)
            self.num_events += 1
            act()

    def note(self, *words: object) -> None:
        line = f"{self.now:.6f} {words}"
        self.trace = zlib.crc32(line.encode(), self.trace)
        if self.verbose:
            self.lines.append(line)

    def draw(self, *key: object) -> float:
        return draw(self.seed, *key)

    # -- network ------------------------------------------------------------------------------------------

    def send(self, source: Process, life: str, frame: Frame) -> Session | None:
        """Over the session that this process has to that one; it is made if there is none."""
        session = self.sessions.get((source.life, life))
        if session is None or source in session.heard:
            target = self.processes.get(life)
            if target is None:
                return None
            session = Session(source, target)
            self.sessions[source.life, life] = session
            blocked = self._wall(source, target) or self._wall(target, source)
            if not target.is_alive or blocked:  # refused, or the attempt times out
                session.is_broken = True
                self.at(self.now + (0.2 if blocked else 0.002), lambda: self._hear(session, source))
                return session
            self.old.append(session)
        self.transmit(session, source, frame)
        return session

    def _wall(self, source: Process, target: Process) -> float:
        until = self.walls.get((source.name, target.name), 0.0)
        return until if until > self.now else 0.0

    def transmit(self, session: Session, source: Process, frame: Frame) -> None:
        """In this session: kept in order, held up by a wall, lost when it is broken."""
        if session.is_broken or not source.is_alive:
            return
        way = 0 if session.ends[0] is source else 1
        target = session.ends[1 - way]
        link = f"{source.name}>{target.name}"
        number = self._numbers[link] = self._numbers.get(link, 0) + 1
        luck = self.draw(link, number)
        delay = 0.0003 + 0.004 * luck if luck < 0.97 else 0.02 + 4.0 * (luck - 0.97)
        arrive = max(self.now + delay, session.last[way] + 1e-6)
        wall = self.walls.get((source.name, target.name), 0.0)
        if arrive < wall:
            arrive = wall + delay
        session.last[way] = arrive
        flight = Flight(session, target, frame)
        session.flying[way].append(flight)
        if way == 0:
            session.log.append(frame)
        self.at(arrive, lambda: self._arrive(flight, way))

    def _arrive(self, flight: Flight, way: int) -> None:
        flying = flight.session.flying[way]
        if flying and flying[0] is flight:
            flying.popleft()
        if flight.lost or flight.session.is_ghost:
            return
        if way == 0 and flight.session.slow_seconds:
            self.at(self.now + flight.session.slow_seconds, lambda: self._give(flight))
            return
        wall = self.walls.get((flight.session.ends[way].name, flight.target.name), 0.0)
        if wall > self.now:  # put up after it was sent: it is sent again when the wall is gone
            flying.appendleft(flight)
            self.at(wall + 0.001, lambda: self._arrive(flight, way))
            return
        self._give(flight)

    def _give(self, flight: Flight) -> None:
        target, frame = flight.target, flight.frame
        self.note(flight.session.other(target).name, target.life, frame.kind, frame.generation)
        target.run(lambda: target.receive(flight.session, frame))

    def break_session(self, session: Session, key: object, deaf: Process | None = None, silent: bool = False) -> None:
        """What flies arrives up to some point. Both ends hear of it after that; a deaf one much later."""
        if session.is_broken:
            return
        session.is_broken = True
        self.note("broken", session.ends[0].life, session.ends[1].life)
        for way in (0, 1):
            flying = session.flying[way]
            keep = int(self.draw(key, "cut", session.ends[0].name, session.ends[1].name, way) * (len(flying) + 1))
            for flight in list(flying)[keep:]:
                flight.lost = True
        if session.ends[1].role == "coordinator" and self.draw(key, "slow", session.ends[0].name) < SLOW:
            # The thread that reads it stands still meanwhile, and others that read later connections go on.
            session.slow_seconds = 0.3 * self.draw(key, "slow seconds", session.ends[0].name)
            session.last[0] += session.slow_seconds
        for way, end in enumerate(session.ends):
            late = 0.3 + 0.9 * self.draw(key, "late", end.name) if (end is deaf or silent) else 0.001
            self.at(max(self.now, session.last[1 - way]) + late, lambda end=end: self._hear(session, end))

    def _hear(self, session: Session, end: Process) -> None:
        if end not in session.heard:
            session.heard.add(end)
            end.run(lambda: end.lost(session))

    def replay(self, session: Session, key: object) -> None:
        """An old session's frames come a second time, in order, with the numbers they had."""
        source, target = session.ends
        target = self.current.get(target.name, target)
        ghost = Session(source, target)
        ghost.is_broken = ghost.is_ghost = True  # answers go nowhere
        frames = list(session.log)
        start = int(self.draw(key, "from") * len(frames))
        for number, frame in enumerate(frames[start:]):
            flight = Flight(ghost, target, frame, ghost=True)
            self.at(self.now + 0.001 * (number + 1), lambda flight=flight: self._give(flight))

    # -- processes ----------------------------------------------------------------------------------------

    def start(self, process: Process) -> None:
        self.current[process.name] = process
        self.note("start", process.life)
        process.run(process.begin)

    def crash(self, process: Process, *, silent: bool = False, restart: bool = True) -> None:
        if not process.is_alive:
            return
        process.is_alive = False
        self.note("end", process.life)
        for session in list(self.sessions.values()):
            if process in session.ends:
                self.break_session(session, ("crash", process.life), silent=silent)
        if restart:
            self.restart(process)

    def pause(self, process: Process, seconds: float) -> None:
        if process.is_alive and not process.is_paused:
            process.is_paused = True
            self.note("pause", process.life)
            self.at(self.now + seconds, lambda: self._resume(process))

    def _resume(self, process: Process) -> None:
        process.is_paused = False
        self.note("resume", process.life)
        backlog, process.backlog = process.backlog, []
        for act in backlog:
            process.run(act)
