"""The commit gate: a cut lies between commits on all servers alike, and nobody is stopped by it for good.

Integer gradients with learning rate 1: what a slice has come to says which commits are in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syncline.core.replica_sets import ReplicaSet
from syncline.core.rounds import RoundMembership
from syncline.core.wire.checkpoints import CloseSnapshotBarrier, Mark, OpenSnapshotBarrier, SnapshotBarrierClosed
from syncline.core.wire.control import Leave
from syncline.core.wire.traffic import AskClip, Committed, GiveClip, LoadState, Rest
from syncline.errors import ProtocolError

from .conftest import WAIT, House, Waiting, eventually
from .snapshots import close_gates, mark

MakeHouse = Callable[..., House]


def x(value: float = 1.0) -> dict[str, Any]:
    return {"x": np.full(48, value, np.float32)}


def three(make_house: MakeHouse, workers: int = 2, **settings: Any) -> House:
    """A slice on each of three servers."""
    house = make_house(3, workers, **settings)
    house.register(x(0.0))
    return house


def closed(house: House, server: str, number: int = 1, turn: int = 0, through: Any = ()) -> SnapshotBarrierClosed:
    answer = house.tell(server, CloseSnapshotBarrier(number, turn, list(through))).wait(WAIT)
    assert isinstance(answer, SnapshotBarrierClosed)
    return answer


def sums(house: House) -> list[float]:
    return [float(value) for value in np.unique(house.value("x"))]


def through_of(house: House, **clocks: int) -> list[tuple[str, int, int]]:
    return [
        (n, house.workers[n].incarnation, clock) for n, clock in ((k.replace("_", "-"), c) for k, c in clocks.items())
    ]


# -- one server -------------------------------------------------------------------------------------------


def test_a_closed_gate_holds_everything_until_the_mark(make_house: MakeHouse) -> None:
    house = make_house(1, 1, policy="async")
    house.register(x(0.0))
    worker = house.workers["worker-0"]
    worker.commit("server-0", 1, x()).wait(WAIT)
    assert closed(house, "server-0").clocks == [("worker-0", worker.incarnation, 1)]
    calls = [
        worker.commit("server-0", 2, x()),
        worker.ask("server-0", Rest(0, False)),
        worker.commit("server-0", 3, x()),
    ]
    worker.phase = 1
    assert not any(call.arrives(0.05) for call in calls) and sums(house) == [-1.0]
    house.tell("server-0", Mark(1)).wait(WAIT)
    calls[0].wait(WAIT)
    calls[1].wait(WAIT)
    with pytest.raises(ProtocolError, match="rested"):  # in the order in which they came
        calls[2].wait(WAIT)
    assert sums(house) == [-2.0]


def test_what_has_begun_is_waited_for(make_house: MakeHouse) -> None:
    """A round that is whole and waits for a pinned slice: the gate is closed when it is applied."""
    house = make_house(1, 1, policy="async")
    house.register(x(0.0))
    slot = house.slot("server-0", 2)
    slot.pin()
    call = house.workers["worker-0"].commit("server-0", 1, x())
    barrier = house.tell("server-0", CloseSnapshotBarrier(1))
    assert not barrier.arrives(0.05)
    slot.unpin()
    slot.drain()
    answer = barrier.wait(WAIT)
    assert isinstance(answer, SnapshotBarrierClosed) and [clock for *_, clock in answer.clocks] == [1]
    call.wait(WAIT)
    assert answer.num_updates == 1


def test_a_server_without_slices_says_so_and_stands_in_nobodys_way(make_house: MakeHouse) -> None:
    house = make_house(2, 1, policy="async")
    house.register({"x": np.zeros(4, np.float32)})
    (empty,) = set(house.servers) - set(house.primaries())
    assert not closed(house, empty).has_slices
    assert not house.servers[empty].commits.admission_queue.is_on


def test_a_gate_opens_by_itself_and_a_mark_after_that_is_refused(make_house: MakeHouse) -> None:
    house = make_house(1, 1, policy="async")
    house.register(x(0.0))
    house.servers["server-0"].snapshot_barrier().barrier_seconds = 0.05
    closed(house, "server-0")
    house.workers["worker-0"].commit("server-0", 1, x()).wait(WAIT)
    assert any("opens by itself" in line for line in house.lines)
    with pytest.raises(ProtocolError, match="no longer closed"):
        house.tell("server-0", Mark(1)).wait(WAIT)


def test_a_gate_that_cannot_close_is_given_up(make_house: MakeHouse) -> None:
    house = make_house(1, 1, policy="async")
    house.register(x(0.0))
    house.servers["server-0"].snapshot_barrier().barrier_seconds = 0.05
    slot = house.slot("server-0", 0)
    slot.pin()
    worker = house.workers["worker-0"]
    calls = [worker.commit("server-0", 1, x())]
    with pytest.raises(ProtocolError, match="barrier open before"):
        closed(house, "server-0")
    slot.unpin()
    slot.drain()
    calls.append(worker.commit("server-0", 2, x()))
    for call in calls:
        call.wait(WAIT)


def test_open_gate_lets_all_go_on(make_house: MakeHouse) -> None:
    house = make_house(1, 1, policy="async")
    house.register(x(0.0))
    closed(house, "server-0", number=4)
    call = house.workers["worker-0"].commit("server-0", 1, x())
    assert not call.arrives(0.05)
    house.tell("server-0", OpenSnapshotBarrier(3))
    assert not call.arrives(0.05), "that was another one"
    house.tell("server-0", OpenSnapshotBarrier(4))
    call.wait(WAIT)
    with pytest.raises(ProtocolError, match="no longer closed"):
        house.tell("server-0", Mark(4)).wait(WAIT)


def test_a_generation_that_is_prepared_opens_the_gate(make_house: MakeHouse) -> None:
    """A new coordinator knows of no cut; and while a generation changes there is none."""
    house = make_house(1, 1, policy="async")
    house.register(x(0.0))
    closed(house, "server-0")
    call = house.workers["worker-0"].commit("server-0", 1, x())
    change = house.change()
    house.prepare(change)
    assert not call.arrives(0.05)
    for message in (Mark(1), CloseSnapshotBarrier(2)):
        with pytest.raises(ProtocolError):
            house.tell("server-0", message).wait(WAIT)
    house.install(change)
    call.wait(WAIT)
    closed(house, "server-0", number=2)
    house.tell("server-0", Mark(2)).wait(WAIT)


def test_a_higher_number_or_turn_takes_its_place_and_a_lower_is_refused(make_house: MakeHouse) -> None:
    house = make_house(1, 1, policy="async")
    house.register(x(0.0))
    closed(house, "server-0", 2, 1)
    for number, turn in ((2, 1), (2, 0), (1, 5)):
        with pytest.raises(ProtocolError, match="is closed for"):
            closed(house, "server-0", number, turn)
    closed(house, "server-0", 2, 2)
    closed(house, "server-0", 3, 0)
    with pytest.raises(ProtocolError, match="no longer closed"):
        house.tell("server-0", Mark(2)).wait(WAIT)


# -- several servers --------------------------------------------------------------------------------------


def test_a_commit_that_one_server_has_and_the_others_do_not_yet(make_house: MakeHouse) -> None:
    house = three(make_house, 1, policy="async")
    worker = house.workers["worker-0"]
    worker.commit("server-0", 1, x()).wait(WAIT)
    for server in house.servers:
        closed(house, server)
    through = through_of(house, worker_0=1)
    calls = [house.tell(server, CloseSnapshotBarrier(1, 1, through)) for server in house.servers]
    assert calls[0].wait(WAIT).clocks == through  # type: ignore[attr-defined]
    assert not calls[1].arrives(0.05), "it waits for what is to come"
    for server in ("server-1", "server-2"):
        worker.commit(server, 1, x()).wait(WAIT)
    assert all(call.wait(WAIT).clocks == through for call in calls)  # type: ignore[attr-defined]
    later = worker.commit_all(2, x())
    assert not any(call.arrives(0.02) for call in later) and sums(house) == [-1.0]
    mark(house.tell, list(house.servers))
    for call in later:
        call.wait(WAIT)
    assert sums(house) == [-2.0]


def test_a_held_commit_passes_when_others_turn_out_to_have_it(make_house: MakeHouse) -> None:
    house = three(make_house, 1, policy="async")
    worker = house.workers["worker-0"]
    closed(house, "server-1")
    calls = worker.commit_all(1, x())
    calls[0].wait(WAIT)
    assert not calls[1].arrives(0.05)
    assert close_gates(house.tell, list(house.servers), 2) == {("worker-0", worker.incarnation): 1}
    assert sums(house) == [-1.0]
    mark(house.tell, list(house.servers), 2)


def test_a_round_that_a_rest_makes_whole_at_one_server_only(make_house: MakeHouse) -> None:
    """worker-1 has rested at server-0, which applied worker-0's round; elsewhere the rest comes to a closed gate."""
    house = three(make_house, 2)
    one, two = house.workers.values()
    calls = [one.commit("server-0", 1, x()), two.ask("server-0", Rest(0, False))]
    for call in calls:
        call.wait(WAIT)
    for server in ("server-1", "server-2"):
        calls.append(one.commit(server, 1, x()))
        closed(house, server)
        calls.append(two.ask(server, Rest(0, False)))
    assert not any(call.arrives(0.02) for call in calls[2:])
    clocks = close_gates(house.tell, list(house.servers), 2)
    assert clocks == {("worker-0", one.incarnation): 1} and sums(house) == [-1.0]
    mark(house.tell, list(house.servers), 2)
    for call in calls:
        call.wait(WAIT)


def test_a_worker_that_has_left_one_server_only(make_house: MakeHouse) -> None:
    house = three(make_house, 2, policy="async")
    one, two = house.workers.values()
    for call in [*one.commit_all(1, x()), *two.commit_all(1, x())]:
        call.wait(WAIT)
    two.ask("server-0", Leave(False)).wait(WAIT)
    clocks = close_gates(house.tell, list(house.servers))
    assert clocks == {("worker-0", one.incarnation): 1, ("worker-1", two.incarnation): 1}
    mark(house.tell, list(house.servers))


def test_rounds_that_wait_for_their_norm_are_cut_before_or_after_as_a_whole(make_house: MakeHouse) -> None:
    """The norm has come to one server: there the round is in, so it is everywhere, by the norms that are let pass."""
    house = three(make_house, 2)
    one, two = house.workers.values()
    asked = []
    for worker in (one, two):
        asked += worker.commit_all(1, x(), clip_norm=1e9)
    for call in asked:
        assert isinstance(call.wait(WAIT), AskClip)
    clips = [one.ask("server-0", GiveClip(1, 1.0, []))]
    clips[0].wait(WAIT)
    for server in ("server-1", "server-2"):
        assert closed(house, server).clocks == []
        clips += [worker.ask(server, GiveClip(1, 1.0, [])) for worker in (one, two)]
    clips.append(two.ask("server-0", GiveClip(1, 1.0, [])))
    assert not any(call.arrives(0.02) for call in clips[1:-1])
    assert set(close_gates(house.tell, list(house.servers), 2).values()) == {1} and sums(house) == [-2.0]
    mark(house.tell, list(house.servers), 2)
    for call in clips:
        assert isinstance(call.wait(WAIT), Committed)


def test_a_norm_for_a_round_that_nobody_has_waits_for_the_mark(make_house: MakeHouse) -> None:
    house = three(make_house, 1)
    (one,) = house.workers.values()
    for call in one.commit_all(1, x(), clip_norm=1e9):
        call.wait(WAIT)
    assert close_gates(house.tell, list(house.servers)) == {}
    clips = [one.ask(server, GiveClip(1, 1.0, [])) for server in house.servers]
    assert not any(call.arrives(0.02) for call in clips) and sums(house) == [0.0]
    mark(house.tell, list(house.servers))
    for call in clips:
        call.wait(WAIT)
    assert sums(house) == [-1.0]


def test_with_spare_workers_who_follows_comes_level_with_who_decides(make_house: MakeHouse) -> None:
    house = three(make_house, 3, policy="sync:spare=1")
    decider = house.replica_sets[0].primary
    others = [server for server in house.servers if server != decider]
    one, two, three_ = house.workers.values()
    for worker in (one, two, three_):
        for server in others:
            worker.stage(server, 1, x()).wait(WAIT)
    answers = [worker.commit(decider, 1, x()) for worker in (one, two, three_)]
    round_memberships = []
    for call in answers:
        answer = call.wait(WAIT)
        assert isinstance(answer, Committed) and isinstance(answer.round_membership, RoundMembership)
        round_memberships.append(answer.round_membership)
    assert round_memberships[2].late, "the third was late"
    for server in house.servers:
        closed(house, server)
    told = [
        w.commit_staged(s, 1, r) for s in others for w, r in zip((one, two, three_), round_memberships, strict=True)
    ]
    assert not any(call.arrives(0.02) for call in told)
    assert set(close_gates(house.tell, list(house.servers), 2).values()) == {1} and sums(house) == [-2.0]
    mark(house.tell, list(house.servers), 2)
    for call in told:
        call.wait(WAIT)


def test_who_has_made_its_last_step_before_a_server_had_slices_is_not_waited_for_there(
    make_house: MakeHouse,
) -> None:
    house = make_house(2, 2, policy="async")
    house.register({"y": np.zeros(4, np.float32)})
    (first,) = house.primaries()
    one, two = house.workers.values()
    for worker in (one, two):
        worker.commit(first, 1, {"y": np.ones(4, np.float32)}, num_segments=1).wait(WAIT)
    house.register(x(0.0))
    assert len(house.primaries()) == 2
    for call in one.commit_all(2, x(), num_segments=2):
        call.wait(WAIT)
    clocks = close_gates(house.tell, list(house.servers))
    assert clocks == {("worker-0", one.incarnation): 2, ("worker-1", two.incarnation): 1}
    mark(house.tell, list(house.servers))


def test_no_cut_lies_between_the_servers_loads_of_state(make_house: MakeHouse) -> None:
    house = three(make_house, 1)
    (chief,) = house.workers.values()
    for server in house.servers:
        chief.ask(server, LoadState([], [], about=1)).wait(WAIT)
    with pytest.raises(ProtocolError, match="given their state"):
        closed(house, "server-0")
    for server in house.servers:
        chief.ask(server, LoadState([], [], about=2)).wait(WAIT)
    close_gates(house.tell, list(house.servers))
    calls = [chief.ask(server, LoadState([], [], about=1)) for server in house.servers]
    assert not any(call.arrives(0.02) for call in calls), "it is behind the cut"
    mark(house.tell, list(house.servers))
    for call in calls:
        call.wait(WAIT)
    chief.vanish()
    eventually(lambda: not any(server.commits.admission_queue.loading for server in house.servers.values()))


def test_after_a_move_slices_of_one_server_come_level_too(make_house: MakeHouse) -> None:
    """server-1's slices come to server-0 without the round that server-0 has: workers make it again, and no cut is
    made before."""
    house = make_house(2, 2, replicas=2)
    house.register(x(0.0))
    house.seed("server-1", "server-0")
    one, two = house.workers.values()
    for call in [worker.commit("server-0", 1, x()) for worker in (one, two)]:
        call.wait(WAIT)
    house.carry_out(replica_sets=[ReplicaSet(number, "server-0") for number in house.replica_sets], moves=True)
    assert sums(house) == [-2.0, 0.0]
    answer = closed(house, "server-0")
    assert answer.clocks == through_of(house, worker_0=1, worker_1=1)
    assert answer.behind == through_of(house, worker_0=0, worker_1=0)
    barrier = Waiting(lambda: close_gates(house.tell, ["server-0"], 2))
    calls = [worker.commit("server-0", 1, x()) for worker in (one, two)]
    assert set(barrier.result().values()) == {1} and sums(house) == [-2.0]
    mark(house.tell, ["server-0"], 2)
    for call in calls:
        call.wait(WAIT)


def test_a_gate_that_is_closed_for_a_while_stops_nobody_for_good(make_house: MakeHouse) -> None:
    """Many cuts, one after the other, beside a worker that commits without a pause."""
    house = make_house(2, 1, policy="async")
    house.register(x(0.0))
    (worker,) = house.workers.values()
    done = threading.Event()

    def push() -> None:
        for clock in range(1, 101):
            for call in worker.commit_all(clock, x()):
                call.wait(WAIT)
        done.set()

    thread = threading.Thread(target=push, daemon=True)
    thread.start()
    number = 0
    while not done.is_set() and number < 1000:
        number += 1
        close_gates(house.tell, list(house.servers), number)
        assert len(sums(house)) == 1, "level"
        mark(house.tell, list(house.servers), number)
    thread.join(WAIT)
    assert done.is_set() and sums(house) == [-100.0]
    eventually(lambda: not any(server.commits.admission_queue.is_on for server in house.servers.values()))
