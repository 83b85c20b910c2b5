"""Messages about leases: workers request and return them, servers report what commits have used."""

from __future__ import annotations

from syncline.core.leasing.loader import Loader
from syncline.core.leasing.ranges import Span
from syncline.core.wire.message import Message

#: A lease and a range of places in it that a commit has used.
LeaseAck = tuple[int, int, int]


class OpenEpoch(Message, frozen=True):
    """A worker begins its loop over an epoch; answered with `Opened`.

    `seed`: of the loader's order in this worker; the chief's counts for the job. None: no seed. `insists`: the chief
    did not open this loader in time, so this worker's seed counts.
    """

    loader: str
    epoch: int
    data: Loader
    seed: int | None = None
    insists: bool = False


class Opened(Message, frozen=True):
    """`is_left`: whether there is anything to read. `is_shared`: whether all workers read this loader's epochs, as
    far as known. `seed`: of the loader's order in the whole job. `is_early`: nothing was opened, since the chief
    has not opened this loader yet and its seed counts; ask again.
    """

    is_left: bool
    is_shared: bool = True
    seed: int | None = None
    is_early: bool = False


class AskLease(Message, frozen=True):
    """A worker has read, or will soon have read, its leases.

    `held`: read and not committed. `left`: still to read. Also the samples and working time since its last request.
    `waits`: it takes part in no round and is answered when there is more or the epoch is finished; otherwise also
    when others hold the rest. `newest`: the last lease it knows of; later ones were lost on the way and are sent
    again. `given`: leases that it gave back from some place on, in case a coordinator died before it journaled that.
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
    """The next lease and its step size; 0: there is none, for now or because the epoch is finished.

    `is_shared`: whether all workers read this loader's epochs, as far as known. `origin`: samples of the epoch done
    before its first step; in rounds the same for all. `wide`: samples per step of all workers together.
    """

    lease: int
    span: Span
    is_finished: bool = False
    step: int = 0
    is_shared: bool = True
    begin: int = 0  # the place to begin at
    is_common: bool = False  # all workers have it and make its steps together; it is the only one
    origin: int = 0
    wide: int = 0


class Recall(Message, frozen=True):
    """To a worker: give back what is not started; answered with `GaveBack`."""

    loader: str
    epoch: int


class GaveBack(Message, frozen=True):
    """Leases, and the places from which on this worker gives them back. `newest`: the last that it knows of."""

    leases: list[tuple[int, int]]
    newest: int | None = None


class LeaveEpoch(Message, frozen=True):
    """A worker has left its loop over an epoch: what it gives back, and what it has read without a step.

    Leases after `newest` go back entirely.
    """

    loader: str
    epoch: int
    leases: list[tuple[int, int]]
    passed_over: list[LeaseAck]
    newest: int | None = None


class EndShard(Message, frozen=True):
    """A shard ended before this position."""

    loader: str
    epoch: int
    position: int


class AskLeaseAcks(Message, frozen=True):
    """Asks for the unconfirmed lease ranges of applied commits."""


class GivenLeaseAcks(Message, frozen=True):
    """Lease ranges used by commits, from the server of slice 0; from a worker, if that server was lost.

    `open`: incarnations of workers with commits that may still be applied: removed ones; from a worker, its own.
    """

    acks: list[LeaseAck]
    late: list[LeaseAck] = []  # of late commits: to do again
    open: list[tuple[str, int]] = []


class Confirm(Message, frozen=True):
    """The coordinator has journaled these ranges: servers may drop them."""

    acks: list[LeaseAck]
    late: list[LeaseAck] = []
