"""With spare workers a step waits, before it is told to all servers, until its round is closed: that is no work."""

from __future__ import annotations

import itertools
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syncline import Rule
from syncline.errors import WaitTimeout
from syncline.worker import waits
from syncline.worker.exchange.commit import CommitFlow

LONG = 1000.0


def test_the_time_until_a_round_is_closed_is_a_wait(
    house: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = house(2, slice_bytes=256)
    twin.job.kv.register({"a": np.zeros(100)}, Rule("SGD", lr=1.0))
    exchange, ticks, waited = twin.job.exchange, itertools.count(), 0.0
    monkeypatch.setattr(
        waits, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks) + waited, monotonic=time.monotonic)
    )
    exchange.times.resume()

    def close(flow: CommitFlow, seconds: float) -> None:
        nonlocal waited
        waited = LONG
        now = exchange.waits.now
        assert now is not None and (now.what, now.step) == ("step", 1), "it is told why it does not go on"

    monkeypatch.setattr(CommitFlow, "waits_for_decision", True)
    monkeypatch.setattr(CommitFlow, "wait_until_decided", close)
    ticket = twin.job.kv.push({"a": np.ones(100)})
    found = exchange.times.times()
    assert found.wait >= LONG > found.stage and exchange.times.measured[1] < LONG
    ticket.wait()


def test_a_round_that_is_not_closed_in_time_says_for_whom_it_waits(
    house: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = house(2, slice_bytes=256)
    twin.job.kv.register({"a": np.zeros(100)}, Rule("SGD", lr=1.0))

    def late(flow: CommitFlow, seconds: float) -> None:
        raise WaitTimeout("no answer")

    monkeypatch.setattr(CommitFlow, "waits_for_decision", True)
    monkeypatch.setattr(CommitFlow, "wait_until_decided", late)
    with pytest.raises(WaitTimeout, match=r"step 1 has waited .* s: "):
        twin.job.kv.push({"a": np.ones(100)})
