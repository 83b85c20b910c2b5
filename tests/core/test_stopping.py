"""Stop rules: which one fires, on what; plateaus, what is tried first, and what is remembered."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.config import resolve
from syncline.core.metrics import Reading, Steer
from syncline.core.stopping import NEXT, Rules, Steering, Stopping, from_checkpoint, is_reported_late, rules_of
from syncline.errors import ConfigError


def rules(**settings: Any) -> Rules:
    return rules_of(resolve(settings))


class Run:
    """Readings, one after the other, held against some rules."""

    def __init__(self, state: Steering | None = None, **settings: Any) -> None:
        self.stopping = Stopping(rules(**settings), state or Steering())
        self.newest: dict[str, Reading] = {}
        self.step = 0

    def read(self, **values: float) -> list[str]:
        self.step += 10
        fresh = {name: Reading(value, self.step) for name, value in values.items()}
        self.newest.update(fresh)
        return self.stopping.take(fresh, self.newest, self.step)

    @property
    def state(self) -> Steering:
        return self.stopping.state


def test_a_comparison_fires_once_and_says_on_what() -> None:
    run = Run(stop=("accuracy>=0.9",))
    assert run.read(accuracy=0.5) == [] and run.read(loss=7) == [] and run.state.steer == Steer()
    assert run.read(accuracy=0.91) == [
        f"training stops by --stop 'accuracy>=0.9': accuracy = 0.91 at step 30; {NEXT}"
    ]
    assert run.state.steer == Steer(1, "--stop 'accuracy>=0.9': accuracy = 0.91 at step 30", 1.0)
    assert run.read(accuracy=0.99) == [] and run.state.number == 1


def test_a_plateau_is_so_many_readings_without_a_better_one() -> None:
    run = Run(stop=("loss.plateau(3)",))
    for value in (5, 4, 4, 4.5, 3, 3, math.nan):
        assert run.read(loss=value) == []
    assert run.read(accuracy=1) == [], "a reading of something else is none of it"
    (event,) = run.read(loss=3.5)
    assert event == (
        f"training stops by --stop 'loss.plateau(3)': loss = 3.5 (best 3, 3 readings ago) at step 90; {NEXT}"
    )


def test_min_delta_and_direction() -> None:
    run = Run(stop=("accuracy.plateau(2, 0.1)",))
    assert [bool(run.read(accuracy=value)) for value in (0.5, 0.55, 0.61, 0.65, 0.7)] == [False] * 4 + [True]


def test_and_or_and_several_rules() -> None:
    both = Run(stop=("loss.plateau(2) and accuracy>=0.8",))
    assert not any(both.read(loss=1.0, accuracy=0.5) for _ in range(5))
    (event,) = both.read(accuracy=0.85)
    assert "loss = 1 (best 1, 4 readings ago), accuracy = 0.85" in event
    either = Run(stop=("loss<0.1", "accuracy>0.9 or f1>0.9"))
    assert either.read(loss=1, accuracy=0.1) == []
    assert "'accuracy>0.9 or f1>0.9': f1 = 0.95 at" in either.read(f1=0.95)[0]


def test_what_is_tried_first_resets_the_plateau() -> None:
    run = Run(stop=("loss.plateau(2)",), on_plateau="lr*0.1, at most 2 times")
    events = [run.read(loss=1.0) for _ in range(7)]
    assert [bool(event) for event in events] == [False, False, True, False, True, False, True]
    assert events[2] == [
        "loss.plateau(2) (loss = 1 (best 1, 2 readings ago)): learning rates are multiplied by 0.1 from now on, "
        "time 1 of 2"
    ]
    assert run.state.factor == pytest.approx(0.01) and run.state.steer.stop and run.state.number == 3


def test_a_rule_that_holds_without_its_plateau_stops_at_once() -> None:
    run = Run(stop=("loss.plateau(1) or accuracy>0.9",), on_plateau="lr*0.1")
    run.read(loss=1.0, accuracy=0.1)
    assert "training stops" in run.read(loss=1.0, accuracy=0.95)[0] and run.state.factor == 1.0


def test_steps_and_time() -> None:
    run = Run(max_steps=100, max_time="2h")
    assert run.stopping.reach(99) == [] and run.stopping.pass_time(7199, 5) == []
    assert run.stopping.pass_time(7201, 5) == [f"training stops by --max-time 2h: trained 2h at step 5; {NEXT}"]
    assert run.stopping.reach(100) == [], "one rule is enough"
    assert Run(max_steps=100).stopping.reach(101) == [f"training stops by --max-steps 100: step 101; {NEXT}"]


def test_what_is_remembered_goes_on() -> None:
    """A plateau of 4: two readings, a checkpoint, and two more in the next run."""
    first = Run(stop=("loss.plateau(4)",), on_plateau="lr/2")
    for _ in range(3):
        first.read(loss=1.0)
    saved = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(first.state)))
    second = Run(from_checkpoint(saved, 17.0), stop=("loss.plateau(4)",), on_plateau="lr/2")
    second.stopping.begin()
    assert second.state.seconds == 17.0
    assert second.read(loss=2.0) == [] and second.read(loss=2.0) and second.state.factor == 0.5
    third = from_checkpoint(msgspec.to_builtins(second.state), 20.0)
    assert third.factor == 0.5 and third.num_tries == 1 and third.number > second.state.number
    assert from_checkpoint({"plateaus": 3}, 1.0).plateaus == {}, "what cannot be read is begun again"


def test_what_has_fired_counts_as_long_as_its_rule_is_there() -> None:
    run = Run(stop=("loss<1",))
    run.read(loss=0.5)
    for stop, counts in ((("loss<1",), True), (("loss<0.1",), False), ((), False)):
        again = Stopping(rules(stop=stop), from_checkpoint(msgspec.to_builtins(run.state), 0.0))
        again.begin()
        assert (again.state.stop is not None) == counts
    by_steps = Run(max_steps=5)
    by_steps.stopping.reach(5)
    assert from_checkpoint(msgspec.to_builtins(by_steps.state), 0.0).stop is None, "it may go on to more steps"


def test_a_metric_that_nobody_reports() -> None:
    stopping = Run(stop=("acuracy>0.9 and loss<1",), best="max:reach").stopping
    assert stopping.unreported({"accuracy", "loss"}) == [
        "--best: no worker has reported 'reach'; reported are: accuracy, loss",
        "--stop: no worker has reported 'acuracy'; reported are: accuracy, loss; did you mean 'accuracy'?",
    ]
    assert "nothing was reported: job.report(…)" in stopping.unreported(set())[0]
    assert stopping.unreported({"acuracy", "loss", "reach"}) == []
    assert [is_reported_late(*n) for n in ((99, 0), (100, 0), (0, 2), (9, 1))] == [False, True, True, False]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stop": ("loss<",)}, "a number is expected"),
        ({"on_plateau": "lr*0.1"}, 'no --stop rule says what a plateau is; give one, e.g. --stop "loss.plateau'),
        ({"on_plateau": "lr*0.1", "stop": ("loss<1",)}, "no --stop rule says what a plateau is"),
        ({"max_time": "soon"}, "--max-time 'soon': give a duration, e.g. 90s, 30m, 2h"),
        ({"max_steps": -1}, "max_steps = -1: must be at least 0"),
        ({"best": "reach"}, "min:reach or max:reach"),
        ({"average": "lots"}, "last:N"),
    ],
)
def test_bad_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rules(**settings)
    assert words in str(caught.value)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), st.integers(1, 5), st.floats(0, 10))
def test_a_plateau_fires_where_the_definition_says(values: list[float], count: int, delta: float) -> None:
    """The first reading after which the best so far, by more than delta, is `count` readings old."""
    run = Run(stop=(f"loss.plateau({count}, {delta!r})",))
    fired = next((n for n, value in enumerate(values) if run.read(loss=value)), None)
    best, age, expected = math.inf, 0, None
    for n, value in enumerate(values):
        better = best == math.inf or best - value > delta
        best, age = (value, 0) if better else (best, age + 1)
        if age >= count:
            expected = n
            break
    assert fired == expected


@pytest.mark.parametrize(
    ("value", "error", "sign", "fires"),
    [
        (0.8999999761581421, 0.9 * 2**-24, ">=", True),  # 45/50 as float32
        (0.8999999761581421, 0.0, ">=", False),  # the same digits from a float64 are below
        (0.8984375, 0.9 * 2**-8, ">=", True),  # as bfloat16
        (0.89453125, 0.9 * 2**-8, ">=", False),  # its neighbour is not 0.9
        (0.8999999761581421, 0.9 * 2**-24, "<", False),
        (0.8999999761581421, 0.9 * 2**-24, "<=", True),
        (0.9000000357627869, 0.9 * 2**-24, ">", False),  # the mean of two float32 is off by as much as one of them
        (0.9 - math.ulp(0.9), 0.0, ">=", True),  # (a + b + c) / 3 of Python floats
        (0.9001, 0.9 * 2**-24, ">", True),
        (math.inf, 0.0, ">", True),
        (-math.inf, 0.0, ">=", False),
        (math.nan, 0.0, ">=", False),
    ],
)
def test_a_number_is_compared_at_the_precision_of_the_reading(
    value: float, error: float, sign: str, fires: bool
) -> None:
    run = Run(stop=(f"accuracy{sign}0.9",))
    reading = {"accuracy": Reading(value, 1, error=error)}
    assert bool(run.stopping.take(reading, reading, 1)) == fires


def test_what_was_compared_is_shown_with_the_digits_that_it_takes() -> None:
    """The reader of `accuracy = 0.9` would ask why `accuracy<0.9` has fired."""
    below = Run(stop=("accuracy<0.9",))
    assert "accuracy = 0.8999999 at" in below.read(accuracy=0.8999999)[0]
    equal = Run(stop=("accuracy>=0.9",))
    reading = {"accuracy": Reading(0.8999999761581421, 1, error=0.9 * 2**-24)}
    assert "accuracy = 0.9 at" in equal.stopping.take(reading, reading, 1)[0]


def test_the_end_names_what_was_compared_in_vain() -> None:
    run = Run(stop=("accuracy>=0.9 and loss<1", "loss.plateau(5)", "f1>0.5"))
    assert run.read(accuracy=0.89999999, loss=0.5) == []
    assert run.stopping.unmet(run.newest) == [
        "--stop 'accuracy>=0.9 and loss<1' did not fire: the last reading was accuracy = 0.89999999"
    ]
    run.read(f1=0.6)
    assert run.stopping.unmet(run.newest) == [], "another rule has stopped the job"
