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

collect_ignore = [
    folder for folder, packages in NEEDS.items() if any(importlib.util.find_spec(name) is None for name in packages)
]
