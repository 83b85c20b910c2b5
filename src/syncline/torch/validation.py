"""torch models in a validation: weights of candidates, evaluation mode, and torch batches."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.utils.data

from syncline.core.wire.validation import AVERAGE, OWN, WEIGHTS
from syncline.data.source import Source
from syncline.torch.batches import tensors
from syncline.torch.weights import load_state_dict
from syncline.worker.validation import WorkerValidation


class PulledParameters(Protocol):
    """An optimizer of ours."""

    def pull(self) -> None: ...
    def read_average(self) -> dict[torch.Tensor, torch.Tensor]: ...
    def named(self) -> dict[str, torch.Tensor]: ...


class ValidatedModel:
    """What one optimizer updates."""

    def __init__(self, optimizer: PulledParameters, model: torch.nn.Module | None) -> None:
        self._optimizer, self._model = optimizer, model
        self._average: dict[torch.Tensor, torch.Tensor] = {}
        self._own: dict[str, torch.Tensor] = {}

    def note_own(self) -> None:
        """Copies the model's current weights."""
        for name, parameter in self._optimizer.named().items():
            if name not in self._own:
                self._own[name] = torch.empty_like(parameter, device="cpu", memory_format=torch.contiguous_format)
            self._own[name].copy_(parameter.detach())

    def own(self) -> dict[str, Any]:
        """The weights noted last, or the current ones."""
        if not self._own:
            self.note_own()
        return {name: value.clone() for name, value in self._own.items()}

    def pull(self, *, average: bool) -> None:
        """Pulls the job's parameters, and the average of the same version."""
        self._optimizer.pull()
        self._average = self._optimizer.read_average() if average else {}

    def forget(self) -> None:
        """The validation is over: drops what was pulled."""
        self._average = {}

    @contextlib.contextmanager
    def having(self, candidate: str, folder: str) -> Iterator[None]:
        """Context with the weights of this candidate; `folder`: where a candidate on disk lies."""
        if candidate == WEIGHTS:
            yield
            return
        named = self._optimizer.named()
        if candidate == OWN:
            wanted = {named[name]: value for name, value in self._own.items()}
        else:
            wanted = self._average if candidate == AVERAGE else self._read(folder)
        with torch.no_grad():
            before = {parameter: parameter.detach().clone() for parameter in wanted}
            for parameter, value in wanted.items():
                parameter.copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in before.items():
                    parameter.copy_(value)

    def _read(self, folder: str) -> dict[torch.Tensor, torch.Tensor]:
        named = self._optimizer.named()
        found = load_state_dict(folder, list(named))
        return {named[name]: value for name, value in found.items()}

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context without gradients, in eval mode; restores every module's mode."""
        modes = [(module, module.training) for module in self._model.modules()] if self._model is not None else []
        if self._model is not None:
            self._model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode


def take_part_in(validating: WorkerValidation, optimizer: PulledParameters, model: torch.nn.Module | None) -> None:
    """Validations use this optimizer's parameters while it lives."""
    alive, made = weakref.ref(optimizer), weakref.WeakValueDictionary[str, ValidatedModel]()

    def find() -> ValidatedModel | None:
        found = alive()
        if found is None:
            return None
        if (known := made.get("")) is None:
            made[""] = known = ValidatedModel(found, model)
        return known

    validating.add_model(find, read_samples)


def read_samples(dataset: Any, samples: Sequence[int], collate: Any) -> Any:
    """A batch, collated as torch's DataLoader does."""
    if isinstance(dataset, Source):
        return (collate or tensors)(dataset.read(torch.tensor(samples).numpy()))
    many = getattr(dataset, "__getitems__", None)
    found = many(list(samples)) if many is not None else [dataset[number] for number in samples]
    return (collate or torch.utils.data.default_collate)(found)
