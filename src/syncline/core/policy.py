"""Policy: when updates are applied, and how far a worker may run ahead."""

from __future__ import annotations

import msgspec

from syncline.config import JobConfig
from syncline.errors import ConfigError

KINDS = "sync, bounded:K (K = 0, 1, 2, …), async"


class Policy(msgspec.Struct, frozen=True):
    """`sync`, `bounded:K` or `async`; `bound` is K."""

    kind: str
    bound: int = 0

    def __str__(self) -> str:
        return f"bounded:{self.bound}" if self.kind == "bounded" else self.kind

    @property
    def in_rounds(self) -> bool:
        """Whether commits are applied together, one round after the other."""
        return self.kind == "sync"


def parse_policy(text: str) -> Policy:
    """The policy of this name; a wrong one is a ConfigError that lists what there is."""
    kind, colon, bound = text.partition(":")
    if kind in ("sync", "async") and not colon:
        return Policy(kind)
    if kind == "bounded" and bound.isascii() and bound.isdigit() and len(bound) < 10:
        return Policy(kind, int(bound))
    raise ConfigError(f"policy = {text!r}: there are {KINDS}")


def policy_of(config: JobConfig) -> Policy:
    """The config's policy, checked against the options that only make sense with some of them."""
    policy = parse_policy(config.policy)
    if config.sync_every > 1 and not policy.in_rounds:
        raise ConfigError(f"--sync-every {config.sync_every} needs --policy sync; this job has {policy}")
    if config.window > 0 and policy.in_rounds:
        raise ConfigError(
            f"--window {config.window} needs --policy bounded:K or async: in sync a worker has one open clock"
        )
    return policy
