"""Pulls that wait for a version, while slices move away."""

from __future__ import annotations

import types
from typing import Any

from syncline.core.wire.traffic import Pull
from syncline.errors import Refresh
from syncline.server.pulls import Pulls


def test_one_whose_slice_has_moved_is_sent_elsewhere_and_breaks_nothing() -> None:
    """It came in between: looked up before primaries changed, noted after it. The next round finds it here."""
    refused: list[Exception] = []
    request: Any = types.SimpleNamespace(peer="worker-0", refuse=refused.append)
    slot = types.SimpleNamespace(state=types.SimpleNamespace(version=0))
    slices: dict[int, Any] = {4: slot}
    pulls = Pulls(slices, None, None, moved=lambda number: Refresh(f"slice {number} is elsewhere"))  # type: ignore[arg-type]
    pulls.pull(request, Pull([4], 1, False))
    pulls.advanced()
    assert not refused, "it waits"
    slices.clear()
    pulls.advanced()
    assert [str(error) for error in refused] == ["slice 4 is elsewhere"]
    pulls.advanced()
    assert len(refused) == 1
