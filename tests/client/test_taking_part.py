"""Whether rounds count a worker, and since where: what it asks before it comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncline.client.taking_part import TakingPart
from syncline.core.message import Message
from syncline.core.rounds import ERA, apart
from syncline.core.traffic import AskPlace, GivenPlace, Rest


class Servers:
    """Two of them, in the place of a placement and of a redo; the slowest worker stands elsewhere on each."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def ask_all(self, message: Message) -> list[Message]:
        self.heard.append(message)
        return [GivenPlace(4), GivenPlace(6)] if isinstance(message, AskPlace) else []

    def again(self, action: Callable[[], Any], seconds: float) -> Any:
        return action()


def part_of(servers: Servers) -> TakingPart:
    made = TakingPart(servers, None, is_bounded=True, is_late=False, wait_seconds=1.0)  # type: ignore[arg-type]
    made.redo = servers  # type: ignore[assignment]
    return made


def test_behind_a_barrier_all_stand_level() -> None:
    servers = Servers()
    part = part_of(servers)
    part.step_aside()
    part.begin_stretch(ERA)
    assert servers.heard == [Rest(0, True)] and not part.must_come_back and part.stretch == ERA


def test_who_comes_to_a_barrier_that_all_have_passed_asks_where_it_stands() -> None:
    """Nothing levels it with the others: left to themselves, two servers would place it differently, and in
    `bounded` two workers could wait for each other."""
    servers = Servers()
    part = part_of(servers)
    part.begin_stretch(ERA)
    part.step_aside()
    own = apart(ERA, 7)
    part.begin_stretch(own)
    assert part.must_come_back and part.stretch == own
    part.come_back()
    assert part.back_at == 6 and servers.heard[-1] == AskPlace()
    part.committed(own)
    assert not part.must_come_back and part.back_at is None
