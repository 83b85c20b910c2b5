"""What a job knows of its own checkpoints: all of it that must outlive the coordinator."""

from __future__ import annotations

import msgspec

from syncline.config import JobConfig
from syncline.core.frequency import every
from syncline.errors import ConfigError


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """One that exists."""

    root: str  # the folder of all checkpoints
    folder: str  # its own
    name: str
    digest: str  # of its manifest
    step: int
    num_updates: int = 0  # of the slice that has had the most
    seconds: float = 0.0  # that its lineage had trained
    versions: int = 0  # of all its slices together
    num_bytes: int = 0


class SaveState(msgspec.Struct):
    """Where a job comes from, and what it has saved."""

    lineage: str = ""  # drawn when a job begins; one that is taken up goes on with it
    token: str = ""  # of this job alone: others of its lineage may save in the same folder
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


def check_words(config: JobConfig) -> None:
    """What excludes each other, or does not parse."""
    if config.save_every:
        every("--save-every", config.save_every)
    if config.fresh and config.resume:
        raise ConfigError("--fresh and --resume exclude each other: one starts over, the other from a checkpoint")
    for name in ("save_every", "fresh", "checkpoint_mirror", "best"):
        if getattr(config, name) and not config.checkpoint:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} needs to know where to save: say --checkpoint DIR too")
    if config.average and not config.best:
        raise ConfigError("--average needs to know what is better: say --best METRIC too, e.g. --best accuracy")
