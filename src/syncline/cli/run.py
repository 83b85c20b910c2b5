"""`syncline run`: starts a whole job and exits with its verdict."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from syncline import config as configuration
from syncline.cli.screen import TerminalScreen
from syncline.config import JobConfig
from syncline.errors import ConfigError
from syncline.launch.hosts import parse_workers
from syncline.launch.running import Script, check_script, run_job, settle_here

_FLAGS = (
    "--workers", "--servers", "--policy", "--sync-every", "--window", "--transport", "--hosts", "--remote",
    "--env", "--device", "--server-device", "--name", "--bind", "--profile", "--runs",
    "--start-seconds", "--wait-seconds", "--replicas", "--ack", "--max-restarts", "--deadline-seconds",
    "--stuck-seconds", "--bad-pushes", "--no-check-finite", "--help",
)  # fmt: skip

WorkersOption = Annotated[
    str | None,
    typer.Option(
        "-w",
        "--workers",
        metavar="N|MIN:MAX",
        help="Number of workers, or the least and the most: starts with as many as there is room for (GPUs, else "
        "cores) and may be scaled. [default: one per GPU, else 1]",
    ),
]
ReplicasOption = Annotated[
    int | None,
    typer.Option(help="Servers that have each slice: 1 or 2. [default: 2 when servers are on several hosts, else 1]"),
]
AckOption = Annotated[
    str | None,
    typer.Option(help="A push is acknowledged when its server has it (memory) or two have it (replicated)."),
]


def run(
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT", help="Script that every worker runs.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Given to the script.")] = None,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module instead.")] = None,
    workers: WorkersOption = None,
    servers: Annotated[int | None, typer.Option("-s", "--servers", help="Number of servers. [default: 1]")] = None,
    replicas: ReplicasOption = None,
    ack: AckOption = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(help="Of a member that dies without an acknowledged push in between. [default: 3]"),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="sync, bounded:K or async. [default: sync]")] = None,
    sync_every: Annotated[
        int | None, typer.Option(metavar="H", help="Step locally H times, then average (sync only).")
    ] = None,
    window: Annotated[
        int | None, typer.Option(metavar="W", help="Commits a worker may leave unanswered (bounded, async).")
    ] = None,
    transport: Annotated[str | None, typer.Option(help="auto, shm or tcp. [default: auto]")] = None,
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", metavar="a:4,b:4", help="Workers per host, on several hosts.")
    ] = None,
    remote: Annotated[
        str | None, typer.Option(help='Command prefix that starts a process on a host. [default: "ssh {host}"]')
    ] = None,
    env: Annotated[
        str | None, typer.Option(help="torchrun: also set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda:0, …  [default: cuda:LOCAL_RANK if there are enough GPUs, else cpu]")
    ] = None,
    server_device: Annotated[
        str | None, typer.Option(help="Where servers hold slices and run rules: cpu, cuda, cuda:0, …  [default: cpu]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job and of its folder under runs/.")] = None,
    bind: Annotated[
        str | None, typer.Option(metavar="ADDRESS[:PORT]", help="Where the coordinator listens. [default: loopback]")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="At the end, show where the time of the steps went.")
    ] = False,
    runs: Annotated[str | None, typer.Option(metavar="DIR", help="Folder for jobs' folders. [default: runs]")] = None,
    start_seconds: Annotated[
        float | None, typer.Option(help="Deadline for all members to be there. [default: 120]")
    ] = None,
    wait_seconds: Annotated[float | None, typer.Option(help="Deadline of every other wait. [default: 600]")] = None,
    deadline_seconds: Annotated[
        float | None, typer.Option(help="Of silence, at least, before a member counts as dead. [default: 2]")
    ] = None,
    stuck_seconds: Annotated[
        float | None,
        typer.Option(help="Others wait so long for a member that does not advance; it is evicted. [default: 600]"),
    ] = None,
    bad_pushes: Annotated[
        int | None, typer.Option(metavar="N", help="Quarantine a worker after N pushes with NaN or Inf. [default: 3]")
    ] = None,
    no_check_finite: Annotated[
        bool, typer.Option("--no-check-finite", help="Let pushes with NaN or Inf count.")
    ] = False,
) -> None:
    """Runs a whole job.

    Starts a coordinator, servers and workers, shows their output, and exits with the job's verdict. Lines of
    worker-0 are shown as they are, those of others behind their names; all of it, output and errors alike, goes to
    standard output and into runs/NAME/. A member that dies is started again, and the others go on meanwhile.
    Ctrl-C ends everything.

    Example:  syncline run -w 2:8 -s 2 --replicas 2 --policy bounded:2 train.py --epochs 3
    """
    given, config, target = prepare(locals())
    with TerminalScreen(config.policy) as screen:
        code = run_job(given, config, target, screen)
    raise typer.Exit(code)


def prepare(said: Mapping[str, Any]) -> tuple[dict[str, Any], JobConfig, Script]:
    """What `run` was told, by the names of its parameters: the settings that are given, all settings, the script."""
    launch = {key: value for key, value in said.items() if value is not None and value is not False}
    if launch.pop("no_check_finite", False):
        launch["check_finite"] = False
    target = chosen_script(launch.pop("script", None), launch.pop("module", None), launch.pop("arguments", []))
    workers = launch.pop("workers", None)
    launch.update(parse_workers(workers) if workers is not None else _default_workers(launch))
    check_script(target)
    given, config = settle_here(launch, target)
    return given, config, target


def _default_workers(launch: Mapping[str, Any]) -> dict[str, int]:
    """One worker per GPU where nothing else was said, here or in syncline.toml."""
    said = {*launch, *configuration.read_toml_here()}
    if said.isdisjoint(("workers", "hosts", "least_workers", "most_workers")):
        return {"workers": max(1, configuration.num_gpus())}
    return {}


def chosen_script(script: str | None, module: str | None, arguments: list[str]) -> Script:
    """What the workers run; with -m, everything positional belongs to the module."""
    if module is not None:
        return Script(path=module, is_module=True, arguments=[*([script] if script else []), *arguments])
    if script is None:
        raise ConfigError("no script was given, e.g. syncline run -w 2 train.py")
    if script == "-":
        raise ConfigError("a script from standard input cannot be given to several workers; write it to a file")
    if script.startswith("-"):
        near = difflib.get_close_matches(script, _FLAGS, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; see syncline run --help"
        raise ConfigError(f"there is no option {script}{hint}")
    return Script(path=script, arguments=arguments)
