"""Validates checkpoint settings before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from syncline import config as configuration
from syncline.config import JobConfig
from syncline.core.checkpoint.schedule import check_words
from syncline.errors import ConfigError, StoreError
from syncline.store import checkpoints
from syncline.store.folders import check_writable, open_folder

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def settle_saving(given: Mapping[str, Any], *, is_shared: bool = True) -> dict[str, Any]:
    """Makes addresses in the settings absolute, since members may run in other folders.

    `is_shared`: by members in several processes.
    """
    config = configuration.resolve(given)
    check_words(config)
    places = [name for name in ("checkpoint", "resume", "checkpoint_mirror") if getattr(config, name)]
    for name in places if is_shared else ():
        if getattr(config, name).startswith("memory:"):
            flag = f"--{name.replace('_', '-')} {getattr(config, name)}"
            raise ConfigError(f"{flag}: every process has a memory of its own; name a folder that all members see")
    settled = {**given, **{name: open_folder(getattr(config, name)).url for name in places}}
    check_places(config)
    return settled


def check_places(config: JobConfig) -> None:
    """Checks that folders are writable, and the checkpoint to start from."""
    try:
        if config.checkpoint:
            check_writable(open_folder(config.checkpoint))
        if config.checkpoint_mirror:
            check_writable(open_folder(config.checkpoint_mirror))
        if config.resume:
            folder = open_folder(config.resume)
            passed_over: list[str] = []
            if next(checkpoints.candidates(folder, passed_over.append), None) is None:
                why = "; ".join(passed_over) or "name a checkpoint, or a folder of such"
                raise ConfigError(f"--resume {config.resume}: there is no checkpoint: {why}")
    except StoreError as error:
        raise ConfigError(str(error)) from None


def parse_bytes(flag: str, text: str) -> int:
    """Parses bytes: 256MiB, 1g, 4096."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise ConfigError(f"{flag} {text!r}: give a size, e.g. 256MiB, 2GiB")
    return int(float(found[1]) * _UNITS[found[2]])
