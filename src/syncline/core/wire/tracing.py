"""With `--trace`: spans of a member on their way to the coordinator, and what its answer says of the clocks."""

from __future__ import annotations

from syncline.core.tracing import Knot, PhaseSpan
from syncline.core.wire.message import Message


class GiveSpans(Message, frozen=True):
    """From a member. One that is not answered is sent again with the same number."""

    number: int
    sent: int  # microseconds of the member's clock
    spans: list[PhaseSpan]
    knot: Knot | None = None  # of the message before
    num_dropped: int = 0  # spans of this life so far that were too many


class GotSpans(Message, frozen=True):
    """The coordinator's clock when it got them: seconds since 1970."""

    at: float
