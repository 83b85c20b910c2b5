"""`syncline run`: starts a whole job and exits with its verdict."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from syncline import config as configuration
from syncline.cli.options import settings_of, takes_job_options
from syncline.cli.planning import plan_launch
from syncline.cli.screen import TerminalScreen
from syncline.config import JobConfig
from syncline.errors import ConfigError
from syncline.launch.hosts import parse_workers
from syncline.launch.own_codecs import check_own_codecs
from syncline.launch.running import Script, check_script, run_job, settle_here


@takes_job_options
def run(
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT", help="Script that every worker runs.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Given to the script.")] = None,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module instead.")] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "-w",
            "--workers",
            metavar="N|MIN:MAX|auto:MIN:MAX",
            help="Number of workers, or the least and the most: starts with as many as there is room for (GPUs, else "
            "cores) and may be scaled; auto: starts with the least, and adds more while they pay. "
            "[default: one per GPU, else 1]",
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(help="Of a member that dies without an acknowledged push in between. [default: 3]"),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", metavar="a:4,b:4", help="Workers per host, on several hosts.")
    ] = None,
    remote: Annotated[
        str | None, typer.Option(help='Command prefix that starts a process on a host. [default: "ssh {host}"]')
    ] = None,
    env: Annotated[
        str | None, typer.Option(help="torchrun: also set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.")
    ] = None,
    **said: Any,
) -> None:
    """Runs a whole job.

    Starts a coordinator, servers and workers, shows their output, and exits with the job's verdict. Lines of
    worker-0 are shown as they are, those of others behind their names; all of it, output and errors alike, goes to
    standard output and into runs/NAME/. A member that dies is started again, and the others go on meanwhile.
    Ctrl-C ends everything. However the job ends, a short table says how, how far it came and where the logs are.

    Example:  syncline run -w 2:8 -s 2 --replicas 2 --policy bounded:2 train.py --epochs 3
    """
    own = {"workers": workers, "max_restarts": max_restarts, "hosts": hosts, "remote": remote, "env": env}
    given, config, target = prepare({"script": script, "arguments": arguments, "module": module, **own, **said})
    with TerminalScreen(config.policy) as screen:
        code = run_job(given, config, target, screen)
    raise typer.Exit(code)


def prepare(said: Mapping[str, Any]) -> tuple[dict[str, Any], JobConfig, Script]:
    """What `run` was told, by the names of its parameters: the settings that are given, all settings, the script."""
    launch = settings_of(said)
    target = chosen_script(launch.pop("script", None), launch.pop("module", None), launch.pop("arguments", []))
    workers = launch.pop("workers", None)
    launch.update(parse_workers(workers) if workers is not None else _default_workers(launch))
    check_script(target)
    launch.update(plan_launch(launch, target))
    given, config = settle_here(launch)
    check_own_codecs(config, "" if target.is_module else target.path)
    return given, config, target


def _default_workers(launch: Mapping[str, Any]) -> dict[str, int]:
    """One worker per GPU where nothing else was said, here or in syncline.toml."""
    said = {**configuration.read_toml_here(), **launch}
    if said.keys().isdisjoint(("workers", "hosts", "least_workers", "most_workers")):
        return {"workers": int(said.get("stages", 0)) or max(1, configuration.num_gpus())}
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
        near = difflib.get_close_matches(script, flags(), n=1)
        hint = f"; did you mean {near[0]}?" if near else "; see syncline run --help"
        raise ConfigError(f"there is no option {script}{hint}")
    return Script(path=script, arguments=arguments)


def flags() -> list[str]:
    names = [name for name in inspect.signature(run).parameters if name not in ("script", "arguments", "module")]
    return [f"--{name.replace('_', '-')}" for name in (*names, "help")]
