"""The sinks of a job: those that `--sink` names, and TensorBoard's files where tensorboard is installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping

import msgspec

from syncline.config import JobConfig
from syncline.core.sinks import MLFLOW, OFF, TENSORBOARD, SinkPlace, places_of
from syncline.errors import ConfigError
from syncline.sinks.sink import Sink, SinkRun

REMEDIES = {TENSORBOARD: "pip install tensorboard", MLFLOW: "pip install mlflow-skinny"}


class Choice(msgspec.Struct, frozen=True):
    """A sink that is not made yet: its package is imported when it is."""

    name: str
    make: Callable[[SinkRun], Sink]


def choices(config: JobConfig) -> list[Choice]:
    """Raises ConfigError for a sink that cannot be, or whose package is missing."""
    places = places_of(config)
    for place in places:
        if not is_installed(place.kind):
            raise ConfigError(f"--sink {place.kind}: its package is missing: {REMEDIES[place.kind]}")
    kinds = {place.kind for place in places}
    if TENSORBOARD not in kinds and OFF not in config.sink and is_installed(TENSORBOARD):
        places = [*places, SinkPlace(TENSORBOARD)]
    return [Choice(place.kind, functools.partial(_MAKERS[place.kind], place)) for place in places]


def _tensorboard(place: SinkPlace, run: SinkRun) -> Sink:
    from syncline.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(run)


def _mlflow(place: SinkPlace, run: SinkRun) -> Sink:
    from syncline.sinks.mlflow import MlflowSink

    return MlflowSink(run, place)


_MAKERS: Mapping[str, Callable[[SinkPlace, SinkRun], Sink]] = {TENSORBOARD: _tensorboard, MLFLOW: _mlflow}


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
