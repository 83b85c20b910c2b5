"""From launch settings to a running job: the job file, the plans, the folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from syncline import config as configuration
from syncline.config import JobConfig
from syncline.core.ring import (
    check_process_group_gpus,
    check_process_group_hosts,
    check_said,
    protection_of,
    ring_settings,
    trust_told,
)
from syncline.core.settings import check_settings
from syncline.core.units import counted
from syncline.errors import ConfigError
from syncline.launch import jobfile
from syncline.launch.engine import Attended, Engine, Prefixes, Processes
from syncline.launch.folder import claim_name, found_by_others, hold
from syncline.launch.forkserver import ForkServer
from syncline.launch.hosts import assign, hosts_of, parse_hosts, settle_stages, settle_workers
from syncline.launch.launcher import Launcher, Screen
from syncline.launch.processes import LOCAL_HOSTS, MemberPlan, MemberProcess
from syncline.launch.saving import settle_saving
from syncline.launch.watching import Watching, ask_to_save
from syncline.net import tcp
from syncline.page import serving
from syncline.page.hosts import page_hosts_of
from syncline.sinks.choosing import choices


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """The script of the workers."""

    path: str
    is_module: bool = False
    arguments: list[str] = []


def settle_here(launch: Mapping[str, Any]) -> tuple[dict[str, Any], JobConfig]:
    """The settings of a job: the command line over syncline.toml; validated as far as possible."""
    said = {**configuration.read_toml_here(), **configuration.check_known(launch, "command line")}
    check_said(said)
    given = settle_workers(settle_stages(said))
    config = configuration.resolve(given)
    check_settings(config)
    choices(config)
    given = settle_saving(settle_servers(given, config, server_hosts(config)))
    config = configuration.resolve(given)
    if config.transport == "shm" and len(set(assign(config).values())) > 1:
        raise ConfigError("--transport shm and several hosts (-H) cannot be combined; use auto or tcp")
    check_process_group_hosts(config, server_hosts(config))
    if not config.hosts:
        check_process_group_gpus(config, max(config.workers, config.most_workers), configuration.num_gpus())
    return given, config


def settle_name(given: dict[str, Any], config: JobConfig, script: Script) -> tuple[dict[str, Any], JobConfig]:
    """Gives a job without a name a name and a folder; last, so that a refused command leaves nothing behind."""
    if config.name:
        return given, config
    given = {**given, "name": claim_name(pathlib.Path(config.runs), default_name(script))}
    return given, configuration.resolve(given)


def server_hosts(config: JobConfig) -> list[str]:
    """The host of every server at the start."""
    return [host for name, host in assign(config).items() if name.startswith("server-")]


#: The usual size of slices of servers on a GPU: nothing is spread over cores there, and every slice costs time.
DEVICE_SLICE_BYTES = 256 << 20


def settle_servers(given: Mapping[str, Any], config: JobConfig, hosts: Sequence[str]) -> dict[str, Any]:
    """Adds explicit replicas, ack and size of slices to the settings. `hosts`: of each server at the start.

    Two replicas if servers are on several hosts, or if set; ack follows from the replicas. In a ring both follow from
    the workers, as do the servers.
    """
    if config.is_ring:
        return {**given, **ring_settings(config)}
    if config.ack not in ("", "memory", "replicated"):
        raise ConfigError(f"ack = {config.ack!r}: must be one of memory, replicated")
    replicas = config.replicas or {"memory": 1, "replicated": 2}.get(config.ack, 2 if len(set(hosts)) > 1 else 1)
    if replicas == 2 and len(hosts) < 2:
        said = "--ack replicated" if not config.replicas else "--replicas 2"
        raise ConfigError(f"{said} needs two servers or more; this job has {len(hosts)}: use -s 2")
    ack = "replicated" if replicas == 2 else "memory"
    if config.ack and config.ack != ack:
        raise ConfigError(f"--ack {config.ack} and --replicas {replicas} cannot be combined; use --ack {ack}")
    large = {"slice_bytes": DEVICE_SLICE_BYTES} if config.server_device != "cpu" else {}
    return {**large, **given, "replicas": replicas, "ack": ack}


def default_name(script: Script) -> str:
    stem = script.path.rpartition(".")[2] if script.is_module else pathlib.Path(script.path).stem
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"


_IMPORTS_TORCH = re.compile(r"^\s*(import|from)\s[^#\n]*\btorch\b", re.MULTILINE)


def mentions_torch(script: Script) -> bool:
    """Whether the script's own text imports torch. A script that imports it by another module starts more slowly."""
    path = pathlib.Path(*script.path.split(".")).with_suffix(".py") if script.is_module else pathlib.Path(script.path)
    try:
        return _IMPORTS_TORCH.search(path.read_text("utf-8", "replace")) is not None
    except OSError:
        return False


def check_script(script: Script) -> None:
    if not script.is_module and not pathlib.Path(script.path).is_file():
        raise ConfigError(f"there is no script {script.path}")


def run_job(
    given: dict[str, Any],
    config: JobConfig,
    script: Script,
    screen: Screen,
    start: Callable[[Engine, MemberPlan], MemberProcess] | None = None,
    make_engine: Callable[[JobConfig, ForkServer | None], Engine] | None = None,
    fork_server: ForkServer | None = None,
) -> int:
    """`syncline run`: runs one job; returns the exit code. `start` starts its members in place of the engine.
    `make_engine`: where they run; without it, on this host and those of `hosts`. `fork_server`: one that may have
    begun.
    """
    if not config.replicas:
        given = settle_servers(given, config, server_hosts(config))
        config = configuration.resolve(given)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(listen(config))
        given, config = settle_name(given, config, script)
        folder = stack.enter_context(hold(config))
        file = jobfile.new(advertised(sock, config), sock.getsockname()[1], given)
        if fork_server is None and config.preload:
            fork_server = ForkServer(
                lambda text: screen.line("launcher", f"syncline: {text}"), also=also_loaded(config)
            )
        engine = (make_engine or engine_of)(config, fork_server)
        if start is not None:
            engine = Attended(engine, start)
        page = page_socket(config)
        if page is not None:
            stack.enter_context(page)
        if fork_server is not None:
            stack.callback(fork_server.close)
        premises = Premises(config, script, folder, file, sock, page)
        return launch(premises, screen, engine, fork_server)


@dataclasses.dataclass(frozen=True)
class Premises:
    """What a job has before any of its members."""

    config: JobConfig
    script: Script
    folder: pathlib.Path  #: its own, under runs/
    file: jobfile.JobFile
    sock: socket.socket  #: of the coordinator
    page: socket.socket | None  #: of the web page


@dataclasses.dataclass(frozen=True)
class FoundMembers:
    """What an earlier launcher of this job has left."""

    members: Sequence[tuple[MemberPlan, MemberProcess]]
    seconds: float  #: since that one began


def launch(
    premises: Premises,
    screen: Screen,
    engine: Engine,
    fork_server: ForkServer | None = None,
    found: FoundMembers | None = None,
) -> int:
    """Runs a job whose sockets and folder are there to its end; the exit code. `found`: takes over its members."""
    config, script, folder, file = premises.config, premises.script, premises.folder, premises.file
    page = premises.page
    code = serving.new_code() if page is not None else ""
    page_fd = page.fileno() if page is not None else None
    plans = Plans(file, config, script, premises.sock.fileno(), engine, page_fd, code)
    first = plans.first()
    if fork_server is not None and any(plan.loads_torch and plan.host in LOCAL_HOSTS for plan in first):
        fork_server.start()
    if found is None:
        for told in opening(config, script, folder, engine):
            screen.line("launcher", f"syncline: {told}")
        if page is not None:
            screen.line("launcher", f"syncline: the page: {serving.link_of(page, code)}")
    launcher = Launcher(
        first,
        screen,
        Watching(file),
        folder=folder,
        grow=plans.another,
        engine=engine,
        max_restarts=config.max_restarts,
        fork_server=fork_server,
        save=functools.partial(ask_to_save, file, config.save_seconds) if config.checkpoint else None,
        found=found.members if found is not None else None,
        seconds_before=found.seconds if found is not None else 0.0,
    )
    with found_by_others(folder, file):
        return launcher.run()


def also_loaded(config: JobConfig) -> tuple[str, ...]:
    """Every process of a pipeline needs torch's schedules. They load the compiler: two seconds of processor time."""
    return ("torch.distributed.pipelining",) if config.stages > 1 else ()


def engine_of(config: JobConfig, fork_server: ForkServer | None) -> Engine:
    """Where this job's members run."""
    hosts = hosts_of(config)
    return Prefixes(hosts, config.remote, fork_server) if hosts else Processes(fork_server)


def opening(config: JobConfig, script: Script, folder: pathlib.Path, engine: Engine) -> list[str]:
    """The first lines of a job: what runs, what it survives, where to look."""
    servers = "as a ring" if config.is_ring else f"and {counted(config.servers, 'server')}"
    where = f" on {hosts}" if (hosts := engine.describe()) else ""
    trusted = trust_told(config, server_hosts(config))
    workers = counted(config.workers, "worker")
    if config.stages > 1:
        workers = f"{counted(config.workers, 'pipeline')} of {config.stages} stages, {config.schedule},"
    return [
        f"{config.name}: {workers} {servers}{where}, {config.policy}; runs {script.path}",
        protection_of(config, server_hosts(config)),
        *([trusted] if trusted else []),
        f"logs are in {folder}/; `syncline why {config.name}` says what the job waits for",
    ]


def listen(config: JobConfig) -> socket.socket:
    """Binds the coordinator's socket before anything starts, to notice a used port at once."""
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


def bound_host(config: JobConfig) -> str:
    """The address of `--bind`, without its port."""
    return (config.bind.rpartition(":")[0] if _has_port(config.bind) else config.bind).strip("[]")


def page_socket(config: JobConfig, seconds: float = 0.0) -> socket.socket | None:
    """The socket of the web page; it stays when the coordinator starts again. None: there is no page. `seconds`: for
    an earlier job that ends to let go of its port.
    """
    is_there = all(
        importlib.util.find_spec(name) is not None for name in ("starlette", "uvicorn", "prometheus_client")
    )
    if config.page == "off" or (config.page == "auto" and not is_there):
        return None
    if not is_there:
        raise ConfigError(f"--page {config.page}: the page needs the extra: pip install 'syncline[page]'")
    page_hosts_of(config.page_host)  # what is wrong there is said before anything starts
    return serving.listen(config.page, seconds=seconds)


def _has_port(text: str) -> bool:
    return text.count(":") == 1 or (text.startswith("[") and "]:" in text)


def _address_towards(hosts: list[tuple[str, int]]) -> str:
    """This host's address as the first other host sees it."""
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
        f"cannot tell which address of this host {', '.join(host for host, _ in hosts)} can reach; give it with "
        "--bind ADDRESS"
    )


def advertised(sock: socket.socket, config: JobConfig) -> str:
    host = str(sock.getsockname()[0])
    if host in ("0.0.0.0", "::"):
        return _address_towards(parse_hosts(config.hosts)) if config.hosts else "127.0.0.1"
    return host


class Plans:
    """The plan of every member, at the start and later; workers of a host share its cores."""

    def __init__(
        self,
        file: jobfile.JobFile,
        config: JobConfig,
        script: Script,
        listen_fd: int,
        engine: Engine,
        page_fd: int | None = None,
        page_code: str = "",
    ) -> None:
        """`page_fd`: the socket of the web page. `page_code`: opens it once."""
        self._file, self._config, self._script, self._listen_fd = file, config, script, listen_fd
        self._engine, self._page_fd, self._page_code = engine, page_fd, page_code
        self._folder = os.getcwd()
        self._has_torch = importlib.util.find_spec("torch") is not None
        self._scripts_load_torch = self._has_torch and mentions_torch(script)
        self._rendezvous_port = _free_port(file.host) if config.env == "torchrun" else 0

    def first(self) -> list[MemberPlan]:
        """The members that the job starts with."""
        where = assign(self._config)
        if self._config.is_ring:  # servers are in the workers' processes
            where = {name: host for name, host in where.items() if name.startswith("worker-")}
        coordinator = MemberPlan(
            role="coordinator",
            name="coordinator",
            host="local",
            file=self._file,
            listen_fd=self._listen_fd,
            page_fd=self._page_fd,
            page_code=self._page_code,
        )
        first = {host: name for name, host in reversed(where.items())}  # one member of each host speaks for all
        return [coordinator, *(self._plan(name, where, first[host] == name) for name, host in where.items())]

    def another(self, name: str, where: Mapping[str, str]) -> MemberPlan:
        """Another member, on the host with the fewest of its role. `where`: the hosts of current members."""
        host = self._engine.scale(name.rpartition("-")[0], where)
        return self._plan(name, {**where, name: host}, True)

    def _plan(self, name: str, where: Mapping[str, str], speaks: bool) -> MemberPlan:
        role, host = name.rpartition("-")[0], where[name]
        place = self._place(name, where) if self._config.cores == "auto" else None
        if role == "server":
            return MemberPlan(
                role=role,
                name=name,
                host=host,
                file=self._file,
                script=self._script.path,
                is_module=self._script.is_module,
                folder=self._folder,
                place=place,
                tells_cores=speaks,
                loads_torch=self._has_torch,
            )
        beside = [other for other, h in where.items() if h == host and other.startswith("worker-")]
        return MemberPlan(
            role=role,
            name=name,
            host=host,
            file=self._file,
            script=self._script.path,
            is_module=self._script.is_module,
            arguments=self._script.arguments,
            folder=self._folder,
            environment=self._rendezvous(name, beside) if self._config.env == "torchrun" else {},
            num_local_workers=len(beside) * self._config.stages,
            place=place,
            tells_cores=speaks,
            loads_torch=self._scripts_load_torch,
        )

    @staticmethod
    def _place(name: str, where: Mapping[str, str]) -> tuple[int, int, int]:
        """A member's index on its host, servers first, and the host's numbers of servers and workers."""
        here = [other for other, host in where.items() if host == where[name]]
        servers = [other for other in here if other.startswith("server-")]
        workers = [other for other in here if other.startswith("worker-")]
        return ([*servers, *workers].index(name), len(servers), len(workers))

    def _rendezvous(self, name: str, beside: list[str]) -> dict[str, str]:
        """The variables that torchrun sets; `beside`: the workers of that host, including this one.

        They count processes. With `--stages` they are the leader's; a stage process adds its number to both ranks.
        """
        stages = self._config.stages
        return {
            "RANK": str(int(name.rpartition("-")[2]) * stages),
            "WORLD_SIZE": str(self._config.workers * stages),
            "LOCAL_RANK": str(beside.index(name) * stages),
            "LOCAL_WORLD_SIZE": str(len(beside) * stages),
            "MASTER_ADDR": self._file.host,
            "MASTER_PORT": str(self._rendezvous_port),
        }


def _free_port(host: str) -> int:
    with tcp.bind(host, 0) as sock:
        return int(sock.getsockname()[1])
