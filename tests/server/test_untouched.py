"""Slices that rounds do not touch share their clocks; whatever happens to one of them, each push counts once.

Integer gradients with learning rate 1, a slice for each parameter: a value says which pushes are in it.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syncline.core.replica_sets import ReplicaSet
from syncline.core.rounds import Commit
from syncline.core.slice_state import life_of
from syncline.core.wire.checkpoints import CloseSnapshotBarrier, Mark
from syncline.core.wire.control import SeedTo
from syncline.core.wire.traffic import Committed, LoadState, Pin, Prefer, Pull, Pulled, Rest, Unpin
from syncline.errors import ProtocolError
from syncline.server.tasks import FenceTask, StagedCommit
from syncline.server.untouched import UntouchedSlices

from .conftest import WAIT, House, Waiting, eventually
from .test_replication import check_equal

MakeHouse = Callable[..., House]
NAMES = ("a", "b", "c", "d", "e", "f")


def push_of(*names: str) -> dict[str, Any]:
    return {name: np.ones(16, np.float32) for name in names}


class Pushing:
    """Rounds of all workers, and the count of what they pushed."""

    def __init__(self, house: House) -> None:
        self.house, self.clocks, self.pushed = house, collections.Counter[str](), collections.Counter[str]()
        house.register({name: np.zeros(16, np.float32) for name in NAMES})

    def step(self, *names: str) -> None:
        calls = []
        for worker in list(self.house.workers.values()):
            self.clocks[worker.name] += 1
            self.pushed.update(names)
            calls += worker.commit_all(self.clocks[worker.name], push_of(*names))
        assert all(isinstance(call.wait(WAIT), Committed) for call in calls)

    def slots(self) -> list[Any]:
        return [self.house.slot(replica_set.primary, n) for n, replica_set in sorted(self.house.replica_sets.items())]

    def share(self) -> int:
        """How many slices share one table with others."""
        number = collections.Counter(id(slot.state.clocks) for slot in self.slots())
        return sum(count for count in number.values() if count > 1)

    def check(self) -> None:
        """Every push is in its parameter once, and every slice is at the clocks of the workers."""
        for name in NAMES:
            assert set(self.house.value(name).tolist()) == {-float(self.pushed[name])}, name
        there = {(w.name, w.incarnation): self.clocks[w.name] for w in self.house.workers.values()}
        for slot in self.slots():
            clocks = {life: clock for life, clock in slot.state.clocks.items() if life in there}
            assert clocks == there, slot.part.id


def number_of(house: House, name: str) -> int:
    """The slice of this parameter."""
    segment, index = house.registry.layout.where[name]
    (found,) = [part.id for part in segment.slices if any(p.parameter == index for p in segment.pieces(part))]
    return found


def sharing(make_house: MakeHouse, servers: int = 1, **settings: Any) -> Pushing:
    """A job whose slices share their clocks, but for that of `a`."""
    pushing = Pushing(make_house(servers, **settings))
    for _ in range(3):
        pushing.step("a")
    assert pushing.share() == len(NAMES) - 1
    return pushing


# -- what is queued where -----------------------------------------------------------------------------------


def test_a_round_is_queued_at_the_slices_that_it_touches(make_house: MakeHouse) -> None:
    house = make_house(1, 1)
    house.register({name: np.zeros(16, np.float32) for name in NAMES})
    slots = tuple(house.slot("server-0", number_of(house, name)) for name in NAMES)
    untouched = UntouchedSlices()

    def queued(clock: int, *names: str, acks: Any = (), worker: str = "one") -> list[int]:
        item = StagedCommit(1, 0, 0)
        item.pushed, item.acks = tuple((house.id_of(name), house.id_of(name) + 1) for name in names), acks
        found = untouched.count([Commit(worker, 1, clock, item)], slots)
        for slot in found:  # as the round does there
            slot.state.applied([((worker, 1), clock)], True)
        return sorted(slots.index(slot) for slot in found)

    assert queued(1, "b") == [1] and queued(2, "b", "d") == [1, 3] and queued(3) == []
    assert queued(4, *NAMES) == [0, 1, 2, 3, 4, 5]
    assert queued(5, "b", acks=[(1, 0, 64)]) == [0, 1], "slice 0 keeps the lease ranges"
    slots[4].pin()
    slots[4].state.stand_apart()
    slots[2].put(FenceTask((), (slots[2],), lambda work: None))
    assert queued(6, "b") == [1, 2, 4], "in its turn, where a reader is or something waits"
    slots[2].drain()
    slots[4].unpin()
    assert queued(6, "b") == [0, 1, 2, 3, 4, 5], "again: each slice says what it has"


def test_workers_may_push_different_parameters_in_one_round(make_house: MakeHouse) -> None:
    pushing = sharing(make_house)
    house = pushing.house
    for clock in (4, 5):
        calls = [
            worker.commit("server-0", clock, push_of(name))
            for worker, name in zip(house.workers.values(), ("b", "d"), strict=True)
        ]
        for call in calls:
            call.wait(WAIT)
    pushing.pushed.update({"b": 2, "d": 2})
    pushing.clocks.update({"worker-0": 2, "worker-1": 2})
    pushing.check()
    assert pushing.share() >= 3


@pytest.mark.parametrize("policy", ["sync", "async", "bounded:2"])
def test_a_repeated_push_is_answered_and_counts_once(make_house: MakeHouse, policy: str) -> None:
    pushing = sharing(make_house, workers=1, policy=policy)
    (worker,) = pushing.house.workers.values()
    assert isinstance(worker.commit("server-0", 3, push_of("a")).wait(WAIT), Committed)
    with pytest.raises(ProtocolError, match="one is missing"):
        worker.commit("server-0", 5, push_of("a")).wait(WAIT)
    pushing.step("b")
    pushing.check()


# -- what happens to a slice that shares its clocks ---------------------------------------------------------


def pulled(pushing: Pushing) -> None:
    worker = pushing.house.workers["worker-0"]
    numbers = [number_of(pushing.house, name) for name in ("b", "c")]
    answer = worker.ask("server-0", Pull(numbers, None, True), into=[bytearray(64), bytearray(64)]).wait(WAIT)
    assert isinstance(answer, Pulled) and answer.versions == [0, 0]


def pinned(pushing: Pushing) -> None:
    """Rounds that touch it wait, others pass."""
    worker, number = pushing.house.workers["worker-0"], number_of(pushing.house, "b")
    worker.ask("server-0", Pin([number])).wait(WAIT)
    pushing.step("a")
    waiting = Waiting(lambda: pushing.step("b"))
    slot = pushing.house.slot("server-0", number)
    eventually(lambda: len(slot.queue) == 1)
    worker.ask("server-0", Unpin([number])).wait(WAIT)
    waiting.result()


def marked(pushing: Pushing) -> None:
    """A snapshot between two rounds."""
    house = pushing.house
    answer = house.tell("server-0", CloseSnapshotBarrier(1)).wait(WAIT)
    assert {(name, clock) for name, _, clock in answer.clocks} == {("worker-0", 3), ("worker-1", 3)}
    house.tell("server-0", Mark(1)).wait(WAIT)


def fenced(pushing: Pushing) -> None:
    """A worker dies in the middle of a round that the other has committed."""
    house = pushing.house
    open_round = house.workers["worker-0"].commit("server-0", 4, push_of("a", "b"))
    house.fence("worker-1")
    open_round.wait(WAIT)
    pushing.clocks["worker-0"] += 1
    pushing.pushed.update("ab")
    assert all("worker-1" in slot.state.fences for slot in pushing.slots())


def joined(pushing: Pushing) -> None:
    """Another worker takes part from now on: its first clock is new on every slice."""
    worker, standing = pushing.house.enter("worker-7")
    pushing.clocks[worker.name] = standing.clock


def rested(pushing: Pushing) -> None:
    house = pushing.house
    for worker in house.workers.values():
        worker.ask("server-0", Rest(0, True)).wait(WAIT)
        worker.phase = 1 << 32


def changed(pushing: Pushing) -> None:
    pushing.house.carry_out()


def preferred(pushing: Pushing) -> None:
    worker = pushing.house.workers["worker-0"]
    worker.ask("server-0", Prefer([number_of(pushing.house, name) for name in reversed(NAMES)])).wait(WAIT)


def grown(pushing: Pushing) -> None:
    """More slices: they begin at the clocks of the others."""
    pushing.house.register({"more": np.zeros(16, np.float32)})


def loaded(pushing: Pushing) -> None:
    """Rules are given their state: nothing of it concerns the clocks."""
    worker = pushing.house.workers["worker-0"]
    worker.ask("server-0", LoadState([number_of(pushing.house, "c")], [])).wait(WAIT)


EVENTS = [pulled, pinned, marked, fenced, joined, rested, changed, preferred, grown, loaded]


@pytest.mark.parametrize("event", EVENTS, ids=[event.__name__ for event in EVENTS])
def test_each_push_counts_once_whatever_happens(make_house: MakeHouse, event: Callable[[Pushing], None]) -> None:
    pushing = sharing(make_house)
    event(pushing)
    for names in ("b", "bc", "a", "abcdef", "f", "f"):
        pushing.step(*names)
    pushing.check()
    assert pushing.share() >= len(NAMES) - 1, "they are together again"


def test_a_late_worker_of_spare_jobs_counts_everywhere(make_house: MakeHouse) -> None:
    """Its commit is void: it touches nothing, and its clock advances on every slice."""
    house = make_house(1, 3, policy="sync:spare=1")
    pushing = Pushing(house)
    one, two, three = house.workers.values()
    for clock in range(1, 5):
        calls = [worker.commit("server-0", clock, push_of("b")) for worker in (one, two)]
        for call in calls:
            assert not call.wait(WAIT).late
        assert three.commit("server-0", clock, push_of("c")).wait(WAIT).late
    pushing.pushed["b"] = 8
    pushing.clocks.update(dict.fromkeys(house.workers, 4))
    pushing.check()


@pytest.mark.parametrize("threads", [0, 2], ids=["inline", "pool"])
def test_a_slice_that_is_seeded_meanwhile_gives_its_backup_every_round(make_house: MakeHouse, threads: int) -> None:
    """The race: a round is counted for all that share while the copy of one of them is on its way. From its seed on,
    each round is sent to the backup.
    """
    house = make_house(2, 2, replicas=2, policy="async", threads=threads)
    pushing = Pushing(house)
    for _ in range(3):
        pushing.step("a")
    stop = threading.Event()

    def go_on() -> None:
        number = 0
        while not stop.is_set() or number < 60:
            pushing.step("abc"[number % 3])
            number += 1

    running = Waiting(go_on)
    for source, target in (("server-0", "server-1"), ("server-1", "server-0")):
        for part in house.parts(source):
            house.seed(source, target, [part.id])
    stop.set()
    running.result()
    pushing.check()
    check_equal(house)


def test_a_seeded_slice_tells_its_backup_of_rounds_that_pass_it(make_house: MakeHouse) -> None:
    """At once, and not only after the generation that names the backup: it may be promoted before."""
    house = make_house(2, 1, replicas=2, policy="async")
    pushing = Pushing(house)
    for _ in range(3):
        pushing.step("a")
    (number, *_) = [part.id for part in house.parts("server-0") if part.id != number_of(house, "a")]
    target = next(member for member in house.members if member.name == "server-1")
    house.tell("server-0", SeedTo([number], target)).wait(WAIT)
    pushing.step("a")
    worker = house.workers["worker-0"]
    for server in house.servers:
        assert house.slot(server, number).state.clocks == {(worker.name, worker.incarnation): 4}, server


def test_what_is_queued_at_a_slice_happens_to_it_alone(make_house: MakeHouse) -> None:
    pushing = sharing(make_house)
    one, two, three = (pushing.house.slot("server-0", number_of(pushing.house, name)) for name in "bcd")
    assert one.state.clocks is two.state.clocks is three.state.clocks
    one.put(FenceTask((), (one,), lambda work: None))
    assert one.state.clocks is not two.state.clocks is three.state.clocks
    one.drain()
    pushing.step("a")
    pushing.check()


def test_a_slice_that_is_leaving_counts_no_more(make_house: MakeHouse) -> None:
    """Its next primary may have the step of a removed worker from elsewhere, and sees by the clocks what it lacks."""
    pushing = sharing(make_house)
    house, flow = pushing.house, pushing.house.servers["server-0"].commits.flow
    leaving, staying = (house.slot("server-0", number_of(house, name)) for name in "bc")
    before = dict(leaving.state.clocks)
    with flow.state_lock:
        flow.hosts_others([leaving.part.id])
    pushing.step("a")
    assert leaving.state.clocks == before != staying.state.clocks


def test_a_slice_that_moves_takes_its_clocks_along(make_house: MakeHouse) -> None:
    """Its new primary has every round up to the move, and the old one counts no more for it."""
    house = make_house(2, 1, replicas=2, policy="async")
    pushing = Pushing(house)
    for _ in range(3):
        pushing.step("a")
    (moving, *_) = [part.id for part in house.parts("server-0") if part.id != number_of(house, "a")]
    house.seed("server-0", "server-1", [moving])
    pushing.step("a")
    house.carry_out(replica_sets=[ReplicaSet(moving, "server-1", ())], moves=True)
    for names in ("a", "bcdef", "a", "f"):
        pushing.step(*names)
    pushing.check()


def test_a_slice_restored_from_a_worker_goes_its_own_way(make_house: MakeHouse) -> None:
    """It lacks rounds that the others have: it refuses what comes too early, and they go on."""
    pushing = sharing(make_house, workers=1)
    house = pushing.house
    (worker,) = house.workers.values()
    slot = house.slot("server-0", number_of(house, "c"))
    with slot.lock:
        slot.state.clocks = {(worker.name, worker.incarnation): 2}
        slot.copied = {life_of(worker.name, worker.incarnation): 2}
    call = worker.commit("server-0", 4, push_of("a"))
    with pytest.raises(Exception, match="commits clock 4 on a slice that is at 2"):
        call.wait(WAIT)
    others = [each for each in pushing.slots() if each is not slot]
    assert all(each.state.clocks == {(worker.name, worker.incarnation): 4} for each in others)
    assert slot.state.clocks == {(worker.name, worker.incarnation): 2}
