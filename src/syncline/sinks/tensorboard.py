"""TensorBoard files in the run's folder. Needs the package tensorboard, which writes and checks their records.

TensorFlow is not loaded, also where it is installed.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import pathlib
import socket
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from syncline.core.media import ReportedMedia, counts_of, size_of_png
from syncline.sinks.sink import SinkError, SinkRun, Spacing
from syncline.stats import JobLook

FOLDER = "tensorboard"
#: Bytes before readings get sparser: a week stays below 100 MB, see Spacing.
FULL_BYTES = 4_000_000
#: Records that wait for a disk that is full; of more, the oldest are left out.
MOST_DUE = 10_000
#: Between two images, histograms or texts of one name: tensorboard adds up their bytes in Python.
MEDIA_SECONDS = 10.0
#: Of the job as a whole, besides its metrics.
FIGURES = ("samples_per_second", "steps_per_second")
FIGURES_SECONDS = 10.0


class TensorBoardSink:
    """One event file for each coordinator of the run."""

    def __init__(self, run: SinkRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2
        self._tensor, self._string = tensor_pb2.TensorProto, types_pb2.DT_STRING
        self._folder, self._make = run.folder / FOLDER, RecordWriter
        self._file: Any = None
        self._writer: Any = None
        self._due: collections.deque[bytes] = collections.deque(maxlen=MOST_DUE)
        self._scalars = Spacing(FULL_BYTES, num_passed=_bytes_in(self._folder))
        self._figures = Spacing(FULL_BYTES, FIGURES_SECONDS)
        self._media = Spacing(FULL_BYTES, MEDIA_SECONDS)
        self._settings = msgspec.json.format(msgspec.json.encode(run.settings), indent=2).decode()

    def write(self, look: JobLook, media: Sequence[ReportedMedia]) -> None:
        events = [*self._readings(look), *self._job_figures(look), *self._shown(media)]
        self._due.extend(event.SerializeToString() for event in events)
        self._write_due()

    def _write_due(self) -> None:
        if not self._due:
            return
        try:
            if self._writer is None:
                self._open()
            for event in self._due:
                self._writer.write(event)
            self._writer.flush()
            self._due.clear()
        except OSError as error:
            self._drop()
            raise SinkError(
                f"{self._folder} cannot be written: {error.strerror or error}; make space, or let us write"
            ) from None

    def _open(self) -> None:
        """The name is one that TensorBoard looks for; another life of the coordinator has another file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(self._folder / name, "xb")  # noqa: SIM115  # the next coordinator begins another
        self._writer = self._make(self._file)
        settings = self._text("settings", 0, time.time(), f"```json\n{self._settings}\n```")
        for event in (self._event(wall_time=time.time(), file_version="brain.Event:2"), settings):
            self._writer.write(event.SerializeToString())

    # -- events -------------------------------------------------------------------------------------------

    def _readings(self, look: JobLook) -> list[Any]:
        """What is not finite is shown as such."""
        return [
            self._scalar(name, step, at, math.nan if value is None else value)
            for name, step, at, value in look.readings
            if self._scalars.lets_pass(name, at, 40 + len(name))
        ]

    def _job_figures(self, look: JobLook) -> list[Any]:
        figures = look.figures
        if not figures.seconds:
            return []
        return [
            self._scalar(f"syncline/{name}", figures.step, figures.at, float(getattr(figures, name)))
            for name in FIGURES
            if self._figures.lets_pass(name, figures.at, 80)
        ]

    def _shown(self, media: Sequence[ReportedMedia]) -> list[Any]:
        found = []
        for at, _, item in media:
            if not self._media.lets_pass(item.name, at, len(item.content)):
                continue
            if item.kind == "image":
                found.append(self._image(item.name, item.step, at, item.content))
            elif item.kind == "histogram":
                found.append(self._histogram(item.name, item.step, at, item.content))
            else:
                found.append(self._text(item.name, item.step, at, item.content.decode("utf-8", "replace")))
        return found

    def _scalar(self, name: str, step: int, at: float, value: float) -> Any:
        return self._one(step, at, tag=name, simple_value=value)

    def _image(self, name: str, step: int, at: float, png: bytes) -> Any:
        width, height, channels = size_of_png(png) or (0, 0, 0)
        image = self._summary.Summary.Image(width=width, height=height, colorspace=channels, encoded_image_string=png)
        return self._one(step, at, tag=name, image=image)

    def _histogram(self, name: str, step: int, at: float, content: bytes) -> Any:
        counts = counts_of(content)
        histogram = self._summary.HistogramProto(
            min=counts.low,
            max=counts.high,
            num=counts.num,
            sum=counts.sum,
            sum_squares=counts.sum_squares,
            bucket_limit=counts.edges[1:],
            bucket=counts.counts,
        )
        return self._one(step, at, tag=name, histo=histogram)

    def _text(self, name: str, step: int, at: float, text: str) -> Any:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        tensor = self._tensor(dtype=self._string, string_val=[text.encode()])
        tensor.tensor_shape.dim.add(size=1)
        metadata = self._summary.SummaryMetadata(plugin_data=plugin)
        return self._one(step, at, tag=f"{name}/text_summary", metadata=metadata, tensor=tensor)

    def _one(self, step: int, at: float, **value: Any) -> Any:
        summary = self._summary.Summary(value=[self._summary.Summary.Value(**value)])
        return self._event(step=step, wall_time=at, summary=summary)

    # -- the end ------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        """A file that could not be written is not gone on with: its last record may be half."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = self._writer = None

    def close(self, *, has_failed: bool) -> None:
        try:
            self._write_due()
        finally:
            self._drop()


def _bytes_in(folder: pathlib.Path) -> int:
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.glob("events.out.tfevents.*"))
    return 0
