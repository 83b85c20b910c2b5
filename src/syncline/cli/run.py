"""`syncline run`: starts a whole job and exits with its verdict."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

import typer

from syncline import config as configuration
from syncline.cli.screen import TerminalScreen
from syncline.errors import ConfigError
from syncline.launch.running import Script, check_script, run_job, settle_here

_FLAGS = (
    "--workers", "--servers", "--policy", "--sync-every", "--window", "--transport", "--hosts", "--remote",
    "--env", "--device", "--server-device", "--name", "--bind", "--profile", "--runs",
    "--start-seconds", "--wait-seconds", "--help",
)  # fmt: skip


def run(
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT", help="Script that every worker runs.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Given to the script.")] = None,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module instead.")] = None,
    workers: Annotated[
        int | None, typer.Option("-w", "--workers", help="Number of workers. [default: one per GPU, else 1]")
    ] = None,
    servers: Annotated[int | None, typer.Option("-s", "--servers", help="Number of servers. [default: 1]")] = None,
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
) -> None:
    """Runs a whole job.

    Starts a coordinator, servers and workers, shows their output, and exits with the job's verdict. Lines of
    worker-0 are shown as they are, those of others behind their names; all of it, output and errors alike, goes to
    standard output and into runs/NAME/.

    Example:  syncline run -w 4 -s 2 --policy bounded:2 train.py --epochs 3
    """
    said: dict[str, Any] = {
        "workers": workers, "servers": servers, "policy": policy, "sync_every": sync_every, "window": window,
        "transport": transport, "hosts": hosts, "remote": remote, "env": env, "device": device,
        "server_device": server_device, "name": name,
        "bind": bind, "profile": profile or None, "runs": runs, "start_seconds": start_seconds,
        "wait_seconds": wait_seconds,
    }  # fmt: skip
    launch = {key: value for key, value in said.items() if value is not None}
    target = chosen_script(script, module, arguments or [])
    check_script(target)
    if "workers" not in launch and "hosts" not in launch:
        launch["workers"] = None
    given, config = settle_here(_with_default_workers(launch), target)
    with TerminalScreen(config.policy, config.workers) as screen:
        code = run_job(given, config, target, screen)
    raise typer.Exit(code)


def _with_default_workers(launch: dict[str, Any]) -> dict[str, Any]:
    """One worker per GPU where nothing else was said, here or in syncline.toml."""
    if launch.get("workers", 0) is None:
        del launch["workers"]
        toml = configuration.read_toml_here()
        if "workers" not in toml and "hosts" not in toml:
            launch["workers"] = max(1, configuration.num_gpus())
    return launch


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
