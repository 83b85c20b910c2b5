"""`syncline doctor`: what works here, and what to do about what does not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from syncline.cli import checks, connections
from syncline.cli.checks import Check, Finding
from syncline.cli.engines import checks_of, host_checks
from syncline.config import JobConfig
from syncline.errors import ConfigError

#: torch comes before what looks into it.
CHECKS = (
    Check("python", checks.python),
    Check("torch", checks.torch),
    Check("packages", checks.packages),
    Check("cores", checks.cores),
    Check("memory", checks.memory),
    Check("GPUs", checks.gpus),
    Check("shared memory", connections.shared_memory),
    Check("loopback TCP", connections.loopback),
    Check("TLS", connections.tls),
    Check("address", connections.address),
    Check("open files", checks.open_files),
    Check("network namespaces", connections.namespaces),
    Check("Fashion-MNIST", checks.fashion_mnist),
    Check("disk", checks.disk),
    Check("small job", connections.small_job),
)
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="The findings, for machines.")] = False,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="ENGINE", help="Check an engine: mpi, torchrun, slurm, ray, kubernetes, ssh."),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", metavar="a,b", help="Hosts to look at, with --on ssh.")
    ] = None,
    remote: Annotated[
        str | None, typer.Option(help='Command prefix that starts a process on a host. [default: "ssh {host}"]')
    ] = None,
) -> None:
    """Looks at what jobs need on this machine, and says what to do about what is missing.

    The exit code is 1 when there is a problem; warnings are for you to weigh.

    Example:  syncline doctor
    """
    if on != "ssh" and (hosts or remote):
        raise ConfigError("-H and --remote are for --on ssh")
    if on == "ssh":
        found: Sequence[Check] = host_checks(hosts or "", remote or JobConfig().remote)
    else:
        found = checks_of(on) if on is not None else CHECKS
    findings = [(check, check.run()) for check in found]
    if as_json:
        sys.stdout.write(msgspec.json.format(to_json(findings), indent=2).decode() + "\n")
    else:
        show(findings)
    raise typer.Exit(1 if any(finding.level == "problem" for _, finding in findings) else 0)


def to_json(findings: Sequence[tuple[Check, Finding]]) -> bytes:
    found = [
        {"name": check.name, "level": finding.level, "finding": finding.text, "remedy": finding.remedy}
        for check, finding in findings
    ]
    return msgspec.json.encode({"checks": found, "problems": sum(item["level"] == "problem" for item in found)})


def show(findings: Sequence[tuple[Check, Finding]]) -> None:
    console = Console(highlight=False)
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check, finding in findings:
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="bold")
        table.add_row(check.name, Text(finding.level, style=_STYLES[finding.level]), text)
    console.print(table)
    problems, warnings = (sum(f.level == level for _, f in findings) for level in ("problem", "warning"))
    console.print(f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}")


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"
