"""Whether rounds count a worker, and since where: what it asks before it comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncline.core.policy import Policy
from syncline.core.rounds import BARRIER_EPOCH, LOOP
from syncline.core.wire.control import Enter, Entered, Passed
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import AskPlace, GivenPlace, Rest
from syncline.worker.exchange.participation import Participation

BOUNDED = Policy("bounded", 2)


class Servers:
    """Two of them, in the place of a placement and of a redo; the slowest worker stands elsewhere on each."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def ask_all(self, message: Message) -> list[Message]:
        self.heard.append(message)
        return [GivenPlace(4), GivenPlace(6)] if isinstance(message, AskPlace) else []

    def again(self, action: Callable[[], Any], seconds: float) -> Any:
        return action()


class Coordinator:
    """Says where who enters stands."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def call(self, message: Message, seconds: float) -> Message:
        self.heard.append(message)
        return Entered(BARRIER_EPOCH + 3, 0)


def part_of(servers: Servers, policy: Policy = BOUNDED, coordinator: Coordinator | None = None) -> Participation:
    return Participation(
        servers, servers, coordinator,  # type: ignore[arg-type]
        policy=policy, is_late=False, wait_seconds=1.0, is_in_loop=lambda: False,
    )  # fmt: skip


def test_behind_a_barrier_all_stand_level() -> None:
    servers = Servers()
    part = part_of(servers)
    part.enter_barrier()
    part.pass_barrier(Passed(BARRIER_EPOCH))
    assert servers.heard == [Rest(0, True)] and not part.must_come_back and part.phase == BARRIER_EPOCH


def test_who_comes_to_a_barrier_that_all_have_passed_asks_where_it_stands() -> None:
    """Nothing levels it with the others: left to themselves, two servers would place it differently, and in
    `bounded` two workers could wait for each other."""
    servers = Servers()
    part = part_of(servers)
    part.pass_barrier(Passed(BARRIER_EPOCH))
    part.enter_barrier()
    part.pass_barrier(Passed(BARRIER_EPOCH, is_away=True))
    assert part.must_come_back and part.phase == BARRIER_EPOCH
    part.come_back()
    assert part.back_at == 6 and servers.heard[-1] == AskPlace()
    part.committed(BARRIER_EPOCH)
    assert not part.must_come_back and part.back_at is None


def test_in_sync_who_came_late_to_a_barrier_is_away_and_enters_again() -> None:
    """One server may have gone a round further without it than another: it has to be told with which it begins."""
    servers, coordinator = Servers(), Coordinator()
    part = part_of(servers, Policy("sync"), coordinator)
    for entry in range(2):
        part.enter_barrier()
        part.pass_barrier(Passed(BARRIER_EPOCH, is_away=True))
        assert part.must_enter
        servers.heard.clear()
        part.tell()
        assert servers.heard == [Rest(BARRIER_EPOCH, True)], "a server that comes now must not wait for it either"
        part.come_back()
        assert coordinator.heard[-1] == Enter(entry) and part.phase == BARRIER_EPOCH + 3 and part.back_at is None
        part.committed(part.phase)
        assert not part.must_come_back
        part.pass_barrier(Passed(BARRIER_EPOCH))


def test_in_sync_who_has_paused_in_a_loop_enters_again_beside_the_others() -> None:
    """In a phase of its own it would wait for all who have paused, and they, for the end of the epoch, for it."""
    servers, coordinator = Servers(), Coordinator()
    part = part_of(servers, Policy("sync"), coordinator)
    part.pause()
    part.pause()
    assert servers.heard == [Rest(0, False)] and part.must_enter
    part.come_back()
    assert coordinator.heard == [Enter(0)] and part.phase == BARRIER_EPOCH + 3
    part.committed(part.phase)
    assert not part.must_come_back


def test_who_has_paused_until_the_end_of_the_loop_is_in_the_next_one_like_all_others() -> None:
    part = part_of(Servers(), Policy("sync"))
    part.pause()
    part.rest()
    assert not part.must_enter and part.phase == LOOP


def test_with_spare_workers_nobody_enters_again() -> None:
    """There is one server, which decides who is late."""
    part = part_of(Servers(), Policy("sync", spare=1))
    part.pause()
    assert not part.must_enter and part.phase == 1
