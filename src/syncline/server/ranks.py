"""Ranks at a server: who came first, whose values count, and whose hyperparameters lead a round."""

from __future__ import annotations

from collections.abc import Iterable

from syncline.core.members import Member, by_name
from syncline.core.rounds import Rounds
from syncline.errors import ProtocolError
from syncline.net.transport import Peer
from syncline.server.flow import Flow
from syncline.server.work import Contribution


class Ranks:
    """The workers in the order in which they came, as the coordinator tells."""

    def __init__(self, rounds: Rounds[Contribution], flow: Flow) -> None:
        self._rounds, self._flow = rounds, flow
        self._names: list[str] = []  # the chief first
        self._chief = ""  # of those who take part here

    def hear(self, members: Iterable[Member]) -> None:
        """Who there is. Who was there, and has commits here, keeps its place in the rounds that it is in."""
        workers = {(m.name, m.incarnation): (m.since, by_name(m.name)) for m in members if m.role == "worker"}
        with self._flow.order:
            self._names = [name for name, _ in workers]
            here = {(s.name, s.incarnation) for s in self._rounds.standings.values()}
            gone = {life: place for life, place in self._flow.seniority.items() if life in here}
            self._flow.seniority = {**gone, **workers}
            self.choose_chief()

    def choose_chief(self) -> None:
        """Under `order`."""
        there = [s.name for s in self._rounds.standings.values() if not (s.left or s.fenced)]
        self._chief = next((name for name in [*self._names, *there] if name in there), "")

    @property
    def num_workers(self) -> int:
        return len(self._names)

    def check_chief(self, peer: Peer, doing: str) -> None:
        first = self._names[0] if self._names else ""
        if peer.name not in (self._chief, first):
            raise ProtocolError(f"{peer} {doing}; only the chief's count")
