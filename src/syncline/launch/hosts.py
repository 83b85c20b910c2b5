"""The number of workers, and which member runs on which host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from syncline import config as configuration
from syncline.config import JobConfig
from syncline.core.stages import check_divisible
from syncline.core.units import counted
from syncline.errors import ConfigError


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Parses `a:4,b:4` into pairs of host and number of workers; the default number is one."""
    found: list[tuple[str, int]] = []
    for word in text.split(","):
        host, colon, count = word.strip().rpartition(":")
        if not colon:
            host, count = count, "1"
        if not host or not count.isdigit() or int(count) < 1:
            raise ConfigError(f"-H {text!r}: give hosts and numbers of workers, e.g. a:4,b:4")
        if host in (known for known, _ in found):
            raise ConfigError(f"-H {text!r}: {host} is there twice")
        found.append((host, int(count)))
    return found


def parse_workers(text: str) -> dict[str, int | bool]:
    """Parses `4`, or `2:8`: the least and the most; then the starting number follows from the machine (0).

    `auto:1:8`: starts with the least, and adds workers while they pay off.
    """
    is_auto = text.startswith("auto:")
    least, colon, most = text.removeprefix("auto:").partition(":")
    if not colon and text.removeprefix("-").isdecimal():
        return {"workers": int(text), "least_workers": 0, "most_workers": 0}
    if not (least.isdecimal() and most.isdecimal()) or not 1 <= int(least) <= int(most):
        raise ConfigError(
            f"-w {text!r}: give a number of workers, or the least and the most, e.g. 4, 2:8 or auto:1:8"
        )
    found: dict[str, int | bool] = {"workers": 0, "least_workers": int(least), "most_workers": int(most)}
    return {**found, "workers": int(least), "auto_workers": True} if is_auto else found


def settle_stages(given: Mapping[str, Any]) -> dict[str, Any]:
    """With `--stages`: numbers of workers become numbers of pipelines. Each pipeline is one worker of the job."""
    stages = int(given.get("stages", 1))
    if stages <= 1:
        return dict(given)
    if "hosts" in given:
        uneven = [f"{host}:{count}" for host, count in parse_hosts(str(given["hosts"])) if count % stages]
        if uneven:
            raise ConfigError(
                f"-H {given['hosts']} and --stages {stages}: all workers of a pipeline are on one host, and "
                f"{uneven[0]} is not divisible by {stages}"
            )
    check_divisible(given, stages)
    settled = {**given, **{name: int(given[name]) // stages for name in _WORKERS if name in given}}
    if "hosts" in given:
        pairs = parse_hosts(str(given["hosts"]))
        settled["hosts"] = ",".join(f"{host}:{count // stages}" for host, count in pairs)
    return settled


_WORKERS = ("workers", "least_workers", "most_workers")


def settle_workers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the starting number of workers to the settings: as many as the hosts have, or as there is room for."""
    settled = dict(given)
    least, most = int(given.get("least_workers", 0)), int(given.get("most_workers", 0))
    said = int(given.get("workers", 0))
    if "hosts" in given:
        count = sum(number for _, number in parse_hosts(str(given["hosts"])))
        known = said if said or "workers" not in given or most else -1
        if known not in (0, count) or count < least or (most and count > most):
            workers = f"{least}:{most}" if most and not said else f"{said}"
            raise ConfigError(f"-w {workers} and -H {given['hosts']} ({counted(count, 'worker')}) cannot be combined")
        settled["workers"] = count
    elif not said and (least or most):
        there = configuration.num_gpus() or configuration.num_cores()
        settled["workers"] = max(least, 1, min(there, most or there))
    elif "workers" in given and said and (said < least or (most and said > most)):
        raise ConfigError(f"workers = {said}: least_workers = {least} and most_workers = {most} exclude this")
    return settled


def hosts_of(config: JobConfig) -> list[str]:
    """The hosts that were named at launch; none: this one."""
    return [host for host, _ in parse_hosts(config.hosts)] if config.hosts else []


def quietest(role: str, where: Mapping[str, str], hosts: Sequence[str]) -> str:
    """The host for another member: the first one with the fewest of its role."""
    counts = dict.fromkeys(hosts, 0)
    for name, host in where.items():
        if name.startswith(f"{role}-") and host in counts:
            counts[host] += 1
    return min(hosts, key=lambda host: counts[host])


def assign(config: JobConfig) -> dict[str, str]:
    """Member name to host: workers as in `hosts`, servers in turn over these or `server_hosts`, or in a ring beside
    workers.
    """
    if not config.hosts:
        hosts = ["local"]
        workers = ["local"] * config.workers
    else:
        pairs = parse_hosts(config.hosts)
        hosts = [host for host, _ in pairs]
        workers = [host for host, count in pairs for _ in range(count)]
    hosts = config.server_hosts.split(",") if config.server_hosts else hosts
    servers = workers if config.is_ring else [hosts[k % len(hosts)] for k in range(config.servers)]
    return {
        **{f"server-{k}": host for k, host in enumerate(servers)},
        **{f"worker-{k}": host for k, host in enumerate(workers)},
    }


def local_place(config: JobConfig, worker: str, host: str) -> int:
    """The index of a worker among those of its host at the start; for later ones, in turn."""
    workers = [name for name, where in assign(config).items() if name.startswith("worker-") and where == host]
    number = worker.rpartition("-")[2]
    if worker in workers:
        return workers.index(worker)
    return int(number) % max(1, len(workers)) if number.isdecimal() else 0
