"""Random states: of Python's `random`, NumPy's and torch's global generators, as far as they are loaded."""

from __future__ import annotations

import random
import sys
from typing import Any

from syncline.errors import StoreError


def take(device: str = "") -> dict[str, Any]:
    """All of them as they are now; `device`: the worker's, when it is a GPU."""
    found: dict[str, Any] = {"python": random.getstate()}
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        found["numpy"] = numpy_random.get_state(legacy=False)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        # As arrays: in a ring it may be the server that has loaded torch, and the script goes on without it.
        found["torch"] = torch.get_rng_state().numpy()
        if torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state(device or "cuda").cpu().numpy()
    return found


def put_back(states: dict[str, Any], device: str = "") -> None:
    """The generators go on where they were. What is not loaded now is left out."""
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    try:
        if "python" in states:
            random.setstate(states["python"])
        if "numpy" in states and numpy_random is not None:
            numpy_random.set_state(states["numpy"])
        if torch is not None:
            if "torch" in states:
                torch.set_rng_state(torch.as_tensor(states["torch"]))
            if "cuda" in states and torch.cuda.is_available():
                torch.cuda.set_rng_state(torch.as_tensor(states["cuda"]), device or "cuda")
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise StoreError(f"the random states of the checkpoint cannot be put back: {error}") from error
