"""Rules by name and numbers: how a parameter is updated, independent of a framework."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping

import msgspec

from syncline.config import JobConfig
from syncline.errors import ConfigError, RuleError
from syncline.extensions import is_named

Number = bool | int | float | str | None
Option = Number | tuple[Number, ...]

_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
_KERAS_ADAM = ("lr", "beta_1", "beta_2", "epsilon", "amsgrad", "weight_decay")
#: Every dense torch.optim optimizer that steps without a closure, with its transferable options; those of Keras that
#: have a rule; and two that take what is pushed as it is.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "ASGD": ("lr", "lambd", "alpha", "t0", "weight_decay", "maximize"),
    "Adadelta": ("lr", "rho", "eps", "weight_decay", "maximize"),
    "Adafactor": ("lr", "beta2_decay", "eps", "d", "weight_decay", "maximize"),
    "Adagrad": ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize"),
    "Adam": (*_ADAM, "decoupled_weight_decay"),
    "AdamW": _ADAM,
    "Adamax": ("lr", "betas", "eps", "weight_decay", "maximize"),
    "Muon": (
        "lr",
        "weight_decay",
        "momentum",
        "nesterov",
        "ns_coefficients",
        "eps",
        "ns_steps",
        "adjust_lr_fn",
    ),
    "NAdam": ("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize"),
    "RAdam": ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
    "Rprop": ("lr", "etas", "step_sizes", "maximize"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "KerasAdagrad": ("lr", "initial_accumulator_value", "epsilon", "weight_decay"),
    "KerasAdam": _KERAS_ADAM,
    "KerasAdamW": _KERAS_ADAM,
    "KerasRMSprop": ("lr", "rho", "momentum", "epsilon", "centered", "weight_decay"),
    "KerasSGD": ("lr", "momentum", "nesterov", "weight_decay"),
    "Add": (),
    "Assign": (),
}
#: State entries that are one number per piece; all others have the shape of the piece.
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
#: Rules that need whole tensors: their parameters are never split across slices.
WHOLE_TENSOR = frozenset({"Adafactor", "Muon"})
#: Rules other than gradient descent: a push is a delta or the value itself.
PLAIN = frozenset({"Add", "Assign"})
#: Rules whose step is as large as its gradient; the others divide gradients by their size.
SCALES_WITH_GRADIENT = frozenset({"SGD", "ASGD", "KerasSGD"})
#: Rules with Keras' formulas.
KERAS = frozenset({"KerasAdagrad", "KerasAdam", "KerasAdamW", "KerasRMSprop", "KerasSGD"})
#: What to do about sparse gradients, which are not supported.
SPARSE_REMEDY = (
    "either use dense gradients (sparse=False, and Adam in place of SparseAdam), or let the optimizer run on the "
    "workers with --sync-every H or init(sync_every=H), H > 1, which takes sparse gradients and SparseAdam"
)


class RuleSpec(msgspec.Struct, frozen=True, array_like=True):
    """A rule as sent in messages; validated again on arrival."""

    name: str
    options: dict[str, Option]

    @property
    def elementwise(self) -> bool:
        """Whether a tensor may be split across slices under this rule."""
        return self.name not in WHOLE_TENSOR and not is_named(self.name)

    @property
    def option_names(self) -> tuple[str, ...]:
        """The options that it can be given; of a user's own rule, those that it was registered with."""
        return OPTIONS.get(self.name) or tuple(self.options)

    def rule(self) -> Rule:
        return Rule(self.name, **self.options)


class Rule:
    """`Rule("Adam", lr=1e-3)`: a torch.optim optimizer by name, or one of Keras (`KerasAdam`), or `Add`, or `Assign`.

    `Rule("package.module:Name", lr=1e-3)`: a torch optimizer of your own. Servers import it by this name.
    """

    __slots__ = ("spec",)

    def __init__(self, name: str, /, **options: object) -> None:
        self.spec = RuleSpec(name, {key: plain_option(name, key, value) for key, value in options.items()})
        check_rule(self.spec)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def options(self) -> dict[str, Option]:
        return self.spec.options

    @property
    def elementwise(self) -> bool:
        return self.spec.elementwise

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted((k, repr(v)) for k, v in self.options.items()))))

    def __repr__(self) -> str:
        return f"Rule({', '.join([repr(self.name), *(f'{k}={v!r}' for k, v in self.options.items())])})"


def plain_option(rule: str, key: str, value: object) -> Option:
    """A hyperparameter as plain numbers; a zero-dimensional tensor becomes its number."""
    if isinstance(value, tuple | list):
        return tuple(plain_number(rule, key, item) for item in value)
    return plain_number(rule, key, value)


def plain_number(rule: str, key: str, value: object) -> Number:
    if value is None or type(value) in (bool, int, float, str):
        return value  # type: ignore[return-value]
    # numpy.float64 is a float that msgspec does not encode; it has an `item` too.
    item = getattr(value, "item", None)
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # several elements, complex, or not a number
        number = item() if item is not None else value
        for kind in (bool, int, float, str):
            if isinstance(number, kind):
                return kind(number)
    raise RuleError(f"{rule}({key}=…): {type(value).__name__} is not a plain number")


def check_rule(rule: RuleSpec) -> None:
    """Raises RuleError for an unknown name or option."""
    own = is_named(rule.name)
    if rule.name not in OPTIONS and not own:
        hint = " (LBFGS needs a closure)" if rule.name == "LBFGS" else ""
        if rule.name == "SparseAdam":
            raise RuleError(f"there is no rule 'SparseAdam': servers take no sparse gradients yet; {SPARSE_REMEDY}")
        raise RuleError(f"there is no rule {rule.name!r}{hint}; choose from: {', '.join(OPTIONS)}")
    for key, value in rule.options.items():
        if not own and key not in OPTIONS[rule.name]:
            known = ", ".join(OPTIONS[rule.name]) or "none"
            raise RuleError(f"rule {rule.name} has no option {key!r}; it has: {known}")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and math.isnan(number):
                raise RuleError(f"rule {rule.name}: {key} is NaN")


def check_state(rule: str, key: str, dtype: str, shape: tuple[int, ...], of: tuple[str, tuple[int, ...]]) -> None:
    """Raises RuleError for a tensor that cannot be this state of a piece of this dtype and shape (`of`).

    torch's kernels do not check sizes: they would write beyond the end of a small one.
    """
    if key in NUMBERS or (is_named(rule) and math.prod(shape) == 1):
        fits = math.prod(shape) == 1
    else:
        fits = dtype == of[0] and shape in _shapes(rule, of[1])
    if not fits:
        raise RuleError(f"{dtype}{list(shape)} cannot be {key!r} of {rule} for {of[0]}{list(of[1])}")


def _shapes(rule: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Adafactor has row and column sums for matrices."""
    if rule == "Adafactor" and len(shape) > 1:
        return [shape, (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])]
    return [shape]


EXAMPLE = "SGD(lr=0.7, momentum=0.9, nesterov=True)"
_CALL = re.compile(r"\s*([A-Za-z_]\w{0,40})\s*\((.*)\)\s*", re.ASCII | re.DOTALL)
#: name = a tuple of values, or one value; up to a comma or the end.
_OPTION = re.compile(r"\s*([A-Za-z_]\w{0,40})\s*=\s*(?:\(([^()]*)\)|([^(),=]+))\s*(?:,|$)", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d{1,40}\.?\d{0,40}|\.\d{1,40})([eE][+-]?\d{1,4})?", re.ASCII)
_WORDS: dict[str, Number] = {"True": True, "False": False, "None": None}


def parse_outer(text: str) -> Rule:
    """The rule that is said so; a ConfigError says what is wrong with it, and what there is."""
    found = _CALL.fullmatch(text)
    if found is None:
        raise ConfigError(f"--outer {_short(text)}: write it as in Python, e.g. --outer '{EXAMPLE}'")
    name, inside = found.group(1), found.group(2)
    there_are = [known for known in OPTIONS if known not in PLAIN]
    if name not in there_are:
        raise ConfigError(
            f"--outer {_short(text)}: there is no optimizer {name!r}; choose from: {', '.join(there_are)}"
        )
    try:
        rule = Rule(name, **_options(text, inside))
    except RuleError as error:
        raise ConfigError(f"--outer {_short(text)}: {error}") from None
    if "lr" not in rule.options:
        raise ConfigError(f"--outer {_short(text)}: give its lr, e.g. --outer '{EXAMPLE}'")
    return rule


def _options(text: str, inside: str) -> dict[str, Option]:
    options: dict[str, Option] = {}
    place = 0
    while inside[place:].strip():
        found = _OPTION.match(inside, place)
        if found is None:
            where = inside[place:].strip()
            raise ConfigError(f"--outer {_short(text)}: {_short(where)} is not name=value, e.g. '{EXAMPLE}'")
        key, several, one = found.groups()
        if key in options:
            raise ConfigError(f"--outer {_short(text)}: {key} is given twice")
        if several is None:
            options[key] = _value(text, key, one)
        else:
            items = [item for item in several.split(",") if item.strip()]
            options[key] = tuple(_value(text, key, item) for item in items)
        place = found.end()
    return options


def _value(text: str, key: str, said: str) -> Number:
    said = said.strip()
    if said in _WORDS:
        return _WORDS[said]
    if _NUMBER.fullmatch(said) is None:
        raise ConfigError(
            f"--outer {_short(text)}: {key}={_short(said)} is not a number, True, False or a tuple of numbers"
        )
    number = int(said) if re.fullmatch(r"[+-]?\d+", said) else float(said)
    if not math.isfinite(number):
        raise ConfigError(f"--outer {_short(text)}: {key}={said} is too large")
    return number


def outer_of(config: JobConfig) -> Rule | None:
    """The config's outer rule, if it has one."""
    if not config.outer:
        return None
    if not config.steps_locally:
        raise ConfigError(
            f"--outer {_short(config.outer)} needs --sync-every H: it takes the mean of what H local steps changed"
        )
    return parse_outer(config.outer)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:79] + "…")
