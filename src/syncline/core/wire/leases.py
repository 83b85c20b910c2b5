"""What is said about leases: workers ask and give back, servers tell what commits have used."""

from __future__ import annotations

from syncline.core.leasing.loader import Loader
from syncline.core.leasing.ranges import Span
from syncline.core.wire.message import Message

#: A lease and places in it, from and to: what a commit has used.
LeaseAck = tuple[int, int, int]


class OpenEpoch(Message, frozen=True):
    """A worker begins its loop over an epoch; answered with what is left of it.

    `seed`: of the loader's order, as this worker has it; the chief's counts in the whole job. None: there is none.
    `insists`: the chief did not open this loader in time, so this worker's counts.
    """

    loader: str
    epoch: int
    data: Loader
    seed: int | None = None
    insists: bool = False


class Opened(Message, frozen=True):
    """`is_left`: whether there is anything to read. `is_shared`: whether all workers come to this loader's epochs, by
    what is known. `seed`: of the loader's order in the whole job. `is_early`: nothing was opened, since the chief has
    not opened this loader yet, and its seed counts; ask again."""

    is_left: bool
    is_shared: bool = True
    seed: int | None = None
    is_early: bool = False


class AskLease(Message, frozen=True):
    """A worker has read, or will soon have read, all that it has.

    `held`: what it has read and not committed. `left`: what it has still to read. With how many samples it has spent
    how much time of work since it asked last. `waits`: it takes part in no round, and is answered when there is more,
    or the epoch is finished; else also when all that is left is in others' hands. `newest`: the last lease that it
    has heard of; one that it was given after that got lost on the way, and is given once more. `given`: leases of
    which it reads nothing from some place on; a coordinator may have died before it kept that.
    """

    loader: str
    epoch: int
    held: list[LeaseAck]
    left: int = 0
    samples: int = 0
    seconds: float = 0.0
    waits: bool = False
    newest: int | None = None
    given: list[tuple[int, int]] = []


class GivenLease(Message, frozen=True):
    """The next lease, and how much of it is one step; 0: there is none, for now or because the epoch is finished.

    `is_shared`: whether all workers come to this loader's epochs, by what is known. `origin`: how many samples of the
    epoch are done when its first step begins; in rounds the same for all. `wide`: how many are done in every step of
    it, by all workers together.
    """

    lease: int
    span: Span
    is_finished: bool = False
    step: int = 0
    is_shared: bool = True
    begin: int = 0  # the place in it to begin at
    is_common: bool = False  # all workers have it, and make its steps together; it is all that there is
    origin: int = 0
    wide: int = 0


class Recall(Message, frozen=True):
    """A worker is to give back what it has not begun; answered with `GaveBack`."""

    loader: str
    epoch: int


class GaveBack(Message, frozen=True):
    """Leases, and the places from which on this worker reads none of them. `newest`: the last that it knows of."""

    leases: list[tuple[int, int]]
    newest: int | None = None


class LeaveEpoch(Message, frozen=True):
    """A worker has left its loop over an epoch: what it gives back, and what it has read and made no step with.

    Leases after the `newest` it has heard of go back whole.
    """

    loader: str
    epoch: int
    leases: list[tuple[int, int]]
    passed_over: list[LeaseAck]
    newest: int | None = None


class EndShard(Message, frozen=True):
    """A shard has ended before this position."""

    loader: str
    epoch: int
    position: int


class AskLeaseAcks(Message, frozen=True):
    """What have commits used, that was not confirmed yet? Those that are applied."""


class GivenLeaseAcks(Message, frozen=True):
    """What commits have used, by the word of the server of slice 0; or, when that is lost, of a worker.

    `open`: lives of workers whose commits may still be applied: those that are out; of a worker, its own.
    """

    acks: list[LeaseAck]
    late: list[LeaseAck] = []  # of commits that were late: to do again
    open: list[tuple[str, int]] = []


class Confirm(Message, frozen=True):
    """The coordinator has kept that these were used, or late: servers may forget them."""

    acks: list[LeaseAck]
    late: list[LeaseAck] = []
