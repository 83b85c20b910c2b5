"""What a process says that has no memory for its part of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from syncline.core.units import counted, size
from syncline.errors import ConfigError

#: torch raises a RuntimeError for the host's memory, and where NumPy allocates it is a MemoryError.
_OF_TORCH = "can't allocate memory"


@contextlib.contextmanager
def naming_lack_of_memory(model: torch.nn.Module, num_processes: int) -> Iterator[None]:
    """Turns an allocation that fails into an error with the size of the model and the remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        failed = _allocation(error)
        if failed is None:
            raise
        parameters = size(sum(p.numel() * p.dtype.itemsize for p in model.parameters()))
        raise ConfigError(
            f"Pipeline: this process has no memory left. The model has {parameters} of parameters and as many of "
            f"gradients, besides activations, in {counted(num_processes, 'stage')}; use more --stages, smaller "
            f"batches or more --micro-batches ({failed})"
        ) from error


def _allocation(error: BaseException | None) -> str | None:
    """What failed, in the words of who allocates; None if it is something else."""
    while error is not None:
        if isinstance(error, MemoryError) or _OF_TORCH in str(error):
            text = next((line for line in str(error).splitlines() if _OF_TORCH in line), str(error))
            return text.partition("DefaultCPUAllocator: ")[2] or text or "MemoryError"
        error = error.__cause__
    return None
