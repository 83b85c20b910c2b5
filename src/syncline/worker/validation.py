"""`job.validate`: at a boundary all workers meet, read the same parameters, and share the validation set.

With local steps, a worker's own model before it is averaged is a candidate for the best model too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from syncline.config import JobConfig
from syncline.core.conditions import METRIC
from syncline.core.layout import ITEM_BYTES, Segment, Slice
from syncline.core.metrics import rounding_error
from syncline.core.units import Interval, interval
from syncline.core.wire.message import Message
from syncline.core.wire.validation import (
    OWN,
    AskReading,
    AskValidationShard,
    Attend,
    Begin,
    Begun,
    Called,
    Come,
    GivenReading,
    GivenValidationShard,
    LocalCandidate,
    WriteCandidate,
    WrittenCandidate,
)
from syncline.errors import ConfigError, StoreError, SynclineError
from syncline.net.rpc import Request
from syncline.store.averaging import plan_of
from syncline.store.folders import open_folder
from syncline.store.tensors import TensorWriter
from syncline.worker import arrays
from syncline.worker.arrays import Array, Bytes
from syncline.worker.checkpoint import rng_state
from syncline.worker.checkpoint.boundary import Boundary
from syncline.worker.exchange.servers import ServersExchange
from syncline.worker.kv import KeyValue
from syncline.worker.waits import ValidationCalled


class Model(Protocol):
    """An adapter's model in this worker, as validation uses it."""

    def pull(self, *, average: bool) -> None:
        """Pulls the job's parameters, and the servers' running average of the same version if `average` is set."""

    def having(self, candidate: str, folder: str) -> contextlib.AbstractContextManager[None]:
        """Context with the weights of this candidate; `folder`: where a candidate on disk lies."""

    def forget(self) -> None:
        """Drops everything but the parameters."""

    def note_own(self) -> None:
        """With local steps: notes this worker's weights before they are averaged."""

    def own(self) -> dict[str, Array]:
        """The noted weights by their names in the job, or the current ones if none were noted."""

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Context in evaluation mode."""


class ValidatingJob(Protocol):
    """What validations need of a job."""

    name: str
    config: JobConfig
    exchange: ServersExchange
    kv: KeyValue
    boundary: Boundary
    own_step: int

    @property
    def in_rounds(self) -> bool: ...
    @property
    def step(self) -> int: ...
    @property
    def is_chief(self) -> bool: ...
    @property
    def known_device(self) -> str: ...
    def ask(self, message: Message, meanwhile: Callable[[], None] = ..., /) -> Message: ...
    def send_all(self) -> None: ...
    def catch_up(self) -> None: ...


class LocalCandidates:
    """Local models, noted at every averaging. Those of the last validation are kept until the best is known."""

    def __init__(self, job: ValidatingJob) -> None:
        self._job = job
        config = job.config
        self.is_wanted = config.steps_locally and bool(config.best and config.checkpoint)
        self._kept: tuple[int, dict[str, Array]] = (0, {})

    def keep(self, turn: int, models: list[Model]) -> None:
        """Keeps what is validated now, with the state that all workers share, in case it is the best."""
        found: dict[str, Array] = {}
        for model in models:
            found |= model.own()
        others = [name for name in self._job.exchange.layout.where if name not in found]
        self._kept = (turn, {**found, **(self._job.kv.pull(others) if others else {})})

    def write(self, request: Request) -> None:
        """Writes a candidate, in its own thread."""
        message = request.message
        assert isinstance(message, WriteCandidate)
        try:
            turn, values = self._kept
            if turn != message.turn:
                raise StoreError(f"{self._job.name} has its own model of validation {turn}, not of {message.turn}")
            request.reply(self._write(message, values))
        except SynclineError as error:
            request.refuse(error)
        except Exception as error:  # a full disk or a bug: the coordinator waits for a reply
            request.refuse(StoreError(f"{self._job.name}: {error}"))

    def _write(self, message: WriteCandidate, values: dict[str, Array]) -> WrittenCandidate:
        segments = list(self._job.exchange.layout.segments)
        writer = TensorWriter(open_folder(message.folder), message.file, plan_of(segments))
        try:
            for segment in segments:
                for part in segment.slices:
                    writer.write(f"slice-{part.id}", _slice_of(segment, part, values))
        except BaseException:
            writer.abandon()
            raise
        return WrittenCandidate(writer.finish())


def _slice_of(segment: Segment, part: Slice, values: dict[str, Array]) -> Bytes:
    found, size = np.zeros(part.num_bytes, np.uint8), ITEM_BYTES[part.dtype]
    for piece in segment.pieces(part):
        data = arrays.to_bytes(values[segment.parameters[piece.parameter].name])
        begin = piece.start * size
        found[piece.offset : piece.offset + piece.num_items * size] = data[begin : begin + piece.num_items * size]
    return found


#: In rounds: all workers validate this many steps after the due time.
AHEAD_STEPS = 2
#: In rounds: how often a worker that waits for others checks whether a round waits for it.
ASK_ROUND_SECONDS = 1.0
#: fn(batch) -> means over the batch, by name.
Measure = Callable[[Any], Mapping[str, Any]]
#: (data set, numbers of samples, collate function) -> a batch.
ReadSamples = Callable[[Any, Sequence[int], Any], Any]


class Validated:
    """A validation set of the job: what `job.validate` returns."""

    def __init__(
        self, name: str, measure: Measure, dataset: Any, every: Interval, batch_size: int, collate: Any,
        now: Callable[[Validated], None],
    ) -> None:  # fmt: skip
        self.name = name
        self.latest: dict[str, float] = {}  #: the newest readings known to this worker
        self.every, self.batch_size = every, batch_size
        self.measure, self.dataset, self.collate = measure, dataset, collate
        self.step = 0  # of the last validation
        self.at = time.monotonic()  # the time of the last validation
        self._now = now

    def now(self) -> dict[str, float]:
        """Validates now; all workers must call it. Returns the readings, cached if no step was made since."""
        self._now(self)
        return self.latest


class WorkerValidation:
    """All sets of a job, in one worker."""

    def __init__(self, job: ValidatingJob) -> None:
        self._job = job
        self._sets: dict[str, Validated] = {}
        self._called = Called(0)
        self._done = 0  # the last turn that this worker attended
        self._is_inside = False
        self._first_loader = ""  # of the training
        self._local = LocalCandidates(job)
        self.write_candidate = self._local.write  #: for the best checkpoint; slow
        self._models: list[Callable[[], Model | None]] = []
        self._kept: list[Model] = []  # a validation after the script's end still needs them
        self._read: ReadSamples = read_samples

    def add(
        self, fn: Measure, dataset: Any, every: str | int, batch_size: int, collate_fn: Any, name: str
    ) -> Validated:
        """Adds a validation set."""
        if name in self._sets or (name and not METRIC.fullmatch(name)):
            what = "there is one already" if name in self._sets else "it must be letters, digits, '_' and '-'"
            raise ConfigError(f"job.validate: name={name!r}: {what}; its metrics are reported as NAME/METRIC")
        if not hasattr(dataset, "__len__") or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "read")):
            raise ConfigError(
                f"job.validate: {type(dataset).__name__} has no samples by number, so workers cannot share it; give "
                "a data set with __len__ and __getitem__, or a source of syncline.data that is no shard source"
            )
        if len(dataset) == 0:
            raise ConfigError("job.validate: the data set is empty: there is nothing to validate on")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"job.validate: batch_size = {batch_size!r}: must be an int of at least 1")
        if isinstance(every, int) and not isinstance(every, bool):
            every = f"{every}steps"
        when = interval("job.validate: every =", str(every), epochs=True)
        found = Validated(name, fn, dataset, when, batch_size, collate_fn, self._now)
        self._sets[name] = found
        self._kept = self._known_models()
        return found

    def add_model(self, find: Callable[[], Model | None], read: ReadSamples) -> None:
        """An adapter has made a model. `find` returns it while it lives. `read`: reads batches for it."""
        self._read = read
        self._models.append(find)
        self._kept = self._known_models() if self._sets else []

    # -- when ---------------------------------------------------------------------------------------------

    def hear(self, called: Called) -> None:
        """Called in the thread that reads from the coordinator."""
        if called.turn > self._called.turn:
            self._called = called

    @property
    def is_called(self) -> bool:
        """Whether other workers wait for this one."""
        return self._called.turn > self._done and not self._is_inside

    def look_at_a_boundary(self) -> None:
        """Between two steps: takes part in a validation, if one is due."""
        if self._is_inside or not (self._sets or self._called.turn > self._done):
            return
        job = self._job
        if self.is_called and (not job.in_rounds or job.step >= self._called.step):
            self._enter({})
            return
        step = job.step
        due = {one.name: at for one in self._sets.values() if (at := _due_since(one, step))}
        if due:
            self._enter(due)
        elif job.is_chief and not self.is_called:
            self._look_at_the_clock(step)

    def _look_at_the_clock(self, step: int) -> None:
        """In rounds other workers may be in the next round already: schedules all for a later common step."""
        now = time.monotonic()
        due = {
            one.name: step
            for one in self._sets.values()
            if one.every.seconds and now - one.at >= one.every.seconds and step > one.step
        }
        if due and self._job.in_rounds:
            self._come(step + AHEAD_STEPS, due)
        elif due:
            self._enter(due)

    def before_average(self) -> None:
        """With local steps: notes this worker's model before averaging."""
        if self._local.is_wanted and self._sets:
            for model in self._known_models():
                model.note_own()

    def while_waiting(self) -> None:
        """Called while the script waits for workers that may wait for it."""
        if self.is_called:
            raise ValidationCalled(lambda: self._enter({}))

    def behind_epoch(self, loader: str, epoch: int) -> None:
        """The loop over an epoch has ended."""
        self._first_loader = self._first_loader or loader
        if loader == self._first_loader:
            self._enter_if_new((one for one in self._sets.values() if one.every.is_epoch), epoch)

    def finish(self) -> None:
        """The script has ended."""
        if self.is_called:
            self._enter({})
        if self._job.own_step:
            self._enter_if_new(iter(self._sets.values()))

    def _now(self, one: Validated) -> None:
        self._enter({one.name: max(1, self._job.step)})

    def _enter_if_new(self, some: Iterator[Validated], epoch: int = -1) -> None:
        step = self._job.step
        due = {one.name: step for one in some if step > one.step}
        if due and not self._is_inside:
            self._enter(due, epoch)

    # -- coming together ----------------------------------------------------------------------------------

    def _enter(self, due: dict[str, int], epoch: int = -1) -> None:
        job, self._is_inside = self._job, True
        try:
            job.send_all()
            if not due or self._come(job.step, due, epoch):
                self._attend(self._called.turn)
        finally:
            self._is_inside = False
            job.exchange.times.resume()  # not part of a step

    def _come(self, step: int, due: dict[str, int], epoch: int = -1) -> bool:
        """Whether there is a validation to attend."""
        answer = self._job.ask(Come(step, due, epoch))
        assert isinstance(answer, Called)
        self._note(answer.steps, answer.floor)
        self.hear(answer)
        return answer.turn > self._done

    def _note(self, steps: Mapping[str, int], floor: int) -> None:
        for one in self._sets.values():
            one.step = max(one.step, steps.get(one.name, floor))

    def _attend(self, turn: int) -> None:
        job = self._job
        if not job.in_rounds:
            job.exchange.rest(is_pause=True, if_active=True)  # no round should wait for it
        asked = time.monotonic()

        def rest_if_awaited() -> None:
            """Leaves the rounds if another worker waits for one with this worker, since it arrives only after that
            round. Other delays are no reason: leaving would make rounds differ from run to run.
            """
            nonlocal asked
            if time.monotonic() - asked > ASK_ROUND_SECONDS:
                job.exchange.rest(is_pause=True, if_active=True, if_awaited=True)
                asked = time.monotonic()

        with job.boundary.waiting():
            job.ask(Attend(turn), rest_if_awaited)
        self._done = turn
        for model in self._known_models():
            model.pull(average=job.config.average.startswith("ema"))
        begun = job.ask(Begin(turn, job.step))
        assert isinstance(begun, Begun)
        if begun.sets:
            self._note(dict.fromkeys(begun.sets, begun.step), 0)
            states = rng_state.take(job.known_device)
            try:
                if self._local.is_wanted:
                    self._local.keep(turn, list(self._known_models()))
                    self._validate_own(turn, begun)
                self._take_part(turn, begun)
            finally:
                rng_state.put_back(states, job.known_device)
        for model in self._known_models():
            model.forget()
        for name in begun.sets:
            if name in self._sets:
                self._sets[name].at = time.monotonic()
        if not job.in_rounds:
            job.catch_up()

    def _known_models(self) -> list[Model]:
        return [model for known in self._models if (model := known()) is not None]

    # -- taking part ---------------------------------------------------------------------------------------

    def _take_part(self, turn: int, begun: Begun) -> None:
        """Validates shards until all are done; outside of rounds, until the rest is assigned to others."""
        job = self._job
        while True:
            for candidate in begun.candidates:
                with self._prepared(candidate, begun.folder):
                    for name in begun.sets:
                        if name in self._sets:
                            self._run(turn, candidate, self._sets[name])
            waits = job.in_rounds and all(name in self._sets for name in begun.sets)
            answer = job.ask(AskReading(turn, waits))
            assert isinstance(answer, GivenReading)
            self._hear_readings(begun.sets, answer.values)
            if answer.is_over:
                return

    def _validate_own(self, turn: int, begun: Begun) -> None:
        """Validates this worker's local model on all samples."""
        with self._prepared(OWN, ""):
            for name in begun.sets:
                values: dict[str, float] = {}
                if name in self._sets:
                    one = self._sets[name]
                    size = len(one.dataset)
                    values = {key: total / size for key, total in self._measure(one, 0, size)[0].items()}
                self._job.ask(LocalCandidate(turn, name, values))

    @contextlib.contextmanager
    def _prepared(self, candidate: str, folder: str) -> Iterator[None]:
        """Context in which all models have this candidate's weights in evaluation mode."""
        with contextlib.ExitStack() as stack:
            for model in self._known_models():
                stack.enter_context(model.having(candidate, folder))
                stack.enter_context(model.evaluating())
            yield

    def _hear_readings(self, sets: Sequence[str], values: Mapping[str, float]) -> None:
        for name in sets:
            prefix = f"{name}/" if name else ""
            own = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
            if name in self._sets and own:
                self._sets[name].latest = own

    def _run(self, turn: int, candidate: str, one: Validated) -> None:
        question = AskValidationShard(turn, one.name, candidate, len(one.dataset), one.batch_size)
        given = self._job.ask(question)
        while isinstance(given, GivenValidationShard) and given.validation_shard:
            sums, errors = self._measure(one, given.begin, given.end)
            answer = AskValidationShard(
                turn, one.name, candidate, len(one.dataset), one.batch_size, given.validation_shard, sums, errors
            )
            given = self._job.ask(answer)

    def _measure(self, one: Validated, begin: int, end: int) -> tuple[dict[str, float], dict[str, float]]:
        """Sums over these samples, and their rounding errors."""
        sums: dict[str, float] = {}
        errors: dict[str, float] = {}
        for first in range(begin, end, one.batch_size):
            samples = range(first, min(first + one.batch_size, end))
            found = one.measure(self._read(one.dataset, samples, one.collate))
            if not isinstance(found, Mapping) or not found:
                raise ConfigError(
                    f"job.validate: fn returned {found!r:.80}: it must return a dict of means over the batch, e.g. "
                    '{"accuracy": 0.91}'
                )
            for name, value in found.items():
                number = number_of(name, value)
                sums[name] = sums.get(name, 0.0) + len(samples) * number
                errors[name] = errors.get(name, 0.0) + len(samples) * rounding_error(value, number)
        return sums, errors


def _due_since(one: Validated, step: int) -> int:
    """The step since which a set is due; 0 if it is not."""
    at = (one.step // one.every.steps + 1) * one.every.steps if one.every.steps else 0
    return at if step >= at else 0


def number_of(name: Any, value: Any) -> float:
    """Numbers, and scalars of NumPy, torch and others."""
    if not isinstance(name, str) or not METRIC.fullmatch(name):
        raise ConfigError(f"job.validate: {name!r:.80} is not a name for a metric: letters, digits, '_', '-' and '/'")
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        shape = getattr(value, "shape", None)
        what = type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
        raise ConfigError(
            f"job.validate: {name} is a {what}: it must be one number, the mean over the batch; e.g. .mean()"
        ) from None


def read_samples(dataset: Any, samples: Sequence[int], collate: Any) -> Any:
    """Reads a batch without an adapter: arrays of a source, else a list of samples."""
    if hasattr(dataset, "read"):
        batch = dataset.read(np.array(samples, dtype=np.int64))
    else:
        batch = [dataset[number] for number in samples]
    return collate(batch) if collate is not None else batch
