"""Folders of runs that have ended, made as a recorder makes them."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import msgspec

from syncline.config import JobConfig
from syncline.core.series import point
from syncline.stats import Event, JobFigures, JobLook, JobVerdict, MemberFigures
from syncline.store.lines import EVENTS, METRICS, LinesWriter
from syncline.store.series import WHOLE, SeriesWriter

BEGAN = 1_700_000_000.0
NASTY = "</script><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"


def make_run(
    folder: pathlib.Path, *, num_steps: int = 100, metrics: tuple[str, ...] = ("loss",), text: str = "worker-1 died",
    rate: float = 0.01, **settings: Any,
) -> pathlib.Path:  # fmt: skip
    """A run of two workers and a server; a worker dies at half of its steps. `rate`: how fast the metrics fall."""
    folder.mkdir(parents=True)
    config = JobConfig(name=folder.name, **{"workers": 2, **settings})
    members = (
        MemberFigures(name="server-0", role="server", host="a", apply=0.001, num_rounds=3),
        MemberFigures(name="worker-0", role="worker", host="a", step=num_steps),
        MemberFigures(name="worker-1", role="worker", host="b", step=num_steps),
    )
    look = JobLook(
        number=9,
        figures=JobFigures(
            at=BEGAN + num_steps, step=num_steps, seconds=float(num_steps), members=members,
            staleness_counts=(5, 3, 1), verdict="all workers have finished",
        ),
        verdicts=(JobVerdict(kind="straggler", subject="worker-1", text=f"slow: {text}", advice="look at it"),),
    )  # fmt: skip
    series, lines = SeriesWriter(folder / "series.db"), LinesWriter(folder / METRICS, 1 << 22)
    for step in range(1, num_steps + 1):
        at = BEGAN + step
        values = {name: math.exp(-rate * step) * (k + 1) for k, name in enumerate(metrics)}
        row = {
            "step": float(step), "steps_per_second": 1.0, "samples_per_second": 64.0, "num_workers": 2.0,
            "num_servers": 1.0, "memory_bytes": 1e8 + 1e6 * step, "cores": 1.5, "sent_per_second": 1e6,
            "received_per_second": 2e6, "compute": 0.6, "data": 0.1, "stage": 0.1, "wait": 0.2, "pull": 0.1,
            "apply": 0.05,
        }  # fmt: skip
        worker = {k: row[k] for k in ("compute", "data", "stage", "wait", "pull", "cores", "memory_bytes")}
        series.write(
            at,
            {WHOLE: row, "worker-0": worker, "worker-1": worker, "server-0": {"apply": 0.05, "cores": 0.1}},
            [(name, point(step, at, value)) for name, value in values.items()],
            {"look": msgspec.json.encode(look), "settings": msgspec.json.encode(config)},
        )
        lines.write([{"at": at, "step": step, "metrics": values}])
        if step % 10 == 0:
            lines.write([{"at": at, "step": step, "job": row}])
    series.finish()
    series.close()
    lines.close()
    events = LinesWriter(folder / EVENTS, 1 << 22)
    kinds = [(0, "join", "the job has formed"), (num_steps // 2, "death", text), (num_steps, "end", "it has ended")]
    events.write(
        Event(number=k, at=BEGAN + step, step=step, kind=kind, text=said)
        for k, (step, kind, said) in enumerate(kinds, 1)
    )
    events.close()
    return folder
