"""A ring: every worker's process has a server in it, which has every slice. What follows, and what it excludes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from syncline.config import JobConfig
from syncline.core.codecs.named import NONE
from syncline.core.policy import parse_policy
from syncline.core.seats import Seat, protection
from syncline.core.words import counted
from syncline.errors import ConfigError

#: On a GPU nothing is spread over cores, and every slice has its price: what is usual there.
NCCL_SLICE_BYTES, _USUAL_BYTES = 1 << 30, JobConfig().slice_bytes
#: What follows from the number of workers in a ring, and is not said.
_FOLLOWS = {"servers": "-s", "replicas": "--replicas", "ack": "--ack"}


def partner_of(name: str) -> str:
    """The other member of the same process: server-3 of worker-3, and the other way round."""
    role, _, number = name.rpartition("-")
    return f"{'server' if role == 'worker' else 'worker'}-{number}"


def ring_settings(config: JobConfig) -> dict[str, Any]:
    """What follows in a ring from its number of workers: as many servers, each with every slice."""
    large = {"slice_bytes": NCCL_SLICE_BYTES} if config.sums == "nccl" and config.slice_bytes == _USUAL_BYTES else {}
    if max(config.workers, config.most_workers) < 2:
        return {"servers": 1, "replicas": 1, "ack": "memory", **large}
    return {"servers": config.workers, "replicas": max(2, config.workers), "ack": "replicated", **large}


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
        if config.sums != "ours":
            raise ConfigError(
                f"--sums {config.sums} is for rings: servers add up gradients themselves; say --exchange ring, or "
                "leave --sums out"
            )
        return
    _check_circle(config)
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
            "have their slices in host memory, or with --sums nccl on their worker's GPU; leave --server-device out, "
            "or say --exchange servers"
        )


def _check_circle(config: JobConfig) -> None:
    for option, name in (("--codec", config.codec), ("--pull-codec", config.pull_codec)):
        if config.has_circle and name not in NONE:
            raise ConfigError(
                f"--sums {config.sums} and {option} {name} exclude each other: {config.sums} carries gradients as "
                f"they are; leave {option} out, or say --sums ours"
            )
    if config.sums == "nccl" and config.device != "auto" and not config.device.startswith("cuda"):
        raise ConfigError(
            f"--sums nccl and --device {config.device} exclude each other: nccl is for GPUs; say --sums gloo"
        )


def check_circle_hosts(config: JobConfig, hosts: Iterable[str]) -> None:
    """Raises ConfigError where gloo or nccl would speak between hosts, and nobody has said that it may. `hosts`: of
    each server."""
    found = sorted(set(hosts))
    if config.has_circle and len(found) > 1 and not config.trust_network:
        raise ConfigError(
            f"--sums {config.sums} between hosts ({', '.join(found)}): {config.sums} speaks in the clear, and to "
            "anyone who connects. In a network that you trust say --trust-network; else --sums ours, which encrypts"
        )


def trust_told(config: JobConfig, hosts: Iterable[str]) -> str:
    """What somebody has allowed by --trust-network, where it counts. `hosts`: of each server."""
    found = sorted(set(hosts))
    if not config.has_circle or len(found) < 2:
        return ""
    return (
        f"--trust-network: {config.sums} speaks between {', '.join(found)} in the clear, and to anyone who connects"
    )


def check_circle_gpus(config: JobConfig, num_workers: int, num_gpus: int, where: str = "this machine") -> None:
    """Raises ConfigError where workers of one host would have no GPU of their own."""
    if config.sums == "nccl" and num_gpus < num_workers:
        raise ConfigError(
            f"--sums nccl needs a GPU for every worker; {where} has {counted(num_gpus, 'GPU')} for "
            f"{counted(num_workers, 'worker')}: say --sums gloo, or leave --sums out"
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
