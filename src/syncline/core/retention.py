"""Which checkpoints may go. Nothing that could not be replaced ever does."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

#: Whatever was asked for: one that turns out to be damaged has one before it.
FEWEST = 2


@dataclasses.dataclass(frozen=True)
class Standing:
    """A checkpoint's folder, as it was found."""

    name: str
    number: int
    lineage: str  # empty: nobody knows
    is_sound: bool  # its manifest verifies, and its files are there
    is_unfinished: bool = False  # it has no manifest
    is_whole: bool = True  # a job can go on from it; else it is of weights only


def outdated(found: Iterable[Standing], keep: int, lineage: str, best: Collection[str]) -> list[str]:
    """Names of those to remove, oldest first.

    Only of this lineage; not the `keep` newest sound ones, not the best. What is damaged stays until as many newer
    ones are sound: somebody may want to save what can be saved. What a try has left that came to no end goes when a
    newer one is sound. Of those with weights only, the newest stays, and the best.
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
