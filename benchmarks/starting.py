"""The rows about starting: from the command to the end of the first step."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from benchmarks import first_step
from benchmarks.match import take_pairs
from benchmarks.row import Effort, NotMeasured, Reach, Row, Samples
from syncline.errors import JobFailed, WaitTimeout

START_SECONDS = 120.0
IMPORT_TORCH = ("-c", "import torch")
RUN = ("-m", "syncline", "run", "--name", "start", "-s", "1")
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


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


def seconds_to_first_step(command: Sequence[str], folder: str) -> float:
    """The script says when it was there, by the clock that all processes of this machine read."""
    began = time.monotonic()
    output = _run(command, folder)
    said = re.search(rf"^{re.escape(first_step.DONE)}([0-9.]+)$", output, re.MULTILINE)
    if said is None:
        raise JobFailed(f"{command[-1]} has not said when its first step was done: {output[-2000:].strip()}")
    return float(said[1]) - began


def seconds_to_run(words: Sequence[str], folder: str) -> float:
    began = time.monotonic()
    _run(words, folder)
    return time.monotonic() - began


def start(name: str, *, reach: Reach, reference: Sequence[str] = IMPORT_TORCH) -> Row:
    """`syncline run` until a tiny script has made its first step, beside a process that only loads torch."""

    def measure(effort: Effort) -> Samples:
        def take(side: str, script: str, folder: str) -> float:
            if side == "ours":
                return seconds_to_first_step([*RUN, "-w", "1", script], folder)
            return seconds_to_run(reference, folder)

        return _in_turns(take, effort)

    return Row(
        name=name,
        what="from syncline run -w 1 -s 1 to the end of the first step of a tiny torch script",
        reference='python -c "import torch"',
        reach=reach,
        measure=measure,
    )


def start_beside_plain(name: str, *, reach: Reach) -> Row:
    """`syncline run` until LeNet has made its first step, beside the same script under plain python."""

    def measure(effort: Effort) -> Samples:
        if not (EXAMPLES / "fashion_mnist.py").is_file():
            raise NotMeasured(f"there is no {EXAMPLES}/fashion_mnist.py")

        def take(side: str, script: str, folder: str) -> float:
            command = [*RUN, "-w", "2"] if side == "ours" else []
            return seconds_to_first_step([*command, script, str(EXAMPLES)], folder)

        return _in_turns(take, effort)

    return Row(
        name=name,
        what="from syncline run -w 2 -s 1 to the end of the first step of LeNet, data read",
        reference="the same script under plain python",
        reach=reach,
        measure=measure,
    )


def _in_turns(take: Callable[[str, str, str], float], effort: Effort) -> Samples:
    """`take`: of a side, with the path of a script and an empty folder."""
    with tempfile.TemporaryDirectory(prefix="syncline-") as folder:
        # Not from our own folder: a script's folder is where its imports are looked for first.
        script = shutil.copy(first_step.__file__, folder)
        return take_pairs(lambda side: take(side, script, folder), effort, time.monotonic())
