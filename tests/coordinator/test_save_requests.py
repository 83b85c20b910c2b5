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


WORKERS = ["worker-0", "worker-1", "worker-2"]


def test_a_look_while_workers_are_asked_finds_none_or_all_asked() -> None:
    """Heartbeats look at it in other threads: a table that grew under them closed a healthy worker's connection."""
    save = SaveInProgress(3, SaveRequest("asked", []), 0.0, "worker-0", WORKERS)
    asked: dict[str, Any] = {f"worker-{rank}": Asked(save, is_gone=rank == 1) for rank in range(3)}
    save.expect(asked, print)
    assert [one.seen for one in asked.values()] == [WORKERS, WORKERS, WORKERS]
    assert save.waiting == WORKERS
    assert [one.woken_by for one in asked.values()] == [[print], [], [print]]


def test_a_worker_that_comes_back_is_asked_once_on_each_connection() -> None:
    """A save after a restart of the coordinator left out the script of a worker that had not come back yet."""
    save = SaveInProgress(3, SaveRequest("asked", []), 0.0, "worker-0", ["worker-0", "worker-1"])
    here: dict[str, Any] = {"worker-0": Asked(save), "worker-7": Asked(save)}
    assert save.unasked(here).keys() == {"worker-0"}, "worker-7 has come since: it has no part in this save"
    save.expect(save.unasked(here), print)
    here["worker-0"].is_done = True
    assert not save.unasked(here) and save.waiting == ["worker-1"]
    here["worker-1"] = Asked(save, is_gone=True)
    save.expect(save.unasked(here), print)
    assert not save.unasked(here) and save.waiting == ["worker-1"], (
        "the connection broke; it is not asked there again"
    )
    here["worker-1"] = Asked(save)
    save.expect(save.unasked(here), print)
    assert save.waiting == ["worker-1"]
    here["worker-1"].is_done = True
    assert not save.waiting
