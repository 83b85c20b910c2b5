"""The best model: every validation is saved, and the pointer `best` says which save has the best reading."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from syncline.core.checkpoint.manifest import Manifest
from syncline.core.checkpoint.schedule import Checkpoint
from syncline.core.conditions import Best
from syncline.core.validation import BestSoFar, Validation, ValidationState, of_candidates
from syncline.core.wire.validation import AVERAGE, MEAN, WEIGHTS, WriteCandidate, WrittenCandidate
from syncline.errors import StoreError, SynclineError
from syncline.store import averaging, checkpoints
from syncline.store.averaging import WEIGHTS_FILE
from syncline.store.folders import open_folder

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator

#: Between two looks whether a validation is over.
_LOOK_SECONDS = 0.5


class Bests:
    """Readings go with saves: into their manifests, and into the choice of the best."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._change = threading.Condition()
        self._over: dict[int, Validation] = {}  # validations that are over, by their turns
        self._is_known = False  # whether the best of before the job was taken up was looked for

    @property
    def _state(self) -> ValidationState:
        return self._c.membership.state.validations

    @property
    def _rule(self) -> Best | None:
        return self._c.stopping.rules.best if self._c.config.checkpoint else None

    @property
    def wants_save(self) -> bool:
        """Under the lock: whether validations are saved."""
        return self._rule is not None and bool(self._c.registry.layout.segments)

    def save(self, turn: int, release: Callable[[], None]) -> None:
        """Under the lock: all workers stand still for a validation; `release`: once the cut is made."""
        self._c.saving.save_validated(turn, release)

    def candidates(self) -> list[str]:
        """Under the lock: what is validated besides the job's parameters."""
        average = self._c.stopping.rules.average
        if not self.wants_save or average is None:
            return []
        return [AVERAGE] if average.decay else [MEAN] if self._state.mean else []

    @property
    def wants_own(self) -> bool:
        """Under the lock: with local steps every worker's own model is a candidate."""
        return self.wants_save and self._c.config.sync_every > 1

    def mean_folder(self) -> str:
        """Under the lock: where the mean of the last checkpoints is."""
        return open_folder(self._c.config.checkpoint).join(self._state.mean).url

    # -- readings go into manifests -----------------------------------------------------------------------

    def validated(self, over: Validation) -> None:
        """Under the lock: these are its readings."""
        with self._change:
            self._over = {over.turn: over}
            self._change.notify_all()

    def with_readings(self, manifest: Manifest, turn: int) -> Manifest:
        """In the thread of a save: what the job's metrics and rules are. When it is a validation's: at its end."""
        over = self._wait(turn) if turn else None
        with self._c.lock:
            values = over.all_values() if over is not None else self._reported()
            return msgspec.structs.replace(manifest, metrics=values, steering=self._c.stopping.saved())

    def _reported(self) -> dict[str, float]:
        """What is validated was so at other steps."""
        known = set(self._state.metrics)
        return {name: value for name, value in self._c.readings.values().items() if name not in known}

    def _wait(self, turn: int) -> Validation | None:
        """None: it was given up."""
        with self._change:
            while turn not in self._over:
                now = self._state.now
                is_going_on = (now is not None and now.turn == turn) or self._state.called == turn
                if not is_going_on or self._c.over.is_set():
                    return self._over.get(turn)
                self._change.wait(_LOOK_SECONDS)
            return self._over[turn]

    # -- which is the best --------------------------------------------------------------------------------

    def judge(self, made: Checkpoint, manifest: Manifest) -> None:
        """In the thread of a save: a checkpoint exists; `best` points at it, if it is. No trouble here costs it."""
        try:
            if (rule := self._rule) is not None:
                self._judge(rule, made, manifest)
        except SynclineError as error:
            self._c.event(f"{made.name} is saved, but not looked at as the best: {error}")

    def _judge(self, rule: Best, made: Checkpoint, manifest: Manifest) -> None:
        self._look_for_the_one_before(made.root, manifest.lineage, rule)
        best = known = self._state.best
        for candidate, value in of_candidates(manifest.metrics, rule.metric).items():
            if rule.is_better(value, best.value if best is not None else None):
                best = BestSoFar(rule.metric, value, made.name, made.step, candidate, made.root)
        if best is not None and best is not known:
            if best.candidate == MEAN:
                best = self._as_mean(best, manifest)
            elif best.candidate not in (WEIGHTS, AVERAGE):
                best = self._written_by(best, manifest)
            self._point(best)
        self._make_mean(made.root, manifest.lineage)

    def _as_mean(self, best: BestSoFar, manifest: Manifest) -> BestSoFar:
        """The mean is a checkpoint of its own, which gets its readings now."""
        folder = open_folder(best.root).join(self._state.mean)
        mean, _ = checkpoints.read_manifest(folder)
        values = {k.removeprefix(f"{MEAN}:"): v for k, v in manifest.metrics.items() if k.startswith(f"{MEAN}:")}
        checkpoints.write_manifest(folder, msgspec.structs.replace(mean, metrics=values))
        return msgspec.structs.replace(best, checkpoint=mean.name, step=mean.step)

    def _written_by(self, best: BestSoFar, manifest: Manifest) -> BestSoFar:
        """A worker's own model is the best: it writes it, as a checkpoint of weights only."""
        root, worker = open_folder(best.root), best.candidate
        number = checkpoints.next_number(root)
        folder = checkpoints.begin(root, number, manifest.step, manifest.lineage)
        try:
            with self._c.lock:
                endpoint = self._c.endpoints.get(worker)
            if endpoint is None:
                raise StoreError(f"{worker}, whose own model is the best so far ({best.told}), is gone")
            call = endpoint.call(WriteCandidate(max(self._over), folder.url, WEIGHTS_FILE))
            answer = call.wait(self._c.config.wait_seconds)
            if not isinstance(answer, WrittenCandidate):
                raise StoreError(f"{worker} answered {type(answer).__name__} to WriteOwn")
            values = {k.removeprefix(f"{worker}:"): v for k, v in manifest.metrics.items()}
            values = {k: v for k, v in values.items() if f"{worker}:{k}" in manifest.metrics}
            made = averaging.weights_only(manifest, number, answer.file, values)
            checkpoints.write_manifest(folder, made)
        except BaseException:
            folder.remove_all()
            raise
        return msgspec.structs.replace(best, checkpoint=made.name)

    def _make_mean(self, root: str, lineage: str) -> None:
        """Of the last checkpoints, for the next validation."""
        average = self._c.stopping.rules.average
        if average is None or not average.last:
            return
        folder = open_folder(root)
        chosen = averaging.last(folder, average.last, lineage)
        if len(chosen) == average.last:
            made = averaging.write_mean(folder, chosen)
            with self._c.lock:
                self._state.mean = made.name
                self._c.try_keep()

    def _point(self, best: BestSoFar) -> None:
        facts = {"metric": best.metric, "value": best.value, "step": best.step}
        if best.candidate == AVERAGE:
            facts["weights"] = best.candidate
        checkpoints.point(open_folder(best.root), "best", best.checkpoint, **facts)
        with self._c.lock:
            self._state.best = best
            self._c.try_keep()
        self._c.event(f"the best so far: {best.told}")

    def _look_for_the_one_before(self, root: str, lineage: str, rule: Best) -> None:
        """Of the same lineage, in a job that was taken up."""
        if self._is_known or self._state.best is not None:
            return
        self._is_known = True
        folder = open_folder(root)
        fact = checkpoints.pointed(folder, "best")
        if fact is None or fact.get("metric") != rule.metric or not isinstance(fact.get("value"), int | float):
            return
        try:
            manifest, _ = checkpoints.read_manifest(folder.join(fact["checkpoint"]))
        except StoreError as error:
            self._c.event(f"{root}/best is not what it was: {error}")
            return
        if manifest.lineage == lineage:
            candidate = str(fact.get("weights", WEIGHTS))
            self._state.best = BestSoFar(
                rule.metric, float(fact["value"]), manifest.name, manifest.step, candidate, root
            )

    def end(self) -> None:
        """Under the lock: the job is over."""
        if self._rule is not None and self._state.best is None:
            with contextlib.suppress(StoreError):
                self._look_for_the_one_before(
                    self._c.saving.recording.root, self._c.membership.state.saves.lineage, self._rule
                )
        if self._state.best is not None:
            self._c.last_word(f"best {self._state.best.told}")
        elif self._rule is not None and self._c.membership.formed:
            self._c.event(f"--best {self._rule.metric}: there is no checkpoint with such a reading")
