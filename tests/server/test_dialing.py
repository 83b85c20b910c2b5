"""A server whose partner does not answer: whoever has nothing to do with that one does not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tests.blackhole import blackhole
from tests.server.test_generations import by_slice, two_of, x, zeros

from syncline.core.members import Member
from syncline.core.wire.control import SeedTo
from syncline.net import tcp
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.transport import Peer

from .conftest import WAIT, House

MakeHouse = Callable[..., House]
DIAL_SECONDS = WAIT


def test_a_seed_for_a_host_that_does_not_answer_holds_up_no_other(make_house: MakeHouse) -> None:
    """Its slices could not have another backup before the dial has given up; pushes go on either way."""
    house = make_house(3, 2, replicas=2)
    house.register(zeros())
    dialled = threading.Event()
    with blackhole() as (host, port):

        def hang(member: Member) -> Endpoint | None:
            if member.name != "server-1":
                return None
            dialled.set()
            identity = tcp.Identity("job", bytes(32), Peer("server", "server-0", 1))
            return Endpoint(tcp.connect_tcp(host, port, identity, DIAL_SECONDS), Stamp("job"))

        house.dial_instead = hang
        numbers = [part.id for part in house.parts("server-0")]
        silent, other = (next(m for m in house.members if m.name == f"server-{k}") for k in (1, 2))
        hangs = house.tell("server-0", SeedTo(numbers, silent))
        assert dialled.wait(WAIT)
        began = time.monotonic()
        house.tell("server-0", SeedTo(numbers, other)).wait(WAIT)
        one, two = two_of(house)
        for call in [*one.commit_all(1, x(1)), *two.commit_all(1, x(1))]:
            call.wait(WAIT)
        assert time.monotonic() - began < DIAL_SECONDS / 2 and not hangs.is_done
        assert set(by_slice(house).values()) == {-2.0}
