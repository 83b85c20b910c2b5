"""Backups: whatever anybody has seen is on both, bit for bit, whenever the copy was made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from syncline.core.layout import Slice
from syncline.core.replica_sets import ReplicaSet
from syncline.core.wire.control import SeedTo
from syncline.core.wire.traffic import AskClip, Committed, GiveClip, LoadState
from syncline.errors import ConnectionLost, FencedError, SynclineError
from syncline.server import replicate
from syncline.server.storage import SliceStorage

from .conftest import WAIT, House, Waiting, eventually

MakeHouse = Callable[..., House]
X = {"x": np.zeros(48, np.float32)}  # three slices of 64 bytes


def ones(value: float = 1.0) -> dict[str, Any]:
    return {"x": np.full(48, value, np.float32)}


def step(house: House, clock: int, chance: np.random.Generator | None = None, **rest: Any) -> None:
    """One step of all workers."""
    calls = []
    for worker in house.workers.values():
        grads = ones() if chance is None else {"x": chance.normal(size=48).astype(np.float32)}
        calls += [(worker, s, worker.commit(s, clock, grads, **rest)) for s in house.primaries()]
    shares = [call.wait(WAIT) for _, _, call in calls]
    if isinstance(shares[0], AskClip):
        norm = sum(
            share.squared_norm for (worker, _, _), share in zip(calls, shares, strict=True) if worker is calls[0][0]
        )
        shares = [worker.ask(s, GiveClip(clock, norm, [])).wait(WAIT) for worker, s, _ in calls]
    assert all(isinstance(answer, Committed) for answer in shares)


def check_equal(house: House) -> None:
    """Primary and backup of every slice: parameters, rule state, version, clocks and fences."""
    for replica_set in house.replica_sets.values():
        assert replica_set.backups
        one, two = (
            house.slot(replica_set.primary, replica_set.slice),
            house.slot(replica_set.backups[0], replica_set.slice),
        )
        assert one.memory.tobytes() == two.memory.tobytes()
        assert (one.state.version, one.state.clocks, one.state.fences) == (
            two.state.version, two.state.clocks, two.state.fences,
        )  # fmt: skip
        states = [[(e, t.numpy().tobytes()) for e, t in slot.rules.state()] for slot in (one, two)]
        assert states[0] == states[1]


POOLS = {"inline": (0, True), "pool": (2, True), "sockets": (2, False)}
RULES: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 0.1},
    "Adafactor": {"lr": 0.1},
}


def ways() -> list[Any]:
    """Any two of these meet in `make test`, all in proof."""
    rules, policies = ("Adam", "SGD", "Adafactor"), ("sync", "async,damped")
    quick = {(rule, policies[(r + p) % 2], pool) for r, rule in enumerate(rules) for p, pool in enumerate(POOLS)}
    return [
        pytest.param(rule, policy, pool, marks=[] if (rule, policy, pool) in quick else [pytest.mark.proof])
        for rule in RULES
        for policy in ("sync", "async", "async,damped")
        for pool in POOLS
    ]


@pytest.mark.parametrize(("rule", "policy", "pool"), ways())
def test_backups_are_equal_bit_by_bit_after_hundreds_of_updates(
    make_house: MakeHouse, rule: str, policy: str, pool: str
) -> None:
    """Seeded in the middle, with updates going on."""
    threads, lends = POOLS[pool]
    house = make_house(2, 2, replicas=2, policy=policy, threads=threads, lends=lends)
    house.register({"x": np.ones(48, np.float32)}, rule, "mean", **RULES[rule])
    chance = np.random.default_rng(1)
    for clock in range(1, 41):
        step(house, clock, chance)
    stop = threading.Event()

    def go_on() -> int:
        clock = 40
        while not stop.is_set() or clock < 300:
            clock += 1
            step(
                house, clock, chance, overrides=[(0, 0, {"lr": 0.05})] if clock % 7 == 0 else [], skip=clock % 11 == 0
            )
        return clock

    pushing = Waiting(go_on)
    house.seed("server-0", "server-1")
    house.seed("server-1", "server-0")
    stop.set()
    clock = pushing.result()
    check_equal(house)
    for number in house.replica_sets:
        assert house.slot(house.replica_sets[number].primary, number).state.clocks == {
            ("worker-0", 3): clock,
            ("worker-1", 4): clock,
        }


class Twin(SliceStorage):
    """A device that is memory of its own."""

    def numbers(self, host: torch.Tensor, part: Slice | None = None) -> torch.Tensor:
        return host.clone()

    def bring(self, staged: torch.Tensor) -> torch.Tensor:
        return staged.clone()

    def load(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        numbers.copy_(host)

    def publish(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        host.copy_(numbers)


def test_backups_are_equal_where_slices_live_on_a_device(make_house: MakeHouse) -> None:
    house = make_house(2, 2, replicas=2, storage=Twin())
    house.register({"x": np.ones(48, np.float32)}, "Adam", "mean", lr=0.1)
    for clock in range(1, 10):
        step(house, clock, np.random.default_rng(clock))
        if clock == 3:
            house.seed("server-0", "server-1")
            house.seed("server-1", "server-0")
    check_equal(house)
    house.carry_out(
        replica_sets=[ReplicaSet(s.slice, s.backups[0], (s.primary,)) for s in house.replica_sets.values()],
        moves=True,
    )
    step(house, 10)
    check_equal(house)


def test_a_clipped_round_is_the_same_on_both(make_house: MakeHouse) -> None:
    house = make_house(1, 2, replicas=2)
    house.start(house.member("server", 1))
    house.members.append(house.member("server", 1))
    house.register(X, "Adam", "mean", lr=0.1)
    house.seed("server-0", "server-1")
    for clock in range(1, 20):
        step(house, clock, np.random.default_rng(clock), clip_norm=0.5)
    check_equal(house)


def test_nothing_is_acknowledged_before_the_backup_has_it_or_is_out(make_house: MakeHouse) -> None:
    house = make_house(2, 1, replicas=2)
    house.register(X)
    before = dict(house.replica_sets)
    house.seed("server-0", "server-1")
    house.seed("server-1", "server-0")
    step(house, 1)
    house.kill("server-1")
    mine = [number for number, replica_set in before.items() if replica_set.primary == "server-0"]
    call = house.workers["worker-0"].commit("server-0", 2, ones())
    assert not call.arrives(0.15)
    assert all(house.slot("server-0", number).state.version == 1 for number in mine), "nor applied"
    (wait,) = [w for w in eventually_beat(house, "server-0") if w.what == "server"]
    assert wait.for_whom == ["server-1"]
    house.promote()
    assert isinstance(call.wait(WAIT), Committed), "what was in flight is applied alone, and finished before the move"
    assert all(house.slot("server-0", number).state.version == 2 for number in mine)
    for answer in house.workers["worker-0"].commit_all(2, ones()):
        answer.wait(WAIT)
    assert (house.value("x") == -2).all()


def eventually_beat(house: House, server: str) -> list[Any]:
    eventually(lambda: house.servers[server].beat().waits)
    return list(house.servers[server].beat().waits)


def test_a_backup_that_is_no_longer_wanted_releases_what_waits_for_it(make_house: MakeHouse) -> None:
    """Without a move: the replica sets lose their backup, and the update in flight counts alone, once."""
    house = make_house(2, 1, replicas=2)
    house.register(X)
    numbers = [part.id for part in house.parts("server-0")]
    house.seed("server-0", "server-1")
    house.refuses_dials = True
    house.between[-1].close()
    call = house.workers["worker-0"].commit("server-0", 1, ones())
    assert not call.arrives(0.1)
    house.carry_out(replica_sets=[ReplicaSet(number, "server-0") for number in numbers])
    assert isinstance(call.wait(WAIT), Committed)
    assert all(house.slot("server-0", number).state.version == 1 for number in numbers)


def test_an_update_whose_answer_was_lost_is_repeated_and_counts_once(make_house: MakeHouse) -> None:
    house = make_house(2, 1, replicas=2)
    house.register(X)
    house.seed("server-0", "server-1")
    house.seed("server-1", "server-0")
    for clock in range(1, 30):
        calls = house.workers["worker-0"].commit_all(clock, ones())
        for endpoint in list(house.between):
            endpoint.close("cut")
        for call in calls:
            call.wait(WAIT)
    check_equal(house)
    assert (house.value("x") == -29).all()


def test_the_connection_breaks_with_the_update_in_it(make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backup applies it, its answer is lost: said again, it is answered and not applied again."""
    house = make_house(2, 1, replicas=2, threads=2)
    house.register(X, "SGD", lr=1.0, momentum=0.5)
    house.seed("server-0", "server-1")
    house.seed("server-1", "server-0")
    step(house, 1)
    original, cut = replicate.UpdateSend.answered, []

    def loses(self: Any, answer: Any) -> None:
        if len(cut) < 3:
            cut.append(1)
            raise ConnectionLost("the answer is lost")
        original(self, answer)

    monkeypatch.setattr(replicate.UpdateSend, "answered", loses)
    step(house, 2)
    step(house, 3)
    assert len(cut) == 3
    check_equal(house)
    assert (house.value("x") == -(1 + 1.5 + 1.75)).all()


def test_a_backup_that_differs_is_seeded_anew_loudly(make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicate, "DIGEST_EVERY", 4)
    house = make_house(2, 1, replicas=2)
    house.register(X, "Adam", lr=0.1)
    house.seed("server-0", "server-1")
    house.seed("server-1", "server-0")
    number = house.parts("server-0")[0].id
    house.slot("server-1", number).memory[3] = 0x41
    for clock in (1, 2, 3):
        step(house, clock)
    with pytest.raises(AssertionError):
        check_equal(house)
    step(house, 4)
    eventually(lambda: house.slot("server-0", number).in_flight is None and not house.slot("server-0", number).queue)
    assert [line for line in house.lines if f"slice {number}: the backup on server-1 differs" in line]
    check_equal(house)
    for clock in range(5, 12):
        step(house, clock)
    check_equal(house)
    assert sum("differs" in line for line in house.lines) == 1


def test_digests_of_other_kinds_of_machines_are_not_compared(
    make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicate, "DIGEST_EVERY", 1)
    house = make_house(2, 1, replicas=2)
    house.register(X)
    other = next(m for m in house.members if m.name == "server-1")
    import msgspec

    house.members[house.members.index(other)] = msgspec.structs.replace(other, kind="another")
    house.seed("server-0", "server-1", [part.id for part in house.parts("server-0")])
    house.slot("server-1", house.parts("server-0")[0].id).memory[3] ^= 1
    step(house, 1)
    assert not [line for line in house.lines if "differs" in line]


def test_a_backup_at_another_version_is_seeded_anew(make_house: MakeHouse) -> None:
    house = make_house(2, 1, replicas=2)
    house.register(X)
    house.seed("server-0", "server-1")
    house.seed("server-1", "server-0")
    number = house.parts("server-0")[0].id
    step(house, 1)
    house.slot("server-1", number).state.version = 0
    step(house, 2)
    assert [line for line in house.lines if "refused an update" in line]
    check_equal(house)


def test_loaded_state_is_on_the_backup_when_it_is_answered(make_house: MakeHouse) -> None:
    house = make_house(2, 1, replicas=2)
    house.register(X, "Adam", lr=0.1)
    house.seed("server-0", "server-1")
    house.seed("server-1", "server-0")
    step(house, 1)
    numbers = [part.id for part in house.parts("server-0")]
    house.workers["worker-0"].ask("server-0", LoadState(numbers, [])).wait(WAIT)
    assert all(not house.slot("server-1", number).rules.state() for number in numbers)
    step(house, 2)
    check_equal(house)


def test_a_seed_for_a_server_that_is_gone_leaves_the_slices_alone(make_house: MakeHouse) -> None:
    house = make_house(2, 1, replicas=2)
    house.register(X)
    numbers = [part.id for part in house.parts("server-0")]
    target = next(m for m in house.members if m.name == "server-1")
    house.refuses_dials = True
    with pytest.raises(SynclineError):
        house.tell("server-0", SeedTo(numbers, target)).wait(WAIT)
    step(house, 1)
    house.refuses_dials = False
    for _ in range(2):
        house.tell("server-0", SeedTo(numbers, target)).wait(WAIT)
    assert len(house.between) == 1
    step(house, 2)
    house.kill("server-1")
    call = house.workers["worker-0"].commit("server-0", 3, ones())
    assert not call.arrives(0.1), "a copy that was reported as made is counted on"


def test_a_worker_that_pushes_while_a_slice_is_seeded_does_not_wait_for_the_backup(
    make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the seed is acknowledged the primary acknowledges alone; what it applied meanwhile follows in order."""
    house = make_house(2, 1, replicas=2)
    house.register(X, "SGD", lr=1.0, momentum=0.5)
    backups = house.servers["server-1"].hosting.backups
    go, take = threading.Event(), backups.take_seed
    monkeypatch.setattr(backups, "take_seed", lambda *args: go.wait(WAIT) and take(*args))
    numbers = [part.id for part in house.parts("server-0")]
    seeding = Waiting(lambda: house.seed("server-0", "server-1", numbers))
    eventually(lambda: house.slot("server-0", numbers[0]).replicas)
    for clock in (1, 2, 3):
        step(house, clock)
    go.set()
    seeding.result()
    step(house, 4)
    for number in numbers:
        one, two = house.slot("server-0", number), house.slot("server-1", number)
        assert one.memory.tobytes() == two.memory.tobytes() and one.state.clocks == two.state.clocks


def test_only_the_primary_of_a_slice_may_say_what_happens_to_it(make_house: MakeHouse) -> None:
    house = make_house(3, 1, replicas=2)
    house.register(X)
    number = house.parts("server-0")[0].id
    house.seed("server-0", "server-1", [number])
    slot = house.slot("server-0", number)
    # The replica sets change behind its back: another server is the primary now.
    house.servers["server-1"].hosting.replica_sets[number] = ReplicaSet(number, "server-2", ("server-1",))
    call = house.workers["worker-0"].commit("server-0", 1, ones())
    assert not call.arrives(0.1) and slot.state.version == 0
    eventually(lambda: [line for line in house.lines if "refuses updates from here" in line])
    with pytest.raises(FencedError, match="is not the primary of slice"):
        house.servers["server-1"].hosting.check_sender(slot.replicas[0].partner.current().peer, number)


def test_primary_and_backup_change_places(make_house: MakeHouse) -> None:
    """No seed is needed for that: both have everything."""
    house = make_house(2, 2, replicas=2)
    house.register(X, "Adam", "mean", lr=0.1)
    house.seed("server-0", "server-1")
    house.seed("server-1", "server-0")
    for clock in (1, 2):
        step(house, clock, np.random.default_rng(clock))
    for turn in range(3):
        house.carry_out(
            replica_sets=[ReplicaSet(s.slice, s.backups[0], (s.primary,)) for s in house.replica_sets.values()],
            moves=True,
        )
        for clock in (3 + 2 * turn, 4 + 2 * turn):
            step(house, clock, np.random.default_rng(clock))
        check_equal(house)
    assert not [line for line in house.lines if "seeded again" in line]


def test_a_rule_that_raises_is_told_and_stops_nothing_else(make_house: MakeHouse) -> None:
    house = make_house(2, 1, replicas=2, policy="async")
    house.register(X)
    house.seed("server-0", "server-1")
    house.seed("server-1", "server-0")
    number = house.parts("server-0")[0].id
    for server in house.servers:
        house.slot(server, number).rules.apply = _raises
    call = house.workers["worker-0"].commit("server-0", 1, ones())
    with pytest.raises(SynclineError, match="could not be applied"):
        call.wait(WAIT)


def _raises(*arguments: Any) -> None:
    raise RuntimeError("no")


def test_times_of_waiting_are_not_told_at_once(make_house: MakeHouse) -> None:
    house = make_house(2, 1, replicas=2)
    house.register(X)
    house.seed("server-0", "server-1")
    step(house, 1)
    time.sleep(0.01)
    assert house.servers["server-0"].beat().waits == []
    assert house.servers["server-0"].beat().clocks == {"worker-0": 1}
