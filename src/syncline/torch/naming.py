"""Errors of a data set or a `collate_fn` name their samples and where they are."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch.utils.data

from syncline.errors import SynclineError

_MOST_NAMED = 4


class Read(list[Any]):
    """Samples of a shard as read, and their positions."""

    where = ""


@dataclasses.dataclass(frozen=True)
class Fetched:
    """What a data set returned for these numbers."""

    dataset: Any
    numbers: Sequence[Any]
    samples: Any

    def describe(self) -> str:
        if isinstance(self.numbers, Read):
            return self.numbers.where
        named = [where(self.dataset, number) for number in self.numbers[:_MOST_NAMED]]
        more = len(self.numbers) - len(named)
        return ", ".join(named) + (f" and {more} more" if more else "")


class Named:
    """A data set for torch's iterators. Its errors get a note, and keep their type and text."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, numbers: Sequence[Any]) -> Fetched:
        dataset, samples = self.dataset, []
        at_once = getattr(dataset, "__getitems__", None)
        try:
            if at_once:
                return Fetched(dataset, numbers, at_once(numbers))
            for number in numbers:
                samples.append(dataset[number])  # noqa: PERF401  # one by one: when one fails, it is the next
        except Exception as error:
            wrong = numbers if at_once else numbers[len(samples) : len(samples) + 1]
            _note(error, f"raised by the data set {_kind(dataset)} for {Fetched(dataset, wrong, None).describe()}")
            raise
        return Fetched(dataset, numbers, samples)


class Collating:
    """Wraps a `collate_fn` for such a data set."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, fetched: Fetched) -> Any:
        try:
            return self._collate(fetched.samples)
        except Exception as error:
            _note(error, f"raised by the collate_fn for {fetched.describe()}")
            raise


class Beginning:
    """Wraps a `worker_init_fn`, so that torch's `get_worker_info()` shows the script's own data set."""

    def __init__(self, given: Callable[[int], None] | None) -> None:
        self._given = given

    def __call__(self, worker_id: int) -> None:
        info: Any = torch.utils.data.get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch has frozen it
        if self._given is not None:
            self._given(worker_id)


def where(dataset: Any, number: int) -> str:
    """Names a sample and its location: by the data set's `where(number)`, or by a list `samples` of paths, as in
    torchvision's folders.
    """
    told = f"sample {number}"
    with contextlib.suppress(Exception):  # foreign code, while an error is being reported
        while isinstance(dataset, torch.utils.data.Subset):
            dataset, number = dataset.dataset, dataset.indices[number]
        dataset = getattr(dataset, "source", dataset)
        if callable(teller := getattr(dataset, "where", None)):
            return f"{told} ({teller(number)})"
        path = getattr(dataset, "samples", {})[number]
        path = path[0] if isinstance(path, tuple) else path
        if isinstance(path, str):
            return f"{told} ({path})"
    return told


def _kind(dataset: Any) -> str:
    return type(getattr(dataset, "source", dataset)).__name__


def _note(error: Exception, text: str) -> None:
    if not isinstance(error, SynclineError):  # ours name the sample themselves
        error.add_note(text)
