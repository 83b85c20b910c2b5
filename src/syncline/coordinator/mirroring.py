"""The second copy of every checkpoint: made in the background, verified; its trouble is said and stops nothing."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from syncline.core.checkpoint.schedule import Checkpoint
from syncline.errors import StoreError
from syncline.store import checkpoints
from syncline.store.folders import open_folder
from syncline.store.mirror import copy_checkpoint

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator


class Mirroring:
    """One copy at a time, in a thread of its own; of those that wait only the newest is made."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._change = threading.Condition()
        self._next: Checkpoint | None = None
        self._is_busy = self._closed = False

    def wants(self, made: Checkpoint) -> None:
        """This checkpoint is to be copied, if there is a mirror."""
        if not self._c.config.checkpoint_mirror:
            return
        with self._change:
            self._next = made
            if not self._is_busy:
                self._is_busy = True
                threading.Thread(target=self._run, name="mirror", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Until everything is copied, for so long at most."""
        until = time.monotonic() + seconds
        with self._change:
            while self._is_busy and not self._closed and time.monotonic() < until:
                self._change.wait(0.1)

    def _run(self) -> None:
        while True:
            with self._change:
                made, self._next = self._next, None
                if made is None or self._closed:
                    self._is_busy = False
                    self._change.notify_all()
                    return
            self._copy(made)

    def _copy(self, made: Checkpoint) -> None:
        config = self._c.config
        try:
            source, target = open_folder(made.root), open_folder(config.checkpoint_mirror)
            copy_checkpoint(source, target, made.name)
            checkpoints.point(target, "last", made.name, step=made.step)
            best = checkpoints.pointed(source, "best")
            kept = {best["checkpoint"]} if best else set()
            if best:
                copy_checkpoint(source, target, best["checkpoint"])
                checkpoints.point(target, "best", **best)
            saves = self._c.membership.state.saves
            checkpoints.prune(target, config.keep, saves.lineage, kept, token=saves.token)
        except StoreError as error:
            self._c.event(f"{made.name} has no second copy: {error}; the job goes on")
        except Exception as error:  # a bug of ours costs the copy, not the job
            self._c.event(f"{made.name} has no second copy: {type(error).__name__}: {error}")

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
