"""What the tests see of a script: the samples of each step, a death at a chosen step, and the result.

Each script calls `stepped` behind each of its steps and `result` at its end. Without the variables below, `stepped`
does nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import signal
import time
from collections.abc import Mapping
from typing import Any

import torch

#: Folder in which each life of each worker notes its steps.
FOLDER = "SCRIPT_PROBE"
#: "worker-1@7": this worker kills itself behind its 7th step, in its first life only.
DIES = "SCRIPT_DIES"
#: Seconds of sleep behind each step: a worker that starts again finds the job still at work.
THINKS = "SCRIPT_THINKS"

_num_steps = 0


def stepped(job: Any, samples: torch.Tensor | None = None) -> None:
    """This worker has made a step, from these samples if they come from a data set."""
    global _num_steps
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    _num_steps += 1
    marks = [] if samples is None else samples.flatten(1).double().sum(1).tolist()
    with (pathlib.Path(folder) / f"{job.name}.{os.getpid()}").open("a") as file:
        file.write(json.dumps({"step": _num_steps, "job_step": job.step, "samples": marks}) + "\n")
    name, _, step = os.environ.get(DIES, "").partition("@")
    if name == job.name and _num_steps == int(step) and _is_first_life(pathlib.Path(folder), name):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(os.environ.get(THINKS, "0")))


def _is_first_life(folder: pathlib.Path, name: str) -> bool:
    return [path.name for path in folder.glob(f"{name}.*")] == [f"{name}.{os.getpid()}"]


def result(job: Any, metric: float, *models: torch.nn.Module, **more: float) -> None:
    """Prints the line that the tests read, by the chief only."""
    if job.is_chief:
        digest = hashlib.sha256()
        for model in models:
            for tensor in model.state_dict().values():
                digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        told: Mapping[str, Any] = {"steps": job.step, "metric": metric, "model": digest.hexdigest(), **more}
        print("RESULT " + json.dumps(told), flush=True)
