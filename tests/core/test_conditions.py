"""What `--stop` and its neighbours take, and what they say to what they do not take."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.core.conditions import (
    AllOf,
    Average,
    Best,
    Compare,
    Condition,
    Either,
    OnPlateau,
    Plateau,
    is_less_better,
    leaves,
    parse_average,
    parse_best,
    parse_condition,
    parse_on_plateau,
)
from syncline.core.units import Interval, duration, interval
from syncline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("accuracy>=0.9", Compare("accuracy", ">=", 0.9)),
        (" val/top-5  <  -1e-3 ", Compare("val/top-5", "<", -1e-3)),
        ("loss.plateau(5)", Plateau("loss", 5, 0.0, True)),
        ("accuracy.plateau( 5 , 0.01 )", Plateau("accuracy", 5, 0.01, False)),
        ("loss.plateau(5, min_delta=0.01)", Plateau("loss", 5, 0.01, True)),
        ("max:reach.plateau(2)", Plateau("reach", 2, 0.0, False)),
        ("max:loss.plateau(2)", Plateau("loss", 2, 0.0, False)),
        ("a>1 and b<2 or c>3", Either((AllOf((Compare("a", ">", 1), Compare("b", "<", 2))), Compare("c", ">", 3)))),
        ("a>1 and (b<2 or c>3)", AllOf((Compare("a", ">", 1), Either((Compare("b", "<", 2), Compare("c", ">", 3)))))),
        ("((a>1))", Compare("a", ">", 1)),
    ],
)
def test_rules_are_read(text: str, expected: Condition) -> None:
    assert parse_condition(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty", "accuracy>=0.9"]),
        ("accuracy>=", ["at position 11, its end", "a number is expected"]),
        ("accuracy=>0.9", ["at position 9, '='", "one of >=, <=, >, <"]),
        ("accuracy>>0.9", ["at position 10, '>'", "a number"]),
        ("accuracy==0.9", ["at position 9, '=='", "one of >=, <=, >, <"]),
        ("accuracy", ["at position 9, its end", "one of >=, <=, >, <, or .plateau(N)"]),
        ("0.9<=accuracy", ["at position 1, '0.9'", "the name of a metric"]),
        ("loss.platau(5)", ["at position 6, 'platau'", "did you mean 'plateau'?"]),
        ("loss.plateau", ["at position 13", "`(`"]),
        ("loss.plateau()", ["at position 14, ')'", "a number of readings"]),
        ("loss.plateau(0)", ["at position 14, '0'", "a whole number of readings from 1"]),
        ("loss.plateau(2.5)", ["at position 14, '2.5'", "a whole number of readings from 1"]),
        ("loss.plateau(5,-1)", ["at position 16, '-1'", "min_delta, a number from 0 on"]),
        ("loss.plateau(5", ["at position 15, its end", "`)`"]),
        ("reach.plateau(5)", ["at position 7", "min:reach.plateau", "max:reach.plateau"]),
        ("mix:loss.plateau(5)", ["at position 1, 'mix:loss'", "min:NAME or max:NAME"]),
        ("min:loss<1", ["at position 9, '<'", "a comparison needs no min:"]),
        ("a>1 adn b>2", ["at position 5, 'adn'", "`and`, `or` or the end", "did you mean 'and'?"]),
        ("a>1 b>2", ["at position 5, 'b'"]),
        ("a>1 and", ["at position 8, its end", "the name of a metric"]),
        ("(a>1", ["at position 5, its end", "`)`"]),
        ("a>1e999", ["at position 3", "a finite number"]),
        ("a>1 and §", ["at position 9, '§'"]),
        ("(" * 30 + "a>1" + ")" * 30, ["more than 20 parentheses"]),
        ("a>1 and " * 200 + "a>1", ["1603 characters; at most 1000"]),
    ],
)
def test_errors_say_where_what_and_the_nearest_word(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_condition(text)
    assert str(caught.value).startswith("--stop")
    for word in words:
        assert word in str(caught.value)


@given(st.text(alphabet="ab><=()., 019.-e:minxplateuord", max_size=40))
def test_whatever_is_typed_is_a_rule_or_a_config_error(text: str) -> None:
    try:
        condition = parse_condition(text)
    except ConfigError as error:
        assert repr(text) in str(error) or "parentheses" in str(error)
    else:
        for leaf in leaves(condition):
            assert leaf.metric and (not isinstance(leaf, Plateau) or leaf.num_readings >= 1)


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([">=", "<=", ">", "<"]), st.floats())
def test_comparisons(number: float, sign: str, value: float) -> None:
    compare = parse_condition(f"x{sign}{number!r}")
    assert isinstance(compare, Compare) and compare.number == number
    expected = {">=": value >= number, "<=": value <= number, ">": value > number, "<": value < number}[sign]
    assert compare.holds(value) == expected


def test_directions_are_known_by_any_word_of_a_name() -> None:
    less = ("loss", "val_loss", "loss_val", "train/error", "perplexity", "RMSE", "loss2")
    more = ("accuracy", "top5/accuracy", "val-auc", "f1", "macro_f1", "r2", "score")
    assert [is_less_better(name) for name in less] == [True] * len(less)
    assert [is_less_better(name) for name in more] == [False] * len(more)
    assert (
        is_less_better("reach") is None
        and is_less_better("loss_score") is None
        and is_less_better("glossary") is None
    )


def test_best() -> None:
    assert parse_best("accuracy") == Best("accuracy", False)
    assert parse_best("val_loss") == Best("val_loss", True)
    assert parse_best("max:reach") == Best("reach", False) and parse_best("min:reach") == Best("reach", True)
    less = Best("loss", True)
    assert less.is_better(1.0, None) and less.is_better(1.0, 2.0) and less.is_better(1.0, math.nan)
    assert not less.is_better(2.0, 1.0) and not less.is_better(1.0, 1.0) and not less.is_better(math.nan, None)
    for text, words in (("reach", "min:reach or max:reach"), ("mix:a", "did you mean min:a"), ("", "give a metric")):
        with pytest.raises(ConfigError, match="--best") as caught:
            parse_best(text)
        assert words in str(caught.value) or "did you mean max:a" in str(caught.value)


def test_average() -> None:
    assert parse_average("last:5") == Average(last=5) and parse_average("ema:0.999") == Average(decay=0.999)
    for text in ("last:1", "last:x", "last", "ema:1", "ema:0", "ema:nan", "mean:3", ""):
        with pytest.raises(ConfigError, match="last:N"):
            parse_average(text)
    with pytest.raises(ConfigError, match="did you mean last"):
        parse_average("lst:5")


def test_on_plateau() -> None:
    assert parse_on_plateau("lr*0.1") == OnPlateau(0.1, 1)
    assert parse_on_plateau(" lr / 2 , at most 3 times") == OnPlateau(0.5, 3)
    assert parse_on_plateau("lr*0.5, 2 times") == OnPlateau(0.5, 2)
    for text in (
        "lr",
        "lr*",
        "lr*0",
        "lr/0",
        "lr*1",
        "momentum*0.1",
        "lr*0.1, at most",
        "lr*0.1, at most 0 times",
        "lr*-1",
    ):
        with pytest.raises(ConfigError, match=r"e\.g\. lr\*0\.1"):
            parse_on_plateau(text)


def test_intervals() -> None:
    assert interval("--save-every", "500steps") == Interval(steps=500) == interval("--save-every", "500 steps")
    assert interval("--save-every", "10m") == Interval(seconds=600.0) and duration("--max-time", "2h") == 7200.0
    assert interval("every", "epoch", epochs=True) == Interval(is_epoch=True)
    for text in ("epoch", "0steps", "-1steps", "x", "", "10 parsecs", "1.5steps"):
        with pytest.raises(ConfigError, match=r"--save-every .*500steps"):
            interval("--save-every", text)
