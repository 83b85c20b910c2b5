"""JAX and optax, or an error that says what to install."""

from __future__ import annotations

import importlib
import re
from typing import Any

from syncline.errors import ConfigError

#: The lowest versions that the tests have passed with.
LOWEST = {"jax": (0, 5, 1), "optax": (0, 2, 4)}


def needed(package: str, what: str = "syncline.jax") -> Any:
    """Imports a package; ConfigError if it is missing or too old. `what` needs it."""
    lowest = ".".join(map(str, LOWEST[package]))
    try:
        found = importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f'{what} needs {package}: pip install "{package}>={lowest}" ({error})') from error
    version = str(getattr(found, "__version__", "0"))
    if tuple(int(number) for number in re.findall(r"\d+", version)[:3]) < LOWEST[package]:
        raise ConfigError(
            f'{what} needs {package} {lowest} or newer; {version} is installed: pip install -U "{package}>={lowest}"'
        )
    return found


jax: Any = needed("jax")
io_callback: Any = importlib.import_module("jax.experimental").io_callback
