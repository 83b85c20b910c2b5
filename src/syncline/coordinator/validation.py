"""Validations at the coordinator: called, begun when all are there, shared out, and read."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import msgspec

from syncline.coordinator.job import JobContext
from syncline.coordinator.metrics import MetricService, StopRules
from syncline.core.checkpoint.manifest import Manifest
from syncline.core.checkpoint.schedule import Checkpoint
from syncline.core.conditions import Best
from syncline.core.members import Member
from syncline.core.slice_state import Identity
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

#: Between two looks whether a validation is over.
_LOOK_SECONDS = 0.5


class BestCheckpoint:
    """Readings go with saves: into their manifests, and into the choice of the best."""

    def __init__(self, job: JobContext, stop_rules: StopRules, metrics: MetricService) -> None:
        self._job, self._stop_rules, self._metrics = job, stop_rules, metrics
        self._change = threading.Condition()
        self._over: dict[int, Validation] = {}  # validations that are over, by their turns
        self._is_known = False  # whether the best of before the job was taken up was looked for

    @property
    def _state(self) -> ValidationState:
        return self._job.membership.state.validations

    @property
    def _rule(self) -> Best | None:
        return self._stop_rules.rules.best if self._job.config.checkpoint else None

    @property
    def wants_save(self) -> bool:
        """Under the lock: whether validations are saved."""
        return self._rule is not None and bool(self._job.registry.layout.segments)

    def candidates(self) -> list[str]:
        """Under the lock: what is validated besides the job's parameters."""
        average = self._stop_rules.rules.average
        if not self.wants_save or average is None:
            return []
        return [AVERAGE] if average.decay else [MEAN] if self._state.mean else []

    @property
    def wants_local_candidates(self) -> bool:
        """Under the lock: with local steps every worker's own model is a candidate."""
        return self.wants_save and self._job.config.sync_every > 1

    def mean_folder(self) -> str:
        """Under the lock: where the mean of the last checkpoints is."""
        return open_folder(self._job.config.checkpoint).join(self._state.mean).url

    # -- readings go into manifests -----------------------------------------------------------------------

    def add_validation(self, over: Validation) -> None:
        """Under the lock: these are its readings."""
        with self._change:
            self._over = {over.turn: over}
            self._change.notify_all()

    def with_readings(self, manifest: Manifest, turn: int) -> Manifest:
        """In the thread of a save: what the job's metrics and rules are. When it is a validation's: at its end."""
        over = self._wait(turn) if turn else None
        with self._job.lock:
            values = over.all_values() if over is not None else self._reported()
            return msgspec.structs.replace(manifest, metrics=values, steering=self._stop_rules.for_manifest())

    def _reported(self) -> dict[str, float]:
        """What is validated was so at other steps."""
        known = set(self._state.metrics)
        return {name: value for name, value in self._metrics.values().items() if name not in known}

    def _wait(self, turn: int) -> Validation | None:
        """None: it was given up."""
        with self._change:
            while turn not in self._over:
                now = self._state.now
                is_going_on = (now is not None and now.turn == turn) or self._state.called == turn
                if not is_going_on or self._job.over.is_set():
                    return self._over.get(turn)
                self._change.wait(_LOOK_SECONDS)
            return self._over[turn]

    # -- which is the best --------------------------------------------------------------------------------

    def consider(self, made: Checkpoint, manifest: Manifest) -> None:
        """In the thread of a save: a checkpoint exists; `best` points at it, if it is. No trouble here costs it."""
        try:
            if (rule := self._rule) is not None:
                self._judge(rule, made, manifest)
        except SynclineError as error:
            self._job.event(f"{made.name} is saved, but not looked at as the best: {error}")

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
            with self._job.lock:
                endpoint = self._job.endpoints.get(worker)
            if endpoint is None:
                raise StoreError(f"{worker}, whose own model is the best so far ({best.told}), is gone")
            call = endpoint.call(WriteCandidate(max(self._over), folder.url, WEIGHTS_FILE))
            answer = call.wait(self._job.config.wait_seconds)
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
        self._job.event(f"the best so far: {best.told}")

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
            self._job.event(f"{root}/best is not what it was: {error}")
            return
        if manifest.lineage == lineage:
            candidate = str(fact.get("weights", WEIGHTS))
            self._state.best = BestSoFar(
                rule.metric, float(fact["value"]), manifest.name, manifest.step, candidate, root
            )

    def report_at_end(self) -> None:
        """Under the lock: the job is over."""
        if self._rule is not None and self._state.best is None:
            with contextlib.suppress(StoreError):
                self._look_for_the_one_before(
                    open_folder(self._job.config.checkpoint).url, self._job.membership.state.saves.lineage, self._rule
                )
        if self._state.best is not None:
            self._job.final_event(f"best {self._state.best.told}")
        elif self._rule is not None and self._job.membership.formed:
            self._job.event(f"--best {self._rule.metric}: there is no checkpoint with such a reading")


class ValidationService:
    """All of a job. Everything here is under the coordinator's lock; what is decided is the core's."""

    def __init__(
        self,
        job: JobContext,
        metrics: MetricService,
        best: BestCheckpoint,
        save: Callable[[int, Callable[[], None]], None],
    ) -> None:
        self._job, self._metrics, self._best, self._save = job, metrics, best, save
        self._told: dict[str, tuple[Endpoint, int]] = {}  # which call a worker has heard, over which connection
        self._there: dict[str, tuple[Request, float]] = {}  # have come, and since when they wait for the others
        self._beginning: dict[str, tuple[Request, int]] = {}  # have the parameters, and wait until all have
        self._waiting: dict[str, tuple[Request, int]] = {}  # for readings
        self._readings: dict[int, dict[str, float]] = {}  # of those that are over, by their turns
        self._cut: tuple[int, bool] = (0, False)  # for which turn a save was asked for, and whether its cut is made

    @property
    def _core(self) -> Validating:
        return Validating(self._job.membership.state.validations)

    # -- calling ------------------------------------------------------------------------------------------

    def propose(self, request: Request, message: Come) -> None:
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
        """Whoever does not know of a call hears it: also a new life of a name, or one over a new connection."""
        with self._job.lock:
            called = self._core.called()
            if not called.turn or not self._job.membership.formed:
                return
            for name in self._job.membership.workers():
                endpoint = self._job.endpoints.get(name)
                if endpoint is not None and self._told.get(name) != (endpoint, called.turn):
                    endpoint.mention(called)
                    self._told[name] = (endpoint, called.turn)

    # -- coming together ----------------------------------------------------------------------------------

    def attend(self, request: Request, message: Attend) -> None:
        with self._job.lock:
            state, name = self._core.state, request.peer.name
            if message.turn != state.called:
                request.reply(Done())  # it is over, or began without this one; who asks again may be in it
                return
            self._there[name] = (request, time.monotonic())
        self.start_if_complete()

    def start_if_complete(self) -> None:
        """When all are there, and what they have in common is saved, it begins."""
        with self._job.lock:
            state, missing = self._core.state, self._missing()
            if not state.called or not self._there or missing or not self._is_saved(state.called):
                return
            members = self._job.membership.state.members
            lives = [(name, members[name].incarnation) for name in self._there if name in members]
            now = self._core.begin(state.called, state.step, lives, [WEIGHTS, *self._best.candidates()])
            now.awaited = sorted(now.inside) if self._best.wants_local_candidates else []
            now.folder = self._best.mean_folder() if MEAN in now.candidates else ""
            self._readings = {}
            self._job.try_keep()
            there, self._there = self._there, {}
        for request, _ in there.values():
            request.reply(Done())

    def _missing(self) -> list[str]:
        return [name for name in self._job.barrier_workers() if name not in self._there]

    def _is_saved(self, turn: int) -> bool:
        """All stand still: whether the cut of the save that goes with this validation is made, or not wanted."""
        if self._cut[0] != turn:
            self._cut = (turn, not self._best.wants_save)
            if self._best.wants_save:
                self._save(turn, self._released(turn))
        return self._cut[1]

    def _released(self, turn: int) -> Callable[[], None]:
        """To be called when the cut is made, or not to be had."""

        def release() -> None:
            with self._job.lock:
                if self._cut[0] == turn:
                    self._cut = (turn, True)
            self.start_if_complete()

        return release

    def waits(self, now: float) -> list[Wait]:
        """Under the lock: who waits for whom."""
        if not self._there or not self._missing():
            return []
        since = min(at for _, at in self._there.values())
        return [Wait("", self._core.state.called, self._missing(), now - since, "the validation")]

    # -- inside -------------------------------------------------------------------------------------------

    def has_pulled(self, request: Request, message: Begin) -> None:
        owner = _owner(request)
        with self._job.lock:
            if self._core.of(message.turn, owner) is None:
                request.reply(Begun(message.step))
                return
            self._core.pulled(message.turn, owner, message.step)
            self._beginning[owner[0]] = (request, message.turn)
        self._go_on()

    def ask_shard(self, request: Request, message: AskValidationShard) -> None:
        """What is said with it counts when it is kept, and not before; nor is a validation shard given that is
        not."""
        with self._job.lock:
            core = self._core
            try:
                given = core.ask(_owner(request), message)
            except ConfigError as error:
                request.refuse(error)
                return
            if given.validation_shard or message.validation_shard:
                self._job.try_keep()
        request.reply(given)
        self._go_on()

    def add_local_candidate(self, request: Request, message: LocalCandidate) -> None:
        with self._job.lock:
            self._core.said_own(message.turn, _owner(request), message.set, message.values)
        request.reply(Done())
        self._go_on()

    def ask_reading(self, request: Request, message: AskReading) -> None:
        owner = _owner(request)
        with self._job.lock:
            now = self._core.of(message.turn, owner)
            if now is None or not message.waits:
                if now is not None:
                    now.out(owner)
                    self._job.try_keep()
                request.reply(GivenReading(True, self._readings.get(message.turn, {})))
            else:
                self._waiting[owner[0]] = (request, message.turn)
        self._go_on()

    def member_is_out(self, member: Member) -> None:
        """This life of a worker is over."""
        owner = (member.name, member.incarnation)
        with self._job.lock:
            self._told.pop(owner[0], None)
            self._beginning.pop(owner[0], None)
            self._waiting.pop(owner[0], None)
            self._there.pop(owner[0], None)
            now = self._core.state.now
            if now is None or not now.out(owner):
                return
        self._go_on()

    def _go_on(self) -> None:
        """Whatever has changed: who is to hear of it."""
        with self._job.lock:
            now = self._core.state.now
            begun = self._begun(now)
            over = self._core.end()
            if over is not None:
                self._end(over)
            elif (lost := self._core.give_up()) is not None:
                self._give_up(lost)
            answers: list[tuple[Request, Message]] = []
            for name, (request, turn) in list(self._waiting.items()):
                still = now if over is None and now is not None and now.turn == turn else None
                if still is None or still.has_more:
                    del self._waiting[name]
                    answers.append((request, GivenReading(still is None, self._readings.get(turn, {}))))
        for request, answer in [*begun, *answers]:
            request.reply(answer)

    def _begun(self, now: Validation | None) -> list[tuple[Request, Message]]:
        """All have the parameters; or what they wait for is not to be."""
        found: list[tuple[Request, Message]] = []
        for name, (request, turn) in list(self._beginning.items()):
            if now is None or now.turn != turn:
                found.append((request, Begun(0)))
            elif not now.absent:
                found.append((request, Begun(now.step, now.sets, now.candidates, now.folder)))
            else:
                continue
            del self._beginning[name]
        return found

    def _end(self, over: Validation) -> None:
        """Rules have seen the readings before anybody goes on."""
        values = over.values()
        self._readings = {over.turn: values}
        self._job.try_keep()
        self._job.event(f"validation at step {over.step}: {over.told}")
        self._metrics.add_merged(values, over.step)
        self._best.add_validation(over)

    def _give_up(self, lost: Validation) -> None:
        self._readings = {}
        self._job.event(
            f"the validation at step {lost.step} was given up: no worker left has its parameters; it is repeated"
        )
        self._job.try_keep()
        self.announce()


def _owner(request: Request) -> Identity:
    return (request.peer.name, request.peer.incarnation)
