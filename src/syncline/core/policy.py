"""Policy: when updates are applied, and how far a worker may run ahead."""

from __future__ import annotations

import msgspec

from syncline.config import JobConfig
from syncline.core.aggregate import Aggregate, aggregate_of
from syncline.errors import ConfigError

KINDS = (
    "sync, sync:spare=N, bounded:K (K = 0, 1, 2, …), bounded:K,damped, async, async,damped, async:gather=N, "
    "async:gather=N,damped"
)
_MOST_DIGITS = 9


class Policy(msgspec.Struct, frozen=True):
    """`sync`, `bounded:K` or `async`; `bound` is K.

    `core/rounds.py` decides by it when a round is applied. `has_spare` also changes the protocol: a round may be
    closed without a worker, so commits can be late, the server of slice 0 decides for all servers, replies are
    copies, and a ring is excluded.
    """

    kind: str
    bound: int = 0
    spare: int = 0  # sync: a round is complete when all but this many have committed
    gather: int = 0  # async: a slice applies the weighted mean of so many pushes; 0: every push by itself
    is_damped: bool = False  # async, bounded: a stale gradient counts less
    weighs: bool = True  # async, bounded: a push counts by its weight
    lr_per_worker: bool = False  # sync: each gradient counts by its own worker's learning rate
    aggregate: Aggregate | None = None  # sync: how the gradients of a round become one; None: as registered
    most_rounds: int = 0  # sync: limit for updates of a parameter; 0: none

    def __str__(self) -> str:
        if self.kind == "sync":
            return f"sync:spare={self.spare}" if self.spare else "sync"
        name = f"bounded:{self.bound}" if self.kind == "bounded" else self.kind
        name = f"async:gather={self.gather}" if self.gather else name
        return f"{name},damped" if self.is_damped else name

    @property
    def in_rounds(self) -> bool:
        """Whether commits are applied in rounds."""
        return self.kind == "sync"

    @property
    def stands_still(self) -> bool:
        """Whether a worker's reply stays unchanged until its next commit."""
        return self.in_rounds and not self.has_spare

    @property
    def has_spare(self) -> bool:
        """Whether a round may be closed without a worker: this changes the protocol, `spare` is only the number."""
        return self.spare > 0

    def damping(self, staleness: int) -> float:
        """The factor on a gradient of this staleness."""
        return 1.0 / (1.0 + staleness) if self.is_damped else 1.0


def parse_policy(text: str) -> Policy:
    """What the text alone says; `policy_of` adds the other options. A ConfigError lists the valid policies."""
    name, comma, option = text.partition(",")
    kind, colon, number = name.partition(":")
    is_damped = option == "damped"
    if comma and not is_damped:
        raise ConfigError(f"policy = {_short(text)}: must be one of {KINDS}")
    if kind == "sync" and is_damped:
        raise ConfigError(
            f"policy = {_short(text)}: nothing is stale in sync; damped goes with bounded:K or async, "
            "e.g. bounded:4,damped"
        )
    if kind == "sync" and number.startswith("spare="):
        return Policy(kind, spare=_spare(text, number.removeprefix("spare=")))
    if kind == "async" and number.startswith("gather="):
        return Policy(kind, gather=_gather(text, number.removeprefix("gather=")), is_damped=is_damped)
    if kind in ("sync", "bounded") and number.startswith("gather="):
        raise ConfigError(
            f"policy = {_short(text)}: gather=N goes with async, e.g. async:gather=2; in sync a round gathers the "
            "pushes of all workers"
        )
    if kind in ("sync", "async") and not colon:
        return Policy(kind, is_damped=is_damped)
    if kind == "bounded" and _is_number(number):
        return Policy(kind, int(number), is_damped=is_damped)
    raise ConfigError(f"policy = {_short(text)}: must be one of {KINDS}")


def _spare(text: str, number: str) -> int:
    if not _is_number(number) or int(number) < 1:
        raise ConfigError(
            f"policy = {_short(text)}: spare=N is the number of workers that a round does not wait for, at least 1, "
            "e.g. sync:spare=1"
        )
    return int(number)


def _gather(text: str, number: str) -> int:
    if not _is_number(number) or int(number) < 1:
        raise ConfigError(
            f"policy = {_short(text)}: gather=N is how many pushes are applied as one, 1 or more, e.g. async:gather=2"
        )
    return int(number)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:79] + "…")


def policy_of(config: JobConfig) -> Policy:
    """The config's policy, checked against options that need certain policies."""
    policy = parse_policy(config.policy)
    if config.window > 0 and policy.in_rounds:
        raise ConfigError(
            f"--window {config.window} needs --policy bounded:K or async: in sync a worker has one open step"
        )
    least = config.least_workers or config.workers
    if policy.spare >= least:
        remedy = f"say sync:spare={least - 1} or less, or more workers (-w)" if least > 1 else "say more workers (-w)"
        raise ConfigError(
            f"policy = {config.policy!r}: of {least} {'worker' if least == 1 else 'workers'} at least one must be in "
            f"a round; {remedy}"
        )
    most = max(config.workers, config.most_workers)
    if policy.gather > most:
        raise ConfigError(
            f"policy = {config.policy!r}: a group of {policy.gather} pushes is more than this job has workers "
            f"({most}); say async:gather={most} or less, or more workers (-w)"
        )
    if config.weights == "ignore" and policy.in_rounds:
        raise ConfigError(
            "--weights ignore needs --policy bounded:K or async: in sync the weights make the mean of a round; give "
            "each push the weight 1"
        )
    if config.lr_per_worker and not policy.in_rounds:
        raise ConfigError(
            f"--lr-per-worker needs --policy sync: in {policy} each worker's learning rate counts anyway"
        )
    if config.lr_per_worker and config.is_ring:
        raise ConfigError("--lr-per-worker needs servers: leave out --exchange ring")
    in_steps = policy.in_rounds and not config.steps_locally
    return msgspec.structs.replace(
        policy,
        most_rounds=config.max_steps if in_steps else 0,
        weighs=config.weights == "count",
        lr_per_worker=config.lr_per_worker,
        aggregate=aggregate_of(config, policy.in_rounds, policy.has_spare),
    )
