"""Random states: saves and restores the global generators of Python's `random`, NumPy and torch, if imported; and
`seed_everything`, which gives each worker its own stream.
"""

from __future__ import annotations

import operator
import random
import sys
from typing import Any

import numpy as np

from syncline.errors import ConfigError, StoreError


def take(device: str = "") -> dict[str, Any]:
    """The current states; `device`: the worker's GPU, if any."""
    found: dict[str, Any] = {"python": random.getstate()}
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        found["numpy"] = numpy_random.get_state(legacy=False)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        # As arrays: in a ring only the server may have loaded torch.
        found["torch"] = torch.get_rng_state().numpy()
        if torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state(device or "cuda").cpu().numpy()
    return found


def put_back(states: dict[str, Any], device: str = "") -> None:
    """Restores the generators. States of modules that are not loaded are skipped."""
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


#: The last seed of `seed_everything` until training begins with it, and permanently.
_given: int | None = None
_last_given: int | None = None
_torch_seed: int | None = None  # the last seed given to torch here


def seed_everything(seed: int) -> None:
    """Seeds the global generators of Python's `random`, NumPy and torch (CPU and GPUs), where they are imported.

    Call it before the model is made. Until training begins every worker draws the same numbers, so models, data
    sets and splits come out equal. From then on each worker has a stream of its own, which follows from the seed
    and the worker's name, so that noise, dropout and augmentation differ between workers and equal runs are equal.
    Training begins with the first loop over a loader of ours (not under `torch.no_grad()`), or with the first step.
    A worker that starts again gets a new stream; a job that resumes goes on with the saved ones.
    """
    global _given, _last_given
    try:
        seed = operator.index(seed)
    except TypeError:
        raise ConfigError(f"seed_everything({seed!r}): the seed must be an int") from None
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed_everything({seed}): the seed must be from 0 to 2**64 - 1")
    _given = _last_given = seed
    _seed(seed, seed % (1 << 32), seed)


def forget_seed() -> None:
    """As if `seed_everything` had not been called yet: another script begins in this process."""
    global _given, _last_given
    _given = _last_given = None


def last_given(torch_seed: int) -> int | None:
    """The last seed given to `seed_everything`; None if torch was seeded otherwise since."""
    return _last_given if torch_seed == _torch_seed else None


def seed_process(seed: int) -> None:
    """Seeds the global generators of a process that follows another one."""
    _seed(seed, seed % (1 << 32), seed)


def _seed(for_python: int, for_numpy: int, for_torch: int) -> None:
    random.seed(for_python)
    np.random.seed(for_numpy)
    global _torch_seed
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(for_torch)  # seeds all devices
        _torch_seed = int(torch.initial_seed())


class OwnStream:
    """The random numbers of one life of a worker. `life`: 0 for a worker present at the start, so that equal runs
    are equal; else a unique number.
    """

    def __init__(self, name: str, life: int) -> None:
        self._name, self._life = name, life
        self._seed: int | None = None  # of this stream, once begun

    def begin(self) -> None:
        """Training begins or continues."""
        if _given is not None:
            self._begin()

    def _begin(self) -> None:
        global _given
        if _given is not None:
            self._seed, _given = _given, None
        if self._seed is None:
            return  # the script seeds by itself
        one, two, three = np.random.SeedSequence([self._seed, self._who, self._life]).generate_state(3, np.uint64)
        _seed(int(one), int(two) >> 32, int(three))

    @property
    def _who(self) -> int:
        return int.from_bytes(self._name.encode(), "big")

    @property
    def is_later_life(self) -> bool:
        """Whether this worker has joined a running job."""
        return bool(self._life)

    def of_process(self, number: int) -> int | None:
        """The seed of another process of this worker; None: the script seeds by itself, or training has not begun."""
        if self._seed is None:
            return None
        return int(
            np.random.SeedSequence([self._seed, self._who, self._life, number]).generate_state(1, np.uint64)[0]
        )

    def restored(self) -> None:
        """The random states were restored from a checkpoint. In a resumed job they continue; a worker restarted in
        a running job has used them already and gets a new stream.
        """
        global _given
        if self._life:
            self._begin()
        else:
            _given = None
