"""Messages between workers: collectives and point-to-point transfers."""

from __future__ import annotations

from syncline.core.wire.message import Message

Shape = tuple[int, ...]
#: In `Describe.failures`: this member started its script after the sender's first call.
STRANGER = -1


class Describe(Message, frozen=True):
    """A worker has called a collective; the other members must have called the same. Contains small data."""

    group: tuple[int, ...]  # incarnations of its members, by rank
    number: int  # index among the group's collectives
    verb: str
    dtype: str = ""  # "": this rank gives nothing
    shape: Shape = ()
    parts: tuple[Shape, ...] = ()  # shapes of the pieces, if there is one per rank
    op: str = ""
    root: int = 0  # an incarnation
    generation: int = 0  # of the roster that the group was made from; 0: an explicitly chosen group
    host: int = 0  # the first member of the group that shares memory with this one
    sharing: int = 1  # number of members that do, including this one
    memory: int = 0  # where the data lies in shared memory; 0: not shared
    offset: int = 0
    waits: bool = True  # whether the script waits
    of_torch: bool = False
    into: tuple[str, Shape] | None = None  # dtype and shape of the output buffer
    attempt: int = 0  # how often the workers have restarted together
    failures: tuple[int, ...] = ()  # for each member: failed calls with it, or STRANGER; (): none
    num_calls: int = 0  # calls of this worker in this attempt; only set if a member is a STRANGER

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        return (self.group, self.number)


class Chunk(Message, frozen=True):
    """Bytes of the last described collective, in the order that the receiver expects."""

    offset: int


class Through(Message, frozen=True):
    """This worker no longer reads the others' memory for this collective."""

    group: tuple[int, ...]
    number: int


class Broken(Message, frozen=True):
    """This collective fails for all members with this reason, and so does one that was called in its place."""

    group: tuple[int, ...]
    number: int
    reason: str
    other_group: tuple[int, ...] = ()
    other_number: int = 0


class Share(Message, frozen=True):
    """Shared memory of the sender, with a number."""

    memory: int
    num_bytes: int


class Unshare(Message, frozen=True):
    """The sender no longer uses this memory."""

    memory: int


class Goodbye(Message, frozen=True):
    """The sender leaves the job between two collectives."""


class Offer(Message, frozen=True):
    """Point to point: data offered to the receiver. Contains small data."""

    number: int  # index among the sender's offers to this receiver
    dtype: str
    shape: Shape
    memory: int = 0
    offset: int = 0
    waits: bool = True
    of_torch: bool = False
    attempt: int = 0
    is_stranger: bool = False  # the receiver started its script after the sender's first call


class Take(Message, frozen=True):
    """The receiver has a buffer: send the bytes of the offer."""

    number: int


class TensorPiece(Message, frozen=True):
    """Some bytes of an offer."""

    number: int
    offset: int


class Taken(Message, frozen=True):
    """An offer was received, or refused with a reason."""

    number: int
    refused: str = ""


class Withdraw(Message, frozen=True):
    """The sender has withdrawn an offer."""

    number: int
