"""Saves of a script's state without a coordinator that makes any: asked for over the coordinator's own connection."""

from __future__ import annotations

import pathlib
from typing import Any

from tests.patience import PATIENCE
from tests.store.made import make

from syncline.core.checkpoint.manifest import SavedScript
from syncline.core.wire.checkpoints import EndSave, Expect, GivenResume, WriteScript, WrittenScript
from syncline.net.rpc import Call, Endpoint
from syncline.store.folders import open_folder
from syncline.worker.job import Job

SECONDS = PATIENCE
NAME = "000001-step-10"  # of a checkpoint's folder


class Asker:
    """Speaks to one worker as the coordinator does."""

    def __init__(self, endpoint: Endpoint, worker: str = "worker-0") -> None:
        self.endpoint, self._worker = endpoint, worker

    def expect(self, number: int = 1) -> Call:
        return self.endpoint.call(Expect(number))

    def write(self, folder: pathlib.Path, clock: int, number: int = 1) -> Call:
        folder.mkdir(parents=True, exist_ok=True)
        return self.endpoint.call(WriteScript(number, clock, str(folder), f"{self._worker}.own.safetensors"))

    def written(self, folder: pathlib.Path, clock: int, number: int = 1) -> SavedScript:
        answer = self.write(folder, clock, number).wait(SECONDS)
        assert isinstance(answer, WrittenScript)
        return answer.script

    def end(self, number: int = 1) -> None:
        self.endpoint.tell(EndSave(number))


def finish(folder: pathlib.Path, *scripts: SavedScript) -> str:
    """The checkpoint exists."""
    return make(open_folder(str(folder.parent)), 1, scripts=scripts).digest


def resumes(job: Job, folder: pathlib.Path, digest: str) -> None:
    """As if this worker's job had begun with that checkpoint."""
    resumed_from: Any = job.checkpoints.resume
    resumed_from.ask = lambda message: GivenResume(str(folder), digest)
    resumed_from.is_known = resumed_from.is_over = False
    resumed_from.begin(job.state)
