"""From the settings of a launch to a running job: the job file, the plans, the folder."""

from __future__ import annotations

import os
import pathlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from syncline import config as configuration
from syncline.config import JobConfig
from syncline.core.policy import policy_of
from syncline.errors import ConfigError
from syncline.launch import jobfile
from syncline.launch.hosts import assign, parse_hosts
from syncline.launch.launcher import Launcher, Screen
from syncline.launch.processes import LOCAL_HOSTS, MemberProcess, Plan, start_member
from syncline.net import tcp


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers run."""

    path: str
    is_module: bool = False
    arguments: list[str] = []


def settle_here(launch: Mapping[str, Any], script: Script) -> tuple[dict[str, Any], JobConfig]:
    """All that is given for a job: the command line over syncline.toml; checked as far as it can be."""
    given = {**configuration.read_toml_here(), **configuration.check_known(launch, "command line")}
    if "hosts" in given:
        count = sum(number for _, number in parse_hosts(str(given["hosts"])))
        if given.get("workers", count) != count:
            raise ConfigError(f"-w {given['workers']} and -H {given['hosts']} ({count} workers) exclude each other")
        given["workers"] = count
    if not given.get("name"):
        given["name"] = default_name(script)
    config = configuration.resolve(given)
    policy_of(config)
    if config.transport == "shm" and len(set(assign(config).values())) > 1:
        raise ConfigError("--transport shm and several hosts (-H) exclude each other; use auto or tcp")
    return given, config


def default_name(script: Script) -> str:
    stem = script.path.rpartition(".")[2] if script.is_module else pathlib.Path(script.path).stem
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_script(script: Script) -> None:
    if not script.is_module and not pathlib.Path(script.path).is_file():
        raise ConfigError(f"there is no script {script.path}")


def run_job(
    given: dict[str, Any],
    config: JobConfig,
    script: Script,
    screen: Screen,
    start: Callable[[Plan, str], MemberProcess] = start_member,
) -> int:
    """`syncline run`: one job from start to verdict; the exit code. `start` starts its members."""
    with listen(config) as sock:
        folder = _make_folder(config)
        file = jobfile.new(advertised(sock, config), sock.getsockname()[1], given)
        plans = make_plans(file, config, script, sock.fileno())
        return Launcher(file, plans, screen, folder=folder, remote=config.remote, start=start).run()


def _make_folder(config: JobConfig) -> pathlib.Path:
    """The job's folder; logs of an earlier job of that name make way."""
    folder = pathlib.Path(config.runs) / config.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.log"):
            old.unlink()
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} cannot be used: {error.strerror or error}; say another with --runs DIR"
        ) from None
    return folder


def listen(config: JobConfig) -> socket.socket:
    """The coordinator's socket, bound before anything starts: a port in use is known at once."""
    host, port = "127.0.0.1", 0
    if config.bind:
        host, _, number = config.bind.rpartition(":") if _has_port(config.bind) else (config.bind, "", "0")
        if not number.isdigit() or int(number) > 65535:
            raise ConfigError(f"--bind {config.bind!r}: give an address or address:port, e.g. 10.0.0.1:7000")
        port = int(number)
        host = host.strip("[]")
    elif config.hosts and not all(name in LOCAL_HOSTS for name, _ in parse_hosts(config.hosts)):
        host = _address_towards(parse_hosts(config.hosts))
    sock = tcp.bind(host, port)
    sock.listen(128)
    return sock


def _has_port(text: str) -> bool:
    return text.count(":") == 1 or (text.startswith("[") and "]:" in text)


def _address_towards(hosts: list[tuple[str, int]]) -> str:
    """The address of this host as the first other host sees it."""
    for host, _ in hosts:
        if host in LOCAL_HOSTS:
            continue
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing; asks the routing table
                return str(probe.getsockname()[0])
        except OSError:
            continue
    raise ConfigError(
        f"which address of this host do {', '.join(host for host, _ in hosts)} reach? say it with --bind ADDRESS"
    )


def advertised(sock: socket.socket, config: JobConfig) -> str:
    host = str(sock.getsockname()[0])
    if host in ("0.0.0.0", "::"):
        return _address_towards(parse_hosts(config.hosts)) if config.hosts else "127.0.0.1"
    return host


def make_plans(file: jobfile.JobFile, config: JobConfig, script: Script, listen_fd: int) -> list[Plan]:
    """One plan per member; workers that share a host share its cores."""
    where = assign(config)
    folder = os.getcwd()
    plans = [Plan(role="coordinator", name="coordinator", host="local", file=file, listen_fd=listen_fd)]
    rendezvous_port = _free_port(file.host) if config.env == "torchrun" else 0
    local_ranks: dict[str, int] = {}
    for name, host in where.items():
        role = name.partition("-")[0]
        environment: dict[str, str] = {}
        count = 0
        if role == "worker":
            local = local_ranks[host] = local_ranks.get(host, -1) + 1
            count = sum(h == host for n, h in where.items() if n.startswith("worker-"))
            if config.env == "torchrun":
                environment = {
                    "RANK": name.rpartition("-")[2],
                    "WORLD_SIZE": str(config.workers),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(count),
                    "MASTER_ADDR": file.host,
                    "MASTER_PORT": str(rendezvous_port),
                }
        plans.append(
            Plan(
                role=role,
                name=name,
                host=host,
                file=file,
                script=script.path if role == "worker" else "",
                is_module=script.is_module,
                arguments=script.arguments,
                folder=folder,
                environment=environment,
                num_local_workers=count,
            )
        )
    return plans


def _free_port(host: str) -> int:
    with tcp.bind(host, 0) as sock:
        return int(sock.getsockname()[1])
