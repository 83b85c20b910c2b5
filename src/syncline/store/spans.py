"""The spans of a run with `--trace`, read from its folder."""

from __future__ import annotations

import pathlib

from syncline.core.tracing import TracedBatch, TracedLife, lives_of
from syncline.store.lines import SPANS, Lines


def read_lives(folder: pathlib.Path) -> tuple[list[TracedLife], str]:
    """What each life of a member has traced, and where the file is damaged: later spans are missing."""
    lines = Lines(folder / SPANS, TracedBatch)
    lives = lives_of(lines)
    return lives, lines.damage
