"""The row about starting: from the command to the end of the first step."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks import first_step
from benchmarks.match import take_pairs
from benchmarks.row import Effort, Reach, Row, Samples
from syncline.errors import JobFailed, WaitTimeout

START_SECONDS = 120.0
IMPORT_TORCH = ("-c", "import torch")


def _run(words: Sequence[str], folder: str) -> str:
    """A whole Python process, in a folder where no syncline.toml changes what is measured; its output."""
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise WaitTimeout(f"python {' '.join(words)} has run for {START_SECONDS:g} s") from None
    output = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        last = output[-2000:].strip()
        raise JobFailed(f"python {' '.join(words)} ended with exit code {done.returncode}: {last}")
    return output


def seconds_to_first_step(script: str, folder: str) -> float:
    """The script says when it was there, by the clock that all processes of this machine read."""
    began = time.monotonic()
    output = _run(["-m", "syncline", "run", "-w", "1", "-s", "1", "--name", "start", script], folder)
    said = re.search(rf"^{re.escape(first_step.DONE)}([0-9.]+)$", output, re.MULTILINE)
    if said is None:
        raise JobFailed(f"{script} has not said when its first step was done: {output[-2000:].strip()}")
    return float(said[1]) - began


def seconds_to_run(words: Sequence[str], folder: str) -> float:
    began = time.monotonic()
    _run(words, folder)
    return time.monotonic() - began


def start(name: str, *, reach: Reach, script: str = "", reference: Sequence[str] = IMPORT_TORCH) -> Row:
    """`syncline run` until a tiny script has made its first step, beside a process that only loads torch."""

    def measure(effort: Effort) -> Samples:
        with tempfile.TemporaryDirectory(prefix="syncline-") as folder:
            # Not from our own folder: a script's folder is where its imports are looked for first.
            path = shutil.copy(script or first_step.__file__, folder)

            def take(side: str) -> float:
                return seconds_to_first_step(path, folder) if side == "ours" else seconds_to_run(reference, folder)

            return take_pairs(take, effort, time.monotonic())

    return Row(
        name=name,
        what="from syncline run -w 1 -s 1 to the end of the first step of a tiny torch script",
        reference='python -c "import torch"',
        reach=reach,
        measure=measure,
    )
