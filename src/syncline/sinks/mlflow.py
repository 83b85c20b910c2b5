"""Runs in MLflow: a tracking server or a folder. Needs the package mlflow, or mlflow-skinny.

The settings are its parameters, readings its metrics; images, histograms and texts are artifacts below `media/`. A
coordinator that starts again goes on with the same run.
"""

from __future__ import annotations

import collections
import contextlib
import pathlib
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from syncline import config as configuration
from syncline.core.media import ReportedMedia
from syncline.core.sinks import SinkPlace
from syncline.sinks.sink import SinkError, SinkRefusal, SinkRun, Spacing
from syncline.stats import JobLook

EXPERIMENT = "syncline"
NOTE = "mlflow.json"
#: What the API takes in one call.
MOST_METRICS, MOST_PARAMS, MOST_LETTERS = 1_000, 100, 500
#: Answers of the API about what a call brings. Others are about the server, or about who asks.
REFUSALS = frozenset({400, 409, 413, 422})
#: Images, histograms and texts that wait while the server is away.
MOST_DUE = 50
#: Between two calls.
BATCH_SECONDS = 5.0
#: Readings, and media, before they get sparser.
FULL_READINGS, FULL_MEDIA = 50_000, 200
MEDIA_SECONDS = 30.0
FIGURES = ("samples_per_second", "steps_per_second")
FIGURES_SECONDS = 10.0
SUFFIXES = {"image": "png", "histogram": "json", "text": "txt"}


class MlflowNote(msgspec.Struct, frozen=True):
    """The run in MLflow that belongs to a run of ours; kept in its folder."""

    job: str
    where: str
    run_id: str


class MlflowSink:
    """One run in MLflow."""

    def __init__(self, run: SinkRun, place: SinkPlace) -> None:
        configuration.add_to_environment({"MLFLOW_DISABLE_TELEMETRY": "true", "GIT_PYTHON_REFRESH": "quiet"})
        import mlflow
        from mlflow.entities import Metric, Param

        self._run, self._place = run, place
        self._metric, self._param = Metric, Param
        self._client: Any = mlflow.MlflowClient(_uri(place.where))
        self._run_id, self._has_params = "", False
        self._waiting: list[Any] = []
        self._due: collections.deque[ReportedMedia] = collections.deque(maxlen=MOST_DUE)
        self._refused: set[str] = set()  # metrics that the server will never take
        self._refusals: list[str] = []  # to be said
        self._sent_at = 0.0
        self._readings = Spacing(FULL_READINGS, 1.0)
        self._figures = Spacing(FULL_READINGS, FIGURES_SECONDS)
        self._media = Spacing(FULL_MEDIA, MEDIA_SECONDS)

    def write(self, look: JobLook, media: Sequence[ReportedMedia]) -> None:
        figures = look.figures
        told = [(name, step, at, value) for name, step, at, value in look.readings if value is not None]
        told = [one for one in told if self._readings.lets_pass(one[0], one[2])]
        told += [
            (f"syncline/{name}", figures.step, figures.at, float(getattr(figures, name)))
            for name in FIGURES
            if figures.seconds and self._figures.lets_pass(name, figures.at)
        ]
        self._waiting += [self._metric(name, value, round(1000 * at), step) for name, step, at, value in told]
        del self._waiting[: -10 * MOST_METRICS]  # while the server is away
        self._due.extend(one for one in media if self._media.lets_pass(one.item.name, one.at))
        if not self._due and figures.at - self._sent_at < BATCH_SECONDS:
            return
        self._sent_at = figures.at
        with _trouble(self._place):
            self._begin()
            self._send()
            self._send_media()
        self._tell_refusals()

    def _begin(self) -> None:
        """The run of this job, with its parameters: the one that an earlier coordinator has made, or a new one."""
        if not self._run_id:
            note = _read_note(self._run.folder)
            is_ours = note is not None and (note.job, note.where) == (self._run.job, self._place.where)
            self._run_id = note.run_id if note is not None and is_ours else self._make_run()
        if not self._has_params:
            self._send_params()
            self._has_params = True

    def _make_run(self) -> str:
        name = self._place.experiment or EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        tags = {"syncline.job": self._run.job, "syncline.folder": str(self._run.folder)}
        made = self._client.create_run(number, run_name=self._run.name, tags=tags)
        run_id = str(made.info.run_id)
        _write_note(self._run.folder, MlflowNote(self._run.job, self._place.where, run_id))
        return run_id

    def _send_params(self) -> None:
        """Those that the run lacks: the server may have gone away after some, and refuses to change one."""
        known = self._client.get_run(self._run_id).data.params
        params = [
            self._param(key, str(value)[:MOST_LETTERS])
            for key, value in self._run.settings.items()
            if value != "" and key not in known
        ]
        for k in range(0, len(params), MOST_PARAMS):
            self._offer(
                "settings", lambda part: self._client.log_batch(self._run_id, params=part), params[k:][:MOST_PARAMS]
            )

    def _send(self) -> None:
        while self._waiting:
            part = [one for one in self._waiting[:MOST_METRICS] if one.key not in self._refused]
            self._offer_metrics(part)
            del self._waiting[:MOST_METRICS]

    def _offer_metrics(self, metrics: list[Any]) -> None:
        """What the server refuses must not hold up the rest: the metric that it is about is found by halving."""
        if not metrics:
            return
        names = sorted({one.key for one in metrics})
        try:
            self._client.log_batch(self._run_id, metrics=metrics)
        except Exception as error:
            if not _is_refusal(error):
                raise
            if len(names) == 1:
                self._refused.add(names[0])
                self._refusals.append(f"the metric {names[0]} is refused, and left out: {_told(error)}")
                return
            first = set(names[: len(names) // 2])
            self._offer_metrics([one for one in metrics if one.key in first])
            self._offer_metrics([one for one in metrics if one.key not in first])

    def _send_media(self) -> None:
        while self._due:
            item = self._due[0].item
            file = f"{item.step:012d}.{SUFFIXES[item.kind]}"
            self._offer(
                f"the {item.kind} {item.name}", lambda part: self._log(*part), (item.name, file, item.content)
            )
            self._due.popleft()

    def _offer(self, what: str, send: Callable[[Any], None], part: Any) -> None:
        """Sends it; what is refused is left out."""
        try:
            send(part)
        except Exception as error:
            if not _is_refusal(error):
                raise
            self._refusals.append(f"{what} is refused, and left out: {_told(error)}")

    def _tell_refusals(self) -> None:
        if self._refusals:
            told, self._refusals = self._refusals, []
            more = f"; {len(told) - 1} more likewise" if len(told) > 1 else ""
            raise SinkRefusal(told[0] + more)

    def _log(self, name: str, file: str, content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / file
            path.write_bytes(content)
            self._client.log_artifact(self._run_id, str(path), f"media/{name}")

    def close(self, *, has_failed: bool) -> None:
        with _trouble(self._place):
            self._begin()
            self._send()
            self._send_media()
            self._client.set_terminated(self._run_id, "FAILED" if has_failed else "FINISHED")
        self._tell_refusals()


def _uri(where: str) -> str | None:
    """For the client; None: what MLFLOW_TRACKING_URI says."""
    return where if "://" in where or not where else pathlib.Path(where).absolute().as_uri()


@contextlib.contextmanager
def _trouble(place: SinkPlace) -> Any:
    """The client raises errors of many kinds: of its own, of its HTTP library and of the system."""
    try:
        yield
    except Exception as error:
        where = place.where or "MLFLOW_TRACKING_URI"
        raise SinkError(f"MLflow at {where}: {_told(error)}") from error


def _told(error: Exception) -> str:
    """Without the name and password that an address in MLFLOW_TRACKING_URI may have."""
    said = re.sub(r"//[^/@\s]*@", "//", " ".join(str(error).split()))
    return f"{type(error).__name__}: {said[:300]}"


def _is_refusal(error: Exception) -> bool:
    """Whether the same call would be refused again: the server, or its client, has looked at what it was given."""
    status = getattr(error, "get_http_status_code", None)
    return callable(status) and status() in REFUSALS


def _read_note(folder: pathlib.Path) -> MlflowNote | None:
    try:
        return msgspec.json.decode((folder / NOTE).read_bytes(), type=MlflowNote)
    except (OSError, msgspec.MsgspecError):
        return None


def _write_note(folder: pathlib.Path, note: MlflowNote) -> None:
    """Without it another coordinator would begin a second run: no reason to fail."""
    with contextlib.suppress(OSError):
        (folder / NOTE).write_bytes(msgspec.json.encode(note))
