"""Files of a model: the chief writes them, and every Keras loads them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from syncline.keras.optimizer import DistributedOptimizer
from syncline.worker.job import Job


def save_by_chief(model: Any, job: Job) -> None:
    """`model.save` and `save_weights`, also by ModelCheckpoint, write at the chief alone."""

    def by_chief(name: str) -> Any:
        write = getattr(type(model), name)

        def save(*args: Any, **kwargs: Any) -> Any:
            if not job.is_chief:
                return None
            with _as_plain(model):
                return write(model, *args, **kwargs)

        return save

    for name in ("save", "save_weights", "export"):
        object.__setattr__(model, name, by_chief(name))


@contextlib.contextmanager
def _as_plain(model: Any) -> Iterator[None]:
    """The model as without Syncline, so that every Keras loads the file."""
    optimizer: Any = model.optimizer
    compiled: Any = getattr(getattr(model, "_compile_config", None), "config", {})
    if not isinstance(optimizer, DistributedOptimizer):
        yield
        return
    given = compiled.get("optimizer")
    try:
        model.optimizer = optimizer.inner_optimizer
        if given is optimizer:
            compiled["optimizer"] = optimizer.inner_optimizer
        yield
    finally:
        model.optimizer = optimizer
        if given is optimizer:
            compiled["optimizer"] = given
