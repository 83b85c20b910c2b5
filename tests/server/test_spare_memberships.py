"""`sync:spare=N` with several servers: what is said of rounds, by whom it is believed, and whom it lets wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncline.core.replica_sets import ReplicaSet
from syncline.core.rounds import RoundMembership
from syncline.core.wire.control import Prepared, Roster
from syncline.core.wire.traffic import Committed
from syncline.errors import ProtocolError

from .conftest import WAIT, House, Worker, eventually
from .test_spare_servers import MakeHouse, a_house, decide, decided, stage_all


def rounds_at(house: House, server: str) -> Any:
    return house.servers[server].commits.rounds


# -- those who have not registered everything yet --------------------------------------------------------------


def two_segments(make_house: MakeHouse) -> tuple[House, str, str]:
    """`x` is on the server that decides, `y` on the other."""
    house = make_house(2, 3, policy="sync:spare=1")
    for name in "xy":
        house.register({name: np.zeros(8, np.float32)}, "SGD", "sum")
    (here, there) = (house.replica_sets[part.id].primary for part in house.registry.layout.slices())
    assert here != there
    return house, here, there


def push(names: str, value: float) -> dict[str, Any]:
    return {name: np.full(8, value, np.float32) for name in names}


def decide_both(worker: Worker, here: str, clock: int, value: float) -> Any:
    for server in worker.house.primaries():
        worker.stage(server, clock, push("xy", value), num_segments=2).wait(WAIT)
    return worker.commit_staged(here, clock)


def test_a_server_does_not_wait_for_whom_it_is_unknown_to(make_house: MakeHouse) -> None:
    """A worker that has not registered what is there commits at the one that decides, and tells nobody else."""
    house, here, there = two_segments(make_house)
    one, two, three = house.workers.values()
    calls = [decide_both(one, here, 1, 1.0), two.commit(here, 1, push("x", 2.0), num_segments=1)]
    round_membership = decided(*calls)[0]
    late = decide_both(three, here, 1, 4.0).wait(WAIT)
    assert late.late and three.commit_staged(there, 1, late.round_membership).wait(WAIT).late
    waits = [two.commit(here, 2, push("x", 2.0), num_segments=1), decide_both(three, here, 2, 4.0)]
    eventually(lambda: rounds_at(house, here).waiting_reason() == "the round waits for worker-0")
    assert not any(call.is_done for call in waits), "worker-1 has gone on, and had not told the other"
    assert isinstance(one.commit_staged(there, 1, round_membership).wait(WAIT), Committed)
    second = decided(decide_both(one, here, 2, 1.0), *waits)[0]
    calls = [one.commit_staged(there, 2, second), three.commit_staged(there, 2, second)]
    for call in calls:
        call.wait(WAIT)
    third = decided(decide_both(two, here, 3, 2.0), decide_both(one, here, 3, 1.0))
    calls = [
        worker.commit_staged(there, 3, round_membership)
        for worker, round_membership in zip((two, one), third, strict=True)
    ]
    for call in calls:
        call.wait(WAIT)
    assert (house.value("x") == -13.0).all() and (house.value("y") == -9.0).all(), "it has registered by now"


# -- one order ---------------------------------------------------------------------------------------------------


def test_a_round_of_the_dead_comes_first_where_their_end_is_not_installed_yet(make_house: MakeHouse) -> None:
    """A hold that ended by itself: one server has installed it, and closes the next round, the other has not."""
    house = make_house(2, 2, policy="sync:spare=1")
    house.register({"x": np.zeros(96, np.float32)}, "SGD", "sum", lr=1.0, momentum=0.5)
    one, two = house.workers.values()
    decided(decide(one, 1, 1.0))
    late = decide(two, 1, 2.0).wait(WAIT)
    two.commit_staged("server-1", 1, late.round_membership).wait(WAIT)
    waits = decide(two, 2, 4.0)
    house.workers.pop(one.name).vanish()
    house.members = [member for member in house.members if member.name != one.name]
    change = house.change(fenced={one.name: one.incarnation})
    house.holds("server-1", 0.01)
    change.prepared("server-1", house.tell("server-1", change.prepare()).wait(WAIT))
    eventually(lambda: house.servers["server-1"].commits.admission_queue.is_on is False)
    house.holds("server-1")
    change.prepared("server-0", house.tell("server-0", change.prepare()).wait(WAIT))
    message = change.install(house.members)
    house.tell("server-0", message).wait(WAIT)
    with pytest.raises(ProtocolError, match="was superseded"):
        house.tell("server-1", message).wait(WAIT)
    (round_membership,) = decided(waits)
    follows = two.commit_staged("server-1", 2, round_membership)
    eventually(lambda: "waits for worker-0" in rounds_at(house, "server-1").waiting_reason())
    house.carry_out(fenced={one.name: one.incarnation})
    follows.wait(WAIT)
    assert len(np.unique(house.value("x"))) == 1, "a rule with memory: one order on all slices"


# -- who is believed ---------------------------------------------------------------------------------------------


def test_a_worker_tells_the_one_that_decides_nothing_of_rounds(make_house: MakeHouse) -> None:
    house = a_house(make_house)
    one, two, three = house.workers.values()
    stage_all(one, 1, 1.0)
    with pytest.raises(ProtocolError, match="to the server that decides them"):
        one.commit_staged("server-0", 1, RoundMembership(0, 1000, [(one.name, one.incarnation, 1)])).wait(WAIT)
    with pytest.raises(ProtocolError, match="nor late for it"):
        one.commit_staged("server-1", 1, RoundMembership(0, 1000, [(two.name, two.incarnation, 1)])).wait(WAIT)
    assert (
        rounds_at(house, "server-0").round_memberships.newest
        is rounds_at(house, "server-1").round_memberships.newest
        is None
    )
    round_memberships = decided(decide(three, 1, 4.0), one.commit_staged("server-0", 1))
    assert round_memberships[0].members == [(one.name, one.incarnation, 1), (three.name, three.incarnation, 1)]


def test_what_held_commits_say_is_told_with_the_rest(make_house: MakeHouse) -> None:
    """The one that decides may be lost by the time that they are decided upon."""
    house = a_house(make_house)
    one, two, _ = house.workers.values()
    first, _ = decided(decide(one, 1, 1.0), decide(two, 1, 2.0))
    commits, change = house.servers["server-1"].commits, house.change()
    with commits.state_lock:
        commits.admission_queue.hold()
    one.commit_staged("server-1", 1, first)
    eventually(lambda: list(commits.admission_queue.waiting()))
    answer = house.tell("server-1", change.prepare()).wait(WAIT)
    assert isinstance(answer, Prepared) and answer.round_memberships == [first]
    held = two.commit_staged("server-1", 1, RoundMembership(0, 9, [(two.name, two.incarnation, 1)]))
    eventually(lambda: len(list(commits.admission_queue.waiting())) == 2)
    assert commits.rounds.round_memberships.newest == first and not held.is_done, (
        "what comes later may be decided otherwise"
    )


# -- servers that go -----------------------------------------------------------------------------------------------


def test_a_server_is_alone_again_when_the_other_has_left(make_house: MakeHouse) -> None:
    """It has given its slices away before: there is no change by which it goes, only a roster."""
    house = a_house(make_house)
    house.seed("server-1", "server-0")
    replica_sets = [ReplicaSet(part.id, "server-0") for part in house.parts("server-1")]
    house.carry_out(replica_sets=replica_sets, moves=True)
    rounds, server = rounds_at(house, "server-0"), house.servers["server-0"]
    assert not rounds.is_alone
    members = list(house.members)
    house.kill("server-1")
    server.hear(Roster(house.generation - 1, house.members, list(house.replica_sets.values())))
    assert not rounds.is_alone, "an old roster"
    assert {member.name for member in server.hosting.servers()} == {"server-0", "server-1"}
    server.hear(Roster(house.generation, house.members, list(house.replica_sets.values())))
    assert rounds.is_alone and rounds.decides
    server.hear(Roster(house.generation, members, list(house.replica_sets.values())))
    assert not rounds.is_alone
    one, two, _ = house.workers.values()
    for worker in (one, two):
        call = worker.commit("server-0", 1, {"x": np.ones(96, np.float32)})
    call.wait(WAIT)
    assert (house.value("x") == -2.0).all()
