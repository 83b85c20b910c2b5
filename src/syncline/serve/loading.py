"""New versions: found, loaded beside the current one, tried, and switched to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from syncline.core.conditions import AllOf, Compare, Condition, Either, parse_condition
from syncline.errors import ConfigError, StoreError
from syncline.serve.datatypes import DATATYPES, Array, RequestError, TensorSpec, datatype_of
from syncline.serve.following import JobSource
from syncline.serve.model import LoadedModel, ModelFile, check_outputs
from syncline.serve.reading import Candidate, VersionSource, as_made
from syncline.serve.versions import VersionFacts, Versions

log = logging.getLogger("syncline.serve")

_END_SECONDS = 0.3


#: Digests of versions that were refused, which are remembered.
_MOST_REFUSED = 256
#: A version that fails for another reason than its own (a lack of memory) is tried so often.
_MOST_FAILURES = 2

T = TypeVar("T")


class VersionLoading:
    """Looks for versions at the source. Those that are new are brought in, or refused and never tried again."""

    def __init__(
        self,
        source: VersionSource | None,
        versions: Versions[Any],
        bring: Callable[[Candidate], None],
        *,
        refused: Iterable[str] = (),
    ) -> None:
        """`source`: None serves the model as it is made. `bring` raises StoreError for one that must not answer."""
        self._source, self._versions, self._bring = source, versions, bring
        self._refused = dict.fromkeys(refused)
        self._failures: dict[str, int] = {}  # of digests that are not refused yet
        self._num_loaded = 0
        self._lock = threading.Lock()

    def first(self, where: str) -> None:
        """Loads the first version that passes. StoreError if there is none. `where` the model is made."""
        if self._source is None:
            self._bring(as_made(where))
            return
        with self._lock:
            reasons = self._look()
        if self._versions.current is None:
            raise StoreError("; ".join(reasons[:3]) or "there is no version to serve")

    def say_loaded(self, version: VersionFacts, role: str) -> None:
        """Logs it; of a job that is followed, which gives a version every few seconds, the first one only."""
        level = logging.DEBUG if self._num_loaded and isinstance(self._source, JobSource) else logging.INFO
        log.log(level, "version %s (step %d, %s) is loaded: %s", version.name, version.step, version.where, role)
        self._num_loaded += 1

    def look(self) -> list[str]:
        """Looks for a new version; returns why others were refused."""
        if self._source is None:
            return []
        with self._lock:
            return self._look()

    def _look(self) -> list[str]:
        assert self._source is not None
        reasons: list[str] = []
        for candidate in self._source.look():
            current = self._versions.current
            if candidate.is_stand_in and current is not None:
                break
            if candidate.digest in self._refused:
                continue
            if not self._versions.is_wanted(candidate.digest):
                break  # what is preferred is here, or was left
            try:
                self._bring(candidate)
                break
            except Exception as error:
                is_refused = isinstance(error, StoreError | RequestError)
                if not is_refused and current is None:
                    raise
                words = str(error) if is_refused else f"{type(error).__name__}: {error}"
                is_refused = is_refused or self._has_failed_enough(candidate.digest)
                what = "is refused" if is_refused else "cannot be loaded, and is tried once more"
                reasons.append(f"version {candidate.name} {what}: {words}")
                log.warning("%s%s", reasons[-1], f"; version {current.name} goes on" if current is not None else "")
                if not is_refused:
                    break
                self._refused[candidate.digest] = None
                if len(self._refused) > _MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
        return reasons

    def _has_failed_enough(self, digest: str) -> bool:
        """Counts a failure. Reading a whole version again and again would cost more than it brings."""
        failures = self._failures.pop(digest, 0) + 1
        if failures >= _MOST_FAILURES:
            return True
        self._failures[digest] = failures
        if len(self._failures) > _MOST_REFUSED:
            del self._failures[next(iter(self._failures))]
        return False


class VersionTrial:
    """Tries a new version before it answers: on `example`, on recent requests, and by the guard."""

    def __init__(
        self,
        file: ModelFile,
        inputs: Sequence[TensorSpec],
        recent: Callable[[], Sequence[Mapping[str, Array]]],
        *,
        guard: str,
        warm_rows: Collection[int] = (),
    ) -> None:
        """`guard`: a condition on the metrics of `validate`; '': none. `warm_rows`: of batches that will come."""
        self._file, self._inputs, self._recent = file, inputs, recent
        self._warm_rows, self._is_warm = warm_rows, False
        self._guard = parse_guard(guard) if guard else None
        self._said = guard
        if self._guard is not None and not callable(file.validate):
            raise ConfigError(
                f"--guard needs a function `validate(predict)` beside {file.where} that returns metrics"
            )
        self.outputs: tuple[TensorSpec, ...] = ()  #: of the model, once one was tried

    def passed(self, load: Callable[[], LoadedModel], name: str, where: str, seconds: float) -> LoadedModel:
        """The loaded model. StoreError: this version must not answer. `seconds`: how long it may take to load, and
        then to be tried; 0.0: any time.
        """
        model = in_time(load, seconds, f"loading {where}")
        self._warm_up(where, model)
        in_time(lambda: self._run(name, where, model), seconds, f"the trial of {where}")
        return model

    def _warm_up(self, where: str, model: LoadedModel) -> None:
        """Once, of a model that compiles calls: has those of the example and of `warm_rows` compiled, which later
        versions use too. It takes as long as it takes, and says nothing about a version.
        """
        if self._is_warm or not self._file.compiles:
            return
        self._is_warm = True
        example = self._file.example(self._inputs)
        if example is None:
            return
        for num_rows in sorted({len(next(iter(example.values()))), *self._warm_rows}):
            try:
                model({key: np.repeat(array[:1], num_rows, axis=0) for key, array in example.items()})
            except Exception as error:  # the operator's code
                log.warning("%s fails on a batch of %d rows: %s; see --max-batch", where, num_rows, error)

    def _run(self, name: str, where: str, model: LoadedModel) -> None:
        """StoreError: this version must not answer."""
        tried = list(self._recent())
        example = self._file.example(self._inputs)
        if example is not None:
            tried.insert(0, example)
        for inputs in tried:
            self._try(where, model, inputs)
        if self._guard is not None:
            self._check_guard(name, where, model)

    def _try(self, where: str, model: LoadedModel, inputs: Mapping[str, Array]) -> None:
        num_rows = len(next(iter(inputs.values())))
        try:
            outputs = model(inputs)
            check_outputs(outputs, num_rows)
        except Exception as error:  # the operator's code
            raise StoreError(f"{where} fails on a request: {type(error).__name__}: {error}") from error
        for name, array in outputs.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise StoreError(f"{where} answers with NaN or Inf ({name!r})")
        if not self.outputs:
            self.outputs = tuple(
                TensorSpec(name, datatype_of(array.dtype) or "", (-1, *array.shape[1:]))
                for name, array in outputs.items()
            )

    def _check_guard(self, name: str, where: str, model: LoadedModel) -> None:
        assert self._guard is not None
        validate: Any = self._file.validate
        try:
            metrics = {
                str(metric): float(value) for metric, value in dict(validate(_predict(model, self._inputs))).items()
            }
        except Exception as error:  # the operator's code
            raise StoreError(f"{where}: validate failed: {type(error).__name__}: {error}") from error
        told = ", ".join(f"{metric} {value:.6g}" for metric, value in metrics.items())
        if not _holds(self._guard, metrics):
            raise StoreError(f"{where} does not pass --guard {self._said!r}: it has {told or 'no metrics'}")
        log.info("version %s passes --guard %s: %s", name, self._said, told)


def in_time(function: Callable[[], T], seconds: float, what: str) -> T:
    """What it returns or raises; StoreError if it needs longer. Then its thread is left alone. 0.0: any time."""
    if not seconds:
        return function()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # of the operator's code; raised in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="syncline serve trial", daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    if not errors:
        raise StoreError(f"{what} did not end within {seconds:g} s (--trial-timeout)")
    if isinstance(errors[0], Exception):
        raise errors[0]
    raise StoreError(f"{what} ended with {type(errors[0]).__name__}") from errors[0]


def keep_looking(source: VersionSource | None, look: Callable[[], object], seconds: float) -> Callable[[], None]:
    """Looks for new versions every `seconds`, and when a followed job ends. Returns what ends it."""
    if source is None or not seconds:
        return lambda: None
    refresher = Refresher(look, seconds)
    if isinstance(source, JobSource):
        source.call_at_end(refresher.hurry)
    refresher.start()
    return refresher.close


class Refresher:
    """Looks for new versions again and again, in a thread of its own."""

    def __init__(self, look: Callable[[], object], seconds: float) -> None:
        self._look, self._seconds = look, seconds
        self._wake = threading.Event()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="syncline serve versions", daemon=True)
        self._said = ""

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """The next look comes at once."""
        self._wake.set()

    def close(self) -> None:
        """A version that is being loaded is not waited for long."""
        self._has_ended = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while True:
            self._wake.wait(self._seconds)
            self._wake.clear()
            if self._has_ended:
                return
            try:
                self._look()
                self._said = ""
            except Exception as error:  # the operator's code, or a folder that is away for a while
                words = f"{type(error).__name__}: {error}"
                if words != self._said:
                    log.warning("no new version can be looked for (%s); the current one goes on", words)
                self._said = words


def parse_guard(text: str) -> Condition:
    """Comparisons, joined by `and` and `or`."""
    condition = parse_condition(text, "--guard")
    if not _is_comparisons(condition):
        raise ConfigError(f"--guard {text!r}: only comparisons can be said of one version, e.g. accuracy>=0.85")
    return condition


def _is_comparisons(condition: Condition) -> bool:
    if isinstance(condition, AllOf | Either):
        return all(map(_is_comparisons, condition.parts))
    return isinstance(condition, Compare)


def _holds(condition: Condition, metrics: Mapping[str, float]) -> bool:
    """A metric that is missing never holds."""
    if isinstance(condition, AllOf):
        return all(_holds(part, metrics) for part in condition.parts)
    if isinstance(condition, Either):
        return any(_holds(part, metrics) for part in condition.parts)
    assert isinstance(condition, Compare)
    return condition.metric in metrics and condition.holds(metrics[condition.metric])


def _predict(model: LoadedModel, specs: Sequence[TensorSpec]) -> Callable[..., Any]:
    """The model as `validate` calls it: with the rows of its one input, or a dict of inputs by name.

    Returns the rows of its one output, or a dict of outputs.
    """

    def predict(inputs: Any) -> Any:
        given = inputs if isinstance(inputs, Mapping) else {specs[0].name: inputs}
        outputs = model({spec.name: np.asarray(given[spec.name], DATATYPES[spec.datatype]) for spec in specs})
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    return predict
