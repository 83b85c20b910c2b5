"""Messages of followers: processes outside of a job that read its parameters, one consistent cut after another."""

from __future__ import annotations

from syncline.core.layout import Segment
from syncline.core.members import Member
from syncline.core.wire.message import Message


class AskCut(Message, frozen=True):
    """A follower asks for a cut: all parameters at one point between commits. Answered with `GivenCut`.

    `num_segments`: those that it knows.
    """

    num_segments: int = 0


class CutPlace(Message, frozen=True):
    """Slices of a cut, with their versions, and the server that has marked them."""

    server: Member
    slices: list[int]
    versions: list[int]


class AwaitEnd(Message, frozen=True):
    """A follower asks to hear of the job's end. Answered with `Done` when all scripts have ended, before servers end:
    the follower reads a last cut then. The job waits for its `EndCut`, for a deadline.
    """


class GivenCut(Message, frozen=True):
    """All slices are marked. The follower reads them from their places, then says `EndCut` to these and to the
    coordinator.
    """

    number: int
    step: int
    segments: list[Segment]  # that the follower did not know
    places: list[CutPlace]
    held_seconds: float = 0.0  # how long commits were held


class MarkCut(Message, frozen=True):
    """To the primary or a backup of these slices: mark them. Answered with `MarkedCut`.

    Refused if the barrier of this number should be closed here and has opened. Marks are kept until `EndCut`, for a
    deadline, or until a cut of a higher number.
    """

    number: int
    slices: list[int]
    has_barrier: bool


class MarkedCut(Message, frozen=True):
    """The slices are marked at these versions. `primaries`: versions of all slices whose primary this server is."""

    versions: list[int]
    primaries: list[tuple[int, int]] = []


class ReadCut(Message, frozen=True):
    """A follower reads marked slices. Answered with `GivenSlices`, in parts."""

    number: int
    slices: list[int]


class GivenSlices(Message, frozen=True):
    """Some of the slices asked for; their bytes follow. The last part has none."""

    slices: list[int]


class EndCut(Message, frozen=True):
    """To servers, from a follower or the coordinator, and from a follower to the coordinator: this cut is no longer
    read. Not answered.
    """

    number: int
