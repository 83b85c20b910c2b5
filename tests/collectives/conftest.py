"""Jobs in one process, one for many tests: collectives leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from syncline.testing import local_job
from syncline.testing.local import LocalJob

WAYS: dict[str, dict[str, Any]] = {
    "one": {"workers": 1},
    "shared": {"workers": 3},
    "sockets": {"workers": 3, "transport": "tcp"},
    "hosts": {"workers": 5, "on": ["a", "a", "b", "b", "b"]},
}


@pytest.fixture(scope="module", params=WAYS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalJob]:
    """Alone; on one host; over sockets; two hosts of two and three."""
    folder = str(tmp_path_factory.mktemp("runs"))
    with local_job(folder=folder, **WAYS[request.param]) as made:
        yield made


@pytest.fixture(scope="module", params=["shared", "sockets"])
def three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalJob]:
    folder = str(tmp_path_factory.mktemp("runs"))
    with local_job(folder=folder, **WAYS[request.param]) as made:
        yield made
