"""What a job knows of its own checkpoints: all of it that must outlive the coordinator."""

from __future__ import annotations

import msgspec


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """One that exists."""

    root: str  # the folder of all checkpoints
    folder: str  # its own
    name: str
    digest: str  # of its manifest
    step: int
    num_updates: int = 0  # of the slice that has had the most
    saved_at: float = 0.0  # by the clock of the wall


class SaveState(msgspec.Struct):
    """Where a job comes from, and what it has saved."""

    lineage: str = ""  # drawn when a job begins; one that is taken up goes on with it
    seconds: float = 0.0  # of training before this coordinator began
    taken_up: Checkpoint | None = None
    last: Checkpoint | None = None  # the newest of this job
    num_begun: int = 0  # the number of the last save
    open: int = 0  # of the save that is under way
    open_folder: str = ""
    num_saved: int = 0
    num_failed: int = 0
    failure: str = ""  # why the last of these failed

    @property
    def newest(self) -> Checkpoint | None:
        return self.last or self.taken_up
