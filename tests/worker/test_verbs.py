"""Every verb of an exchange is said again when servers change; one who is out, or whose job is over, hears it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syncline import FencedError, JobFailed, Rule
from syncline.core.wire.control import Leave, Over
from syncline.core.wire.traffic import AskState, LoadState, Prefer, Pull, Rest, Stage, Upload
from syncline.errors import Refresh

SGD = Rule("SGD", lr=1.0)
NUM = 64


def register(house: Any, names: str = "ab") -> None:
    house.job.kv.register({name: np.zeros(NUM) for name in names}, SGD)


def push(house: Any, k: int) -> Any:
    return house.job.kv.push_pull({name: np.full(NUM, float(10**k)) for name in "ab"})


def assert_exact(house: Any, num_steps: int) -> None:
    """Every commit was applied once on every slice."""
    expected = -float(sum(10**k for k in range(num_steps)))
    for name, value in house.everything().items():
        assert (value == expected).all(), (name, value[0], expected)
    applied = [(number, clock) for _, number, clock in house.ledger]
    assert len(applied) == len(set(applied)) == num_steps * len(house.values)


VERBS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "pull": (Pull, lambda t: t.job.kv.pull()),
    "rest": (Rest, lambda t: t.job.rest()),
    "barrier": (Rest, lambda t: t.job.barrier("here")),
    "prefer": (Prefer, lambda t: t.job.exchange.prefer([1, 0])),
    "read_state": (AskState, lambda t: t.job.exchange.read_state(t.layout_slices())),
    "write_state": (LoadState, lambda t: t.job.exchange.write_state(t.layout_slices(), [])),
    "upload": (Upload, lambda t: t.job.kv.register({"c": np.ones(NUM)}, SGD)),
    "leave": (Leave, lambda t: t.job.close()),
    "commit": (Stage, lambda t: push(t, 1).wait()),
}


@pytest.mark.parametrize("verb", list(VERBS))
@pytest.mark.parametrize("how", ["refresh", "death"])
def test_every_verb_is_said_again(house: Callable[..., Any], verb: str, how: str) -> None:
    kind, action = VERBS[verb]
    twin = house(2, slice_bytes=256)
    register(twin)
    push(twin, 0).wait()
    victim = twin.servers["server-1"]
    broken = []

    def breaks(message: Any) -> None:
        if isinstance(message, kind) and not broken:
            broken.append(message)
            if how == "death":
                victim.die()
            twin.fail_over("server-1", "server-0")
            if how == "refresh":
                raise Refresh("moved")

    victim.fail = breaks
    action(twin)
    assert broken, "it never came by"
    heard = [m for m in twin.servers["server-0"].heard if isinstance(m, kind)]
    if verb == "upload":
        assert (twin.everything()["c"] == 1.0).all()
        assert {n for m in heard for n in m.slices} >= {p.id for p in twin.registry.layout.segments[1].slices}
    elif verb == "leave":
        assert len(heard) == 2
    else:
        assert heard
    if verb not in ("leave", "upload"):
        push(twin, 2 if verb == "commit" else 1).wait()
        assert_exact(twin, 3 if verb == "commit" else 2)


@pytest.mark.parametrize("by", ["server", "coordinator"])
def test_a_fenced_worker_hears_it_and_again(house: Callable[..., Any], by: str) -> None:
    twin = house(1)
    register(twin)
    if by == "server":

        def refuse(message: Any) -> None:
            raise FencedError("worker-0, incarnation 3, has been evicted: silent for 4.0 s")

        twin.servers["server-0"].fail = refuse
    else:
        twin.handlers.fenced(FencedError("evicted: silent for 4.0 s"))
    for action in (lambda: push(twin, 0).wait(), twin.job.kv.pull, lambda: push(twin, 1).wait()):
        with pytest.raises(FencedError, match=r"silent for 4.0 s"):
            action()
    assert twin.job.evicted is not None


def test_the_end_of_the_job_ends_the_wait(house: Callable[..., Any]) -> None:
    twin = house(1)
    register(twin)
    push(twin, 0).wait()
    twin.servers["server-0"].answer = lambda request, message: None  # type: ignore[method-assign]
    ticket = push(twin, 0)
    twin.coordinator.say(Over(True, "worker-9", "worker-9 was killed"))
    with pytest.raises(JobFailed, match="worker-9 was killed"):
        ticket.wait()
