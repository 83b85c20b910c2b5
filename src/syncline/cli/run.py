"""`syncline run`: starts a whole job and exits with its verdict."""

from __future__ import annotations

import difflib
import inspect
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from syncline import config as configuration
from syncline.cli.options import settings_of, takes_job_options
from syncline.cli.planning import plan_launch
from syncline.cli.screen import TerminalScreen
from syncline.config import JobConfig
from syncline.errors import ConfigError
from syncline.launch.hosts import hosts_of, parse_workers
from syncline.launch.own_codecs import check_own_codecs
from syncline.launch.running import Script, check_script, run_job, settle_here

if TYPE_CHECKING:
    from syncline.engines.slurm import SlurmStep


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
    sync_code: Annotated[
        bool,
        typer.Option("--sync-code", help="Send the working folder to the hosts of -H that do not see it."),
    ] = False,
    env: Annotated[
        str | None, typer.Option(help="torchrun: also set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Only what the scripts print, deaths, verdicts and the table at the end.")
    ] = False,
    log_format: Annotated[
        str | None, typer.Option("--log-format", metavar="text|json", help="How lines are written. [default: text]")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE",
            help="slurm: submit a batch job; in a step of srun, every task is a worker. ray: on this host's "
            "cluster. local: here, whatever environment this is. [default: slurm in a step of srun, else "
            "local]",
        ),
    ] = None,
    slurm_hosts: Annotated[
        int | None, typer.Option("--nodes", metavar="N", help="Slurm: number of nodes. [default: 1]")
    ] = None,
    gpus_per_host: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node", metavar="N", help="Slurm: GPUs of each node; one worker on each. [default: 0]"
        ),
    ] = None,
    cpus_per_host: Annotated[
        int | None,
        typer.Option("--cpus-per-node", metavar="N", help="Slurm: cores of each node. [default: whole nodes]"),
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar="H:MM:SS", help="Slurm: time limit; with --checkpoint 5 minutes or more.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm: partition of the cluster.")] = None,
    requeue: Annotated[
        bool,
        typer.Option(
            "--requeue",
            help="Slurm: before the time limit save, requeue and go on from the checkpoint; also after "
            "the loss of the first node or of the launcher. Ends after three starts in a row that saved no step.",
        ),
    ] = False,
    engine_options: Annotated[
        str | None, typer.Option(metavar="OPTIONS", help="More options for sbatch, e.g. for its account.")
    ] = None,
    cpus_per_worker: Annotated[
        float | None, typer.Option(metavar="N", help="Ray: CPUs of each worker; a server has one. [default: 1]")
    ] = None,
    gpus_per_worker: Annotated[
        float | None,
        typer.Option(metavar="N", help="Ray: GPUs of each worker. [default: 1 if the cluster has any, else 0]"),
    ] = None,
    queue_seconds: Annotated[
        float | None,
        typer.Option(
            help="Deadline for a submitted job to start. [default: none; on Ray 120, only for what other jobs hold]"
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave the job, which goes on: see syncline attach, syncline stop.")
    ] = False,
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
    told = {"script": script, "arguments": arguments, "module": module, **own, **said}
    asked = {
        "hosts": slurm_hosts, "gpus_per_host": gpus_per_host, "cpus_per_host": cpus_per_host, "time": time,
        "partition": partition, "requeue": requeue or None, "options": engine_options,
    }  # fmt: skip
    asked = {name: value for name, value in asked.items() if value is not None}
    if log_format not in (None, "text", "json"):
        raise ConfigError(f"--log-format {log_format!r}: must be one of text, json")
    shown = {"quiet": quiet, "as_json": log_format == "json"}
    step = step_here() if on in (None, "slurm") else None
    if step is not None:
        from syncline.cli.slurm import run_task

        raise typer.Exit(run_task(told, step, **shown))
    if on in (None, "slurm"):
        check_not_submitted()
    if on == "slurm":
        from syncline.cli.slurm import run_job_on_slurm

        raise typer.Exit(run_job_on_slurm(told, asked, queue_seconds or 0.0, detach=detach))
    if on not in (None, "local", "ray"):
        raise ConfigError(f"--on {on}: must be local, ray or slurm")
    if asked or (queue_seconds and on != "ray"):
        first = next(iter(asked), "queue_seconds")
        raise ConfigError(f"--{_FLAGS.get(first, first.replace('_', '-'))} is for Slurm: add --on slurm")
    said_each = {"cpus_per_worker": cpus_per_worker, "gpus_per_worker": gpus_per_worker}
    per_worker = {name: value for name, value in said_each.items() if value is not None}
    if on == "ray":
        from syncline.cli.ray import run_on_ray

        raise typer.Exit(
            run_on_ray(told, per_worker, queue_seconds or 0.0, detach=detach, sync_code=sync_code, **shown)
        )
    if per_worker:
        raise ConfigError(f"--{next(iter(per_worker)).replace('_', '-')} is for Ray: add --on ray")
    given, config, target = prepare(told)
    if detach and (quiet or log_format == "json"):
        raise ConfigError(
            "--quiet and --log-format are for a job that has your terminal: leave them out, or --detach"
        )
    look_at_hosts(config, target, sync_code=sync_code)
    if detach:
        from syncline.cli.attach import run_detached

        run_detached(given, config, target)
        raise typer.Exit(0)
    with TerminalScreen(config.policy, quiet=quiet, as_json=shown["as_json"]) as screen:
        code = run_job(given, config, target, screen)
    raise typer.Exit(code)


def look_at_hosts(config: JobConfig, script: Script, *, sync_code: bool) -> None:
    """Names what makes the job impossible on one of its hosts, before anything starts."""
    if not config.hosts:
        if sync_code:
            raise ConfigError("--sync-code sends the working folder to the hosts of -H; there is no -H")
        return
    from syncline.launch.greeting import greet

    path = "" if script.is_module else script.path
    left_out = [pathlib.Path(config.runs)]
    if config.checkpoint and "://" not in config.checkpoint:
        left_out.append(pathlib.Path(config.checkpoint))
    told = greet(hosts_of(config), config.remote, path, config.start_seconds, sync_code=sync_code, left_out=left_out)
    for line in told:
        sys.stdout.write(f"syncline: {line}\n")
    sys.stdout.flush()


#: Where a flag is not its parameter's name.
_FLAGS = {
    "hosts": "nodes",
    "gpus_per_host": "gpus-per-node",
    "cpus_per_host": "cpus-per-node",
    "options": "engine-options",
}


def step_here() -> SlurmStep | None:
    """The step of srun with several tasks that has started this process as one of them."""
    environment = configuration.inherited_environment({})
    if not environment.get("SLURM_STEP_NODELIST"):
        return None
    from syncline.engines.slurm import step_of

    step = step_of(environment)
    return step if step is not None and (step.num_tasks > 1 or environment.get(AS_STEP)) else None


def check_not_submitted() -> None:
    """A task of a submitted job runs the words of the command that has submitted it, `--on slurm` among them."""
    if not configuration.inherited_environment({}).get(AS_STEP):
        return
    raise ConfigError(
        f"{AS_STEP} is set, so this process is in a batch job of syncline run --on slurm, but SLURM_STEP_NODELIST, "
        "SLURM_STEP_TASKS_PER_NODE and SLURM_PROCID do not say which task it is; nothing is started or submitted. "
        f"If a wrapper of srun clears them, keep them. For a job of its own, unset {AS_STEP} or use --on local"
    )


#: Set by a submitted job: its step is one even with a single task.
AS_STEP = "SYNCLINE_SLURM_STEP"


def prepare(
    said: Mapping[str, Any], place: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> tuple[dict[str, Any], JobConfig, Script]:
    """What `run` was told, by the names of its parameters: the settings that are given, all settings, the script.
    `place` adds where the members are to run.
    """
    launch = settings_of(said)
    target = chosen_script(launch.pop("script", None), launch.pop("module", None), launch.pop("arguments", []))
    for shown in ("quiet", "log_format"):  # of the screen, not of the job
        launch.pop(shown, None)
    workers = launch.pop("workers", None)
    if workers is not None:
        launch.update(parse_workers(workers))
    elif place is dict:
        launch.update(_default_workers(launch))
    check_script(target)
    launch = place(launch)
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
    shown = {"slurm_hosts": "nodes", "gpus_per_host": "gpus-per-node", "cpus_per_host": "cpus-per-node"}
    return [f"--{shown.get(name, name.replace('_', '-'))}" for name in (*names, "help")]
