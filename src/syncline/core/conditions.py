"""Conditions: parses `--stop` into a tree, and related expressions. Errors name the position."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from typing import NoReturn

import msgspec

from syncline.errors import ConfigError

EXAMPLES = 'accuracy>=0.9, loss.plateau(5), loss.plateau(5, 0.001), "loss<0.1 or accuracy>=0.9"'
#: Valid metric names; `job.report` uses it too.
METRIC = re.compile(r"[A-Za-z_][A-Za-z0-9_/-]*")
MOST_LETTERS, MOST_DEPTH, MOST_READINGS = 1000, 20, 1_000_000
#: Words in a metric's name that tell in which direction it is better (val_loss, top5/accuracy).
LESS = frozenset({
    "loss", "error", "err", "perplexity", "ppl", "mse", "mae", "rmse", "mape", "nll", "ce", "bpb", "bpc",
    "wer", "cer", "ter", "fid", "kl", "divergence", "regret",
})  # fmt: skip
MORE = frozenset({
    "accuracy", "acc", "auc", "auroc", "ap", "map", "f1", "score", "precision", "recall", "iou", "miou",
    "dice", "bleu", "rouge", "meteor", "r2", "reward", "return", "correct", "elo", "psnr", "ssim",
    "likelihood",
})  # fmt: skip
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_][A-Za-z0-9_/:-]*)"
    r"|(?P<sign>>=|<=|==|!=|>|<|=|\(|\)|,|\.|\S))"
)
_COMPARISONS = (">=", "<=", ">", "<")
#: Tolerance for means of many numbers in float64.
_MEAN_ULPS = 16


class Compare(msgspec.Struct, frozen=True, tag=True):
    """The newest reading of a metric against a number."""

    metric: str
    sign: str
    number: float

    def holds(self, value: float, error: float = 0.0) -> bool:
        """`error`: the rounding error of the value; a number within it counts as equal."""
        return self.side(value, error) in _SIDES[self.sign]

    def side(self, value: float, error: float = 0.0) -> int | None:
        """-1 if the value is below the number, 0 if equal, 1 if above, None for NaN."""
        if math.isnan(value):
            return None
        if math.isfinite(value) and abs(value - self.number) <= error + _MEAN_ULPS * math.ulp(value):
            return 0
        return 1 if value > self.number else -1

    def shown(self, value: float, error: float = 0.0) -> str:
        """The value with six digits, or as many as show on which side of the number it is."""
        side = self.side(value, error)
        texts = (f"{value:.{digits}g}" for digits in range(6, 18))
        return next((text for text in texts if self.side(float(text), error) == side), repr(value))


_SIDES = {">=": (0, 1), ">": (1,), "<=": (0, -1), "<": (-1,)}


class Plateau(msgspec.Struct, frozen=True, tag=True):
    """This many readings in a row without an improvement of more than `min_delta` over the best before."""

    metric: str
    num_readings: int
    min_delta: float
    is_less: bool  # less is better

    @property
    def key(self) -> str:
        """The key of its counter, shared by all rules that contain it."""
        return f"{'min' if self.is_less else 'max'}:{self.metric}.plateau({self.num_readings}, {self.min_delta:g})"


class AllOf(msgspec.Struct, frozen=True, tag="Every"):
    """All of these: `and`."""

    parts: tuple[Condition, ...]


class Either(msgspec.Struct, frozen=True, tag=True):
    """Any of these: `or`."""

    parts: tuple[Condition, ...]


Condition = Compare | Plateau | AllOf | Either


def leaves(condition: Condition) -> Iterator[Compare | Plateau]:
    if isinstance(condition, AllOf | Either):
        for part in condition.parts:
            yield from leaves(part)
    else:
        yield condition


def parse_condition(text: str, flag: str = "--stop") -> Condition:
    """Parses a condition. A ConfigError names the position, what is allowed there, and the nearest word."""
    if len(text) > MOST_LETTERS:
        raise ConfigError(f"{flag}: the rule has {len(text)} characters; at most {MOST_LETTERS}")
    return _Parser(text, flag).parse()


class _Token(msgspec.Struct, frozen=True):
    kind: str  # number, name, sign, end
    text: str
    place: int  # from 1 on


class _Parser:
    """A recursive descent parser: or, and, a comparison or plateau, or parentheses."""

    def __init__(self, text: str, flag: str) -> None:
        self._text, self._flag = text, flag
        self._tokens = [*_tokens(text), _Token("end", "", len(text) + 1)]
        self._at = self._depth = 0

    def parse(self) -> Condition:
        if len(self._tokens) == 1:
            raise ConfigError(f"{self._flag} {self._text!r}: the rule is empty; give one, e.g. {EXAMPLES}")
        found = self._either()
        if self._next.kind != "end":
            self._fail("`and`, `or` or the end of the rule", ("and", "or"))
        return found

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _fail(self, expected: str, words: tuple[str, ...] = ()) -> NoReturn:
        token = self._next
        near = difflib.get_close_matches(token.text.lower(), words, n=1) if token.text else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        found = f"{token.text!r}" if token.text else "its end"
        raise ConfigError(
            f"{self._flag} {self._text!r}: at position {token.place}, {found}: {expected} is expected{hint}; "
            f"e.g. {EXAMPLES}"
        )

    def _either(self) -> Condition:
        parts = [self._every()]
        while self._next.text == "or":
            self._word("or")
            parts.append(self._every())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _every(self) -> Condition:
        parts = [self._one()]
        while self._next.text == "and":
            self._word("and")
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _word(self, word: str) -> None:
        if self._next.text != word:
            self._fail(f"`{word}`")
        self._take()

    def _one(self) -> Condition:
        if self._next.text == "(":
            self._depth += 1
            if self._depth > MOST_DEPTH:
                raise ConfigError(f"{self._flag}: more than {MOST_DEPTH} parentheses inside each other")
            self._take()
            found = self._either()
            self._word(")")
            self._depth -= 1
            return found
        if self._next.kind != "name" or self._next.text in ("and", "or"):
            self._fail("the name of a metric")
        token = self._take()
        prefix, name = _split(token.text)
        if name is None:
            self._at -= 1
            self._fail("the name of a metric, or min:NAME or max:NAME", ("min", "max"))
        if self._next.text == ".":
            return self._plateau(prefix, name)
        if prefix:
            self._fail(f"`.plateau(N)` (a comparison needs no {prefix}:)")
        return self._compare(name)

    def _compare(self, metric: str) -> Compare:
        if self._next.text not in _COMPARISONS:
            self._fail(f"one of {', '.join(_COMPARISONS)}, or .plateau(N),", _COMPARISONS)
        sign = self._take().text
        return Compare(metric, sign, self._number("a number"))

    def _plateau(self, prefix: str, metric: str) -> Plateau:
        self._take()
        if self._next.text != "plateau":
            self._fail("`plateau(N)`", ("plateau",))
        place = self._take().place
        self._word("(")
        count = self._next
        number = self._number("a number of readings")
        if not (number == int(number) and 1 <= number <= MOST_READINGS):
            self._at = self._tokens.index(count)
            self._fail(f"a whole number of readings from 1 to {MOST_READINGS}")
        delta = 0.0
        if self._next.text == ",":
            self._take()
            if self._next.text == "min_delta":
                self._take()
                self._word("=")
            delta = self._number("min_delta, a number from 0 on,", least=0.0)
        self._word(")")
        return Plateau(metric, int(number), delta, self._direction(prefix, metric, place))

    def _direction(self, prefix: str, metric: str, place: int) -> bool:
        found = {"min": True, "max": False}.get(prefix, is_less_better(metric))
        if found is None:
            raise ConfigError(
                f"{self._flag} {self._text!r}: at position {place}: is less or more of {metric!r} better? Say "
                f"min:{metric}.plateau(…) or max:{metric}.plateau(…)"
            )
        return found

    def _number(self, what: str, least: float | None = None) -> float:
        if self._next.kind != "number" or (least is not None and float(self._next.text) < least):
            self._fail(what)
        value = float(self._take().text)
        if value in (float("inf"), float("-inf")):
            self._at -= 1
            self._fail("a finite number")
        return value


def _tokens(text: str) -> Iterator[_Token]:
    for found in _TOKEN.finditer(text):
        kind = str(found.lastgroup)
        yield _Token(kind, found[kind], found.start(kind) + 1)


def _split(text: str) -> tuple[str, str | None]:
    """min:NAME, max:NAME or NAME; no name if it is none of them."""
    prefix, colon, name = text.partition(":")
    if not colon:
        return "", text
    return (prefix, name) if prefix in ("min", "max") and METRIC.fullmatch(name) else ("", None)


def is_less_better(metric: str) -> bool | None:
    """By the words in its name; None if they do not tell."""
    words = set(re.split(r"[_/\-0-9]+", metric.lower()))
    words |= {metric.lower(), *re.split(r"[_/\-]+", metric.lower())}
    less, more = bool(words & LESS), bool(words & MORE)
    return less if less != more else None


class Best(msgspec.Struct, frozen=True):
    """The metric of `--best`, and in which direction it is better."""

    metric: str
    is_less: bool

    def is_better(self, value: float, than: float | None) -> bool:
        if value != value:  # NaN is never better
            return False
        return than is None or than != than or (value < than if self.is_less else value > than)


def parse_best(text: str, flag: str = "--best") -> Best:
    """`accuracy`, `min:NAME`, `max:NAME`."""
    prefix, name = _split(text.strip())
    if not name or not METRIC.fullmatch(name):
        near = difflib.get_close_matches(text.partition(":")[0].strip(), ("min", "max"), n=1) if ":" in text else []
        hint = f"; did you mean {near[0]}:{text.partition(':')[2]}?" if near else ""
        raise ConfigError(f"{flag} {text!r}: give a metric, min:METRIC or max:METRIC, e.g. accuracy{hint}")
    is_less = {"min": True, "max": False}.get(prefix, is_less_better(name))
    if is_less is None:
        raise ConfigError(f"{flag} {text!r}: is less or more of it better? Say min:{name} or max:{name}")
    return Best(name, is_less)


class Average(msgspec.Struct, frozen=True):
    """`--average`: the mean of the last checkpoints, or an exponential moving average."""

    last: int = 0
    decay: float = 0.0


MOST_AVERAGED = 1000


def parse_average(text: str, flag: str = "--average") -> Average:
    """`last:5`, `ema:0.999`."""
    kind, _, number = text.strip().partition(":")
    try:
        if kind == "last" and number.isdecimal() and 2 <= int(number) <= MOST_AVERAGED:
            return Average(last=int(number))
        if kind == "ema" and 0.0 < float(number) < 1.0:
            return Average(decay=float(number))
    except ValueError:
        pass
    near = difflib.get_close_matches(kind, ("last", "ema"), n=1)
    hint = f"; did you mean {near[0]}:…?" if near and near[0] != kind else ""
    raise ConfigError(
        f"{flag} {text!r}: give last:N (N checkpoints, from 2 to {MOST_AVERAGED}) or ema:DECAY (between 0 and 1), "
        f"e.g. last:5, ema:0.999{hint}"
    )


class OnPlateau(msgspec.Struct, frozen=True):
    """`--on-plateau`: the factor on the learning rate, and how often it is applied before a plateau stops the job."""

    factor: float
    most_times: int = 1


_ACTION = re.compile(
    r"\s*lr\s*(?P<sign>[*/])\s*(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*"
    r"(?:,?\s*(?:at\s+most\s+)?(?P<times>\d{1,9})\s*(?:times?|x)\s*)?"
)


def parse_on_plateau(text: str, flag: str = "--on-plateau") -> OnPlateau:
    """`lr*0.1`, `lr/2`, `lr*0.1, at most 3 times`; once where nothing is said."""
    found = _ACTION.fullmatch(text)
    number = float(found["number"]) if found is not None else 0.0
    factor = number if found is None or found["sign"] == "*" else 1.0 / (number or float("nan"))
    times = int(found["times"] or 1) if found is not None else 1
    if found is None or not 0.0 < factor < 1e9 or factor == 1.0 or times < 1:
        raise ConfigError(
            f"{flag} {text!r}: give a factor for the learning rate, and how often to apply it (default: "
            "once), e.g. lr*0.1, lr/2, 'lr*0.1, at most 3 times'"
        )
    return OnPlateau(factor, times)
