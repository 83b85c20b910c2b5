"""`syncline checkpoint ls|show|verify|prune`: checkpoints of a folder, without a job."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from syncline.cli.standing import duration
from syncline.core.checkpoint.manifest import Manifest
from syncline.core.units import counted
from syncline.errors import StoreError
from syncline.store import checkpoints, weights
from syncline.store.disk import MANIFEST
from syncline.store.folders import Folder, open_folder

app = typer.Typer(
    name="checkpoint",
    help="Looks at checkpoints, verifies and prunes them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
FolderArgument = Annotated[str, typer.Argument(metavar="DIR", help="Folder of checkpoints; any path fsspec knows.")]
OneArgument = Annotated[
    str,
    typer.Argument(metavar="DIR", help="A checkpoint's folder, a folder of such (its newest), DIR/best or /last."),
]


@app.command("ls")
def ls(folder: FolderArgument) -> None:
    """Lists the checkpoints of a folder, newest first; what is damaged with the reason.

    Example:  syncline checkpoint ls checkpoints
    """
    opened = open_folder(folder)
    found = checkpoints.find(opened)
    if not found:
        raise StoreError(f"{folder} holds no checkpoint; check the path")
    marks = _marks(opened)
    table = Table("name", box=None)
    for column in ("step", "age", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("metrics", "lineage", ""):
        table.add_column(column)
    for one in found:
        if one.manifest is None:
            state = "unfinished" if one.is_unfinished else "damaged"
            table.add_row(one.name, "", "", "", "", "", f"{state}: {one.reason}")
            continue
        manifest = one.manifest
        words = [*marks.get(one.name, []), *(["weights only"] if manifest.kind == "weights" else [])]
        try:
            checkpoints.check_files(opened.join(one.name), manifest)
        except StoreError as error:
            words.append(f"damaged: {error}")
        age = duration(max(0.0, time.time() - manifest.saved_at)) if manifest.saved_at else ""
        step, size = f"{manifest.step:,}", _size(_num_bytes(manifest))
        table.add_row(one.name, step, age, size, _metrics(manifest), manifest.lineage[:8], ", ".join(words))
    _print(table)


@app.command("show")
def show(checkpoint: OneArgument) -> None:
    """Shows what a checkpoint says of itself: its files, parameters, scripts and settings.

    Example:  syncline checkpoint show checkpoints/best
    """
    chosen = _first(checkpoint)
    manifest = chosen.manifest
    table = Table(box=None, show_header=False)
    parameters = [parameter for segment in manifest.segments for parameter in segment.parameters]
    for key, value in (
        ("checkpoint", chosen.folder.url),
        ("digest", chosen.digest),
        ("job", f"{manifest.job}, lineage {manifest.lineage}"),
        ("kind", manifest.kind),
        ("step", f"{manifest.step:,}"),
        ("trained", duration(manifest.seconds)),
        ("written by", f"syncline {manifest.syncline or '?'}, torch {manifest.torch or '?'}"),
        ("metrics", _metrics(manifest)),
        ("files", ", ".join(f"{file.name} ({_size(file.num_bytes)})" for file in checkpoints.files_of(manifest))),
        ("scripts", ", ".join(f"{script.worker} at clock {script.clock}" for script in manifest.scripts)),
        ("slices", str(len(manifest.slices))),
        ("parameters", f"{len(parameters)}, {sum(p.num_items for p in parameters):,} numbers"),
    ):
        table.add_row(key, value)
    _print(table)
    own = weights.own_names(manifest)
    listed = Table("parameter", "type", "rule", box=None)
    for segment in manifest.segments:
        for parameter in segment.parameters:
            listed.add_row(
                own.get(parameter.name, parameter.name), parameter.describe(), segment.rule_of(parameter).name
            )
    _print(listed)


@app.command("verify")
def verify(folder: OneArgument) -> None:
    """Reads every tensor of every checkpoint and compares digests; exit code 1 when any is damaged.

    Example:  syncline checkpoint verify checkpoints
    """
    opened = open_folder(folder)
    num_damaged = num_whole = 0
    listed = [] if opened.exists(MANIFEST) else checkpoints.find(opened)
    for one in listed:
        if one.is_unfinished:
            typer.echo(f"{one.name}: unfinished: {one.reason}")
        elif one.manifest is None:
            num_damaged += 1
            typer.echo(f"{one.name}: damaged: {one.reason}")
        elif _verified(opened.join(one.name), one.manifest):
            num_whole += 1
        else:
            num_damaged += 1
    if not listed:
        chosen = _first(folder)
        num_whole = int(_verified(chosen.folder, chosen.manifest))
        num_damaged = 1 - num_whole
    typer.echo(f"{counted(num_whole, 'checkpoint')} verified, {num_damaged} damaged")
    if num_damaged:
        raise typer.Exit(1)


@app.command("prune")
def prune(
    folder: FolderArgument,
    keep: Annotated[int, typer.Option("--keep", min=2, help="Checkpoints to keep of each lineage, the newest.")] = 3,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also folders without a manifest; not while a job saves here.")
    ] = False,
) -> None:
    """Removes old checkpoints: of each lineage all but the newest that verify; what `best` points at stays.

    Example:  syncline checkpoint prune checkpoints --keep 2
    """
    opened = open_folder(folder)
    found = checkpoints.find(opened)
    if not found:
        raise StoreError(f"{folder} holds no checkpoint; check the path")
    gone = []
    for lineage in dict.fromkeys(one.manifest.lineage for one in found if one.manifest is not None):
        gone += checkpoints.prune(opened, keep, lineage, wholly=True)
    if unfinished:
        for one in found:
            if one.is_unfinished and one.name not in gone:
                opened.join(one.name).remove_all()
                gone.append(one.name)
    for name in gone:
        typer.echo(f"{name} is removed")
    typer.echo(f"{counted(len(gone), 'checkpoint')} removed, {len(found) - len(gone)} kept")


def _first(url: str) -> checkpoints.Chosen:
    for chosen in checkpoints.candidates(open_folder(url), lambda words: typer.echo(words, err=True)):
        return chosen
    raise StoreError(f"{url} holds no checkpoint; check the path, or see `syncline checkpoint ls`")


def _verified(folder: Folder, manifest: Manifest) -> bool:
    try:
        checkpoints.verify(folder, manifest)
    except StoreError as error:
        typer.echo(f"{folder.name}: damaged: {error}")
        return False
    typer.echo(f"{folder.name}: verified")
    return True


def _marks(folder: Folder) -> dict[str, list[str]]:
    """What points at which checkpoint."""
    found: dict[str, list[str]] = {}
    for name in checkpoints.POINTERS:
        if fact := checkpoints.pointed(folder, name):
            found.setdefault(fact["checkpoint"], []).append(name)
    return found


def _num_bytes(manifest: Manifest) -> int:
    return sum(file.num_bytes for file in checkpoints.files_of(manifest))


def _metrics(manifest: Manifest) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items())


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def _print(table: Table) -> None:
    Console(highlight=False, markup=False, width=160).print(table)
