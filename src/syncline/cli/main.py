"""`syncline`: the command line. A command's module is imported when it is called: `syncline --help` needs none."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any, NamedTuple

import typer
import typer.core
import typer.main

from syncline.errors import SynclineError


class Command(NamedTuple):
    """Where a command is, and what `syncline --help` says of it."""

    help: str
    module: str
    runs_script: bool = False  # what it does not know are options of the script


COMMANDS = {
    "run": Command("Runs a whole job.", "run", runs_script=True),
    "coordinator": Command("Starts a job's coordinator by hand.", "roles"),
    "server": Command("Starts one server of a job by hand.", "roles"),
    "worker": Command("Starts one worker of a job by hand.", "roles", runs_script=True),
    "worker-env": Command("Runs a command as one rank of mpirun, torchrun or srun.", "worker_env", runs_script=True),
    "manifest": Command("Prints a job for Kubernetes.", "manifest", runs_script=True),
    "status": Command("Shows how a running job stands; without JOB, lists the jobs.", "status"),
    "ls": Command("Lists the jobs of this machine, those that run first.", "status"),
    "page": Command("Prints a link to a job's web page, or serves ended runs.", "page"),
    "report": Command("Makes one HTML file of a run, to keep or to send.", "report"),
    "compare": Command("Shows runs beside each other: settings, results, metrics.", "report"),
    "trace": Command("Makes a trace of a run's steps that Perfetto opens.", "trace"),
    "top": Command("Shows a running job live in the terminal.", "top"),
    "why": Command("Says in one sentence who waits for whom.", "status"),
    "attach": Command("Shows what a detached job prints.", "attach"),
    "stop": Command("Ends a detached job.", "attach"),
    "scale": Command("Gives a running job more or fewer workers or servers.", "status"),
    "pace": Command("Slows, holds or releases a worker of a running job.", "pace"),
    "chaos": Command("Runs a job while it kills its members.", "chaos", runs_script=True),
    "plan-stages": Command(
        "Shows how a script's Pipeline would be cut into stages.", "plan_stages", runs_script=True
    ),
    "doctor": Command("Checks what jobs need on this machine.", "doctor"),
    "bench": Command("Measures speed and memory on this machine.", "bench"),
    "checkpoint": Command("Looks at checkpoints, verifies and prunes them.", "checkpoint"),
    "export": Command("Writes trained weights as safetensors, state_dict or ONNX.", "export"),
    "serve": Command("Answers requests with a trained model, over HTTP.", "serve"),
    "serve-ctl": Command("Shows and switches the versions of a served model.", "serve_ctl"),
}
_SCRIPT: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def load_command(name: str) -> Any:
    """The command itself, from its module."""
    known = COMMANDS[name]
    module = importlib.import_module(f"syncline.cli.{known.module}")
    if name in ("checkpoint", "serve-ctl"):
        return typer.main.get_command(module.app)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(name, context_settings=_SCRIPT if known.runs_script else None)(
        getattr(module, name.replace("-", "_"))
    )
    return typer.main.get_command(alone)


class Commands(typer.core.TyperGroup):
    """All commands by name; each is loaded when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # names, for "did you mean"

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if self.commands[cmd_name] is None:
            self.commands[cmd_name] = load_command(cmd_name)
        return self.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


app = typer.Typer(
    name="syncline",
    cls=Commands,
    help="Trains one model on many processes: parameters on servers, one script, one command.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True)] = False,
) -> None:
    if version:
        import syncline

        typer.echo(f"syncline {syncline.__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the command line: errors of ours are one line, without a traceback."""
    try:
        app()
    except SynclineError as error:
        sys.stderr.write(f"syncline: {error}\n")
        sys.exit(2)
