"""The rows of `syncline bench`, the jobs that measure them, and what comes out."""

from __future__ import annotations

import dataclasses
import fnmatch
import statistics
from collections.abc import Sequence
from typing import Any

from syncline.core.units import size
from syncline.errors import ConfigError

LARGE, SMALL = 16 << 20, 4 << 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of ours beside its floor."""

    name: str
    what: str
    floor: str
    num_bytes: int = 0  #: of one operation; 0: a training step
    good: float  #: up to this ratio there is nothing to do
    advice: str  #: what to do when the ratio is larger


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """Rows that one job measures, and the settings of that job."""

    rows: tuple[Row, ...]
    settings: dict[str, Any]
    is_tls: bool = False  #: connections are inside TLS, those of the floor too


_BUSY = "See that no other program uses the cores (column `others`)"
ROWS = (
    Row(
        name="shm",
        what=f"{size(LARGE)} push_pull between a worker and a server of one host, through shared memory",
        floor="two plain copies of the same bytes",
        num_bytes=LARGE,
        good=2.0,
        advice=f"{_BUSY}; write gradients into `kv.gradients()` instead of your own arrays.",
    ),
    Row(
        name="shm-small",
        what=f"{size(SMALL)} push_pull between the same two: latency",
        floor="a round trip of the same bytes over a plain socket",
        num_bytes=SMALL,
        good=12.0,
        advice=f"{_BUSY}; have a core for each process; for tiny models exchange less often (`--sync-every`).",
    ),
    Row(
        name="tcp",
        what=f"{size(LARGE)} push_pull between a worker and a server over TCP (`--transport tcp`)",
        floor="the same bytes there and back over a plain socket",
        num_bytes=LARGE,
        good=2.0,
        advice=f"{_BUSY}; on one host leave `--transport` out, and shared memory is used.",
    ),
    Row(
        name="tls",
        what=f"{size(LARGE)} push_pull between a worker and a server over TLS, as between hosts",
        floor="the same bytes there and back over plain TLS sockets",
        num_bytes=LARGE,
        good=2.0,
        advice=f"{_BUSY}: TLS needs them; send fewer bytes (`--codec int8`), or less often (`--sync-every`); have "
        "as many servers as hosts (`-s`).",
    ),
    Row(
        name="all-reduce",
        what=f"{size(LARGE)} all_reduce_ of float32 among the workers",
        floor="on one host two plain copies of the same bytes, between hosts the same bytes there and back",
        num_bytes=LARGE,
        good=2.5,
        advice=f"{_BUSY}; make the arrays with `collectives.empty()`, which workers of a host read in place.",
    ),
    Row(
        name="all-reduce-small",
        what=f"{size(SMALL)} all_reduce_ of float32 among the workers: latency",
        floor="a round trip of the same bytes over a plain socket",
        num_bytes=SMALL,
        good=12.0,
        advice=f"{_BUSY}; put several small arrays into one call.",
    ),
    Row(
        name="step",
        what="a training step of an MLP 784-1024-1024-10, batch 128, Adam, in every worker (`sync`)",
        floor="the plain torch step without syncline, in every worker at once",
        good=1.5,
        advice="`syncline run --profile` shows where your own model's step spends its time; use a larger batch or "
        "`--sync-every`; between hosts try `--exchange ring` and `--codec`.",
    ),
)


def groups(hosts: str = "", remote: str = "", bind: str = "") -> list[RowGroup]:
    """The jobs that measure all rows, on this machine or between these hosts."""
    by_name = {row.name: row for row in ROWS}

    def pick(*names: str) -> tuple[Row, ...]:
        return tuple(by_name[name] for name in names)

    if hosts:
        over = {"hosts": hosts} | ({"remote": remote} if remote else {}) | ({"bind": bind} if bind else {})
        return [
            RowGroup(pick("tls", "all-reduce", "all-reduce-small"), {**over, "policy": "async"}, is_tls=True),
            RowGroup(pick("step"), {**over, "policy": "sync"}),
        ]
    here: dict[str, Any] = {"workers": 2, "policy": "async"}
    return [
        RowGroup(pick("shm", "shm-small", "all-reduce", "all-reduce-small"), {**here, "transport": "shm"}),
        RowGroup(pick("tcp"), {**here, "transport": "tcp"}),
        RowGroup(pick("tls"), {**here, "transport": "tcp"}, is_tls=True),
        RowGroup(pick("step"), {**here, "policy": "sync"}),
    ]


def choose(found: Sequence[RowGroup], patterns: Sequence[str]) -> list[RowGroup]:
    """The groups with only those rows whose names match one of the patterns (`*` works); all without patterns."""
    names = [row.name for group in found for row in group.rows]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"--only {pattern}: the rows are {', '.join(names)}")
    kept = {name for name in names if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}
    picked = [(group, tuple(row for row in group.rows if row.name in kept)) for group in found]
    return [dataclasses.replace(group, rows=rows) for group, rows in picked if rows]


@dataclasses.dataclass(frozen=True)
class RowOutcome:
    """A row as measured: seconds per operation, turn by turn; or why it was not measured."""

    row: Row
    ours: Sequence[float] = ()
    floor: Sequence[float] = ()
    others_share: float | None = None
    not_measured: str = ""  #: this machine cannot
    error: str = ""  #: it was tried and failed

    @property
    def ratios(self) -> list[float]:
        """One per pair of turns: whatever slows down the machine for a while slows down both sides of a pair."""
        return [ours / floor for ours, floor in zip(self.ours, self.floor, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_good(self) -> bool | None:
        """None where it was not measured."""
        return self.ratio <= self.row.good if self.ratios else None

    def to_json(self) -> dict[str, Any]:
        found = {**dataclasses.asdict(self.row), "not_measured": self.not_measured, "error": self.error}
        if self.ratios:
            found |= {
                "ratio": self.ratio,
                "lowest_ratio": min(self.ratios),
                "highest_ratio": max(self.ratios),
                "is_good": self.is_good,
                "others_share": self.others_share,
                "ours_seconds": list(self.ours),
                "floor_seconds": list(self.floor),
            }
        return found
