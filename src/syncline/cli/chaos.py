"""`syncline chaos`: runs any script while its members are killed, and says what that cost."""

from __future__ import annotations

import collections
import math
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer

from syncline.cli.killing import SIGNALS, Killing, Rate
from syncline.cli.reckoning import Figures, Times, reckon
from syncline.cli.run import prepare
from syncline.cli.screen import TerminalScreen
from syncline.cli.witness import Step, read_steps
from syncline.config import JobConfig
from syncline.core.units import counted, duration
from syncline.errors import ConfigError
from syncline.launch.hosts import assign
from syncline.launch.processes import LOCAL_HOSTS
from syncline.launch.running import Script, run_job, settle_name

ROLES = ("worker", "server", "coordinator")


def chaos(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- RUN-ARGUMENTS...", help="Those of syncline run, with the script."),
    ] = None,
    every: Annotated[str, typer.Option(metavar="SECONDS", help="One is killed so often, e.g. 10s, 1m.")] = "10s",
    lasting: Annotated[
        str, typer.Option("--for", metavar="SECONDS", help="Kill for so long. [default: until the script ends]")
    ] = "",
    roles: Annotated[str, typer.Option(help="Whom: worker, server, coordinator.")] = ",".join(ROLES),
    by: Annotated[str, typer.Option("--signal", help="KILL, or STOP: it goes on again later.")] = "KILL",
    stop: Annotated[str, typer.Option("--stop-for", metavar="SECONDS", help="With STOP: for so long.")] = "10s",
    seed: Annotated[int, typer.Option(help="Who and in which order.")] = 0,
    baseline: Annotated[bool, typer.Option("--baseline", help="The same run without kills first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The figures, for machines, at the end.")] = False,
) -> None:
    """Runs a script as `syncline run` does, while it kills members, and prints what that cost.

    Only processes that it has started itself are killed, by their ids. With two replicas a server is killed only
    while every slice has its backup, and never a worker and a server in one step: a job does not survive that. In a
    ring workers are killed, with the servers in their processes. The script ends by itself, and its exit code is
    passed on.

    Example:  syncline chaos --every 5s --for 1m -- -w 4 -s 2 --replicas 2 --policy async train.py
    """
    rate = Rate(
        every_seconds=duration("--every", every),
        for_seconds=duration("--for", lasting) if lasting else math.inf,
        roles=_chosen(roles),
        signal=_signal(by),
        stop_seconds=duration("--stop-for", stop),
        seed=seed,
    )
    # Who is killed all the time is not to blame for it, unless the user wants to see just that.
    said = {"max_restarts": 1_000_000, **_said(_run_parameters(context, arguments or []))}
    given, config, script = prepare(said)
    if any(host not in LOCAL_HOSTS for host in assign(config).values()):
        raise ConfigError("syncline chaos kills processes of this host only; leave -H out")
    if config.is_ring and rate.roles == ["server"]:
        raise ConfigError("--roles server: a ring's servers are in its workers' processes; use --roles worker")
    given, config = settle_name(given, config, script)
    before = None
    if baseline:
        code, before = _run({**given, "name": f"{config.name}-baseline"}, config, script, None)
        if code:
            raise typer.Exit(code)
    code, after = _run(given, config, script, rate)
    sys.stdout.write(to_json(after, before) if as_json else show(after, before))
    raise typer.Exit(code)


def _run_parameters(context: typer.Context, words: list[str]) -> dict[str, Any]:
    """The words after our own, read as `syncline run` reads its own."""
    assert context.parent is not None
    command: Any = context.parent.command
    run = command.get_command(context.parent, "run")
    parameters: dict[str, Any] = run.make_context("run", list(words), parent=context.parent).params
    return parameters


def _said(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None}


def _chosen(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",")]
    for word in found:
        if word not in ROLES:
            raise ConfigError(f"--roles {text!r}: must be one of {', '.join(ROLES)}")
    return found


def _signal(text: str) -> str:
    name = text.upper().removeprefix("SIG")
    if name not in SIGNALS:
        raise ConfigError(f"--signal {text!r}: must be one of {', '.join(SIGNALS)}")
    return name


def _run(given: dict[str, Any], config: JobConfig, script: Script, rate: Rate | None) -> tuple[int, Figures]:
    config = msgspec.structs.replace(config, name=str(given["name"]))
    with tempfile.TemporaryDirectory(prefix="syncline-chaos-") as name:
        folder = pathlib.Path(name)
        killing = Killing(rate, folder)
        try:
            with TerminalScreen(config.policy) as screen:
                code = run_job(given, config, script, screen, start=killing.start_member)
        finally:
            killing.close()
        lives: dict[str, list[Sequence[Step]]] = collections.defaultdict(list)
        for path in sorted(folder.iterdir(), key=lambda path: path.suffix):
            lives[path.stem].append(read_steps(path))
    return code, reckon(lives, killing.kills, killing.looks, killing.num_revoked)


# -- what is shown ------------------------------------------------------------------------------------------


def to_json(after: Figures, before: Figures | None) -> str:
    shown = {"run": after, "rate": after.rate, "baseline": before, "ratio": _ratio(after, before)}
    return msgspec.json.format(msgspec.json.encode(shown), indent=2).decode() + "\n"


def _ratio(after: Figures, before: Figures | None) -> float | None:
    return after.rate / before.rate if before is not None and before.rate else None


def show(after: Figures, before: Figures | None = None) -> str:
    """The figures, for people."""
    lines = [f"chaos: {after.seconds:.1f} s of work, {counted(sum(r.kills for r in after.roles.values()), 'kill')}"]
    for role, figures in after.roles.items():
        lines.append(f"  {role}: {counted(figures.kills, 'kill')}")
        lines.append(f"    the others' next step  {_times(figures.stall)}")
        lines.append(f"    out of the job         {_times(figures.out)}")
        late = f"; {figures.not_back} not before the end" if figures.not_back else ""
        lines.append(f"    back at work           {_times(figures.back)}{late}")
    lines.append(f"  between two steps of a worker  {_times(after.gaps)}")
    if before is not None:
        lines.append(f"    without kills                {_times(before.gaps)}")
    revoked = "not known" if after.num_revoked is None else f"{after.num_revoked:,}"
    lines.append(f"  acknowledged updates revoked   {revoked}")
    what = "samples" if after.samples else "steps"
    rate = f"  unique applied {what}/s  {after.rate:,.1f}"
    ratio = _ratio(after, before)
    if before is not None and ratio is not None:
        rate += f", without kills {before.rate:,.1f}: {ratio:.1%}"
    return "\n".join([*lines, rate]) + "\n"


def _times(times: Times) -> str:
    if not times.count:
        return "-"
    return f"median {_ms(times.p50)}, p99 {_ms(times.p99)}, longest {_ms(times.longest)} (of {times.count:,})"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{1e3 * seconds:.1f} ms"
