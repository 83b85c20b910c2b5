"""A save that has begun, as other threads see it."""

from __future__ import annotations

from typing import Any

from syncline.coordinator.saves import SaveInProgress, SaveRequest
from syncline.core.wire.checkpoints import Expect
from syncline.errors import ConnectionLost


class Asked:
    """A worker's endpoint, and the call on it; while it is asked, somebody looks at the save."""

    def __init__(self, save: SaveInProgress, is_gone: bool = False) -> None:
        self.save, self.is_gone, self.is_done, self.seen = save, is_gone, False, None
        self.woken_by: list[Any] = []

    def call(self, message: Any) -> Asked:
        assert message == Expect(3)
        self.seen = self.save.waiting
        if self.is_gone:
            raise ConnectionLost("it is gone")
        return self

    def when_done(self, wake: Any) -> None:
        self.woken_by.append(wake)


def test_whoever_looks_while_workers_are_asked_sees_none_or_all() -> None:
    """Beats look at it in other threads: a table that grew under them closed a healthy worker's connection."""
    save = SaveInProgress(3, SaveRequest("asked", []), 0.0, "worker-0")
    asked: dict[str, Any] = {f"worker-{rank}": Asked(save, is_gone=rank == 1) for rank in range(3)}
    save.expect(asked, print)
    assert [one.seen for one in asked.values()] == [[], [], []]
    assert save.waiting == ["worker-0", "worker-2"]
    assert [one.woken_by for one in asked.values()] == [[print], [], [print]]
