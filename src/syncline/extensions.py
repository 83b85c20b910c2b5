"""The user's own code that a setting names: `package.module:name`, imported from the user's own path."""

from __future__ import annotations

import importlib
import os
import re
import sys

from syncline.errors import ConfigError

_NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)", re.ASCII)


def is_named(text: str) -> bool:
    """Whether this could be `package.module:name`."""
    return len(text) <= 200 and _NAME.fullmatch(text) is not None


def load(text: str) -> object:
    """What this name stands for, in this process."""
    found = _NAME.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text[:80]!r} is not of the form package.module:name")
    module, name = found.groups()
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(
            f"{text}: {type(error).__name__}: {error}; servers need it as workers do: install it, or have it beside "
            "the script, in the working folder or on PYTHONPATH"
        ) from error


def see_beside(script: str, *, is_module: bool) -> None:
    """From now on this process imports from the script's folder, if there is one, and from the working folder."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if script and not is_module:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
