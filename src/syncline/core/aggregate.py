"""`--aggregate`: how the gradients of a round become one, number by number.

`mean` is what a job does anyway. The others are for workers whose gradients may be wrong: a `median` or a `trimmed`
mean leaves out the largest and the smallest, `norm-clipped` limits what one worker can contribute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from syncline.config import JobConfig
from syncline.core.codecs.named import NONE
from syncline.errors import ConfigError, RuleError
from syncline.extensions import is_named

Floats = npt.NDArray[Any]
#: A user's own: the gradients of all workers (one row each) and their weights in, one gradient out.
OwnAggregate = Callable[[Floats, Floats], Floats]
HOW = "mean, sum, median, trimmed:F (e.g. trimmed:0.25), norm-clipped:C (e.g. norm-clipped:1.0), package.module:name"
#: Numbers that are sorted together: they stay in the cache.
BLOCK_ITEMS = 1 << 14
#: Up to this many rows, comparing them in pairs is faster than sorting every column.
_MOST_IN_PAIRS = 16
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?([eE][+-]?\d{1,2})?", re.ASCII)


class Aggregate(msgspec.Struct, frozen=True):
    """One way to aggregate; `number` is F or C, `name` the user's own function."""

    kind: str
    number: float = 0.0
    name: str = ""

    def __str__(self) -> str:
        return self.name or (f"{self.kind}:{self.number:g}" if self.number else self.kind)

    @property
    def needs_all(self) -> bool:
        """Whether it takes the gradients of all workers at once, not their sum."""
        return self.kind in ("median", "trimmed", "own")

    @property
    def is_sum(self) -> bool:
        return self.kind == "sum"

    def factor(self, squared_norm: float) -> float:
        """The factor on a gradient of this squared norm."""
        if self.kind != "norm-clipped":
            return 1.0
        return min(1.0, self.number / (math.sqrt(squared_norm) + 1e-6))

    def trims(self, num_rows: int) -> int:
        """How many of so many rows are left out at each end."""
        return min(int(self.number * num_rows), (num_rows - 1) // 2)


def parse_aggregate(text: str) -> Aggregate | None:
    """Parses the setting; None for the mean, which is the default."""
    kind, colon, number = text.partition(":")
    if text in ("", "mean"):
        return None
    if text in ("sum", "median"):
        return Aggregate(text)
    if kind == "trimmed":
        share = float(number) if _NUMBER.fullmatch(number) else 0.0
        if not 0 < share < 0.5:
            raise ConfigError(
                f"--aggregate {_short(text)}: trimmed:F leaves out the share F of the workers at each end, more than "
                "0 and less than 0.5, e.g. trimmed:0.25"
            )
        return Aggregate(kind, share)
    if kind == "norm-clipped":
        limit = float(number) if _NUMBER.fullmatch(number) else 0.0
        if not 0 < limit < math.inf:
            raise ConfigError(
                f"--aggregate {_short(text)}: norm-clipped:C limits the norm of every push to C, more than 0, "
                "e.g. norm-clipped:1.0"
            )
        return Aggregate(kind, limit)
    if colon and is_named(text):
        return Aggregate("own", name=text)
    raise ConfigError(f"--aggregate {_short(text)}: must be one of {HOW}")


def aggregate_of(config: JobConfig, in_rounds: bool, has_spare: bool) -> Aggregate | None:
    """The config's way to aggregate, checked against the rest of it."""
    found = parse_aggregate(config.aggregate)
    if found is None:
        return None
    what = f"--aggregate {config.aggregate}"
    if config.is_ring:
        raise ConfigError(f"{what} needs servers: a ring only adds gradients up; leave out --exchange ring")
    if not in_rounds:
        raise ConfigError(
            f"{what} needs --policy sync: in {config.policy} every push is applied by itself; async:gather=N applies "
            "the mean of N pushes"
        )
    if has_spare:
        raise ConfigError(f"{what} cannot be used with {config.policy}: say --policy sync")
    if config.codec not in NONE:
        raise ConfigError(f"{what} needs the numbers as they are: leave out --codec {config.codec}")
    least = config.least_workers or config.workers
    if found.kind == "trimmed" and not found.trims(least):
        workers = "1 worker" if least == 1 else f"{least} workers"
        remedy = f"say trimmed:{_least_share(least):g} or more" if least > 2 else "use 3 or more workers"
        raise ConfigError(f"{what} trims none of {workers}: {found.number:g} × {least} is less than 1; {remedy}")
    return found


def own_of(how: Aggregate | None, load: Callable[[str], object]) -> OwnAggregate | None:
    """The user's function, if there is one. Servers and workers import it when they start."""
    if how is None or how.kind != "own":
        return None
    try:
        found = load(how.name)
    except ConfigError as error:
        raise ConfigError(f"--aggregate {error}") from error
    if not callable(found):
        raise ConfigError(
            f"--aggregate {how.name}: {type(found).__name__} is not a function of gradients and weights"
        )
    return found


def _least_share(num_workers: int) -> float:
    """The least share, with few digits, that leaves out one of so many workers."""
    share = 1.0 / num_workers
    for digits in range(2, 9):
        rounded = math.ceil(share * 10.0**digits) / 10.0**digits
        if int(rounded * num_workers) >= 1:
            return rounded
    return share


def aggregated(
    how: Aggregate, rows: Sequence[Floats], weights: Sequence[float], own: OwnAggregate | None = None
) -> Floats:
    """One row of several of equal length. In a median or a trimmed mean every row counts once, whatever it weighs."""
    if how.kind == "own":
        assert own is not None
        return _own_aggregated(how, np.stack(rows), np.asarray(weights, np.float64), own)
    size = len(rows[0])
    found = np.empty(size, rows[0].dtype)
    for start in range(0, size, BLOCK_ITEMS):
        block = _sorted(np.stack([row[start : start + BLOCK_ITEMS] for row in rows]))
        found[start : start + BLOCK_ITEMS] = _middle(how, block)
    return found


def _middle(how: Aggregate, block: Floats) -> Floats:
    """The median or the trimmed mean of sorted rows."""
    num = len(block)
    cut = (num - 1) // 2 if how.kind == "median" else how.trims(num)
    kept = block[cut : num - cut]
    middle: Floats = kept[0] if len(kept) == 1 else kept.mean(axis=0)
    return middle


def _sorted(block: Floats) -> Floats:
    """The block with every column sorted."""
    num = len(block)
    if num > _MOST_IN_PAIRS:
        block.sort(axis=0)
        return block
    lower = np.empty_like(block[0])
    for turn in range(num):  # odd-even transposition sort, on whole rows
        for k in range(turn % 2, num - 1, 2):
            np.minimum(block[k], block[k + 1], out=lower)
            np.maximum(block[k], block[k + 1], out=block[k + 1])
            block[k] = lower
    return block


def _own_aggregated(how: Aggregate, stack: Floats, weights: Floats, own: OwnAggregate) -> Floats:
    given = stack.shape
    try:
        found = np.asarray(own(stack, weights))
    except Exception as error:  # whatever the user's function raises
        raise RuleError(f"--aggregate {how.name}: {type(error).__name__}: {error}") from error
    if found.shape != given[1:]:
        raise RuleError(
            f"--aggregate {how.name}: it returned an array of shape {list(found.shape)} for gradients of shape "
            f"{list(given)}; it must be {list(given[1:])}, one number for each column"
        )
    if found.dtype.kind not in "fiu":
        raise RuleError(f"--aggregate {how.name}: it returned {found.dtype}, not numbers")
    if not np.isfinite(found).all():
        raise RuleError(f"--aggregate {how.name}: it returned NaN or Inf")
    return found


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:79] + "…")
