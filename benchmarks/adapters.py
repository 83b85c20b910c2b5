"""Rows about adapters: what a step of each framework costs beyond its own loop, beside the same with torch.

Each side is a job that runs with the Python of its own environment (tools/setup_frameworks.sh). A worker measures the
step of the job, and the same step with the framework's own optimizer and without a job; the figure is the difference.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys

from benchmarks.match import play
from benchmarks.row import Effort, NotMeasured, Reach, Row, Samples
from benchmarks.sides import ROOT, RunSide
from benchmarks.task import Task

#: Small batches: the less the frameworks compute, the less their own ups and downs hide what is measured.
WIDTHS, BATCH_SIZE = [784, 2048, 2048, 10], 8
#: Turns last so much longer: a difference needs more steps than a time.
LONGER = 5
#: Environments without torch: servers there compute with NumPy, which takes longer and is no cost of an adapter.
_WITHOUT_TORCH = {"tensorflow"}
#: For torch's side beside these: its server computes with NumPy too (see `numpy_server/sitecustomize.py`).
_NUMPY_SERVER = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks" / "numpy_server")])}
#: One thread for each worker, whatever computes; two workers share two cores.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def python_of(environment: str) -> pathlib.Path:
    """Its interpreter; the environment may be made or not."""
    placed = os.environ.get("SYNCLINE_ENVIRONMENTS")
    folder = pathlib.Path(placed) / environment if placed else ROOT / f".venv-{environment}"
    return folder / "bin" / "python"


def beside_torch(name: str, framework: str, *, environment: str, backend: str = "", reach: Reach) -> Row:
    """The adapter of a framework, beside syncline.torch. `backend`: Keras' own."""

    numpy_server = _NUMPY_SERVER if environment in _WITHOUT_TORCH else {}

    def side(framework: str, python: str, which: str, given: dict[str, str]) -> RunSide:
        task = Task(kind=framework, widths=WIDTHS, num_threads=1)
        return RunSide(
            "adapter_worker", task, python=python, workers=2, side=which, environment={**_ONE_THREAD, **given}
        )

    def measure(effort: Effort) -> Samples:
        python = python_of(environment)
        if not python.exists():
            raise NotMeasured(f"needs its environment: sh tools/setup_frameworks.sh {environment}")
        longer = dataclasses.replace(effort, turn_seconds=effort.turn_seconds * LONGER)
        ours = side(framework, str(python), "ours", {"KERAS_BACKEND": backend} if backend else {})
        return play(ours, side("torch", sys.executable, "reference", numpy_server), longer)

    by_framework = {"keras": f"Keras on {backend}", "jax-rule": "JAX with a rule", "jax-optax": "JAX with optax.sgd"}
    model = f"MLP {'-'.join(map(str, WIDTHS))} batch {BATCH_SIZE}, SGD"
    return Row(
        name=name,
        what=f"{by_framework[framework]}: {model}, 2 workers sync: time added to a step",
        reference="the same with torch" + (", its server with NumPy too" if numpy_server else ""),
        reach=reach,
        measure=measure,
    )
