"""What workers say to each other: collectives, and what goes from one to one."""

from __future__ import annotations

from syncline.core.wire.message import Message

Shape = tuple[int, ...]
#: In `Describe.failures`: this member began its script after the sender had made its first call.
STRANGER = -1


class Describe(Message, frozen=True):
    """A worker has called a collective: all of what the others must have called too. Small data comes with it."""

    group: tuple[int, ...]  # the incarnations of its members, in the order of their ranks
    number: int  # of the group's collectives
    verb: str
    dtype: str = ""  # "": this rank gives nothing
    shape: Shape = ()
    parts: tuple[Shape, ...] = ()  # the shapes of the pieces, where it gives one to each rank
    op: str = ""
    root: int = 0  # an incarnation
    generation: int = 0  # of the roster that the group was made of; 0: a group that was chosen
    host: int = 0  # the first member of the group that shares memory with this one
    sharing: int = 1  # how many do, this one included
    memory: int = 0  # where its data lie, in memory that it has shared; 0: they do not
    offset: int = 0
    waits: bool = True  # its script waits for it
    of_torch: bool = False
    into: tuple[str, Shape] | None = None  # dtype and shape of the place that it has for the result
    attempt: int = 0  # how often this worker and the others have restarted together
    failures: tuple[int, ...] = ()  # for each member: calls with it that failed here, or STRANGER; (): none
    num_calls: int = 0  # that this worker has made in this attempt; only set where a member is a STRANGER

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        return (self.group, self.number)


class Chunk(Message, frozen=True):
    """Some bytes of the collective that was described last, in the order in which the other side expects them."""

    offset: int


class Through(Message, frozen=True):
    """This worker is through with the memory of the others, for this collective."""

    group: tuple[int, ...]
    number: int


class Broken(Message, frozen=True):
    """This collective fails, for everyone, with this reason; and another with it, which was called in its place."""

    group: tuple[int, ...]
    number: int
    reason: str
    other_group: tuple[int, ...] = ()
    other_number: int = 0


class Share(Message, frozen=True):
    """Memory of the sender's, which comes with this, to be known by a number."""

    memory: int
    num_bytes: int


class Unshare(Message, frozen=True):
    """The sender has no use for this memory any more."""

    memory: int


class Goodbye(Message, frozen=True):
    """The sender leaves the job, between two collectives."""


class Offer(Message, frozen=True):
    """Something for the one who hears this, from one to one. Small data comes with it."""

    number: int  # of what the sender has offered it
    dtype: str
    shape: Shape
    memory: int = 0
    offset: int = 0
    waits: bool = True
    of_torch: bool = False
    attempt: int = 0
    is_stranger: bool = False  # the receiver began its script after the sender had made its first call


class Take(Message, frozen=True):
    """The bytes of an offer may come: there is a place for them."""

    number: int


class TensorPiece(Message, frozen=True):
    """Some bytes of an offer."""

    number: int
    offset: int


class Taken(Message, frozen=True):
    """An offer was taken; or refused, for a reason."""

    number: int
    refused: str = ""


class Withdraw(Message, frozen=True):
    """An offer does not stand any more: the one who made it has given up."""

    number: int
