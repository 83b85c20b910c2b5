"""A wait of more than a moment is put into words, once and then now and then; a short one costs nothing."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline import Rule
from syncline.core.wire.control import AskWhy, Barrier, GivenWhy
from syncline.core.wire.traffic import CommitStaged, Stage
from syncline.errors import ProtocolError
from syncline.worker import waits


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.worker import reporting
    from syncline.worker.exchange import servers

    monkeypatch.setattr(waits, "LOUD_SECONDS", 0.1)
    monkeypatch.setattr(servers, "LOUD_SECONDS", 0.1)
    monkeypatch.setattr(waits, "AGAIN_SECONDS", 0.25)
    monkeypatch.setattr(reporting, "REPORT_SECONDS", 0.03)


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def slow(twin: Any, name: str, kinds: tuple[type, ...], wait: Callable[[], object]) -> None:
    """A server that answers late: after this wait."""
    server = twin.servers[name]
    kept = server.answer

    def answer(request: Any, message: Any) -> Any:
        if not isinstance(message, kinds):
            return kept(request, message)
        late = lambda: (wait(), request.reply(kept(request, message)))  # noqa: E731
        threading.Thread(target=late, name="Thread-late").start()
        return None

    server.answer = answer


def questions(twin: Any) -> list[AskWhy]:
    return [m for m in twin.coordinator.heard if isinstance(m, AskWhy)]


def test_why_a_step_waits_is_said(house: Callable[..., Any]) -> None:
    twin = house(2, slice_bytes=64)
    twin.job.kv.register({"a": np.zeros(32)}, Rule("SGD", lr=1.0))
    told = []

    def wait() -> None:
        until(lambda: len(questions(twin)) >= 2)
        told.append(twin.handlers.heartbeat())

    slow(twin, "server-1", (CommitStaged,), wait)
    began = time.monotonic()
    twin.job.kv.push({"a": np.ones(32)}).wait()
    asked, most = questions(twin), 1 + (time.monotonic() - began) / waits.AGAIN_SECONDS
    assert 2 <= len(asked) <= most and set(map(repr, asked)) == {repr(AskWhy(1, ["server-1"]))}
    assert twin.said[0] == "step 1 has waited 1.2 s for worker-7 on host b (last heard of 1.1 s ago)"
    [wait] = told[0].waits
    assert (wait.who, wait.step, wait.for_whom, wait.what) == ("worker-0", 1, ["server-1"], "server")
    assert wait.seconds >= 0.1 and twin.handlers.heartbeat().waits == []


def test_a_short_wait_is_not_asked_about(house: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LOUD_SECONDS", PATIENCE)
    twin = house(1)
    twin.job.kv.register({"a": np.zeros(32)}, Rule("SGD", lr=1.0))
    slow(twin, "server-0", (Stage,), lambda: time.sleep(0.05))
    for _ in range(5):
        twin.job.kv.push({"a": np.ones(32)}).wait()
    assert not twin.said and not questions(twin)


def test_a_refusal_is_not_waited_upon_until_the_others_answer(house: Callable[..., Any]) -> None:
    twin = house(2, slice_bytes=64)
    twin.job.kv.register({"a": np.zeros(32)}, Rule("SGD", lr=1.0))
    kept = twin.servers["server-0"].answer
    twin.servers["server-0"].answer = lambda r, m: None if isinstance(m, CommitStaged) else kept(r, m)

    def refuse(message: Any) -> None:
        if isinstance(message, CommitStaged):
            raise ProtocolError("one is missing")

    twin.servers["server-1"].fail = refuse
    with pytest.raises(ProtocolError, match="one is missing"):
        twin.job.kv.push({"a": np.ones(32)}).wait(timeout_seconds=PATIENCE)


def said(twin: Any) -> list[str]:
    return [text for text in list(twin.said) if "has waited" in text]


@pytest.mark.parametrize("how", ["gone", "knows nothing"])
def test_without_the_coordinators_word_the_servers_are_asked(house: Callable[..., Any], how: str) -> None:
    twin = house(1)
    twin.job.kv.register({"a": np.zeros(32)}, Rule("SGD", lr=1.0))
    if how == "gone":
        twin.dial_coordinator = lambda: (_ for _ in ()).throw(OSError("nobody listens"))
        twin.coordinator.endpoints[0].close("killed")
    else:
        twin.coordinator.answers[AskWhy] = lambda m: GivenWhy("no member waits for another")
    slow(twin, "server-0", (Stage,), lambda: until(lambda: said(twin)))
    twin.job.kv.push({"a": np.ones(32)}).wait()
    found = said(twin)[0]
    assert re.match(r"step 1 has waited [0-9.]+ s", found) and found.endswith(
        "server-0: the round waits for worker-7"
    )


def test_why_a_barrier_waits_is_said(house: Callable[..., Any]) -> None:
    twin = house(1)

    def answer(message: Any) -> Any:
        until(lambda: twin.said)
        return twin.coordinator.answer(message)

    twin.coordinator.answers[Barrier] = answer
    twin.coordinator.answers[AskWhy] = lambda m: GivenWhy("barrier 'x' has waited 1.1 s for worker-1 on host b")
    twin.job.barrier("x")
    assert set(twin.said) == {"barrier 'x' has waited 1.1 s for worker-1 on host b"}
