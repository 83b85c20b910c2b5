"""`syncline run` on Slurm: as a task of srun, or submitting a batch job."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from syncline import config as configuration
from syncline.cli.run import AS_STEP, prepare
from syncline.cli.screen import TerminalScreen
from syncline.config import JobConfig
from syncline.engines import slurm
from syncline.engines.detached import close_folder
from syncline.engines.slurm_submit import (
    BATCH,
    Following,
    Wanted,
    batch_script,
    check_here,
    exit_code_of,
    exit_code_path,
    leave_no_empty_job,
    note_start,
    output_of,
    submit,
)
from syncline.errors import ConfigError, SynclineError
from syncline.launch.forkserver import ForkServer
from syncline.launch.running import Script, also_loaded, mentions_torch, run_job, settle_name
from syncline.store import checkpoints
from syncline.store.folders import open_folder


def run_task(told: Mapping[str, Any], step: slurm.SlurmStep, *, quiet: bool = False, as_json: bool = False) -> int:
    """One task of srun: the first runs the job, the others are agents. The exit code is the job's."""
    num_gpus = configuration.num_gpus()
    try:
        given, config, target = prepare(told, lambda launch: slurm.placed(_with_toml(launch), step, num_gpus))
        if step.task:
            folder = pathlib.Path(config.runs) / config.name
            with loading(
                config, target, lambda text: print(f"syncline: {step.host}: {text}", file=sys.stderr)
            ) as server:
                lost, ended = (lambda: _lost(step, folder)), (lambda: _ended(step, folder))
                return slurm.follow(step, config, lost, ended, server)
    except SynclineError as error:
        raise type(error)(f"task {step.task} on {step.host}: {error}") from None
    given, config = settle_name(given, config, target)
    folder = pathlib.Path(config.runs) / config.name
    close_folder(folder)
    if is_submitted() and config.checkpoint:
        try:
            note_start(folder, step.job, int(step.restart), _saved_step(config.checkpoint))
        except ConfigError:
            exit_code_path(folder, step.job).write_text("2")
            raise
    with TerminalScreen(config.policy, quiet=quiet, as_json=as_json) as screen:

        def say(text: str) -> None:
            screen.line("launcher", f"syncline: {text}")

        if warning := slurm.warn_of_gpus(step, num_gpus):
            say(warning)
        with loading(config, target, say) as fork_server, slurm.leading(step, config, say) as hub:
            code = run_job(
                given, config, target, screen,
                make_engine=lambda _, fork_server: slurm.engine_of(step, hub, fork_server),
                fork_server=fork_server,
            )  # fmt: skip
            hub.close(code)
    if is_submitted():
        exit_code_path(folder, step.job).write_text(str(code))
    return code


@contextlib.contextmanager
def loading(config: JobConfig, script: Script, say: Callable[[str], None]) -> Iterator[ForkServer | None]:
    """The process from which this task's members are forked. It begins to load torch at once, where the script does,
    while the tasks find each other.
    """
    if not config.preload:
        yield None
        return
    server = ForkServer(say, also=also_loaded(config))
    try:
        if importlib.util.find_spec("torch") is not None and mentions_torch(script):
            server.start()
        yield server
    finally:
        server.close()


def _saved_step(checkpoint: str) -> int:
    """The step of the newest checkpoint in this folder."""
    return max(
        (found.manifest.step for found in checkpoints.find(open_folder(checkpoint)) if found.manifest), default=0
    )


def _ended(step: slurm.SlurmStep, folder: pathlib.Path) -> int | None:
    """The exit code of a task 0 that has ended before it began the job."""
    return exit_code_of(folder, step.job) if is_submitted() else None


def is_submitted() -> bool:
    """Whether a batch script of ours has started this task."""
    return bool(configuration.inherited_environment({}).get(AS_STEP))


def _lost(step: slurm.SlurmStep, folder: pathlib.Path) -> None:
    """srun, which shows what tasks write, may be gone with the launcher."""

    def say(text: str) -> None:
        with open(output_of(folder, step.job), "a") as file:
            file.write(f"syncline: {text}\n")

    if is_submitted():
        leave_no_empty_job(folder, step.job, say, turn=step.task, restart=step.restart)


def _with_toml(launch: Mapping[str, Any]) -> dict[str, Any]:
    """What syncline.toml says of places counts here too; the command line wins."""
    names = ("workers", "least_workers", "most_workers", "stages", "bind", "hosts", "device")
    toml = {name: value for name, value in configuration.read_toml_here().items() if name in names}
    return {**toml, **launch}


def run_job_on_slurm(told: Mapping[str, Any], asked: Mapping[str, Any], queue_seconds: float, *, detach: bool) -> int:
    """Submits the job and follows it."""
    check_here()
    wanted = msgspec.convert(asked, Wanted)
    wanted.check()
    words = sys.argv[sys.argv.index("run") + 1 :]
    launch = dict(told)
    if launch.get("workers") is None:
        launch["workers"] = str(max(1, wanted.gpus_per_host) * wanted.hosts)
        words = ["-w", launch["workers"], *words]
    given, config, target = prepare(launch)
    if config.hosts:
        raise ConfigError(f"-H {config.hosts} and --on slurm: Slurm chooses the hosts; use --nodes")
    wanted.check(saves=bool(config.checkpoint))
    if wanted.requeue and not config.checkpoint:
        raise ConfigError("--requeue goes on from a checkpoint: add --checkpoint DIR")
    given, config = settle_name(given, config, target)
    folder = pathlib.Path(config.runs).absolute() / config.name
    close_folder(folder)
    command = ["env", f"{AS_STEP}=1", sys.executable, "-m", "syncline", "run", "--name", config.name, *words]
    script = folder / BATCH
    script.write_text(batch_script(wanted, config.name, folder, command, saves=bool(config.checkpoint)))
    job = submit(script)
    output = output_of(folder, job)
    sys.stderr.write(f"syncline: {config.name} is Slurm job {job}; its output is {output}\n")
    if detach:
        sys.stderr.write(f"syncline: squeue -j {job} shows its state, scancel {job} ends it\n")
        return 0
    return Following(job, output, lambda text: print(f"syncline: {text}", file=sys.stderr)).run(queue_seconds)
