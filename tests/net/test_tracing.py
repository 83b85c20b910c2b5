"""How a member sends its spans: nothing is lost while the coordinator is gone, and clocks are compared."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.core.tracing import COMPUTE, MOST_SPANS, SpanBuffer
from syncline.core.wire.message import Message
from syncline.core.wire.tracing import GiveSpans, GotSpans
from syncline.errors import ConnectionLost
from syncline.net.tracing import SpanSender


class Way:
    """A link to a coordinator whose clock is 1,000 s ahead; a message takes 10 ms there, and 10 ms back."""

    def __init__(self) -> None:
        self.now = 5.0
        self.heard: list[GiveSpans] = []
        self.is_broken = self.loses_answer = False

    def try_call(self, message: Message) -> Any:
        assert isinstance(message, GiveSpans)
        if self.is_broken:
            raise ConnectionLost("the coordinator is gone for the moment")
        self.now += 0.01
        self.heard.append(message)
        at = self.now + 1_000
        self.now += 0.01
        return self if self.loses_answer else _Answer(GotSpans(at))

    def wait(self, seconds: float) -> Message:
        raise ConnectionLost("the answer was lost")

    def clock(self) -> float:
        return self.now


class _Answer:
    def __init__(self, answer: Message) -> None:
        self._answer = answer

    def wait(self, seconds: float) -> Message:
        return self._answer


@pytest.fixture
def way() -> Way:
    return Way()


def sender(way: Way, spans: SpanBuffer) -> SpanSender:
    return SpanSender(way, spans, way.clock)  # type: ignore[arg-type]


def test_the_middle_of_a_round_trip_compares_the_clocks(way: Way) -> None:
    spans = SpanBuffer()
    own = sender(way, spans)
    own.close()
    spans.add(COMPUTE, 1, 5.0, 5.1)
    own.close()
    first, second = way.heard
    assert first.knot is None and first.spans == [] and first.sent == 5_000_000
    assert second.knot is not None and (second.knot.offset, second.knot.error) == (1_000_000_000, 10_000)
    assert second.knot.at == 5_010_000 and len(second.spans) == 1


def test_spans_wait_for_a_coordinator_that_is_gone(way: Way) -> None:
    """While there is no way they wait; where the answer was lost they are sent again, with the same number."""
    spans = SpanBuffer()
    own = sender(way, spans)
    spans.add(COMPUTE, 1, 5.0, 5.1)
    way.is_broken = True
    own.close()
    spans.add(COMPUTE, 2, 5.1, 5.2)
    way.is_broken, way.loses_answer = False, True
    own.close()
    way.loses_answer = False
    own.close()
    told = [(message.number, [span.step for span in message.spans]) for message in way.heard]
    assert told == [(1, [1]), (1, [1]), (2, [2])]


def test_many_spans_go_in_several_messages(way: Way) -> None:
    spans = SpanBuffer()
    for number in range(2 * MOST_SPANS + 5):
        spans.add(COMPUTE, number, number * 1e-3, number * 1e-3 + 1e-3)
    sender(way, spans).close()
    assert [len(message.spans) for message in way.heard] == [MOST_SPANS, MOST_SPANS, 5]
    assert [message.number for message in way.heard] == [1, 2, 3]
