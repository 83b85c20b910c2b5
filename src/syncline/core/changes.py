"""Changes: how a job goes from one generation to the next, on every server alike.

The coordinator keeps the next generation on disk, then asks every server to *prepare*: to refuse the fenced ones, to
finish what it has begun, to hold all commits and to say how it stands. From the answers follows what of the fenced
ones counts (a step that any server has committed counts on all, any other on none), and with which round those who
enter begin. Then every server *installs* that and goes on. Only after that are rounds, barriers and places given to
others. Either step may be said again; a higher generation takes the place of one that was not finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from syncline.core.control import Entered, Install, Prepare, Prepared
from syncline.core.members import Member
from syncline.core.rolls import Roll, Rolls
from syncline.core.rounds import LOOP
from syncline.core.seats import Seat
from syncline.core.slices import Identity, life_of
from syncline.core.standings import Standing, merged
from syncline.core.votes import settled_by

#: Where primaries change a hold lasts so many times longer: who has installed the change drops what is open, so who
#: has not must not go on meanwhile.
MOVE_TIMES = 10.0


class Loss(NamedTuple):
    """What is outside of what is promised: whose steps it is about, where that is known, and what, in words."""

    workers: tuple[Identity, ...]
    text: str


class Change:
    """One step from a generation to the next, as the coordinator takes it."""

    def __init__(
        self,
        generation: int,
        servers: Mapping[str, int],
        *,
        fenced: Mapping[str, int],
        entering: Mapping[str, int],
        seats: Sequence[Seat],
        moves: bool,
        staying: Mapping[str, int] | None = None,
        stretch: int = 0,
        stretches: Mapping[str, int] | None = None,
    ) -> None:
        """`servers` with their incarnations; `staying`: workers that take part already; `stretch`: the one that the
        last barrier began; `stretches`: of the loops that those who enter are in."""
        self.generation, self.servers = generation, dict(sorted(servers.items()))
        self.fenced, self.entering = dict(fenced), dict(entering)
        self.seats, self.moves = list(seats), moves
        self.staying, self.stretch, self._stretches = dict(staying or {}), stretch, dict(stretches or {})
        self._answers: dict[str, Prepared] = {}
        #: By worker: its clock at some boundary of its script, and its commits between two of them.
        self.boundaries: dict[str, tuple[int, int]] = {}

    def prepare(self) -> Prepare:
        return Prepare(self.generation, list(self.fenced.items()), self.seats, self.moves, list(self.servers.items()))

    def prepared(self, server: str, answer: Prepared) -> bool:
        """Whether this was the last answer that was missing."""
        self._answers[server] = answer
        return len(self._answers) == len(self.servers)

    @property
    def num_orphans(self) -> int:
        return sum(answer.num_orphans for answer in self._answers.values())

    def settle(self) -> list[tuple[str, int, int]]:
        """Up to which clock a worker's commits count: the highest that any server has committed, or any copy has.

        Of the fenced ones; of all, where primaries change: what is staged does not move along with a slice.
        """
        found, applied = [], self._applied()
        held = [answer.holds for answer in self._answers.values() if answer.holds is not None]
        if held:  # in a ring: what all survivors have, or can come to
            reached = settled_by([{(n, i): clock for n, i, clock in answer} for answer in held])
            return [(n, i, reached.get((n, i), 0)) for n, i in {**self.staying, **self.fenced}.items()]
        settled = {**self.staying, **self.fenced} if self.moves else self.fenced
        for name, incarnation in settled.items():
            clocks = [s.clock for s in self._standings() if (s.name, s.incarnation) == (name, incarnation)]
            found.append((name, incarnation, max([applied.get((name, incarnation), 0), *clocks])))
        return found

    def _applied(self) -> dict[Identity, int]:
        """Of every worker the latest step that is on any copy of any slice."""
        found: dict[Identity, int] = {}
        for answer in self._answers.values():
            for name, incarnation, clock in answer.clocks:
                found[name, incarnation] = max(clock, found.get((name, incarnation), 0))
        return found

    def torn(self) -> list[Loss]:
        """Workers that are out of whose last steps some slices have one that others cannot come to.

        What is committed and open, on all slices, is no loss: it waits for its round, or nobody has it.
        """
        applied, lacking = self._applied(), set()
        if any(answer.holds is not None for answer in self._answers.values()):
            return []
        lives = {life_of(*server) for server in self.servers.items()}
        for server, answer in self._answers.items():
            for name, incarnation, least, primary in answer.reach:
                follows = primary != life_of(server, self.servers[server]) and primary in lives
                is_out = self.staying.get(name) != incarnation
                if is_out and not follows and least < applied.get((name, incarnation), 0):
                    lacking.add((name, incarnation))
        return [
            Loss((who,), f"step {applied[who]} of {who[0]} is on some slices and not on others")
            for who in sorted(lacking)
        ]

    def _speaking(self) -> list[Prepared]:
        """Before anything is registered, all; then those that hear of commits."""
        return [answer for answer in self._answers.values() if answer.is_primary or not self.seats]

    def _standings(self) -> list[Standing]:
        return [standing for answer in self._speaking() for standing in answer.standings]

    def turn(self) -> tuple[int, int]:
        """The highest round that any server has opened; behind a barrier, none yet."""
        return max(next_turn(self._standings()), (self.stretch, 0))

    def back_at(self) -> int:
        """Beside the slowest: the same place on every server. While all rest, beside the one that is furthest: who
        comes back first would else wait for all the steps that lie between."""
        return max((_slowest(answer.standings) for answer in self._speaking()), default=0)

    def standings(self) -> list[Standing]:
        """What every server counts from now on: those who enter; all, where primaries change."""
        stay = merged(answer.standings for answer in self._speaking())
        entering = [self._placed(stay.get(name), name, life) for name, life in self.entering.items()]
        if not self.moves:
            return entering
        kept = [s for s in stay.values() if not s.left and s.name not in self.fenced and s.name not in self.entering]
        # Every server that knew where they stand is gone: their next commits are the first of a new count.
        known = {(s.name, s.incarnation) for s in [*kept, *entering]}
        anew = [Standing(n, i, stretch=-1) for n, i in self.staying.items() if (n, i) not in known]
        return kept + entering + anew

    def _placed(self, known: Standing | None, name: str, incarnation: int) -> Standing:
        """Its next commit is in the round after all that were opened; its clock goes on, where it was away.

        Who is in a loop is beside those in it: others may have left it, and be in a later one.
        """
        clock = known.clock if known is not None and known.incarnation == incarnation else 0
        stretch, number = self.turn()
        own = self._stretches.get(name, -1)
        if self.stretch <= own < stretch + LOOP:
            # Not at the loop's end, also where all others are there: from there nobody could pause in this loop.
            beside = [s for s in self._standings() if s.stretch // LOOP == own // LOOP and not (s.left or s.fenced)]
            inside = [s.turn() for s in beside if not has_left_loop(s)]
            stretch, number = max(inside, default=(own // LOOP * LOOP, 0))
        return Standing(name, incarnation, clock, stretch, clock - number, position=self.back_at())

    def rolls(self) -> list[Roll]:
        """With spare workers: what any server knows of who is in the last rounds, every one is to know."""
        return Rolls(roll for answer in self._answers.values() for roll in answer.rolls).entries()

    def places(self) -> dict[str, Entered]:
        """For those who enter: the stretch of their next commits, or where beside the slowest."""
        back_at, step = self.back_at(), self.step()
        return {
            s.name: Entered(s.stretch, back_at, step, self._num_void(s))
            for s in self.standings()
            if s.name in self.entering
        }

    def _num_void(self, entering: Standing) -> int:
        """Scripts with several optimizers make several commits of a batch. One that enters begins a batch: so many
        rounds are left until the others do."""
        stretch, number = entering.turn()
        for s in self._standings():
            boundary, stride = self.boundaries.get(s.name, (0, 0))
            is_beside = s.turn()[0] == stretch and not (s.left or s.fenced or s.resting or s.name in self.entering)
            if stride > 1 and is_beside:
                made = s.clock + number - s.turn()[1]  # by that one, when the first round of this one begins
                return (boundary - made) % stride
        return 0

    def step(self) -> int:
        """The job's steps before the next round that is opened: those that are applied, and those that are open."""
        applied = max((answer.num_updates for answer in self._answers.values()), default=0)
        return applied + max((answer.num_open for answer in self._answers.values()), default=0)

    def install(self, members: Sequence[Member]) -> Install:
        return Install(self.generation, list(members), self.settle(), self.standings(), self.rolls())


def _slowest(standings: Iterable[Standing]) -> int:
    there = [standing for standing in standings if not (standing.left or standing.fenced)]
    active = [standing.position for standing in there if standing.active]
    return min(active) if active else max((standing.position for standing in there), default=0)


def next_turn(standings: Iterable[Standing]) -> tuple[int, int]:
    """The highest round that any server has opened, of all these standings.

    Of those who have left their loop only when there are no others: a round at the loop's end would wait for whoever
    is still in the loop, and they, for the end of the epoch, maybe for it.
    """
    known = list(standings)
    inside = [s.turn() for s in known if not has_left_loop(s)]
    return max(inside or [s.turn() for s in known], default=(0, 0))


def has_left_loop(standing: Standing) -> bool:
    """Whether it rests at the loop's end."""
    return standing.resting and standing.stretch % LOOP == LOOP - 1
