"""Figures of several seeds are for the docs: `make proof ARGS="--all-seeds"`. Otherwise one seed is enough."""

from __future__ import annotations

import pytest


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """The seeds to train with."""
    return (0, 1, 2) if request.config.getoption("--all-seeds") else (0,)
