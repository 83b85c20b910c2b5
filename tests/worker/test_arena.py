"""Where gradients lie when there is no memory to share."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syncline import Rule
from syncline.errors import ConfigError
from syncline.net.memory import MemoryConnection


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(self: MemoryConnection, num_bytes: int, **kinds: bool) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(MemoryConnection, "create_memory", create)


@pytest.mark.usefixtures("no_memory")
def test_too_little_memory_for_arenas_falls_back_and_says_so_once(house: Callable[..., Any]) -> None:
    """As real processes: tests/launch/test_run.py."""
    twin = house(2, slice_bytes=1024)
    twin.job.kv.register({"x": np.zeros(1000), "y": np.zeros(10)}, Rule("SGD", lr=1.0))
    for _ in range(3):
        out = twin.job.kv.push_pull({"x": np.ones(1000)}).wait()
    assert (out["x"] == -3).all()
    said = [line for line in twin.said if "too little memory" in line]
    assert len(said) == 1 and "(1 x " in said[0]
    assert said[0].endswith("Cannot allocate memory; falls back to TCP: gradients go over the socket")


@pytest.mark.usefixtures("no_memory")
def test_whoever_asked_for_shared_memory_is_told_what_else_there_is(house: Callable[..., Any]) -> None:
    twin = house(1, transport="shm")
    twin.job.kv.register({"x": np.zeros(1000)}, Rule("SGD", lr=1.0))
    with pytest.raises(ConfigError, match=r"too little memory .*; use --transport auto or tcp"):
        twin.job.kv.push_pull({"x": np.ones(1000)})
