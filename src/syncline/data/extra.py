"""Lazy imports of packages that a plain installation does not have."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from syncline.errors import ConfigError


def needed(module: str, what: str) -> Any:
    """Imports a module of the extra `data`; `what` needs it."""
    if (found := sys.modules.get(module)) is not None:  # called for every column of every chunk
        return found
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(f'{what} need {package}: pip install "syncline[data]" ({error})') from error
