"""`syncline run --on ray`: the launcher is here, on a host of the cluster; members are where Ray has room."""

from __future__ import annotations

import contextlib
import pathlib
import secrets
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from syncline import config as configuration
from syncline.cli.run import prepare
from syncline.cli.screen import TerminalScreen
from syncline.config import JobConfig
from syncline.engines import ray_cluster
from syncline.engines.detached import close_folder
from syncline.engines.hub import Hub
from syncline.engines.ray_agents import RayAgents
from syncline.engines.ray_cluster import EachWorker, Room
from syncline.errors import ConfigError
from syncline.launch import jobfile
from syncline.launch.running import bound_host, run_job, settle_name
from syncline.net import tcp


def run_on_ray(
    told: Mapping[str, Any],
    per_worker: Mapping[str, float],
    queue_seconds: float,
    *,
    detach: bool,
    sync_code: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """The command line's job."""
    if detach:
        raise ConfigError("--detach and --on ray cannot be combined: ray job submit --no-wait does it")
    if sync_code:
        raise ConfigError("--on ray sends the working folder in any case: leave out --sync-code")
    wanted = msgspec.convert(per_worker, EachWorker)
    return run_job_on_ray(told, wanted, queue_seconds=queue_seconds, quiet=quiet, as_json=as_json)[0]


def run_job_on_ray(
    told: Mapping[str, Any],
    wanted: EachWorker,
    *,
    queue_seconds: float = 0.0,
    quiet: bool = False,
    as_json: bool = False,
) -> tuple[int, str]:
    """Runs the job to its end; its exit code and its name. `queue_seconds`: for the cluster to have room, also for
    what it does not have now; 0: only for what other jobs hold, as long as for a start.
    """
    wanted.check()
    with contextlib.ExitStack() as stack:
        rooms: list[Room] = []
        early = TerminalScreen("", quiet=quiet, as_json=as_json)  # before the job's settings are known

        def place(launch: dict[str, Any]) -> dict[str, Any]:
            said = {**configuration.read_toml_here(), **launch}
            _check(said)
            stack.enter_context(ray_cluster.connected(_not_sent(said)))
            servers, workers = _needs(said, wanted)
            if not queue_seconds:
                ray_cluster.check_has({"worker": workers, "server": servers})
            stack.callback(ray_cluster.release, rooms)
            rooms.extend(ray_cluster.reserve("server", servers, "SPREAD") if servers else [])
            least = int(said.get("least_workers") or 0) // _stages(said) or len(workers)
            rooms.extend(ray_cluster.reserve("worker", workers[:least], "PACK"))
            seconds = queue_seconds or float(said.get("start_seconds", JobConfig().start_seconds))
            ray_cluster.wait_for_room(rooms, seconds, lambda text: early.line("launcher", f"syncline: {text}"))
            rooms.extend(ray_cluster.reserve_as_many("worker", workers[least:]))
            return {**launch, **_settings(said, rooms)}

        given, config, target = prepare(told, place)
        given, config = settle_name(given, config, target)
        folder = pathlib.Path(config.runs).absolute() / config.name
        close_folder(folder)
        mark = folder / f".seen-{secrets.token_hex(8)}"
        mark.touch()
        stack.callback(mark.unlink, missing_ok=True)
        screen = stack.enter_context(TerminalScreen(config.policy, quiet=quiet, as_json=as_json))

        def say(text: str) -> None:
            screen.line("launcher", f"syncline: {text}")

        host = bound_host(config)
        sock = stack.enter_context(tcp.bind(host, 0))
        file = jobfile.new(host, sock.getsockname()[1], {"start_seconds": config.start_seconds})
        hub, code = stack.enter_context(Hub(file, sock, say)), 1
        engine = RayAgents(
            hub, file, _named(rooms), mark=mark, seconds=config.start_seconds, say=say,
            most_workers=0 if config.auto_workers else config.most_workers,
        )  # fmt: skip
        try:
            code = run_job(given, config, target, screen, make_engine=lambda *_: engine)
        finally:
            hub.close(code)
            engine.close()
    return code, config.name


def _check(said: Mapping[str, Any]) -> None:
    if said.get("hosts"):
        raise ConfigError(f"-H {said['hosts']} and --on ray: Ray chooses the hosts; leave out -H")
    if str(said.get("server_device", "cpu")) != "cpu":
        raise ConfigError("--server-device and --on ray cannot be combined: servers get no GPU there")


def _not_sent(said: Mapping[str, Any]) -> list[str]:
    """What the job writes itself, below the working folder."""
    folders = [str(said.get(name, usual)) for name, usual in (("runs", "runs"), ("checkpoint", ""))]
    below = [pathlib.Path(folder).absolute() for folder in folders if folder and "://" not in folder]
    here = pathlib.Path.cwd()
    return [f"/{path.relative_to(here)}" for path in below if path.is_relative_to(here) and path != here]


def _stages(said: Mapping[str, Any]) -> int:
    """Processes of each worker."""
    return max(1, int(said.get("stages") or 1))


def _needs(
    said: Mapping[str, Any], wanted: EachWorker
) -> tuple[list[Mapping[str, float]], list[Mapping[str, float]]]:
    """What each server and each worker needs."""
    stages = _stages(said)
    bundle = ray_cluster.bundle_of(wanted, stages)
    number = int(said.get("workers") or 0) // stages
    servers = 0 if said.get("exchange") == "ring" else int(said.get("servers", 1))
    if not number and (most := int(said.get("most_workers") or 0) // stages):
        free = ray_cluster.num_that_fit(bundle, besides=servers)
        number = max(int(said.get("least_workers") or 0) // stages, 1, min(most, free))
    elif not number and "GPU" in bundle:
        number = int(ray_cluster.totals()["GPU"] // bundle["GPU"])
    return [ray_cluster.SERVER] * servers, [bundle] * max(1, number)


def _settings(said: Mapping[str, Any], rooms: list[Room]) -> dict[str, Any]:
    """Where members are to run, in the words of a job on several hosts. Puts rooms into the order of the members."""
    rooms.sort(key=lambda room: (room.role, room.host if room.role == "worker" else ""))
    stages = _stages(said)
    counts = Counter(room.host for room in rooms if room.role == "worker")
    placed = {
        "workers": 0 if said.get("most_workers") else counts.total() * stages,
        "hosts": ",".join(f"{host}:{count * stages}" for host, count in sorted(counts.items())),
        "server_hosts": ",".join(room.host for room in rooms if room.role == "server"),
        "bind": str(said.get("bind") or ray_cluster.own_address()),
    }
    if any("GPU" in room.bundle for room in rooms) and "device" not in said:
        placed["device"] = "cuda:0"  # each member sees its own only
    return placed


def _named(rooms: list[Room]) -> dict[str, Room]:
    counts: Counter[str] = Counter()
    named = {}
    for room in rooms:
        named[f"{room.role}-{counts[room.role]}"] = room
        counts[room.role] += 1
    return named
