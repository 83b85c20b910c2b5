"""`job.report`: sends a worker's metrics to the coordinator, and receives what the job's rules decide: to stop
training, or to change the learning rate.
"""

from __future__ import annotations

import collections
import difflib
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from syncline.config import JobConfig
from syncline.core.conditions import METRIC
from syncline.core.media import Histogram, Image, Text
from syncline.core.metrics import MOST_METRICS, Metrics, Steer, rounding_error
from syncline.core.rule import Option
from syncline.core.wire.message import Message
from syncline.errors import ConfigError, SynclineError
from syncline.net.link import Link
from syncline.net.rpc import Call
from syncline.worker.media import MediaReports


class RuleSignals:
    """The rules' decisions. Set by any thread, read by the script's."""

    def __init__(self) -> None:
        self._steer = Steer()
        self._lock = threading.Lock()

    def hear(self, steer: Steer) -> None:
        """Takes a decision; an outdated one has no effect."""
        with self._lock:
            if steer.number > self._steer.number:
                self._steer = steer

    @property
    def stop(self) -> str:
        """Why training ends; empty while it goes on."""
        return self._steer.stop

    @property
    def factor(self) -> float:
        """The factor on every learning rate."""
        return self._steer.factor


def with_factor(
    changed: Mapping[str, Option], registered: Mapping[str, Option], factor: float
) -> Mapping[str, Option]:
    """Hyperparameters that differ from the registered ones, when learning rates are multiplied by a factor."""
    rate = changed.get("lr", registered.get("lr"))
    if factor == 1.0 or not isinstance(rate, int | float):
        return changed
    return {**changed, "lr": rate * factor}


#: Reports kept while the coordinator is away; beyond this, the oldest are dropped.
MOST_OPEN = 10_000
#: The longest name of a metric.
MOST_LETTERS = 200


class MeasuredJob(Protocol):
    """What the reports need of the job."""

    name: str
    config: JobConfig

    @property
    def step(self) -> int: ...
    @property
    def samples_taken(self) -> int: ...
    def ask(self, message: Message, /) -> Message: ...


class Measures:
    """The metrics of one job. Reporting does not wait. Reports lost with a coordinator are resent in order."""

    def __init__(self, job: MeasuredJob, link: Link, signals: RuleSignals, say: Callable[[str], None]) -> None:
        self._job, self._link, self._signals, self._say = job, link, signals, say
        self._lock = threading.RLock()
        self._number = 0
        self._open: collections.deque[Metrics] = collections.deque(maxlen=MOST_OPEN)  # unanswered
        self._is_broken = False  # a reply was lost: resend all open reports
        self._taken: dict[str, int] = {}  # metric -> samples of this worker at its last report
        self._noted: set[str] = set()
        self._is_full = False  # and that was said
        self._media = MediaReports(link, say)
        self._has_reached = False

    # -- reporting ----------------------------------------------------------------------------------------

    def report(self, values: Mapping[str, Any], *, weight: float | None = None) -> None:
        """Reports values, weighted by the samples since the last report or by `weight`."""
        media = {_named(name): value for name, value in values.items() if isinstance(value, Image | Histogram | Text)}
        if media:
            self._media.report(media, self._job.step)
        known = {name: self._checked(name, value) for name, value in values.items() if name not in media}
        known = {name: number for name, number in known.items() if self._has_room(name)}
        if not known:
            return
        if weight is not None and not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"job.report: weight = {weight}: it must be a number from 0 on")
        taken = self._job.samples_taken
        errors = {name: error for name, number in known.items() if (error := rounding_error(values[name], number))}
        weighted = {}
        for name, value in known.items():
            since = max(1, taken - self._taken.get(name, 0))
            weighted[name] = (value, float(since) if weight is None else weight)
            self._taken[name] = taken
        with self._lock:
            self._number += 1
            self._open.append(message := Metrics(self._number, weighted, self._job.step, False, errors))
            if not self._is_broken:
                self._send(message)
        self.flush()

    def report_whole(self, values: Mapping[str, float]) -> None:
        """Readings of the whole job, merged already. When this returns, the rules have seen them everywhere."""
        self.flush()
        with self._lock:
            self._number += 1
            message = Metrics(self._number, {n: (v, 1.0) for n, v in values.items()}, self._job.step, True)
        self._hear(self._job.ask(message))

    def flush(self) -> None:
        """Resends lost reports in order, and sends media that had to wait."""
        self._media.flush()
        with self._lock:
            if not self._is_broken or not self._link.is_open:
                return
            self._is_broken = False
            for message in list(self._open):
                if self._is_broken:
                    return
                self._send(message)

    def finish(self) -> None:
        """Sends what is open, at the end of the job."""
        self.flush()
        self._media.flush(is_end=True)

    def _send(self, message: Metrics) -> None:
        try:
            self._link.try_call(message, self._answered_to(message))
        except SynclineError:
            self._is_broken = True

    def _answered_to(self, message: Metrics) -> Callable[[Call], None]:
        def answered(call: Call) -> None:
            try:
                self._hear(call.wait(0))
            except SynclineError:
                with self._lock:
                    self._is_broken = True
                return
            with self._lock:
                if message in self._open:
                    self._open.remove(message)

        return answered

    def _hear(self, answer: object) -> None:
        if isinstance(answer, Steer):
            self._signals.hear(answer)

    # -- what can be reported -----------------------------------------------------------------------------

    def _has_room(self, name: str) -> bool:
        """Whether this name is one of those that are reported. The first one that is not is told."""
        if name in self._taken:
            return True
        if len(self._taken) < MOST_METRICS:
            self._taken[name] = 0
            return True
        if not self._is_full:
            self._is_full = True
            near = difflib.get_close_matches(name, self._taken, n=1)
            hint = f"; {near[0]!r} is one of them" if near else ""
            self._say(
                f"{self._job.name} has reported {MOST_METRICS:,} metrics: {name!r} and all further names are left "
                f"out; give few, fixed names{hint}"
            )
        return False

    def _checked(self, name: str, value: Any) -> float:
        _named(name)
        number = _number(name, value)
        if not math.isfinite(number) and name not in self._noted:
            self._noted.add(name)
            self._say(f"{self._job.name} reports {name} = {number} at step {self._job.step}: left out of the mean")
        return number

    # -- the end of training ------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Whether a rule has ended training. Each worker checks `--max-steps` itself and tells the others."""
        if self._signals.stop:
            return True
        most = self._job.config.max_steps
        if not most or self._job.step < most:
            return self._has_reached
        if not self._has_reached:
            self._has_reached = True
            with self._lock:
                self._number += 1
                message = Metrics(self._number, {}, self._job.step)
            self._hear(self._job.ask(message))
        return True

    @property
    def stopped_by(self) -> str:
        """Which rule it was, on what value."""
        return self._signals.stop or f"--max-steps {self._job.config.max_steps}: step {self._job.step}"


def _named(name: str) -> str:
    if not METRIC.fullmatch(name) or len(name) > MOST_LETTERS:
        raise ConfigError(
            f"job.report: {name[:MOST_LETTERS]!r} is not a name for a metric: letters, digits, '_', '-' and '/', "
            f"and a letter or '_' first; at most {MOST_LETTERS}"
        )
    return name


def _number(name: str, value: Any) -> float:
    """Numbers, and scalars of NumPy, torch and others."""
    if value is None or isinstance(value, str | bytes):
        remedy = "; report words as syncline.Text" if isinstance(value, str) else ""
        raise ConfigError(f"job.report: {name} = {value!r:.100}: it must be a number{remedy}")
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        shape = getattr(value, "shape", None)
        what = f"{type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
        raise ConfigError(
            f"job.report: {name} is a {what}: it must be one number, e.g. its .mean(), or "
            "syncline.Histogram or syncline.Image of it"
        ) from None
