"""A worker's copies of slices: whole, of the version they are said to be, and given to whoever is to host them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE
from tests.worker.test_waits import until

from syncline import Rule
from syncline.core.slice_state import Copy
from syncline.core.wire.control import AskCopies, GiveCopies, GivenCopies
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import CommitStaged, Committed, Stage
from syncline.errors import SynclineError

SGD = Rule("SGD", lr=1.0)
NUM = 32
SHARED = [pytest.param(True, id="shared memory"), pytest.param(False, id="socket")]


def ask(twin: Any, slices: list[int]) -> dict[int, Copy]:
    answer = twin.coordinator.endpoints[0].call(AskCopies(slices)).wait(PATIENCE)
    assert isinstance(answer, GivenCopies)
    return {copy.slice: copy for copy in answer.copies}


def give(twin: Any, copies: list[Copy], name: str) -> Any:
    server = twin.add_server(name)
    answer = twin.coordinator.endpoints[0].call(GiveCopies(copies, twin.members[name])).wait(PATIENCE)
    assert answer == Done()
    return server


def start(twin: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    values = {"a": np.arange(NUM, dtype=float), "b": np.arange(NUM, dtype=float) + 100}
    out = twin.job.kv.register(values, SGD)
    return {name: np.ones(NUM) for name in values}, dict(out)


@pytest.mark.parametrize("shares_memory", SHARED)
@pytest.mark.parametrize(("policy", "window"), [("sync", 0), ("async", 0), ("async", 2)])
def test_what_has_landed_is_given_back(
    house: Callable[..., Any], shares_memory: bool, policy: str, window: int
) -> None:
    twin = house(2, slice_bytes=128, shares_memory=shares_memory, policy=policy, window=window)
    grads, out = start(twin)
    for _ in range(3):
        twin.job.kv.push_pull(grads, out=out).wait()
    slices = sorted(twin.values)
    before = {number: twin.values[number].tobytes() for number in slices}
    twin.servers["server-0"].die()
    twin.servers["server-1"].die()
    found = ask(twin, slices)
    assert set(found) == set(slices)
    for copy in found.values():
        assert (copy.version, copy.known, copy.clocks) == (3, 3, {"worker-0#3": 3, "worker-1#2": 41})
    fresh = give(twin, list(found.values()), "server-2")
    assert {n: data for n, (_, data) in fresh.restored.items()} == before
    assert {n: copy for n, (copy, _) in fresh.restored.items()} == found


def test_first_values_are_copies_while_the_callers_arrays_live(house: Callable[..., Any]) -> None:
    twin = house(1, slice_bytes=128, replicas=2)
    _, out = start(twin)
    slices = sorted(twin.values)
    assert {copy.version for copy in ask(twin, slices).values()} == {0}
    kept = out.pop("a")
    out.clear()
    gc.collect()
    found = ask(twin, slices)
    segment = twin.registry.layout.segments[0]
    in_a = {p.id for p in segment.slices if {x.parameter for x in segment.pieces(p)} == {0}}
    assert set(found) == in_a
    fresh = give(twin, list(found.values()), "server-2")
    assert b"".join(fresh.restored[n][1] for n in sorted(in_a)) == kept.tobytes()


@pytest.mark.parametrize("verb", ["pull", "push_pull"])
def test_pulled_arrays_are_copies_while_they_live(house: Callable[..., Any], verb: str) -> None:
    twin = house(1, slice_bytes=128, replicas=2)
    grads, out = start(twin)
    out.clear()
    if verb == "pull":
        twin.job.kv.push(grads).wait()
        pulled = dict(twin.job.kv.pull())
    else:
        pulled = dict(twin.job.kv.push_pull(grads).wait())
    assert {c.version for c in ask(twin, sorted(twin.values)).values()} == {1}
    pulled.clear()
    gc.collect()
    assert ask(twin, sorted(twin.values)) == {}


@pytest.mark.parametrize("replicas", [1, 2])
def test_with_one_replica_what_landed_last_is_kept_for_the_servers(house: Callable[..., Any], replicas: int) -> None:
    """The caller drops what it pulled: with one replica it may be all that is left of the parameters."""
    twin = house(1, slice_bytes=128, replicas=replicas)
    grads, out = start(twin)
    out.clear()
    for _ in range(3):
        twin.job.kv.push_pull(grads).wait()
    gc.collect()
    assert {c.version for c in ask(twin, sorted(twin.values)).values()} == ({3} if replicas == 1 else set())


def test_strided_arrays_are_filled_from_memory_that_is_the_copy(house: Callable[..., Any]) -> None:
    twin = house(1, slice_bytes=128)
    grads, out = start(twin)
    out.clear()
    strided = {name: np.zeros(2 * NUM)[::2] for name in grads}
    twin.job.kv.push_pull(grads, out=strided).wait()
    before = {number: twin.values[number].tobytes() for number in twin.values}
    for array in strided.values():
        array[:] = 77.0  # the caller's own, and no copy of anything any more
    found = ask(twin, sorted(twin.values))
    fresh = give(twin, list(found.values()), "server-2")
    assert {n: data for n, (_, data) in fresh.restored.items()} == before


def test_arrays_that_are_pulled_into_again_are_no_copies_of_before(house: Callable[..., Any]) -> None:
    twin = house(1, slice_bytes=128)
    grads, out = start(twin)
    server = twin.servers["server-0"]
    kept = server.answer
    ticket = twin.job.kv.push_pull(grads, out=out)
    ticket.wait()
    server.answer = lambda r, m: None if isinstance(m, Stage) else kept(r, m)
    twin.job.kv.push_pull(grads, out=out)  # under way
    assert {c.version for c in ask(twin, sorted(twin.values)).values()} == {1}
    twin.job.exchange._open.clear()
    server.answer = kept
    other = {name: np.zeros(NUM) for name in out}
    twin.job.kv.pull(out=other)
    assert {c.version for c in ask(twin, sorted(twin.values)).values()} == {1}
    twin.job.kv.pull(out=out)
    assert ticket.done() and {c.version for c in ask(twin, sorted(twin.values)).values()} == {1}


def test_a_landing_that_is_only_partly_there_does_not_count(house: Callable[..., Any]) -> None:
    """Parts without clocks: known to be new, not what is in them."""
    twin = house(1, slice_bytes=128, shares_memory=False)
    grads, out = start(twin)
    twin.job.kv.push_pull(grads, out=out).wait()
    server = twin.servers["server-0"]
    kept, [first, *_] = server.answer, sorted(twin.values)

    def half(request: Any, message: Any) -> Any:
        if not isinstance(message, Stage) or not message.commit:
            return kept(request, message)
        data = memoryview(np.full(twin.values[first].nbytes, 7, np.uint8))
        request.reply_part(Committed(message.clock, [2], [first]), [data], len(data))
        return None

    server.answer = half
    ticket = twin.job.kv.push_pull(grads, out=out)
    found = ask(twin, sorted(twin.values))
    assert first not in found and set(found) == set(twin.values) - {first}
    assert {copy.version for copy in found.values()} == {1}
    server.answer = kept
    server.die()
    twin.add_server("server-2")
    twin.fail_over("server-0", "server-2")
    ticket.wait()
    assert {c.version for c in ask(twin, sorted(twin.values)).values()} == {2}


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_commit_under_way_does_not_make_the_last_landing_worse(house: Callable[..., Any], policy: str) -> None:
    twin = house(2, slice_bytes=128, policy=policy)
    grads, out = start(twin)
    twin.job.kv.push_pull(grads, out=out).wait()
    server = twin.servers["server-1"]
    kept = server.answer
    server.answer = lambda r, m: None if isinstance(m, CommitStaged) else kept(r, m)
    ticket = twin.job.kv.push_pull(grads, out=out)
    assert {c.version for c in ask(twin, sorted(twin.values)).values()} == {1}
    server.die()
    twin.fail_over("server-1", "server-0")
    ticket.wait()
    copies = ask(twin, sorted(twin.values))
    assert set(copies) == set(twin.values) and {c.version for c in copies.values()} == {2}


def test_what_is_told_and_not_landed_is_known(house: Callable[..., Any]) -> None:
    twin = house(1, slice_bytes=128)
    grads, out = start(twin)
    for _ in range(4):
        twin.job.kv.push(grads).wait()
    assert {(c.version, c.known) for c in ask(twin, sorted(twin.values)).values()} == {(0, 4)}
    twin.add_server("server-2")
    twin.fail_over("server-0", "server-2")
    twin.job.kv.push(grads).wait()
    assert {(c.version, c.known) for c in ask(twin, sorted(twin.values)).values()} == {(0, 5)}
    assert len(out) == 2


def test_a_copy_that_is_gone_is_refused(house: Callable[..., Any]) -> None:
    twin = house(1, slice_bytes=128)
    grads, out = start(twin)
    copies = list(ask(twin, sorted(twin.values)).values())
    twin.job.kv.push_pull(grads, out=out).wait()
    twin.add_server("server-2")
    call = twin.coordinator.endpoints[0].call(GiveCopies(copies, twin.members["server-2"]))
    with pytest.raises(SynclineError, match=r"worker-0.* has no copy of slice 0 at version 0 any more"):
        call.wait(PATIENCE)
    assert out


def test_copies_are_never_torn(house: Callable[..., Any]) -> None:
    """Asked for while steps go on: what is given is whole, and of the version that was said."""
    twin = house(1, slice_bytes=1 << 14)
    size = 1 << 14
    out = dict(twin.job.kv.register({"a": np.zeros(size)}, SGD))
    given: list[tuple[int, float]] = []
    over = threading.Event()

    def look() -> None:
        exchange = twin.job.exchange
        while not over.is_set():
            for copy in exchange.copies_of(sorted(twin.values)):
                try:
                    data = exchange.copies.bytes_of(copy).view(np.float64)
                except SynclineError:
                    continue
                assert data.min() == data.max()
                given.append((copy.version, float(-data[0])))

    thread = threading.Thread(target=look, name="Thread-look")
    thread.start()
    try:
        for _ in range(400):
            twin.job.kv.push_pull({"a": np.ones(size)}, out=out).wait()
        until(lambda: given or not thread.is_alive())
    finally:
        over.set()
        thread.join()
    assert given and all(version == value for version, value in given)


def test_a_change_leaves_copies_as_they_are(house: Callable[..., Any]) -> None:
    twin = house(2, slice_bytes=128)
    grads, out = start(twin)
    twin.job.kv.push_pull(grads, out=out).wait()
    twin.servers["server-1"].die()
    twin.fail_over("server-1", "server-0")
    twin.job.exchange.prefer([0])  # takes the roster over
    assert list(twin.job.exchange.routes.endpoints) == ["server-0"]
    found = ask(twin, sorted(twin.values))
    assert set(found) == set(twin.values) and {c.version for c in found.values()} == {1}


def test_while_slices_land_there_is_no_copy_of_them(
    house: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from syncline.worker.exchange.targets import HostTarget

    twin = house(1, slice_bytes=128)
    grads, out = start(twin)
    twin.job.kv.push_pull(grads, out=out).wait()
    take, seen = HostTarget.take, []

    def look(sink: Any, parts: Any) -> None:
        seen.append(twin.job.exchange.copies_of([part.id for part, _ in parts]))
        take(sink, parts)

    monkeypatch.setattr(HostTarget, "take", look)
    twin.job.kv.push_pull(grads, out=out).wait()
    assert seen == [[]] and len(ask(twin, sorted(twin.values))) == len(twin.values)
