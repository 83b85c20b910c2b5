"""A job that pushes one parameter, as the tests of codecs do it."""

from __future__ import annotations

from typing import Any

import numpy as np

from syncline.core.rule import Rule
from syncline.worker.job import Job

SIZE = 20_000
SGD = Rule("SGD", lr=1.0)


def floats(*values: float, size: int = 8) -> Any:
    return np.resize(np.array(values, np.float32), size)


def register(job: Job, size: int = SIZE, **others: Any) -> None:
    job.kv.register({"x": np.zeros(size, np.float32), **others}, SGD)


def push(job: Job, **grads: Any) -> dict[str, Any]:
    found = job.kv.push_pull(grads).wait()
    assert found is not None
    return found


def residual_of(job: Job) -> Any:
    assert job.exchange.encoder is not None
    return job.exchange.encoder.take().get("x")
