"""What a worker waits for, and where the time of its steps goes.

`StepClock` measures every step with a few clock readings. `Waits` records longer waits of the script's thread;
heartbeats report them, and the user is told the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

from syncline.core.tracing import BACKWARD, DATA, FORWARD, MicroBatch, SpanBuffer
from syncline.errors import SynclineError
from syncline.stats import StageSpan, StepTimes, Wait

PHASES = ("compute", "stage", "wait", "pull")  #: of the worker; the first ones of all that are traced


class StepClock:
    """Measures laps: each assigns the time since the last one to a phase. Belongs to the thread that uses the
    exchange.

    compute: the script's own work. stage: gradients into the arena and to the servers. wait: for answers. pull: new
    parameters into place.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._last: float | None = None
        self._reading: tuple[float, float] | None = None  # since when the loader reads, and `wait` then
        self._data_seconds = 0.0
        self.num_steps, self.steps_per_push = 0, 1
        self.measured = (0, 0.0)  #: samples of all steps so far, and their working time

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._seconds[phase] += now - self._last
        self._last = now

    def pause(self) -> None:
        """The time until the next lap is not part of a step: a rest, a barrier, a registration."""
        self._last = None

    def begins_reading(self) -> None:
        """The script asks its loader for a batch."""
        self._reading = (time.perf_counter(), self._seconds["wait"])

    def has_read(self) -> None:
        """The script gets its batch. What it waited for others meanwhile, for samples, is not the loader's."""
        if self._reading is not None:
            began, waited = self._reading
            passed = time.perf_counter() - began - (self._seconds["wait"] - waited)
            self._data_seconds, self._reading = self._data_seconds + max(0.0, passed), None

    def resume(self) -> None:
        """A step begins here, after a rest, a barrier or a registration."""
        self._last = time.perf_counter()

    @property
    def work_seconds(self) -> float:
        """Time spent on steps, without waits for others."""
        seconds = self._seconds
        return seconds["compute"] + seconds["stage"] + seconds["pull"]

    def computed_in_stages(self, spans: Sequence[StageSpan]) -> None:
        """A pipeline has made these forwards and backwards; their times are of `time.perf_counter`."""

    def made_step(self, samples: int) -> None:
        """Counts a step; `samples`: total so far. Samples and seconds are updated together."""
        self.num_steps += 1
        self.measured = (samples, self.work_seconds)

    def times(self) -> StepTimes:
        return StepTimes(
            num_steps=self.num_steps, steps_per_push=self.steps_per_push, data=self._data_seconds, **self._seconds
        )


class TracingClock(StepClock):
    """Also keeps each lap as a span, with `--trace`."""

    def __init__(self, spans: SpanBuffer, step: Callable[[str], int]) -> None:
        """`step`: the number of the step that a phase which ends now belongs to."""
        super().__init__()
        self._spans, self._step = spans, step

    def lap(self, phase: str) -> None:
        began = self._last
        super().lap(phase)
        if began is not None and self._last is not None:
            self._spans.add(PHASES.index(phase), self._step(phase), began, self._last)

    def has_read(self) -> None:
        reading = self._reading
        super().has_read()
        # Where it waited for others meanwhile, laps lie between: the span would lie across them.
        if reading is not None and self._last is not None and self._last <= reading[0]:
            self._spans.add(DATA, self._step("compute"), reading[0], time.perf_counter())

    def computed_in_stages(self, spans: Sequence[StageSpan]) -> None:
        step = self._step("compute")
        for span in spans:
            micro_batch = MicroBatch(span.stage, span.part, span.micro_batch)
            phase = FORWARD if span.kind == "F" else BACKWARD
            self._spans.add(phase, step, span.begin, span.end, micro_batch=micro_batch)


class ValidationCalled(Exception):  # no error
    """Raised out of a wait. `answer` attends the validation and returns after it."""

    def __init__(self, answer: Callable[[], None]) -> None:
        super().__init__("a validation is called")
        self.answer = answer


#: A wait is reported after this time, and again after every further `AGAIN_SECONDS`.
LOUD_SECONDS, AGAIN_SECONDS = 1.0, 10.0


@dataclasses.dataclass(slots=True)
class CurrentWait:
    """One wait of the script's thread."""

    what: str  # step, pull, barrier, registration
    step: int
    began: float
    servers: Callable[[], Sequence[str]]  # servers that have not answered
    asked: float | None = None
    loud_seconds: float = 0.0  # more than usual
    why: Callable[[], str] | None = None  # the reason, if known here

    @property
    def text(self) -> str:
        return f"step {self.step}" if self.what == "step" else self.what


class Waits:
    """The current wait. Set by the script's thread; other threads read it without a lock."""

    def __init__(
        self, name: str, ask: Callable[[int, Sequence[str]], str], ask_servers: Callable[[], str],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`ask` asks the coordinator for the reason, `ask_servers` the servers."""
        self._name, self._ask, self._ask_servers, self._say = name, ask, ask_servers, say
        self.now: CurrentWait | None = None  #: what the script waits for

    @contextlib.contextmanager
    def of(
        self, what: str, *, step: int = 0, began: float | None = None, servers: Callable[[], Sequence[str]] = list,
        loud_seconds: float = 0.0, why: Callable[[], str] | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """Context of a wait. `why`: returns the reason, if the caller knows it."""
        before = self.now
        self.now = CurrentWait(what, step, began or time.monotonic(), servers, loud_seconds=loud_seconds, why=why)
        try:
            yield
        finally:
            self.now = before

    def told(self) -> list[Wait]:
        """For heartbeats: the servers that do not answer, which only this worker knows."""
        now = self.now
        if now is None or now.what not in ("step", "pull"):
            return []
        seconds = time.monotonic() - now.began
        servers = list(now.servers()) if seconds >= LOUD_SECONDS else []
        return [Wait(self._name, now.step, servers, seconds, "server")] if servers else []

    def look(self) -> None:
        """Called periodically by another thread: reports the reason of a long wait."""
        now, moment = self.now, time.monotonic()
        if now is None or moment - now.began < max(LOUD_SECONDS, now.loud_seconds):
            return
        if now.asked is not None and moment - now.asked < AGAIN_SECONDS:
            return
        now.asked = moment
        reason = self._why(now)
        if self.now is now:  # it may be over by now
            self._say(reason)

    def _why(self, now: CurrentWait) -> str:
        if now.why is not None:
            return f"{now.text} has waited {time.monotonic() - now.began:.1f} s {now.why()}"
        with contextlib.suppress(SynclineError):
            reason = self._ask(now.step, list(now.servers()))
            if "has waited" in reason:
                return reason
        seconds = time.monotonic() - now.began
        told = self._ask_servers()  # empty before anything is registered
        return f"{now.text} has waited {seconds:.1f} s" + (f": {told}" if told else " for the coordinator's answer")
