"""MLflow and TensorBoard as they fail: what is refused holds up nothing, and what could not be written is not lost.

The packages are played; `test_real.py` has the real ones.
"""

from __future__ import annotations

import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from syncline.core.media import MediaItem, ReportedMedia
from syncline.core.sinks import MLFLOW, SinkPlace
from syncline.sinks.sink import SinkError, SinkRefusal, SinkRun
from syncline.stats import JobFigures, JobLook


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Refused(Exception):
    """As MlflowException is."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status

    def get_http_status_code(self) -> int:
        return self.status


class PlayedClient:
    """A tracking server that refuses metrics with a colon, and everything with `status`."""

    status = 0
    took: list[Metric]
    files: list[str]

    def __init__(self, uri: str | None) -> None:
        PlayedClient.status, PlayedClient.took, PlayedClient.files = 0, [], []

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id="1")

    def create_run(self, *args: Any, **values: Any) -> Any:
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r"))

    def get_run(self, run: str) -> Any:
        return types.SimpleNamespace(data=types.SimpleNamespace(params={}))

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        if self.status:
            raise Refused(self.status)
        if any(":" in one.key for one in metrics):
            raise Refused(400)
        self.took.extend(metrics)

    def log_artifact(self, run: str, path: str, folder: str) -> None:
        if self.status:
            raise Refused(self.status)
        if "refused" in folder:
            raise Refused(400)
        self.files.append(f"{folder}/{pathlib.Path(path).name}")

    def set_terminated(self, run: str, status: str) -> None:
        self.files.append(status)


@pytest.fixture
def run(tmp_path: pathlib.Path) -> SinkRun:
    return SinkRun(name="now", job="job", folder=tmp_path, settings={})


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch, run: SinkRun) -> Any:
    played: Any = types.ModuleType("mlflow")
    played.MlflowClient = PlayedClient
    entities: Any = types.ModuleType("mlflow.entities")
    entities.Metric, entities.Param = Metric, lambda key, value: (key, value)
    monkeypatch.setitem(sys.modules, "mlflow", played)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    from syncline.sinks.mlflow import MlflowSink

    return MlflowSink(run, SinkPlace(MLFLOW, "http://127.0.0.1:1"))


def look(number: int, *names: str) -> JobLook:
    """Ten seconds after the one before."""
    at = 1e9 + 10 * number
    readings = tuple((name, number, at, float(number)) for name in names)
    return JobLook(number=number, figures=JobFigures(at=at, step=number), readings=readings)


def shown(name: str, number: int = 1) -> ReportedMedia:
    return ReportedMedia(1e9 + 100 * number, "worker-0", MediaItem(name, "text", number, b"x"))


def test_a_refused_metric_does_not_hold_up_the_others(mlflow: Any) -> None:
    """It stayed the first of the queue for ever. It is said once, and others arrive in order."""
    with pytest.raises(SinkRefusal, match=r"the metric b:ad is refused, and left out: Refused: status 400"):
        mlflow.write(look(1, "a", "b:ad", "c", "d"), ())
    mlflow.write(look(2, "a", "b:ad", "c", "d"), ())
    assert sorted((one.key, one.step) for one in PlayedClient.took) == [(n, k) for n in "acd" for k in (1, 2)]


def test_refused_media_do_not_hold_up_the_others(mlflow: Any) -> None:
    with pytest.raises(SinkRefusal, match="the text refused is refused, and left out"):
        mlflow.write(look(1, "a"), [shown("refused"), shown("good")])
    assert PlayedClient.files == ["media/good/000000000001.txt"]


@pytest.mark.parametrize("status", [401, 429, 500, 503])
def test_a_server_that_is_away_gets_everything_later(mlflow: Any, status: int) -> None:
    """Also images: they had been dropped. An answer about the server or its user is no refusal."""
    PlayedClient.status = status
    for number in (1, 2):
        with pytest.raises(SinkError):
            mlflow.write(look(number, "a"), [shown("image", number)])
    PlayedClient.status = 0
    mlflow.close(has_failed=False)
    assert [one.step for one in PlayedClient.took] == [1, 2]
    assert PlayedClient.files == [f"media/image/{k:012d}.txt" for k in (1, 2)] + ["FINISHED"]


def test_an_error_of_the_server_does_not_tell_its_password(mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's errors have the whole address, which MLFLOW_TRACKING_URI may give a name and a password."""

    def refuse(*given: Any, **values: Any) -> None:
        raise OSError("HTTPConnectionPool: http://me:secret@127.0.0.1:1/api cannot be reached")

    monkeypatch.setattr(PlayedClient, "log_batch", refuse)
    with pytest.raises(SinkError, match=r"http://127\.0\.0\.1:1/api cannot be reached") as raised:
        mlflow.write(look(1, "a"), ())
    assert "secret" not in str(raised.value)


class PlayedRecords:
    """Writes records; a full disk refuses them."""

    is_full = False
    written: list[bytes]

    def __init__(self, file: Any) -> None:
        pass

    def write(self, record: bytes) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.written.append(record)

    def flush(self) -> None:
        pass


class Message:
    """A protocol buffer that shows what it was made of."""

    def __init__(self, **values: Any) -> None:
        self.values = values
        self.tensor_shape = types.SimpleNamespace(dim=types.SimpleNamespace(add=lambda size: None))

    def SerializeToString(self) -> bytes:
        told = self.values.get("summary")
        return told.values["value"][0].values["tag"].encode() if told else b"header"


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch, run: SinkRun) -> Any:
    def module(name: str, **values: Any) -> None:
        made: Any = types.ModuleType(name)
        made.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, made)

    summary: Any = type("Summary", (Message,), {"Value": Message, "Image": Message})
    metadata: Any = type("SummaryMetadata", (Message,), {"PluginData": Message})
    protos = {
        "event_pb2": types.SimpleNamespace(Event=Message),
        "summary_pb2": types.SimpleNamespace(Summary=summary, SummaryMetadata=metadata),
        "tensor_pb2": types.SimpleNamespace(TensorProto=Message),
        "types_pb2": types.SimpleNamespace(DT_STRING=7),
    }
    for name in ("tensorboard", "tensorboard.compat", "tensorboard.summary", "tensorboard.summary.writer"):
        module(name)
    module("tensorboard.compat.proto", **protos)
    module("tensorboard.summary.writer.record_writer", RecordWriter=PlayedRecords)
    PlayedRecords.is_full, PlayedRecords.written = False, []
    from syncline.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(run)


@pytest.mark.parametrize("ends", [False, True])
def test_a_full_disk_loses_no_reading_of_tensorboard(tensorboard: Any, ends: bool) -> None:
    """They are written with a later look, or at the end. A look was gone when it could not be written."""
    PlayedRecords.is_full = True
    with pytest.raises(SinkError, match="make space"):
        tensorboard.write(look(1, "a"), [shown("said")])
    PlayedRecords.is_full = False
    act: Callable[[], None] = (
        (lambda: tensorboard.close(has_failed=False)) if ends else (lambda: tensorboard.write(look(2, "b"), ()))
    )
    act()
    later = [] if ends else [b"b"]
    assert PlayedRecords.written == [b"header", b"settings/text_summary", b"a", b"said/text_summary", *later]
