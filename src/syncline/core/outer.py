"""`--outer`: the rule that the mean of local steps goes through, said as its optimizer would be made.

`SGD(lr=0.7, momentum=0.9, nesterov=True)` with `--sync-every` is DiLoCo. It is read, never evaluated.
"""

from __future__ import annotations

import math
import re

from syncline.config import JobConfig
from syncline.core.rule import OPTIONS, PLAIN, Number, Option, Rule
from syncline.errors import ConfigError, RuleError

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
        raise ConfigError(f"--outer {_short(text)}: say it as it is made, e.g. --outer '{EXAMPLE}'")
    name, inside = found.group(1), found.group(2)
    there_are = [known for known in OPTIONS if known not in PLAIN]
    if name not in there_are:
        raise ConfigError(
            f"--outer {_short(text)}: there is no optimizer {name!r}; there are: {', '.join(there_are)}"
        )
    try:
        rule = Rule(name, **_options(text, inside))
    except RuleError as error:
        raise ConfigError(f"--outer {_short(text)}: {error}") from None
    if "lr" not in rule.options:
        raise ConfigError(f"--outer {_short(text)}: say its lr, e.g. --outer '{EXAMPLE}'")
    return rule


def _options(text: str, inside: str) -> dict[str, Option]:
    options: dict[str, Option] = {}
    place = 0
    while inside[place:].strip():
        found = _OPTION.match(inside, place)
        if found is None:
            where = inside[place:].strip()
            raise ConfigError(f"--outer {_short(text)}: {_short(where)} is no name=value, e.g. '{EXAMPLE}'")
        key, several, one = found.groups()
        if key in options:
            raise ConfigError(f"--outer {_short(text)}: {key} is said twice")
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
            f"--outer {_short(text)}: {key}={_short(said)} is no number, True, False or tuple of numbers"
        )
    number = int(said) if re.fullmatch(r"[+-]?\d+", said) else float(said)
    if not math.isfinite(number):
        raise ConfigError(f"--outer {_short(text)}: {key}={said} is too large")
    return number


def outer_of(config: JobConfig) -> Rule | None:
    """The config's outer rule, if it has one."""
    if not config.outer:
        return None
    if config.sync_every == 1:
        raise ConfigError(
            f"--outer {_short(config.outer)} needs --sync-every H: it takes the mean of what H local steps changed"
        )
    return parse_outer(config.outer)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:79] + "…")
