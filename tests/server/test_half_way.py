"""Changes that got half way: what servers say when they prepare, whose updates count then, and that all goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.server.test_generations import by_slice, two_of, x, zeros
from tests.server.test_moves import replicated

from syncline.core.replica_sets import ReplicaSet
from syncline.core.rounds import BARRIER_EPOCH
from syncline.core.slice_state import life_of
from syncline.core.wire.control import Prepared, Roster
from syncline.core.wire.traffic import AskClip, Committed, GiveClip
from syncline.errors import FencedError, ProtocolError, Refresh
from syncline.net.transport import Peer

from .conftest import WAIT, House, eventually

MakeHouse = Callable[..., House]


def test_a_round_that_is_whole_by_an_entry_is_applied(make_house: MakeHouse) -> None:
    """worker-0 is behind a barrier, of which this server hears from one that enters: nobody else would wake it."""
    house = make_house(1, 2)
    house.register(zeros())
    _, two = two_of(house)
    call = two.commit("server-0", 1, x())
    assert not call.arrives(0.05)
    change = house.change(entering={"worker-2": 9})
    change.phase = BARRIER_EPOCH
    house.prepare(change)
    house.install(change)
    call.wait(WAIT)
    assert set(by_slice(house).values()) == {-1.0}


def test_a_server_says_how_far_its_slices_are_and_can_come(make_house: MakeHouse) -> None:
    """Also its backups: of what has died with a primary, they are all that is left."""
    house = make_house(3, 2, policy="async", replicas=2)
    replicated(house)
    one, two = two_of(house)
    for call in [*one.commit_all(1, x()), *two.commit_all(1, x())]:
        call.wait(WAIT)
    two.stage("server-0", 2, x()).wait(WAIT)
    two.commit("server-1", 2, x()).wait(WAIT)
    mine, theirs = ([part.id for part in house.parts(server)] for server in ("server-0", "server-1"))
    house.kill("server-1")
    replica_sets = [ReplicaSet(n, "server-0") for n in [*mine, *theirs]]
    change = house.change(fenced={"worker-1": two.incarnation}, replica_sets=replica_sets, moves=True)
    answers = {name: house.tell(name, change.prepare()).wait(WAIT) for name in change.servers}
    answer = answers["server-0"]
    assert isinstance(answer, Prepared) and answer.is_primary
    assert sorted(answer.clocks) == [("worker-0", one.incarnation, 1), ("worker-1", two.incarnation, 2)]
    lives = life_of("server-0", 1), life_of("server-1", 2)
    assert answer.reach == [("worker-1", two.incarnation, 2, life) for life in lives], "staged here, applied there"


def test_who_is_the_primary_of_nothing_says_so(make_house: MakeHouse) -> None:
    house = make_house(2, 1, replicas=2)
    replicated(house)
    house.carry_out(replica_sets=[ReplicaSet(n, "server-1", ("server-0",)) for n in house.replica_sets], moves=True)
    change = house.change()
    answers = [house.tell(server, change.prepare()).wait(WAIT) for server in change.servers]
    assert [isinstance(answer, Prepared) and answer.is_primary for answer in answers] == [False, True]


def test_from_a_server_that_is_out_no_update_is_taken(make_house: MakeHouse) -> None:
    """It lives, and has not heard that it was evicted: its backup has said by now how far it is."""
    house = make_house(2, 1, policy="async", replicas=2)
    replicated(house)
    (worker,) = house.workers.values()
    numbers = [part.id for part in house.parts("server-0")]
    worker.stage("server-0", 1, x()).wait(WAIT)
    house.members = [m for m in house.members if m.name != "server-0"]
    change = house.change(replica_sets=[ReplicaSet(n, "server-1") for n in house.replica_sets], moves=True)
    assert list(change.servers) == ["server-1"]
    house.prepare(change)
    call = worker.commit_staged("server-0", 1)
    eventually(lambda: any("refuses updates" in line and "is out" in line for line in house.lines))
    assert not call.arrives(0.1)
    house.install(change)
    assert not call.arrives(0.1)
    assert all(house.slot("server-1", n).state.clocks == {} for n in numbers)


@pytest.mark.parametrize("is_fenced", [False, True])
def test_who_has_not_heard_that_its_slices_are_gone_goes_on_until_it_does(
    make_house: MakeHouse, is_fenced: bool
) -> None:
    """Installed by the new primary only, and the old one's hold has ended by itself: what it takes in meanwhile is
    there when the change is made once more, and it does not wait for ever for who is the primary itself by now."""
    house = make_house(2, 2, policy="async", replicas=2)
    replicated(house)
    one, two = two_of(house)
    numbers = [part.id for part in house.parts("server-0")]
    for worker in (one, two):
        for server in house.servers:
            worker.stage(server, 1, x()).wait(WAIT)
    fenced = {"worker-1": two.incarnation} if is_fenced else {}
    replica_sets = [ReplicaSet(number, "server-1", ("server-0",)) for number in numbers]
    change = house.change(replica_sets=replica_sets, moves=True, fenced=fenced)
    house.holds("server-0", 0.01)
    house.prepare(change)
    house.tell("server-1", change.install(house.members)).wait(WAIT)
    one.commit_staged("server-0", 1).wait(WAIT)
    house.holds("server-0")
    assert all(house.slot("server-1", number).state.clocks[("worker-0", one.incarnation)] == 1 for number in numbers)
    house.carry_out(moves=True, fenced=fenced)
    one.commit("server-1", 1, x()).wait(WAIT)
    assert set(by_slice(house).values()) == {-1.0}


def test_when_all_have_heard_nothing_comes_from_who_was_the_primary(make_house: MakeHouse) -> None:
    house = make_house(2, 1, policy="async", replicas=2)
    replicated(house)
    numbers = [part.id for part in house.parts("server-0")]
    house.carry_out(replica_sets=[ReplicaSet(number, "server-1", ("server-0",)) for number in numbers], moves=True)
    hosting = house.servers["server-1"].hosting
    assert hosting.backups.was_of(numbers[0], "server-0")
    house.servers["server-1"].hear(Roster(house.generation, house.members, list(house.replica_sets.values()), []))
    assert not hosting.backups.was_of(numbers[0], "server-0")
    with pytest.raises(FencedError):
        hosting.check_sender(Peer("server", "server-0", 1), numbers[0])


@pytest.mark.parametrize("moves", [True, False])
def test_a_round_that_waits_for_its_norm_is_not_counted_on_where_primaries_change(
    make_house: MakeHouse, moves: bool
) -> None:
    """Two servers have applied it, the third waits for the norm. Its worker dies, and one of the two."""
    house = make_house(3, 1, replicas=2)
    house.register(zeros())
    for source, target in (("server-0", "server-1"), ("server-1", "server-0"), ("server-2", "server-0")):
        house.seed(source, target)
    (worker,) = house.workers.values()
    asked = {server: worker.commit(server, 1, x(), clip_norm=1.0).wait(WAIT) for server in house.primaries()}
    assert all(isinstance(answer, AskClip) for answer in asked.values()) and len(asked) == 3
    for server in ("server-0", "server-2"):
        assert isinstance(worker.ask(server, GiveClip(1, 48.0, [])).wait(WAIT), Committed)
    replica_sets = [ReplicaSet(part.id, "server-0") for part in house.parts("server-2")] if moves else None
    house.kill("server-2")
    change = house.change(fenced={"worker-0": worker.incarnation}, replica_sets=replica_sets, moves=moves)
    house.prepare(change)
    told = ["step 1 of worker-0 is on some slices and not on others"]
    assert [loss.text for loss in change.torn()] == (told if moves else []), "else its server says that it is dropped"


def test_a_move_that_was_begun_is_not_let_go_of_by_itself(make_house: MakeHouse) -> None:
    """Slices that go elsewhere take nothing in from then on: a commit that is decided upon now would be missing on
    them, and be answered. Another change has come in between, and its Install does not come."""
    house = make_house(2, 1, policy="async", replicas=2)
    replicated(house)
    (worker,) = house.workers.values()
    (full,) = [server for server in house.servers if len(house.parts(server)) == 2]
    (other,) = set(house.servers) - {full}
    for clock in (1, 2):
        worker.stage(full, clock, x()).wait(WAIT)
    worker.commit(other, 1, x()).wait(WAIT)
    goes, stays = house.parts(full)
    slot = house.slot(full, stays.id)
    slot.pin()
    change = house.change(replica_sets=[ReplicaSet(goes.id, other, (full,))], moves=True)
    house.prepare(change)
    begun = house.tell(full, change.install(house.members))
    generations = house.servers[full].reconfiguration()
    eventually(lambda: generations.is_half_way)
    again = house.change(moves=True)
    house.holds(full, 0.01)
    prepared = house.tell(full, again.prepare())
    call = worker.commit_staged(full, 2)
    slot.unpin()
    slot.drain()
    assert isinstance(prepared.wait(WAIT), Prepared)
    with pytest.raises(ProtocolError, match="was superseded"):
        begun.wait(WAIT)
    assert not call.arrives(0.4), "only an Install lets go"
    house.holds(full)
    house.prepare(again)
    house.install(again)
    with pytest.raises(Refresh):
        call.wait(WAIT)
    worker.stamp.generation = house.generation
    for clock in (1, 2):
        for made in worker.commit_all(clock, x()):
            made.wait(WAIT)
    assert set(by_slice(house).values()) == {-2.0}
