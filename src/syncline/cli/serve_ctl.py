"""`syncline serve-ctl status|load|rollback|pin|unpin|canary`: the versions of a served model."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from syncline.errors import ConfigError
from syncline.serve.control import ControlRequest, ask, folder_of

app = typer.Typer(
    name="serve-ctl",
    help="Shows and switches the versions of a served model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
NameOption = Annotated[
    str, typer.Option("--name", help="The served model's name; may be left out if there is one. [default: that one]")
]
RunsOption = Annotated[str, typer.Option("--runs", metavar="DIR", help="The folder that `syncline serve` was given.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The same for machines.")]


@app.command("status")
def status(name: NameOption = "", runs: RunsOption = "runs", as_json: JsonOption = False) -> None:
    """Shows the versions in memory, which one answers, and how fast.

    Example:  syncline serve-ctl status
    """
    _do(ControlRequest("status"), name, runs, as_json)


@app.command("load")
def load(name: NameOption = "", runs: RunsOption = "runs", as_json: JsonOption = False) -> None:
    """Looks for a new version now.

    Example:  syncline serve-ctl load
    """
    _do(ControlRequest("load"), name, runs, as_json)


@app.command("rollback")
def rollback(name: NameOption = "", runs: RunsOption = "runs", as_json: JsonOption = False) -> None:
    """Goes back to the version before; the one that answered is dropped. The next newer one takes over; with --follow
    the version is pinned: until `unpin`, new ones do not answer.

    Example:  syncline serve-ctl rollback
    """
    _do(ControlRequest("rollback"), name, runs, as_json)


@app.command("pin")
def pin(
    version: Annotated[str, typer.Argument(help="A version in memory, see status.")],
    name: NameOption = "",
    runs: RunsOption = "runs",
    as_json: JsonOption = False,
) -> None:
    """Stays with this version; new ones are loaded and do not answer.

    Example:  syncline serve-ctl pin 12
    """
    _do(ControlRequest("pin", version=version), name, runs, as_json)


@app.command("unpin")
def unpin(name: NameOption = "", runs: RunsOption = "runs", as_json: JsonOption = False) -> None:
    """Goes to the newest version, and follows new ones again.

    Example:  syncline serve-ctl unpin
    """
    _do(ControlRequest("unpin"), name, runs, as_json)


@app.command("canary")
def canary(
    share: Annotated[
        str, typer.Argument(metavar="PERCENT", help="Its share: 10%; 100%: it takes over; 0%: it goes.")
    ],
    name: NameOption = "",
    runs: RunsOption = "runs",
    as_json: JsonOption = False,
) -> None:
    """Gives a share of the requests to the newest version that does not answer yet, or to the next one that comes.

    Example:  syncline serve-ctl canary 10%
    """
    try:
        part = float(share.removesuffix("%")) / 100
    except ValueError:
        part = -1.0
    if not share.endswith("%") or not 0.0 <= part <= 1.0:
        raise ConfigError(f"canary {share!r}: give a share from 0% to 100%, e.g. 10%")
    _do(ControlRequest("canary", share=part), name, runs, as_json)


def _do(request: ControlRequest, name: str, runs: str, as_json: bool) -> None:
    reply = ask(folder_of(runs, name or _only(runs)), request)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(reply), indent=2).decode() + "\n")
    else:
        _show(reply)


def _only(runs: str) -> str:
    """The name of the one model that was served under this folder."""
    parent = folder_of(runs, "_").parent
    names = sorted(path.parent.name for path in parent.glob("*/control"))
    if len(names) != 1:
        if names:
            raise ConfigError(f"{parent}: there are several models, {', '.join(names)}; give one with --name")
        raise ConfigError(f"{parent}: no model is served here; start one with syncline serve, or see --runs")
    return names[0]


def _show(reply: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False, width=160)
    console.print(f"{reply['name']} at {reply['url']}: {reply['num_requests']:,} requests answered or refused")
    if reply["num_requests"]:
        p50, p99 = 1000 * reply["p50_seconds"], 1000 * reply["p99_seconds"]
        console.print(f"half of them within {p50:g} ms, 99% within {p99:g} ms (on the server)")
    table = Table("version", "step", "", "from", box=None)
    for one in reply["versions"]:
        words = []
        if one["name"] == reply["current"]:
            words.append("answers, pinned" if reply["is_pinned"] else "answers")
        if one["name"] == reply["canary"]:
            words.append(f"canary, {reply['share']:.1%}")
        table.add_row(one["name"], f"{one['step']:,}", ", ".join(words), one["where"])
    console.print(table)
    if reply["is_pinned"]:
        console.print("pinned: new versions are loaded and do not answer until `syncline serve-ctl unpin`")
    if reply["trouble"]:
        console.print(f"nothing new comes: {reply['trouble']}")
    for one in reply["processes"]:
        name = f"replica {one['number']}" if one["role"] == "replica" else one["role"]
        state = "" if one["is_up"] else ", starts"
        restarts = f", restarted {one['num_restarts']} times" if one["num_restarts"] else ""
        console.print(f"{name}{state}{restarts}: process {one['pid']}")
    if reply["share"] and not reply["canary"]:
        console.print(f"the next version gets {reply['share']:.1%} of the requests")
