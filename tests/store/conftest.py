"""fsspec's thread and its event loop stay for the life of the process: not what a test leaves behind."""

from __future__ import annotations

import pytest
from tests.data.conftest import bucket

__all__ = ["bucket"]


@pytest.fixture(scope="session", autouse=True)
def loop() -> None:
    try:
        import fsspec.asyn
    except ImportError:
        return
    fsspec.asyn.get_loop()
