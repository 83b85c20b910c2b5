"""A member's way to the coordinator: what an answer brings is in force before anything else is heard."""

from __future__ import annotations

from typing import Any

from tests.patience import PATIENCE

from syncline.core.control import Join, Over
from syncline.core.message import Done
from syncline.net import memory
from syncline.net.link import Link
from syncline.net.rpc import Call, Endpoint, Request, Stamp
from syncline.net.transport import Connection, Peer


class Hears:
    """Keeps what it heard, in order."""

    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    def landing(self, peer: Peer, message: Any, payload_bytes: int) -> list[memoryview]:
        return []

    def handle(self, request: Request) -> None:
        self._heard.append(type(request.message).__name__)

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        pass


class AnswersAndGoesOn(Hears):
    """A coordinator that has something more to say to who has just joined."""

    def handle(self, request: Request) -> None:
        request.reply(Done())
        request.endpoint.tell(Over(False, "", ""))


def test_what_follows_from_an_answer_is_done_before_the_next_word_is_heard() -> None:
    """A server that answered its first question before it knew its own incarnation was taken for another, and
    fenced: the coordinator's questions may follow its answer at once."""
    heard: list[str] = []

    def dial() -> Connection:
        left, right = memory.pair(Peer("server", "server-0", 0), Peer("coordinator", "coordinator", 0))
        Endpoint(right, Stamp("job"), AnswersAndGoesOn([]))
        return left

    link = Link(
        dial, Hears(heard), Stamp("job"),
        patience_seconds=0.0, say=heard.append, fenced=lambda error: None, gone=lambda reason: None,
    )  # fmt: skip

    def then(call: Call) -> None:
        heard.append("then")
        assert call.answer == Done()

    link.try_call(Join("server", "server-0", "here", 1, None, {}, "process", "kind"), then).wait(PATIENCE)
    assert heard == ["then", "Over"]
    link.close()
