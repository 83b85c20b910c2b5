"""The seam: what a server asks of a reducer, and what a reducer asks of its server.

A reducer adds up rounds among the servers of one generation. Its slices, and the owner (primary) of each, are those
of the generation. Every server needs every sum, so reducing to the owners and gathering from them is one operation
here. It is asynchronous: a server gives it each complete round, and the reducer calls back when all slices have their
sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from syncline.core.members import Member
from syncline.core.ring import HostLeaders
from syncline.core.slice_state import Identity
from syncline.net.reliable_send import Partner
from syncline.net.transport import Memory
from syncline.reduce.rounds import Round
from syncline.reduce.slices import FindNumbers, SliceReduction


class RoundReducer(Protocol):
    """Adds up the rounds of one generation."""

    names: Sequence[str]  #: of all servers that take part

    def reduce(self, complete: Round) -> None:
        """A round is complete here. Its sums are ready, and their memory is kept, from `summed` to `release`."""

    def release(self, complete: Round) -> None:
        """The round is applied here, or was dropped: the memory of its sums may be reused."""

    def stage_early(self, worker: Identity, clock: int, numbers: FindNumbers, slices: set[int]) -> None:
        """A worker has staged these slices before its commit. The reducer may add them up already."""

    def is_staged_here(self, worker: str, number: int) -> bool:
        """Whether this worker stages this slice at this server."""

    def supplied(self) -> None:
        """The other servers have received the copies that they lacked from here, so sums may begin."""

    def waiting_for(self) -> tuple[Round, list[str]] | None:
        """The round that is being added up, and the servers whose parts are missing here, as far as it is known."""

    def close(self) -> None:
        """The generation is over. Returns at once, under the server's lock; open rounds get no answer."""

    @property
    def is_alive(self) -> bool:
        """Whether any thread of a closed reducer still runs."""

    def join(self, seconds: float) -> None:
        """Waits for these threads."""


class ReducerFactory(Protocol):
    """Makes the reducer of each generation."""

    @property
    def what(self) -> str:
        """Who adds up, for messages to users."""

    def begin(self, generation: int, names: Sequence[str]) -> RoundReducer | None:
        """Under the server's lock. None if primaries add up the rounds of this generation themselves."""

    def close(self) -> None:
        """The server ends."""


class Participant(Protocol):
    """A server as its reducers see it."""

    @property
    def name(self) -> str: ...

    @property
    def num_slices(self) -> int:
        """Of the whole layout."""

    @property
    def num_servers(self) -> int: ...

    @property
    def device(self) -> str:
        """Where gradients and sums are, in torch's words."""

    def find(self, number: int) -> SliceReduction:
        """A slice of the layout, hosted here or not. Raises ProtocolError if there is none."""

    def slices(self) -> Iterable[SliceReduction]:
        """All slices that are here, primaries and backups."""

    def has_all(self) -> bool:
        """Whether all slices that belong here are complete."""

    def members(self, names: Collection[str]) -> list[Member]: ...

    def partners(self, names: Collection[str]) -> list[Partner]:
        """The connections to these servers, without this one."""

    def host_leaders(self) -> HostLeaders | None:
        """None if this generation has none."""

    def create_memory(self, num_bytes: int) -> Memory:
        """Memory that other processes can map. Raises OSError if there is too little."""

    def submit(self, task: Callable[[], None]) -> None:
        """Runs the task in a thread of this server. A task must not raise."""

    def at_work(self) -> AbstractContextManager[object]:
        """Context for computing with gradients on `device`."""

    def settle(self) -> None:
        """Waits for what this thread has started on `device`."""
