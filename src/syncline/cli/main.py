"""`syncline`: the command line."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from syncline.cli import bench, chaos, checkpoint, doctor, pace, roles, run, status
from syncline.errors import SynclineError

app = typer.Typer(
    name="syncline",
    help="Trains one model on many processes: parameters on servers, one script, one command.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_SCRIPT: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False}
app.command("run", context_settings=_SCRIPT)(run.run)
app.command("coordinator")(roles.coordinator)
app.command("server")(roles.server)
app.command("worker", context_settings=_SCRIPT)(roles.worker)
app.command("status")(status.status)
app.command("why")(status.why)
app.command("scale")(status.scale)
app.command("pace")(pace.pace)
app.command("chaos", context_settings=_SCRIPT)(chaos.chaos)
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)
app.add_typer(checkpoint.app, name="checkpoint")


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
