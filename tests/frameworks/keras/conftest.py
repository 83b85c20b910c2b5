"""Keras on the backend that KERAS_BACKEND names, as `make test-frameworks` sets it for each environment."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
from tests.launch.conftest import Commands, commands

__all__ = ["Commands", "commands"]

os.environ.setdefault(
    "KERAS_BACKEND", next(name for name in ("torch", "tensorflow", "jax") if importlib.util.find_spec(name))
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@pytest.fixture(scope="module")
def job() -> Iterator[object]:
    """A job of this process alone, for all tests of a file: its server may be a process that starts."""
    import syncline

    with syncline.init() as made:
        yield made


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """The job of a file opens what it needs in the middle of a test; `commands` looks after its own processes."""
