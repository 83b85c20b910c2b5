"""A server's part in the votes of a ring: rounds that are whole and held wait here until all have voted."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from syncline import faults
from syncline.config import JobConfig
from syncline.core.ring import Ballot, Spread, Votes, ballot_of, partner_of
from syncline.core.slice_state import Identity
from syncline.core.wire.message import Done, Message
from syncline.core.wire.traffic import HostSum, Introduce, ShareSums, Vote, WholeSum
from syncline.errors import ProtocolError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Peer
from syncline.server.backups import Backups
from syncline.server.commits import Commits
from syncline.server.hosting import Hosting
from syncline.server.pool import Pool
from syncline.server.replication import Partner
from syncline.server.saying import Saying
from syncline.server.spreading import Spreading
from syncline.server.work import RoundWork

if TYPE_CHECKING:
    from syncline.server.circles import Circles
    from syncline.server.relays import Relays
    from syncline.server.summing import Summing

#: A round of at most this many bytes is applied by the thread that brings the last vote.
INLINE_BYTES, INLINE_SLICES = 1 << 18, 16


class Voting:
    """All under `order`, but what is applied."""

    def __init__(
        self,
        name: str,
        order: threading.RLock,
        backups: Backups,
        pool: Pool,
        *,
        partners: Callable[[Collection[str]], Iterable[Partner]],
        run: Callable[[RoundWork], None],
        waits: Callable[[RoundWork], None],
        resumes: Callable[[RoundWork], None],
        may_apply: Callable[[RoundWork], bool],
        spreading: Spreading,
    ) -> None:
        """`waits`: the round is not on its way before all have voted; then it `resumes`, and `run` applies what is
        the server's own. `may_apply`: no gate is closed to it."""
        self._name, self._order, self._backups, self._pool = name, order, backups, pool
        self._partners, self._run, self._waits, self._resumes = partners, run, waits, resumes
        self._may_apply, self.spreading = may_apply, spreading
        self.votes = Votes()
        self._works: dict[Ballot, RoundWork] = {}  # whole here, in their order
        self._unsaid: list[RoundWork] = []  # held by all since it was frozen
        self.is_frozen = False  # a change is prepared
        self.summing: Summing | None = None  # where every server comes to all sums itself
        self.circles: Circles | None = None  # torch.distributed's
        self.relays: Relays | None = None  # ours
        backups.voting = self

    @property
    def is_on(self) -> bool:
        """Whether there is anybody to wait for."""
        return len(self.votes.voters) > 1

    def begin(self, generation: int, voters: Collection[str]) -> None:
        """Seats have changed. Nothing is on its way."""
        with self._order:
            self.votes.begin(generation, voters)
            self._backups.begin_anew()
            self.spreading.begin()
            self.is_frozen = False
            self._unsaid.clear()
            if self.summing is not None:
                self.summing.begin(generation, voters)

    def supplied(self) -> None:
        """The others have what they lacked of the slices here."""
        if self.summing is not None:
            self.summing.supplied()

    # -- voting -------------------------------------------------------------------------------------------

    def expect(self, work: RoundWork) -> None:
        """A round is whole here: it waits for all."""
        if self.is_on:
            commits = [(c.worker, c.item.incarnation, c.clock) for c in work.commits]
            work.ballot, work.waits_for_votes = ballot_of(self.votes.generation, commits), True
            self._works[work.ballot] = work
            self.spreading.expect(work)
            work.is_summed = self.summing is not None and self.summing.is_on

    def expects(self, work: RoundWork) -> bool:
        """Under `order`: whether this round waits here, and was not dropped."""
        return work.ballot is not None and self._works.get(work.ballot) is work

    def keeps(self, work: RoundWork, take: Callable[[], None]) -> bool:
        """This server has made a sum of its own for this round: it is taken, unless the round was dropped. A change
        that is on its way counts on what was held before, and may drop it."""
        with self._order:
            is_wanted = self.expects(work)
            if is_wanted:
                take()
            return is_wanted

    def held(self, work: RoundWork) -> None:
        """All others hold the sums of the slices here."""
        with self._order:
            if work.ballot is None or not self.expects(work):
                return  # dropped
            if self.is_frozen:
                self._unsaid.append(work)
                return
            self._waits(work)
            self.votes.vote(work.ballot, self._name)
            letters = [Saying(partner, Vote(work.ballot)) for partner in self._partners(self.votes.voters)]
        if faults.armed is not None:
            faults.reach("vote.cast")
        for letter in letters:
            letter.send()
        self._look(work.ballot)

    def missing(self, now: float) -> list[tuple[int, list[str], float]]:
        """Of rounds that it has voted for: a step, whose votes there are not yet, and for how long. Likewise of one
        that it adds up: of whom something is missing."""
        cast = [work for ballot, work in self._works.items() if self._name not in self.votes.missing(ballot)]
        found = [(w.commits[0], self.votes.missing(w.ballot)) for w in cast if w.ballot is not None]
        found += [(w.commits[0], names) for w, names in (self.summing.awaited() if self.summing is not None else ())]
        return [(commit.clock, names, now - commit.item.since) for commit, names in found if names]

    def hear(self, request: Request, message: Vote) -> None:
        with self._order:
            self.votes.vote(message.ballot, request.peer.name)
        request.reply(Done())
        self._look(message.ballot)

    def holds(self, ballot: Ballot, take: Callable[[], None]) -> Literal["held", "later", "over"]:
        """A backup has an update of this round: it takes it, unless a change is on its way, or over."""
        with self._order:
            if ballot.generation < self.votes.generation:
                return "over"
            if self.is_frozen or ballot.generation > self.votes.generation:
                return "later"
            take()
            return "held"

    def look(self) -> None:
        """What kept rounds from being applied may be over."""
        with self._order:
            ballots = list(self._works)
        for ballot in ballots:
            self._look(ballot)

    def _look(self, ballot: Ballot) -> None:
        with self._order:
            work = self._works.get(ballot)
            if work is None or self.is_frozen or not self.votes.is_decided(ballot) or not self._may_apply(work):
                return
            self._resumes(work)
            numbers = self._begin(ballot, work)
        self._apply(work, numbers)

    def _begin(self, ballot: Ballot, work: RoundWork) -> list[int]:
        """It counts from now on: nothing stops it any more. The slices of others that are to be applied here."""
        del self._works[ballot]
        self.votes.forget(ballot)
        numbers = self._backups.held_for(ballot)
        work.waits_for_votes = False
        work.also(len(numbers))
        return numbers

    def _apply(self, work: RoundWork, numbers: list[int]) -> None:
        if work.slots:
            self._run(work)
        elif not numbers:
            work.end()
        small = self._backups.num_bytes(numbers) <= INLINE_BYTES and len(numbers) <= INLINE_SLICES
        for number in numbers:
            action = functools.partial(self._backups.apply_held, number, work)
            action() if small else self._pool.submit(action)

    # -- when replica sets change --------------------------------------------------------------------------------

    def freeze(self) -> None:
        """A change is prepared: nobody votes, holds or applies from now on."""
        self.is_frozen = True

    def thaw(self) -> None:
        """It is not to be."""
        with self._order:
            self.is_frozen = False
            unsaid, self._unsaid = self._unsaid, []
        for work in unsaid:
            self.held(work)
        self._backups.go_on()
        if self.summing is not None:
            self.summing.thaw()
        self.look()

    def close(self) -> None:
        if self.summing is not None:
            self.summing.close()

    def reach(self) -> list[tuple[str, int, int]]:
        """Name, incarnation and clock of the commits in rounds of which everything is here."""
        works = [work for ballot, work in self._works.items() if self._is_whole(ballot, work)]
        return [(c.worker, c.item.incarnation, c.clock) for work in works for c in work.commits]

    def _is_whole(self, ballot: Ballot, work: RoundWork) -> bool:
        if set(self._backups.held_for(ballot)) != self._backups.numbers():
            return False
        return all(slot.is_summing(work) for slot in work.slots)

    def settle(self, clocks: Mapping[Identity, int]) -> tuple[list[RoundWork], Callable[[], None]]:
        """Under `order`: all rounds that there are, and what has those applied, outside of it, that all survivors
        hold. What is left after that counts nowhere."""
        works, counted = list(self._works.values()), list[tuple[RoundWork, list[int]]]()
        for ballot, work in list(self._works.items()):
            counts = all(c.clock <= clocks.get((c.worker, c.item.incarnation), 0) for c in work.commits)
            if counts and self._is_whole(ballot, work):
                for slot in work.slots:
                    slot.count_on_nobody()
                self._resumes(work)
                counted.append((work, self._begin(ballot, work)))

        def apply() -> None:
            for work, numbers in counted:
                self._apply(work, numbers)

        return works, apply

    def drop(self) -> list[RoundWork]:
        """Under `order`: what was not settled counts nowhere."""
        dropped = list(self._works.values())
        self._works.clear()
        self._unsaid.clear()
        self._backups.drop_held()
        if self.summing is not None:
            self.summing.end()
        return dropped


def voting_of(config: JobConfig, commits: Commits, hosting: Hosting, pool: Pool, spread: Spread) -> Voting:
    """As it stands among the other parts of a server."""
    flow, spreading = commits.flow, Spreading(spread, commits.staging.copies, hosting.backups, hosting.home)
    voting = Voting(
        hosting.name, flow.order, hosting.backups, pool,
        partners=hosting.partners_named, run=flow.drain_all, waits=flow.waits,
        resumes=flow.resumes, may_apply=lambda work: commits.holding.may_apply(work.commits),
        spreading=spreading,
    )  # fmt: skip
    spreading.find, spreading.holds, spreading.fail = hosting.spread_by, voting.keeps, flow.fail
    spreading.primaries = lambda: list(hosting.slices.values())
    commits.holding.passed, flow.voting = voting.look, voting
    from syncline.server.relays import Relays
    from syncline.server.summing import Adders, Summing

    adders: Adders
    if config.has_circle:
        from syncline.server.circles import Circles  # torch.distributed, which not every torch has

        adders = voting.circles = Circles(config, hosting)
        own, departures = partner_of(hosting.name), commits.departures
        departures.staged_by = lambda worker: departures.staged_here(worker) if worker == own else ()
        commits.decoding.takes_all = True
    else:
        adders = voting.relays = Relays(config, commits, hosting, pool)
    voting.summing = Summing(adders, flow, voting, hosting.backups)
    commits.staged_early = voting.summing.stage_early
    return voting


def ring_handlers(voting: Callable[[], Voting | None]) -> dict[type[Message], Callable[[Request, Any], None]]:
    """What servers of a ring say to each other."""

    def vote(request: Request, message: Vote) -> None:
        known = voting()
        if known is None or request.peer.role != "server":
            raise ProtocolError(f"{request.peer} votes; only servers of a ring do")
        known.hear(request, message)

    def introduction(request: Request, message: Introduce) -> None:
        known = voting()
        if known is None or known.circles is None or request.peer.role != "server":
            raise ProtocolError(f"{request.peer} introduces itself; only servers of a circle do")
        known.circles.hear(request, message)

    return {
        Vote: vote,
        Introduce: introduction,
        ShareSums: lambda request, message: _relays(voting(), request.peer).lend(request, message),
        HostSum: lambda request, message: _relays(voting(), request.peer).hear(request, message),
        WholeSum: lambda request, message: _relays(voting(), request.peer).hear(request, message),
    }


def landing_of_sum(voting: Voting | None, peer: Peer, message: HostSum | WholeSum) -> Sequence[Buffer]:
    return _relays(voting, peer).landing(peer, message)


def _relays(voting: Voting | None, peer: Peer) -> Relays:
    if voting is None or voting.relays is None or peer.role != "server":
        raise ProtocolError(f"{peer} gives sums; only servers of a ring do, that add up themselves")
    return voting.relays
