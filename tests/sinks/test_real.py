"""The real packages read what we write: tensorboard's own reader, and mlflow's client. `make test-page`."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from syncline.core.media import Histogram, Image, MediaItem, ReportedMedia
from syncline.core.sinks import SinkPlace
from syncline.sinks.mlflow import MlflowSink
from syncline.sinks.sink import SinkError, SinkRun
from syncline.sinks.tensorboard import TensorBoardSink
from syncline.stats import JobFigures, JobLook

pytestmark = pytest.mark.page


def look(number: int, **readings: float | None) -> JobLook:
    told = tuple((name.replace("_slash_", "/"), number, 1e9 + 60 * number, value) for name, value in readings.items())
    figures = JobFigures(at=1e9 + 60 * number, step=number, seconds=1.0, samples_per_second=7.0)
    return JobLook(number=number, figures=figures, readings=told)


PNG = Image(np.arange(24, dtype=np.uint8).reshape(4, 6)).content("x")
VALUES = np.array([0.0, 1.0, 1.0, 2.0])
MEDIA = [
    ReportedMedia(1e9, "worker-0", MediaItem("shown/x", "image", 2, PNG)),
    ReportedMedia(1e9, "worker-0", MediaItem("weights", "histogram", 2, Histogram(VALUES).content("x"))),
    ReportedMedia(1e9, "worker-0", MediaItem("said", "text", 2, "<b>ü</b>".encode())),
]


def run_in(folder: pathlib.Path) -> SinkRun:
    return SinkRun(name="now", job="job-1", folder=folder, settings={"workers": 2, "policy": "sync", "name": ""})


# -- TensorBoard ------------------------------------------------------------------------------------------


def read(folder: pathlib.Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def test_tensorboard_reads_everything(tmp_path: pathlib.Path) -> None:
    sink = TensorBoardSink(run_in(tmp_path))
    for number in range(1, 6):
        sink.write(look(number, loss=1.0 / number, odd_slash_name=None), MEDIA if number == 2 else ())
    sink.close(has_failed=False)
    again = TensorBoardSink(run_in(tmp_path))  # of the next coordinator
    again.write(look(6, loss=0.1), ())
    again.close(has_failed=False)
    found = read(tmp_path)
    told = [(one.step, one.value, one.wall_time) for one in found.Scalars("loss")]
    assert [step for step, _, _ in told] == [1, 2, 3, 4, 5, 6] and told[1][1:] == (0.5, 1e9 + 120)
    assert np.isnan([one.value for one in found.Scalars("odd/name")]).all()
    assert {one.value for one in found.Scalars("syncline/samples_per_second")} == {7.0}
    (image,) = found.Images("shown/x")
    assert image.encoded_image_string == PNG and (image.width, image.height, image.step) == (6, 4, 2)
    (histogram,) = found.Histograms("weights")
    counts = histogram.histogram_value
    assert (counts.min, counts.max, counts.num, counts.sum) == (0.0, 2.0, 4, 4.0)
    assert sum(counts.bucket) == 4 and len(counts.bucket) == len(counts.bucket_limit)
    (text,) = found.Tensors("said/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "<b>ü</b>"
    assert "workers" in found.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert found.SummaryMetadata("said/text_summary").plugin_data.plugin_name == "text"


def test_tensorflow_is_not_loaded(tmp_path: pathlib.Path) -> None:
    """It takes seconds and half a gigabyte. A package of this name is there, and says when it is imported."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('tensorflow was imported')\n")
    code = (
        "import pathlib, sys\nsys.path.insert(0, sys.argv[1])\n"
        "from syncline.sinks.sink import SinkRun\nfrom syncline.sinks.tensorboard import TensorBoardSink\n"
        "from syncline.stats import JobFigures, JobLook\n"
        "sink = TensorBoardSink(SinkRun(name='n', job='j', folder=pathlib.Path(sys.argv[1]), settings={}))\n"
        "sink.write(JobLook(number=1, figures=JobFigures(at=1.0), readings=(('loss', 1, 1.0, 1.0),)), ())\n"
        "print('written')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "written\n", done.stderr


def test_a_disk_that_is_full_begins_another_file_later(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record may have been cut off: nothing is put behind it."""
    from tensorboard.summary.writer import record_writer

    sink = TensorBoardSink(run_in(tmp_path))
    sink.write(look(1, loss=1.0), ())

    def write(self: Any, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(record_writer.RecordWriter, "write", write)
        with pytest.raises(SinkError, match="No space left on device; make space"):
            sink.write(look(2, loss=2.0), ())
    sink.write(look(3, loss=3.0), ())
    sink.close(has_failed=False)
    assert [one.step for one in read(tmp_path).Scalars("loss")] == [1, 2, 3]  # 2: when there was space again


# -- MLflow -----------------------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    return mlflow.MlflowClient((tmp_path / "store").as_uri())


def test_mlflow_has_the_run(tmp_path: pathlib.Path, client: Any) -> None:
    """Also after another coordinator has taken over: it is one run."""
    place = SinkPlace("mlflow", str(tmp_path / "store"), "tests")
    (tmp_path / "run").mkdir()
    for life in range(2):
        sink = MlflowSink(run_in(tmp_path / "run"), place)
        for number in range(5 * life + 1, 5 * life + 6):
            sink.write(look(number, loss=1.0 / number, odd_slash_name=None), MEDIA if number == 2 else ())
    sink.close(has_failed=False)
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "now" and run.info.status == "FINISHED"
    assert run.data.params == {"workers": "2", "policy": "sync"} and run.data.tags["syncline.job"] == "job-1"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [one.step for one in history][4:] == [5, 6, 7, 8, 9, 10] and history[1].value == 0.5
    assert history[1].timestamp == round(1000 * (1e9 + 120))
    assert not client.get_metric_history(run.info.run_id, "odd/name")
    shown = client.list_artifacts(run.info.run_id, "media/shown/x")
    assert [one.path for one in shown] == ["media/shown/x/000000000002.png"]
    folder = client.download_artifacts(run.info.run_id, "media", str(tmp_path))
    files = {path.name: path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file()}
    assert files["000000000002.png"] == PNG and json.loads(files["000000000002.json"])["num"] == 4
    assert files["000000000002.txt"].decode() == "<b>ü</b>"


def test_a_failed_job_is_failed_in_mlflow(tmp_path: pathlib.Path, client: Any) -> None:
    sink = MlflowSink(run_in(tmp_path), SinkPlace("mlflow", str(tmp_path / "store")))
    sink.write(look(1, loss=1.0), ())
    sink.close(has_failed=True)
    (run,) = client.search_runs([client.get_experiment_by_name("syncline").experiment_id])
    assert run.info.status == "FAILED" and run.data.metrics["loss"] == 1.0


def test_a_server_that_is_not_there_is_said(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, client: Any
) -> None:
    """Readings wait for it; nothing is lost when it is there again."""
    import mlflow

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    reached = [mlflow.MlflowClient("http://127.0.0.1:9")]

    class Reached:
        def __getattr__(self, name: str) -> Any:
            return getattr(reached[-1], name)

    monkeypatch.setattr(mlflow, "MlflowClient", lambda uri: Reached())
    sink = MlflowSink(run_in(tmp_path), SinkPlace("mlflow", "http://127.0.0.1:9"))
    with pytest.raises(SinkError, match=r"MLflow at http://127.0.0.1:9: \w+: .*127.0.0.1"):
        sink.write(look(1, loss=1.0), ())
    reached.append(client)
    sink.write(look(2, loss=0.5), ())
    sink.close(has_failed=False)
    (run,) = client.search_runs([client.get_experiment_by_name("syncline").experiment_id])
    assert [one.step for one in client.get_metric_history(run.info.run_id, "loss")] == [1, 2]


def test_parameters_are_not_lost_with_the_call_that_sends_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, client: Any
) -> None:
    """The server goes away when the run is made and its parameters are not there yet: the same sink sends them later.
    The coordinator dies at that moment: the next one finds a run that has only some, and sends the others."""
    import mlflow

    class Interrupted:
        num_failures = 1

        def __getattr__(self, name: str) -> Any:
            if name == "log_batch" and Interrupted.num_failures:
                Interrupted.num_failures -= 1
                return lambda run_id, **batch: (_ for _ in ()).throw(OSError("connection reset"))
            return getattr(client, name)

    monkeypatch.setattr(mlflow, "MlflowClient", lambda uri: Interrupted())
    place = SinkPlace("mlflow", str(tmp_path / "store"))
    sink = MlflowSink(run_in(tmp_path), place)
    with pytest.raises(SinkError, match="connection reset"):
        sink.write(look(1, loss=1.0), ())

    def params() -> dict[str, str]:
        (run,) = client.search_runs([client.get_experiment_by_name("syncline").experiment_id])
        return dict(run.data.params)

    assert params() == {}
    sink.write(look(2, loss=0.5), ())
    assert params() == {"workers": "2", "policy": "sync"}
    more = msgspec.structs.replace(run_in(tmp_path), settings={"workers": 2, "policy": "sync", "servers": 1})
    MlflowSink(more, place).write(look(3, loss=0.1), ())
    assert params() == {"workers": "2", "policy": "sync", "servers": "1"}
