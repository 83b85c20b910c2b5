"""The Fashion-MNIST example with a loader of its own: `--slow NAME` takes four times as long for a step, `--auto`
cuts parts by speed. Started by test_slow_worker.py; further arguments are the example's."""

from __future__ import annotations

import argparse
import pathlib
import runpy
import sys
import time
from collections.abc import Iterator
from typing import Any

import syncline.torch
from syncline.worker.current import current_job

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/fashion_mnist.py"

parser = argparse.ArgumentParser()
parser.add_argument("--slow", default="")
parser.add_argument("--auto", action="store_true")
ours, others = parser.parse_known_args()


class SlowLoader(syncline.torch.DataLoader[Any]):
    """Sleeps three times as long as this worker has worked for its last step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, batch="auto" if ours.auto else "")

    def __iter__(self) -> Iterator[Any]:
        job, slept = current_job(), 0.0
        before = job.exchange.times.work_seconds
        for batch in super().__iter__():
            yield batch
            if job.name == ours.slow:
                after = job.exchange.times.work_seconds
                work, before = after - before - slept, after
                slept = 3 * max(0.0, work)
                time.sleep(slept)


syncline.torch.DataLoader = SlowLoader  # type: ignore[misc]
sys.argv = [str(EXAMPLE), *others]
runpy.run_path(str(EXAMPLE), run_name="__main__")
