"""`syncline plan-stages`: how a script's Pipeline would be cut into stages, why, and what a step would take."""

from __future__ import annotations

import contextlib
import runpy
import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from syncline import config as configuration
from syncline.cli.run import chosen_script
from syncline.core.pipelining.costs import ModelCosts
from syncline.core.pipelining.planning import Plan
from syncline.core.pipelining.schedules import check_schedule
from syncline.core.units import counted, size
from syncline.errors import ConfigError, SynclineError
from syncline.extensions import see_beside
from syncline.launch.running import Script, check_script
from syncline.launch.saving import parse_bytes
from syncline.launch.tracebacks import describe


def plan_stages(
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT", help="Script that makes a Pipeline.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Given to the script.")] = None,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module instead.")] = None,
    stages: Annotated[
        str, typer.Option(metavar="N|auto", help="Stages of a pipeline; auto: what trains most samples per second.")
    ] = "auto",
    workers: Annotated[
        int | None, typer.Option("-w", "--workers", metavar="N", help="Processes. [default: as many as stages]")
    ] = None,
    micro_batches: Annotated[
        str, typer.Option("--micro-batches", metavar="N|auto", help="Into how many a batch is split.")
    ] = "auto",
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b or interleaved.")] = "1f1b",
    memory: Annotated[
        str | None, typer.Option(metavar="4GiB", help="Of each process. [default: not limited]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The plan and all costs, for machines.")] = False,
) -> None:
    """Shows how a script's Pipeline would be cut into stages: the cut, the reason, predicted times and memory.

    Runs the script up to its first pipe.step, measures the layers there in a few steps, and ends it. What was
    measured is kept in the user's cache folder. All processes are taken to be on this machine.

    Example:  syncline plan-stages --stages 2 train.py
    Example:  syncline plan-stages -w 4 --memory 2GiB --json train.py --batch-size 64
    """
    target = chosen_script(script, module, arguments or [])
    check_script(target)
    num_stages, num_micro_batches = _number("--stages", stages), _number("--micro-batches", micro_batches)
    if workers is None:
        workers = num_stages or 0
    if workers < 1:
        raise ConfigError("-w: say how many processes there are, e.g. syncline plan-stages -w 4 train.py")
    check_schedule(schedule)
    memory_bytes = parse_bytes("--memory", memory) if memory is not None else 0
    # Imported here: it loads torch.
    from syncline.torch.pipelining.plan_only import PlanMade, PlanQuestion, ask

    ask(
        PlanQuestion(
            workers=workers,
            stages=num_stages,
            micro_batches=num_micro_batches,
            schedule=schedule,
            threads=max(1, configuration.num_cores() // workers),
            memory_bytes=memory_bytes,
        )
    )
    try:
        _run(target)
    except PlanMade as made:
        show(made.plan, made.costs, as_json=as_json)
        return
    finally:
        ask(None)
    raise ConfigError(
        f"{target.path} ended without a step of a Pipeline; make one with syncline.torch.Pipeline(model, loss_fn), "
        "and train it with pipe.step(x, y)"
    )


def _number(flag: str, said: str) -> int | None:
    """None: auto."""
    if said == "auto":
        return None
    if not said.isdecimal() or int(said) < 1:
        raise ConfigError(f"{flag} {said}: must be a number from 1 on, or auto")
    return int(said)


def _run(target: Script) -> None:
    """The script in this process, as `__main__`. What it prints goes to standard error: the plan is the output."""
    from syncline.torch.pipelining.plan_only import PlanMade

    sys.argv = [target.path, *target.arguments]
    see_beside(target.path, is_module=target.is_module)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if target.is_module:
                runpy.run_module(target.path, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(target.path, run_name="__main__")
    except (PlanMade, SynclineError):
        raise
    except SystemExit as stop:
        if stop.code not in (0, None):
            raise
    except Exception as error:
        sys.stderr.write(describe(error, target.path))
        raise typer.Exit(1) from None


def show(plan: Plan, costs: ModelCosts, *, as_json: bool) -> None:
    if as_json:
        found = {"plan": plan, "cut_before": plan.cut_before, "costs": costs}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
        return
    table = Table(box=None)
    for column in ("stage", "layers", "workers"):
        table.add_column(column, no_wrap=True)
    for column in ("forward", "backward", "parameters", "memory", "busy"):
        table.add_column(column, justify="right", no_wrap=True)
    names = costs.names
    for number, stage in enumerate(plan.stages):
        last = names[stage.last - 1]
        table.add_row(
            str(number),
            stage.first_layer if last == stage.first_layer else f"{stage.first_layer} … {last}",
            " ".join(stage.devices),
            _ms(stage.forward_seconds),
            _ms(stage.backward_seconds),
            size(stage.parameter_bytes),
            size(stage.memory_bytes),
            f"{stage.utilisation:.0%}",
        )
    console = Console(highlight=False)
    # On a narrow terminal lines are long rather than figures cut off.
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    console.print(table)
    lines = [
        f"{counted(plan.replicas, 'pipeline')} of {counted(plan.num_workers, 'worker')}, {plan.schedule}: a batch of "
        f"{plan.batch} in {plan.micro_batches} micro-batches; predicted: "
        f"{_ms(plan.step_seconds)} for a step, bubble {plan.bubble:.0%}, {plan.samples_per_second:,.0f} samples/s",
        f"why: {plan.reason}",
        "times: of one micro-batch, on this machine; memory: parameters, gradients, activations and buffers",
    ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
