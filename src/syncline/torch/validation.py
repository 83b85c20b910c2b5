"""torch models in a validation: the job's parameters in them, nothing learned meanwhile, batches as torch has."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.utils.data

from syncline.client.validating import Validating
from syncline.data.source import Source
from syncline.torch.batches import tensors


class Pulls(Protocol):
    """An optimizer of ours."""

    def pull(self) -> None: ...


class ValidatedModel:
    """What one optimizer updates."""

    def __init__(self, pull: Callable[[], None], model: torch.nn.Module | None) -> None:
        self.pull, self._model = pull, model

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without gradients, in eval mode; afterwards every module is in the mode in which it was."""
        modes = [(module, module.training) for module in self._model.modules()] if self._model is not None else []
        if self._model is not None:
            self._model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode


def take_part_in(validating: Validating, optimizer: Pulls, model: torch.nn.Module | None) -> None:
    """As long as this optimizer is there, validations see to its parameters."""
    alive = weakref.ref(optimizer)

    def find() -> ValidatedModel | None:
        found = alive()
        return ValidatedModel(found.pull, model) if found is not None else None

    validating.add_model(find)
    validating.read = read_samples


def read_samples(dataset: Any, samples: Sequence[int], collate: Any) -> Any:
    """A batch, collated as torch's DataLoader does."""
    if isinstance(dataset, Source):
        return (collate or tensors)(dataset.read(torch.tensor(samples).numpy()))
    many = getattr(dataset, "__getitems__", None)
    found = many(list(samples)) if many is not None else [dataset[number] for number in samples]
    return (collate or torch.utils.data.default_collate)(found)
