"""Validations that all workers run together, and the checkpoint with the best reading."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import msgspec

from syncline.coordinator.job import JobContext, identity_of
from syncline.coordinator.metrics import MetricService, StopRules
from syncline.core.checkpoint.manifest import Manifest
from syncline.core.checkpoint.schedule import Checkpoint
from syncline.core.conditions import Best
from syncline.core.members import Member
from syncline.core.validation import BestSoFar, Validating, Validation, ValidationState, of_candidates
from syncline.core.wire.message import Done, Message
from syncline.core.wire.validation import (
    AVERAGE,
    MEAN,
    WEIGHTS,
    AskReading,
    AskValidationShard,
    Attend,
    Begin,
    Begun,
    Come,
    GivenReading,
    LocalCandidate,
    WriteCandidate,
    WrittenCandidate,
)
from syncline.errors import ConfigError, StoreError, SynclineError
from syncline.net.rpc import Endpoint, Request
from syncline.stats import Wait
from syncline.store import averaging, checkpoints
from syncline.store.averaging import WEIGHTS_FILE
from syncline.store.folders import open_folder

#: How often a save checks whether its validation was given up.
_POLL_SECONDS = 0.5


class BestCheckpoint:
    """Writes readings into the manifests of saves, and points `best` at the save with the best reading."""

    def __init__(self, job: JobContext, stop_rules: StopRules, metrics: MetricService) -> None:
        self._job, self._stop_rules, self._metrics = job, stop_rules, metrics
        # Of the job's lock: a save that waits sees no validation that has ended without its readings.
        self._change = threading.Condition(job.lock)
        self._over: dict[int, Validation] = {}  # validations that are over, by turn
        self._has_looked = False  # whether `_find_earlier_best` was called

    @property
    def _state(self) -> ValidationState:
        return self._job.membership.state.validations

    @property
    def _rule(self) -> Best | None:
        return self._stop_rules.rules.best if self._job.config.checkpoint else None

    @property
    def wants_save(self) -> bool:
        """Under the lock: whether each validation needs a save."""
        return self._rule is not None and bool(self._job.registry.layout.segments)

    def candidates(self) -> list[str]:
        """Under the lock: the models that are validated besides the job's parameters."""
        average = self._stop_rules.rules.average
        if not self.wants_save or average is None:
            return []
        return [AVERAGE] if average.decay else [MEAN] if self._state.mean else []

    @property
    def wants_local_candidates(self) -> bool:
        """Under the lock: with local steps, the model of each worker is a candidate."""
        return self.wants_save and self._job.config.steps_locally

    def mean_folder(self) -> str:
        """Under the lock: the folder of the mean of the last checkpoints."""
        return open_folder(self._job.config.checkpoint).join(self._state.mean).url

    # -- readings in manifests ----------------------------------------------------------------------------

    def add_validation(self, over: Validation) -> None:
        """Under the lock: this validation is over, and has its readings."""
        self._over = {over.turn: over}
        self._change.notify_all()

    def with_readings(self, manifest: Manifest, turn: int) -> Manifest:
        """In the save's thread: adds metrics and the rules' state. For a validation's save, waits until its end."""
        with self._job.lock:
            over = self._wait(turn) if turn else None
            values = over.all_values() if over is not None else self._reported()
            return msgspec.structs.replace(manifest, metrics=values, steering=self._stop_rules.for_manifest())

    def _reported(self) -> dict[str, float]:
        """Readings of validations are left out: they belong to other steps."""
        known = set(self._state.metrics)
        return {name: value for name, value in self._metrics.values().items() if name not in known}

    def _wait(self, turn: int) -> Validation | None:
        """Under the lock, which is released meanwhile. Returns None if the validation was given up."""
        while turn not in self._over and not self._job.over.is_set():
            now = self._state.now
            if self._state.called != turn and (now is None or now.turn != turn):
                break
            self._change.wait(_POLL_SECONDS)
        return self._over.get(turn)

    # -- choosing the best --------------------------------------------------------------------------------

    def consider(self, made: Checkpoint, manifest: Manifest) -> None:
        """In the save's thread: points `best` at this checkpoint if it is the best. Errors do not fail the save."""
        try:
            if (rule := self._rule) is not None:
                self._choose(rule, made, manifest)
        except SynclineError as error:
            self._job.event(f"{made.name} is saved, but was not compared with the best: {error}")

    def _choose(self, rule: Best, made: Checkpoint, manifest: Manifest) -> None:
        self._find_earlier_best(made.root, manifest.lineage, rule)
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
        self._write_mean(made.root, manifest.lineage)

    def _as_mean(self, best: BestSoFar, manifest: Manifest) -> BestSoFar:
        """The mean is a checkpoint of its own: writes its readings into its manifest."""
        folder = open_folder(best.root).join(self._state.mean)
        mean, _ = checkpoints.read_manifest(folder)
        values = {k.removeprefix(f"{MEAN}:"): v for k, v in manifest.metrics.items() if k.startswith(f"{MEAN}:")}
        checkpoints.write_manifest(folder, msgspec.structs.replace(mean, metrics=values))
        return msgspec.structs.replace(best, checkpoint=mean.name, step=mean.step)

    def _written_by(self, best: BestSoFar, manifest: Manifest) -> BestSoFar:
        """The model of one worker is the best: that worker writes it, as a checkpoint of weights only."""
        root, worker = open_folder(best.root), best.candidate
        number = checkpoints.next_number(root)
        folder = checkpoints.begin(root, number, manifest.step, manifest.lineage)
        try:
            with self._job.lock:
                endpoint = self._job.endpoints.get(worker)
            if endpoint is None:
                raise StoreError(f"{worker}, whose own model is the best so far ({best.told}), is gone")
            call = endpoint.call(WriteCandidate(max(self._over), folder.url, WEIGHTS_FILE))
            answer = call.wait(self._job.config.wait_seconds)
            if not isinstance(answer, WrittenCandidate):
                raise StoreError(f"{worker} answered {type(answer).__name__} to WriteCandidate")
            values = {k.removeprefix(f"{worker}:"): v for k, v in manifest.metrics.items()}
            values = {k: v for k, v in values.items() if f"{worker}:{k}" in manifest.metrics}
            made = averaging.weights_only(manifest, number, answer.file, values)
            checkpoints.write_manifest(folder, made)
        except BaseException:
            folder.remove_all()
            raise
        return msgspec.structs.replace(best, checkpoint=made.name)

    def _write_mean(self, root: str, lineage: str) -> None:
        """Writes the mean of the last checkpoints, for the next validation."""
        average = self._stop_rules.rules.average
        if average is None or not average.last:
            return
        folder = open_folder(root)
        chosen = averaging.last(folder, average.last, lineage)
        if len(chosen) == average.last:
            made = averaging.write_mean(folder, chosen)
            with self._job.lock:
                self._state.mean = made.name
                self._job.try_keep()

    def _point(self, best: BestSoFar) -> None:
        facts = {"metric": best.metric, "value": best.value, "step": best.step}
        if best.candidate == AVERAGE:
            facts["weights"] = best.candidate
        checkpoints.point(open_folder(best.root), "best", best.checkpoint, **facts)
        with self._job.lock:
            self._state.best = best
            self._job.try_keep()
        self._job.event(f"the best so far: {best.told}", "checkpoint")

    def _find_earlier_best(self, root: str, lineage: str, rule: Best) -> None:
        """Finds the best checkpoint from before the job was resumed, if it is of the same lineage."""
        if self._has_looked or self._state.best is not None:
            return
        self._has_looked = True
        folder = open_folder(root)
        fact = checkpoints.pointed(folder, "best")
        if fact is None or fact.get("metric") != rule.metric or not isinstance(fact.get("value"), int | float):
            return
        try:
            manifest, _ = checkpoints.read_manifest(folder.join(fact["checkpoint"]))
        except StoreError as error:
            self._job.event(f"{root}/best cannot be read: {error}")
            return
        if manifest.lineage == lineage:
            candidate = str(fact.get("weights", WEIGHTS))
            self._state.best = BestSoFar(
                rule.metric, float(fact["value"]), manifest.name, manifest.step, candidate, root
            )

    def report_at_end(self) -> None:
        """Under the lock, at the end of the job."""
        if self._rule is not None and self._state.best is None:
            with contextlib.suppress(StoreError):
                self._find_earlier_best(
                    open_folder(self._job.config.checkpoint).url, self._job.membership.state.saves.lineage, self._rule
                )
        if self._state.best is not None:
            self._job.final_event(f"best {self._state.best.told}")
        elif self._rule is not None and self._job.membership.formed:
            self._job.event(f"--best {self._rule.metric}: no checkpoint has a value of this metric")


class ValidationService:
    """The validations of a job, under the job's lock. `core/validation` decides; this class keeps and sends."""

    def __init__(
        self,
        job: JobContext,
        metrics: MetricService,
        best: BestCheckpoint,
        save: Callable[[int, Callable[[], None]], None],
    ) -> None:
        """`save`: starts a save for a validation; calls the given function when the workers may go on."""
        self._job, self._metrics, self._best, self._save = job, metrics, best, save
        self._told: dict[str, tuple[Endpoint, int]] = {}  # which turn a worker was called to, over which connection
        self._present: dict[str, tuple[Request, float]] = {}  # workers that have come, and since when they wait
        self._ready: dict[str, tuple[Request, int]] = {}  # workers that have pulled, and wait until all have
        self._waiting: dict[str, tuple[Request, int]] = {}  # workers that wait for readings
        self._readings: dict[int, dict[str, float]] = {}  # of validations that are over, by turn
        self._snapshot: tuple[int, bool] = (0, False)  # the turn of the last save, and whether its snapshot is taken

    @property
    def _core(self) -> Validating:
        return Validating(self._job.membership.state.validations)

    # -- calling ------------------------------------------------------------------------------------------

    def propose(self, request: Request, message: Come) -> None:
        """A worker has reached a step at which a validation is due. All workers are called to it."""
        with self._job.lock:
            before = self._core.called()
            try:
                called = self._core.come(message.step, message.due, message.epoch)
            except ConfigError as error:
                request.refuse(error)
                return
            if called.turn != before.turn:
                self._job.try_keep()
                self.announce()
        request.reply(called)

    def announce(self) -> None:
        """Tells the call to each worker that has not heard it over its current connection."""
        with self._job.lock:
            called = self._core.called()
            if not called.turn or not self._job.membership.formed:
                return
            for name in self._job.membership.workers():
                endpoint = self._job.endpoints.get(name)
                if endpoint is not None and self._told.get(name) != (endpoint, called.turn):
                    endpoint.mention(called)
                    self._told[name] = (endpoint, called.turn)

    # -- the start ----------------------------------------------------------------------------------------

    def attend(self, request: Request, message: Attend) -> None:
        """A worker has come to the validation. Replies when it starts."""
        with self._job.lock:
            state, name = self._core.state, request.peer.name
            if message.turn != state.called:
                request.reply(Done())  # it is over, or has started without this worker
                return
            self._present[name] = (request, time.monotonic())
        self.start_if_complete()

    def start_if_complete(self) -> None:
        """Starts the validation when all workers are there and the snapshot for its save is taken."""
        with self._job.lock:
            state, missing = self._core.state, self._missing()
            if not state.called or not self._present or missing or not self._is_snapshot_taken(state.called):
                return
            members = self._job.membership.state.members
            lives = [(name, members[name].incarnation) for name in self._present if name in members]
            now = self._core.begin(state.called, state.step, lives, [WEIGHTS, *self._best.candidates()])
            now.awaited = sorted(now.inside) if self._best.wants_local_candidates else []
            now.folder = self._best.mean_folder() if MEAN in now.candidates else ""
            self._readings = {}
            self._job.try_keep()
            present, self._present = self._present, {}
        for request, _ in present.values():
            request.reply(Done())

    def _missing(self) -> list[str]:
        return [name for name in self._job.barrier_workers() if name not in self._present]

    def _is_snapshot_taken(self, turn: int) -> bool:
        """Asks once for the save of this validation, if one is wanted. True when the workers may go on."""
        if self._snapshot[0] != turn:
            self._snapshot = (turn, not self._best.wants_save)
            if self._best.wants_save:
                self._save(turn, self._released(turn))
        return self._snapshot[1]

    def _released(self, turn: int) -> Callable[[], None]:
        """Returns the function to call when the snapshot is taken, or was given up."""

        def release() -> None:
            with self._job.lock:
                if self._snapshot[0] == turn:
                    self._snapshot = (turn, True)
            self.start_if_complete()

        return release

    def waits(self, now: float) -> list[Wait]:
        """Under the lock: for which workers the validation waits."""
        if not self._present or not self._missing():
            return []
        since = min(at for _, at in self._present.values())
        return [Wait("", self._core.state.called, self._missing(), now - since, "the validation")]

    # -- a validation in progress -------------------------------------------------------------------------

    def has_pulled(self, request: Request, message: Begin) -> None:
        """A worker has the parameters. Replies when all have them."""
        owner = identity_of(request)
        with self._job.lock:
            if self._core.of(message.turn, owner) is None:
                request.reply(Begun(message.step))
                return
            self._core.pulled(message.turn, owner, message.step)
            self._ready[owner[0]] = (request, message.turn)
        self._advance()

    def ask_shard(self, request: Request, message: AskValidationShard) -> None:
        """Replies with the next validation shard. It is kept first, and so is the result that came with the
        request."""
        with self._job.lock:
            core = self._core
            try:
                given = core.ask(identity_of(request), message)
            except ConfigError as error:
                request.refuse(error)
                return
            if given.validation_shard or message.validation_shard:
                self._job.try_keep()
        request.reply(given)
        self._advance()

    def add_local_candidate(self, request: Request, message: LocalCandidate) -> None:
        """A worker has validated its own model."""
        with self._job.lock:
            self._core.said_own(message.turn, identity_of(request), message.set, message.values)
        request.reply(Done())
        self._advance()

    def ask_reading(self, request: Request, message: AskReading) -> None:
        """Replies with the readings when the validation is over, or tells the worker that there is more to do."""
        owner = identity_of(request)
        with self._job.lock:
            now = self._core.of(message.turn, owner)
            if now is None or not message.waits:
                if now is not None:
                    now.out(owner)
                    self._job.try_keep()
                request.reply(GivenReading(True, self._readings.get(message.turn, {})))
            else:
                self._waiting[owner[0]] = (request, message.turn)
        self._advance()

    def member_is_out(self, member: Member) -> None:
        """This life of a worker is over."""
        owner = (member.name, member.incarnation)
        with self._job.lock:
            self._told.pop(owner[0], None)
            self._ready.pop(owner[0], None)
            self._waiting.pop(owner[0], None)
            self._present.pop(owner[0], None)
            now = self._core.state.now
            if now is None or not now.out(owner):
                return
        self._advance()

    def _advance(self) -> None:
        """Something has changed: ends the validation if it is complete, and replies to the workers that wait."""
        with self._job.lock:
            now = self._core.state.now
            started = self._started(now)
            over = self._core.end()
            if over is not None:
                self._finish(over)
            elif (lost := self._core.give_up()) is not None:
                self._give_up(lost)
            answers: list[tuple[Request, Message]] = []
            for name, (request, turn) in list(self._waiting.items()):
                still = now if over is None and now is not None and now.turn == turn else None
                if still is None or still.has_more:
                    del self._waiting[name]
                    answers.append((request, GivenReading(still is None, self._readings.get(turn, {}))))
        for request, answer in [*started, *answers]:
            request.reply(answer)

    def _started(self, now: Validation | None) -> list[tuple[Request, Message]]:
        """Replies for workers that wait: all have the parameters now, or the validation was given up."""
        found: list[tuple[Request, Message]] = []
        for name, (request, turn) in list(self._ready.items()):
            if now is None or now.turn != turn:
                found.append((request, Begun(0)))
            elif not now.absent:
                found.append((request, Begun(now.step, now.sets, now.candidates, now.folder)))
            else:
                continue
            del self._ready[name]
        return found

    def _finish(self, over: Validation) -> None:
        """The stop rules see the readings before any worker goes on."""
        values = over.values()
        self._readings = {over.turn: values}
        self._job.try_keep()
        self._job.event(f"validation at step {over.step}: {over.told}", "validation")
        self._metrics.add_merged(values, over.step, over.errors())
        self._best.add_validation(over)

    def _give_up(self, lost: Validation) -> None:
        self._readings = {}
        self._job.event(
            f"the validation at step {lost.step} was given up: no worker left has its parameters; it is repeated"
        )
        self._job.try_keep()
        self.announce()
