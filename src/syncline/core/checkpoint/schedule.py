"""When a job saves, and which checkpoints are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import msgspec

from syncline.config import JobConfig
from syncline.core.units import interval
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
    # Journals keep the older name: a reader drops unknown ones without a word.
    resumed_from: Checkpoint | None = msgspec.field(default=None, name="taken_up")
    last: Checkpoint | None = None  # the newest of this job
    num_begun: int = 0  # the number of the last save
    open: int = 0  # of the save that is under way
    open_folder: str = ""
    num_saved: int = 0
    num_failed: int = 0
    failure: str = ""  # why the last of these failed

    @property
    def newest(self) -> Checkpoint | None:
        return self.last or self.resumed_from


def check_words(config: JobConfig) -> None:
    """What excludes each other, or does not parse."""
    if config.save_every:
        interval("--save-every", config.save_every)
    if config.fresh and config.resume:
        raise ConfigError("--fresh and --resume cannot be combined: one starts over, the other from a checkpoint")
    for name in ("save_every", "fresh", "checkpoint_mirror", "best"):
        if getattr(config, name) and not config.checkpoint:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} needs to know where to save: use --checkpoint DIR too")
    if config.average and not config.best:
        raise ConfigError("--average needs to know what is better: use --best METRIC too, e.g. --best accuracy")


#: Whatever was asked for: one that turns out to be damaged has one before it.
FEWEST = 2


@dataclasses.dataclass(frozen=True)
class SaveStanding:
    """A checkpoint's folder, as it was found."""

    name: str
    number: int
    lineage: str  # empty: unknown
    is_sound: bool  # its manifest verifies, and its files are there
    is_unfinished: bool = False  # it has no manifest
    is_whole: bool = True  # a job can go on from it; else it is of weights only


def outdated(found: Iterable[SaveStanding], keep: int, lineage: str, best: Collection[str]) -> list[str]:
    """Names of those to remove, oldest first.

    Only of this lineage; not the `keep` newest sound ones, not the best. A damaged one stays until as many newer
    ones are sound, since parts of it may still be worth saving. An unfinished one goes when a newer one is sound. Of
    those with weights only, the newest stays, and the best.
    """
    every = sorted((one for one in found if one.lineage == lineage and lineage), key=lambda one: one.number)
    own = [one for one in every if one.is_whole]
    sound = [one for one in own if one.is_sound]
    if not sound:
        return []
    kept = {one.name for one in sound[-max(keep, FEWEST) :]}
    oldest_kept = min(one.number for one in sound if one.name in kept)
    gone = []
    for one in own:
        if one.name in kept or one.name in best:
            continue
        if one.is_unfinished:
            if one.number < sound[-1].number:
                gone.append(one.name)
        elif one.number < oldest_kept and len(kept) >= FEWEST:
            gone.append(one.name)
    weights = [one.name for one in every if not one.is_whole]
    return gone + [name for name in weights[:-1] if name not in best]
