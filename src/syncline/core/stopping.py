"""Stop rules: compares readings, steps and time with the rules of a job.

Pure: the state that survives the coordinator and goes into checkpoints is in `Steering`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from syncline.config import JobConfig
from syncline.core.conditions import (
    AllOf,
    Average,
    Best,
    Compare,
    Condition,
    OnPlateau,
    Plateau,
    leaves,
    parse_average,
    parse_best,
    parse_condition,
    parse_on_plateau,
)
from syncline.core.metrics import Reading, Steer
from syncline.core.units import duration
from syncline.errors import ConfigError

#: After this many readings of other metrics, metrics without any report are named.
MANY_READINGS = 100
#: What a fired rule does to the scripts.
NEXT = "loops over a DataLoader or job.steps end now; a step outside of them ends its script (syncline.Stopped)"


class Rules(msgspec.Struct, frozen=True):
    """All settings about stopping, the best and the average; validated."""

    stop: tuple[tuple[str, Condition], ...] = ()
    on_plateau: OnPlateau | None = None
    max_steps: int = 0
    max_time: str = ""  # as it was typed
    max_seconds: float = 0.0
    best: Best | None = None
    average: Average | None = None

    @property
    def metrics(self) -> dict[str, str]:
        """The metrics that are named, with the option that names each."""
        found = {self.best.metric: "--best"} if self.best is not None else {}
        found.update((leaf.metric, "--stop") for _, condition in self.stop for leaf in leaves(condition))
        return found

    @property
    def plateaus(self) -> dict[str, Plateau]:
        """By their keys."""
        found = (leaf for _, condition in self.stop for leaf in leaves(condition))
        return {leaf.key: leaf for leaf in found if isinstance(leaf, Plateau)}


def rules_of(config: JobConfig) -> Rules:
    """The rules of these settings, or a ConfigError with the remedy."""
    rules = Rules(
        stop=tuple((text, parse_condition(text)) for text in config.stop),
        on_plateau=parse_on_plateau(config.on_plateau) if config.on_plateau else None,
        max_steps=config.max_steps,
        max_time=config.max_time,
        max_seconds=duration("--max-time", config.max_time, "90s, 30m, 2h") if config.max_time else 0.0,
        best=parse_best(config.best) if config.best else None,
        average=parse_average(config.average) if config.average else None,
    )
    if rules.on_plateau is not None and not rules.plateaus:
        raise ConfigError(
            f"--on-plateau {config.on_plateau!r}: no --stop rule says what a plateau is; give one, e.g. "
            '--stop "loss.plateau(5)"'
        )
    return rules


class Stop(msgspec.Struct, frozen=True, array_like=True):
    """A fired rule: the option, the values, and the step."""

    rule: str
    told: str
    step: int = 0

    def __str__(self) -> str:
        return f"{self.rule}: {self.told}"


class PlateauCount(msgspec.Struct):
    """Readings in a row without an improvement."""

    best: float | None = None
    num_worse: int = 0


class Steering(msgspec.Struct):
    """The state of the stop rules: survives the coordinator, and goes into checkpoints."""

    plateaus: dict[str, PlateauCount] = {}
    factor: float = 1.0  # on every learning rate
    num_tries: int = 0  # attempts on a plateau so far
    number: int = 0  # of changes sent to workers
    stop: Stop | None = None
    seconds: float = 0.0  # training time so far, when last counted
    counted_at: float = 0.0  # wall clock
    untold: bool = True  # metrics without reports were not named yet

    @property
    def steer(self) -> Steer:
        return Steer(self.number, str(self.stop) if self.stop is not None else "", self.factor)


def from_checkpoint(data: Mapping[str, Any], seconds: float) -> Steering:
    """The state from a checkpoint. Rules fired by steps or time are evaluated again."""
    try:
        known = msgspec.convert(dict(data), Steering)
    except msgspec.ValidationError:
        known = Steering()
    factor = known.factor if math.isfinite(known.factor) and known.factor > 0 else 1.0
    return Steering(
        plateaus=known.plateaus,
        factor=factor,
        num_tries=known.num_tries,
        number=known.number + 1,
        stop=known.stop if known.stop is not None and known.stop.rule.startswith("--stop ") else None,
        seconds=seconds,
    )


class Stopping:
    """Decides. Methods that may decide return the decisions in words, or an empty list."""

    def __init__(self, rules: Rules, state: Steering) -> None:
        self.rules, self.state = rules, state

    def begin(self) -> None:
        """A rule fired before the job resumed counts if it is still a rule of the job."""
        stop = self.state.stop
        rules = {_flagged(text) for text, _ in self.rules.stop}
        if stop is not None and stop.rule.startswith("--stop ") and stop.rule not in rules:
            self.state.stop = None
            self.state.number += 1

    def take(self, fresh: Mapping[str, Reading], newest: Mapping[str, Reading], step: int) -> list[str]:
        """Takes new readings; `newest` has these and those of other metrics."""
        if self.state.stop is not None:
            return []
        for key, plateau in self.rules.plateaus.items():
            if plateau.metric in fresh:
                self._count(key, plateau, fresh[plateau.metric].value)
        for text, condition in self.rules.stop:
            if self._holds(condition, newest, with_plateaus=False):
                return [self._fire(_flagged(text), self._told(condition, newest), step)]
            if self._holds(condition, newest, with_plateaus=True):
                return [self._on_plateau(text, condition, newest, step)]
        return []

    def reach(self, step: int) -> list[str]:
        """The job has reached this step."""
        most = self.rules.max_steps
        if self.state.stop is not None or not most or step < most:
            return []
        return [self._fire(f"--max-steps {most}", f"step {step}", step)]

    def pass_time(self, seconds: float, step: int) -> list[str]:
        """The job has trained this long, including before it resumed."""
        most = self.rules.max_seconds
        if self.state.stop is not None or not most or seconds < most:
            return []
        return [self._fire(f"--max-time {self.rules.max_time}", f"trained {_seconds_told(seconds)}", step)]

    def unreported(self, reported: Collection[str]) -> list[str]:
        """A sentence for each metric that a rule needs and no worker has reported."""
        if self.state.stop is not None and not reported:
            return []  # it was stopped before it resumed
        there = f"reported are: {', '.join(sorted(reported))}" if reported else "nothing was reported: job.report(…)"
        found = []
        for name, flag in self.rules.metrics.items():
            if name not in reported:
                near = difflib.get_close_matches(name, reported, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                found.append(f"{flag}: no worker has reported {name!r}; {there}{hint}")
        return found

    def unmet(self, newest: Mapping[str, Reading]) -> list[str]:
        """At the end of a job that no rule has stopped: the last values of each rule."""
        found = []
        for text, condition in self.rules.stop if self.state.stop is None else ():
            words = {
                f"{leaf.metric} = {leaf.shown(reading.value, reading.error)}": None
                for leaf in leaves(condition)
                if isinstance(leaf, Compare)
                and (reading := newest.get(leaf.metric)) is not None
                and not leaf.holds(reading.value, reading.error)
            }
            if words:
                found.append(f"{_flagged(text)} did not fire: the last reading was {', '.join(words)}")
        return found

    # -- deciding -----------------------------------------------------------------------------------------

    def _count(self, key: str, plateau: Plateau, value: float) -> None:
        count = self.state.plateaus.setdefault(key, PlateauCount())
        gain = math.inf if count.best is None else (count.best - value) * (1 if plateau.is_less else -1)
        if math.isfinite(value) and gain > plateau.min_delta:
            count.best, count.num_worse = value, 0
        else:
            count.num_worse += 1

    def _holds(self, condition: Condition, newest: Mapping[str, Reading], *, with_plateaus: bool) -> bool:
        if isinstance(condition, Compare):
            reading = newest.get(condition.metric)
            return reading is not None and condition.holds(reading.value, reading.error)
        if isinstance(condition, Plateau):
            return with_plateaus and self._is_reached(condition)
        parts = (self._holds(part, newest, with_plateaus=with_plateaus) for part in condition.parts)
        return all(parts) if isinstance(condition, AllOf) else any(parts)

    def _is_reached(self, plateau: Plateau) -> bool:
        count = self.state.plateaus.get(plateau.key)
        return count is not None and count.num_worse >= plateau.num_readings

    def _on_plateau(self, text: str, condition: Condition, newest: Mapping[str, Reading], step: int) -> str:
        action, told = self.rules.on_plateau, self._told(condition, newest)
        if action is None or self.state.num_tries >= action.most_times:
            return self._fire(_flagged(text), told, step)
        self.state.num_tries += 1
        self.state.factor *= action.factor
        self.state.number += 1
        for leaf in leaves(condition):
            if isinstance(leaf, Plateau) and self._is_reached(leaf):
                self.state.plateaus[leaf.key].num_worse = 0
        times = f"time {self.state.num_tries} of {action.most_times}"
        return f"{text} ({told}): learning rates are multiplied by {self.state.factor:.4g} from now on, {times}"

    def _told(self, condition: Condition, newest: Mapping[str, Reading]) -> str:
        """The values of all conditions that hold, each once."""
        words: dict[str, None] = {}
        for leaf in leaves(condition):
            reading = newest.get(leaf.metric)
            if isinstance(leaf, Compare) and reading is not None and leaf.holds(reading.value, reading.error):
                words[f"{leaf.metric} = {leaf.shown(reading.value, reading.error)}"] = None
            elif isinstance(leaf, Plateau) and self._is_reached(leaf):
                value = f"{leaf.metric} = {reading.value:.6g}" if reading is not None else ""
                count = self.state.plateaus[leaf.key]
                best = f"best {count.best:.6g}, " if count.best is not None else ""
                words[f"{value} ({best}{count.num_worse} readings ago)"] = None
        return ", ".join(words)

    def _fire(self, rule: str, told: str, step: int) -> str:
        at = f" at step {step}" if step and not told.startswith("step ") else ""
        self.state.stop = Stop(rule, f"{told}{at}", step)
        self.state.number += 1
        return f"training stops by {self.state.stop}; {NEXT}"


def _flagged(text: str) -> str:
    return f"--stop {text!r}"


def _seconds_told(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("m", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g}{unit}"
    return f"{seconds:.3g}s"


def is_reported_late(num_readings: int, num_epochs: int) -> bool:
    """Whether everything that is ever reported has been reported once: reports after an epoch, as of an
    evaluation, have come by the end of the next one.
    """
    return num_epochs > 1 or num_readings >= MANY_READINGS
