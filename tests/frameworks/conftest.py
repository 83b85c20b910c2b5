"""Tests of adapters, with the real frameworks. `make test-frameworks` installs them into environments of their own.

A folder is collected where its frameworks are installed, so plain `make test` leaves them out.
"""

from __future__ import annotations

import importlib.util

NEEDS = {
    "keras": ("keras",),
    "tensorflow": ("tensorflow", "keras"),
    "jax": ("jax", "optax"),
    "mixed": ("torch", "jax", "optax", "keras", "sklearn"),
}


def is_here(folder: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in NEEDS[folder])


collect_ignore = [folder for folder in NEEDS if not is_here(folder)]
if not any(map(is_here, NEEDS)):
    collect_ignore += ["test_smoke.py", "test_pages.py"]
