"""A ring: every worker's process has a server in it, which has every slice. What follows, and what it excludes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from syncline.config import JobConfig
from syncline.core.policy import parse_policy
from syncline.core.seats import Seat, protection
from syncline.core.words import counted
from syncline.errors import ConfigError

#: What follows from the number of workers in a ring, and is not said.
_FOLLOWS = {"servers": "-s", "replicas": "--replicas", "ack": "--ack"}


def partner_of(name: str) -> str:
    """The other member of the same process: server-3 of worker-3, and the other way round."""
    role, _, number = name.rpartition("-")
    return f"{'server' if role == 'worker' else 'worker'}-{number}"


def ring_settings(config: JobConfig) -> dict[str, Any]:
    """What follows in a ring from its number of workers: as many servers, each with every slice."""
    if max(config.workers, config.most_workers) < 2:
        return {"servers": 1, "replicas": 1, "ack": "memory"}
    return {"servers": config.workers, "replicas": max(2, config.workers), "ack": "replicated"}


def check_said(said: Mapping[str, Any]) -> None:
    """Raises ConfigError for what was said besides a ring, and follows from it."""
    if said.get("exchange") != "ring":
        return
    for key, option in _FOLLOWS.items():
        if key in said:
            raise ConfigError(
                f"--exchange ring and {option} {said[key]} exclude each other: every worker's process has a server, "
                f"which has every slice; leave {option} out (also in syncline.toml: {key}), or say "
                "--exchange servers"
            )


def check_ring(config: JobConfig) -> None:
    """Raises ConfigError for what a ring cannot do, with what to say instead."""
    if not config.is_ring:
        return
    policy = parse_policy(config.policy)
    if not policy.in_rounds or policy.spare:
        raise ConfigError(
            f"--exchange ring and --policy {policy} exclude each other: in a ring every round is that of all "
            "workers; say --policy sync, or --exchange servers"
        )
    if config.window:
        raise ConfigError(
            f"--exchange ring and --window {config.window} exclude each other: in a ring a worker has one open "
            "clock; leave --window out, or say --exchange servers with --policy bounded:K or async"
        )
    if config.server_device != "cpu":
        raise ConfigError(
            f"--exchange ring and --server-device {config.server_device} exclude each other: so far a ring's servers "
            "have their slices in host memory; leave --server-device out, or say --exchange servers"
        )


def protection_of(config: JobConfig, hosts: Iterable[str], seats: Collection[Seat] = ()) -> str:
    """What a death would cost, in either exchange. `hosts`: of each server; `seats`: as they are now."""
    hosts = list(hosts)
    if not config.is_ring:
        return protection(config.replicas, hosts, seats)
    if len(hosts) < 2:
        return "a ring of 1 worker: nobody else has a copy of its parameters and momenta"
    alone = sum(not seat.backups for seat in seats)
    if alone:
        return f"a ring, but {alone} of {counted(len(seats), 'slice')} are in one process only now"
    reach = "" if len(set(hosts)) > 1 else " (process-level only: all are on one host)"
    return (
        f"a ring of {len(hosts)} workers, each of which has everything: the loss of any process but the last costs "
        f"nothing{reach}"
    )
