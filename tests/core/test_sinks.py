"""What `--sink` may name."""

from __future__ import annotations

import pytest

from syncline.config import JobConfig
from syncline.core.sinks import SinkPlace, places_of
from syncline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "where", "experiment"),
    [
        ("mlflow://", "", ""),
        ("mlflow://?experiment=a%20b", "", "a b"),
        ("mlflow://host:5000", "http://host:5000", ""),
        ("mlflow+https://host/prefix/?experiment=x", "https://host/prefix", "x"),
        ("mlflow://[::1]:5000", "http://[::1]:5000", ""),
        ("mlflow:///data/my%20runs", "/data/my runs", ""),
        ("mlflow://./runs", "./runs", ""),
    ],
)
def test_places(text: str, where: str, experiment: str) -> None:
    assert places_of(JobConfig(sink=(text,))) == [SinkPlace("mlflow", where, experiment)]


def test_several_and_none() -> None:
    assert places_of(JobConfig()) == places_of(JobConfig(sink=("off",))) == []
    twice = JobConfig(sink=("tensorboard", "mlflow://", "tensorboard"))
    assert [place.kind for place in places_of(twice)] == ["tensorboard", "mlflow"]


@pytest.mark.parametrize(
    ("sinks", "words"),
    [
        (("wandb",), "--sink 'wandb': give off, tensorboard, mlflow://HOST:PORT"),
        (("mlflow",), "give off, tensorboard"),
        (("mlflow:/folder",), "give off, tensorboard"),
        (("http://host",), "give off, tensorboard"),
        (("mlflow://host?experiments=x",), "give off, tensorboard"),
        (("mlflow://host?x",), "--sink 'mlflow://host?x'"),
        (("mlflow://a b",), "'a b' is no HOST:PORT"),
        (("mlflow://host:x",), "'host:x' is no HOST:PORT"),
        (("mlflow://[::1",), "--sink 'mlflow://[::1'"),
        (("mlflow://user:secret@host",), "MLFLOW_TRACKING_USERNAME"),
        (("off", "tensorboard"), "--sink off cannot be combined"),
    ],
)
def test_what_is_none_is_named(sinks: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        places_of(JobConfig(sink=sinks))
    assert words in str(caught.value) and "secret" not in str(caught.value)
