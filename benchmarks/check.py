"""`python -m benchmarks.check BASE`, or `make bench-check BASE=<commit>`: this checkout against another version.

BASE is a commit, or the folder of another checkout, e.g. on a machine that has no git history.

Both versions run `benchmarks.worker` of this checkout, which uses the public API only, in the same environment; only
PYTHONPATH says which `syncline` a process imports. Their jobs are up at the same time and take turns. The command
fails where the new version is slower (`benchmarks.verdict`), or where a row fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import io
import math
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.match import play
from benchmarks.namespaces import SpannedJobSide
from benchmarks.processor import ProcessorMeter, is_measured
from benchmarks.row import LEAST_PAIRS, Effort, NotMeasured, Samples, Unit, check_gpu
from benchmarks.sides import ROOT, WAIT_SECONDS, WORKER, ProcessSide
from benchmarks.switch import Meter, switch
from benchmarks.task import Task, to_arguments
from benchmarks.training import LONGER, UNCOUNTED
from benchmarks.verdict import LIMIT, Verdict, compare
from benchmarks.words import KIB, MIB, figure
from syncline.bench.machine import Others, describe_machine, in_words
from syncline.errors import ConfigError, SynclineError

#: At least 15 pairs, however long a row takes.
FULL = Effort(num_pairs=15, turn_seconds=0.3, row_seconds=math.inf)
QUICK = Effort(num_pairs=LEAST_PAIRS, turn_seconds=0.05, row_seconds=math.inf)
#: The rows of `--quick`, where none are named: under a minute.
SMOKE = ("shm-small", "allreduce-small")
_RATE = "1gbit"
#: On a busy machine a member that is silent for some seconds is slow, not dead.
DEADLINE_SECONDS = "20"
_IMPORT = "import syncline; print(syncline.__file__)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One operation of a job, which both versions make in turns."""

    name: str
    what: str
    task: Task
    options: tuple[str, ...]  #: of `syncline run`; between hosts without the number of workers
    workers: int = 2
    on_hosts: bool = False  #: two network namespaces with a worker each; the bytes that they send are compared too
    needs_gpu: bool = False  #: its turns last longer


def all_rows() -> list[Row]:
    shm, ring = ("-s", "1", "--transport", "shm"), ("--exchange", "ring")
    codecs = {"bf16": "bf16", "int8": "int8", "topk": "topk:0.01"}
    wire = f"two network namespaces at {_RATE}"
    pushed = Task(kind="push_pull", num_bytes=16 * MIB, is_random=True)
    return [
        Row(
            name="sync-2",
            what="training step of MLP 784-128-10, 2 workers, 1 server, shared memory",
            task=Task(kind="train", model="mlp-small", num_threads=1),
            options=shm,
        ),
        Row(
            name="shm-small",
            what="4 KiB push_pull, 1 worker, 1 server, shared memory",
            task=Task(kind="push_pull", num_bytes=4 * KIB),
            options=shm,
            workers=1,
        ),
        Row(
            name="shm-beside",
            what="the same beside 64 MiB of parameters that are not pushed",
            task=Task(kind="push_pull", num_bytes=4 * KIB, other_bytes=64 * MIB),
            options=shm,
            workers=1,
        ),
        Row(
            name="shm-large",
            what="16 MiB push_pull, 1 worker, 1 server, shared memory",
            task=pushed,
            options=shm,
            workers=1,
        ),
        Row(
            name="tcp",
            what="16 MiB push_pull, 1 worker, 1 server, TCP",
            task=pushed,
            options=("-s", "1", "--transport", "tcp"),
            workers=1,
        ),
        Row(
            name="mlp-ring",
            what="training step of MLP 784-2048-2048-10, ring of 2 workers",
            task=Task(kind="train", model="mlp-wide", num_threads=1),
            options=ring,
        ),
        Row(
            name="ring-net",
            what=f"16 MiB step of a ring of 2 workers, {wire}: time and bytes",
            task=pushed,
            options=ring,
            on_hosts=True,
        ),
        *(
            Row(
                name=f"ring-{name}",
                what=f"the same with --codec {codec}",
                task=pushed,
                options=(*ring, "--codec", codec),
                on_hosts=True,
            )
            for name, codec in codecs.items()
        ),
        Row(
            name="replicas",
            what="16 MiB push_pull, 2 workers, 2 servers, 2 replicas, shared memory",
            task=pushed,
            options=("-s", "2", "--replicas", "2", "--transport", "shm"),
        ),
        Row(
            name="leases",
            what="a leased batch of 64 and a push of 4 KiB, 2 workers, 1 server, shared memory",
            task=Task(kind="leased_steps", num_samples=1_000_000),
            options=shm,
        ),
        Row(
            name="allreduce-small",
            what="4 KiB all_reduce_ among 2 workers",
            task=Task(kind="all_reduce", num_bytes=4 * KIB, own_arrays=True),
            options=shm,
        ),
        Row(
            name="allreduce-large",
            what="16 MiB all_reduce_ among 2 workers, in collectives.empty()",
            task=Task(kind="all_reduce", num_bytes=16 * MIB),
            options=shm,
        ),
        *_gpu_rows(shm),
    ]


def _gpu_rows(shm: tuple[str, ...]) -> list[Row]:
    full, half = (f"training step of a transformer of 124 M parameters in {d} on a GPU" for d in ("float32", "bf16"))
    ours = f"{half}, 1 worker, 1 server"

    def row(name: str, what: str, model: str, options: tuple[str, ...], num_uncounted: int = 1) -> Row:
        task = Task(kind="train", model=model, device="cuda", num_uncounted=num_uncounted)
        return Row(name=name, what=what, task=task, options=options, workers=1, needs_gpu=True)

    window, nccl = ("--policy", "async", "--window", "1"), ("--sums", "nccl")
    return [
        row("gpu", f"{full}, 1 worker, 1 server", "gpt", shm),
        row("cuda-sync-bf16", ours, "gpt-bf16", shm),
        row("cuda-async-bf16", f"{ours}, {' '.join(window)}", "gpt-bf16", (*shm, *window), UNCOUNTED),
        row("ring-nccl", f"{full}, a ring of 1 worker, {' '.join(nccl)}", "gpt", ("--exchange", "ring", *nccl)),
    ]


# -- two versions -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Version:
    """One `syncline`: the folder that it is imported from."""

    name: str
    source: pathlib.Path

    @property
    def environment(self) -> dict[str, str]:
        """`benchmarks` is this checkout's for both versions; what else the caller can import, they can too."""
        given = os.environ.get("PYTHONPATH", "")
        return {"PYTHONPATH": os.pathsep.join([str(self.source), str(ROOT), *([given] if given else [])])}

    def check(self) -> None:
        """Processes with this environment import this version, not one that is installed."""
        environment = {**os.environ, **self.environment}
        found = _run([sys.executable, "-c", _IMPORT], env=environment, cwd=tempfile.gettempdir()).decode().strip()
        if self.source.resolve() not in pathlib.Path(found).resolve().parents:
            raise ConfigError(f"{self.name}: syncline is imported from {found}, not from {self.source}")


@contextlib.contextmanager
def unpacked(base: str, repository: pathlib.Path = ROOT) -> Iterator[Version]:
    """The sources of a commit in a temporary folder, or those of a checkout where they are.

    By `git archive`: a worktree would leave an entry in the repository if this process were killed.
    """
    sources = pathlib.Path(base, "src").absolute()
    if (sources / "syncline" / "__init__.py").is_file():
        yield Version(sources.parent.name, sources)
        return
    words = ["git", "rev-parse", "--verify", "--short", f"{base}^{{commit}}"]
    try:
        name = _run(words, cwd=repository).decode().strip()
        packed = _run(["git", "archive", "--format=tar", name, "src"], cwd=repository)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        raise ConfigError(f"{base} is not a commit with src/: {said.decode(errors='replace').strip()}") from None
    with tempfile.TemporaryDirectory(prefix="syncline-base-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        yield Version(name, pathlib.Path(folder, "src"))


def _run(words: Sequence[str], **more: Any) -> bytes:
    done = subprocess.run(words, check=True, capture_output=True, stdin=subprocess.DEVNULL, **more)
    return bytes(done.stdout)


class RunSide(ProcessSide):
    """`syncline run` of one version on this host."""

    def __init__(self, row: Row, version: Version, side: str) -> None:
        super().__init__(WORKER, row.task, processes=row.workers, side=side, environment=version.environment)
        self._options = row.options

    def commands(self, folder: pathlib.Path, path: str) -> list[list[str]]:
        options = [
            "-w", str(self.num_processes), *self._options, "--name", self._side, "--runs", str(folder),
            "--wait-seconds", f"{WAIT_SECONDS:g}", "--deadline-seconds", DEADLINE_SECONDS, "-m", WORKER,
        ]  # fmt: skip
        return [[sys.executable, "-m", "syncline", "run", *options, *to_arguments(self._task, self._side, path)]]


# -- one row ------------------------------------------------------------------------------------------------


def measure(row: Row, new: Version, old: Version, effort: Effort) -> dict[Unit, Samples]:
    """Per operation of the new version (`ours`) and the old one: seconds, and on one host the processor time of all
    processes, between hosts the bytes.
    """
    if row.needs_gpu:
        check_gpu()
        effort = dataclasses.replace(effort, turn_seconds=effort.turn_seconds * LONGER)
    if not row.on_hosts:
        return _measure_here(
            RunSide(row, new, "ours"), RunSide(row, old, "reference"), effort, row.task.num_uncounted
        )
    sent: dict[str, list[float]] = {"": [], "ours": [], "reference": []}
    with switch(2, _RATE) as hosts:
        meter = Meter(hosts)

        def watch(side: str, num_operations: int) -> None:
            sent[side].append(meter.read(num_operations + row.task.num_uncounted))

        options = (*row.options, "--deadline-seconds", DEADLINE_SECONDS)
        sides = [
            SpannedJobSide(
                row.task,
                hosts,
                options=options,
                side=side,
                environment=version.environment,
            )
            for side, version in (("ours", new), ("reference", old))
        ]
        seconds = play(sides[0], sides[1], effort, watch=watch)
    return {"seconds": seconds, "bytes": Samples(sent["ours"], sent["reference"])}


def _measure_here(ours: RunSide, reference: RunSide, effort: Effort, num_uncounted: int) -> dict[Unit, Samples]:
    spent: dict[str, list[float]] = {"ours": [], "reference": []}
    meters = {"ours": ProcessorMeter(lambda: ours.pids), "reference": ProcessorMeter(lambda: reference.pids)}

    def watch(side: str, num_operations: int) -> None:
        found = {name: meter.read(num_operations + num_uncounted) for name, meter in meters.items()}
        if side:
            spent[side].append(found[side])

    if not is_measured():
        return {"seconds": play(ours, reference, effort)}
    seconds = play(ours, reference, effort, watch=watch)
    return {"seconds": seconds, "processor": Samples(spent["ours"], spent["reference"])}


@dataclasses.dataclass(frozen=True)
class Result:
    """A row of the report."""

    row: Row
    verdicts: tuple[Verdict, ...] = ()
    not_measured: str = ""  #: this machine cannot; no failure
    error: str = ""
    others_share: float | None = None

    @property
    def fails(self) -> bool:
        return bool(self.error) or any(verdict.is_slower for verdict in self.verdicts)


def check_row(row: Row, new: Version, old: Version, effort: Effort) -> Result:
    others = Others()
    try:
        found = measure(row, new, old, effort)
    except NotMeasured as reason:
        return Result(row, not_measured=str(reason))
    except (SynclineError, OSError) as error:
        return Result(row, error=f"{type(error).__name__}: {error} (ours: new, reference: old)")
    verdicts = tuple(compare(row.name, unit, both.ours, both.reference) for unit, both in found.items())
    return Result(row, verdicts, others_share=others.share())


# -- the command --------------------------------------------------------------------------------------------


def choose(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    for pattern in patterns:
        if not fnmatch.filter([row.name for row in rows], pattern):
            raise ConfigError(f"{pattern}: the rows are {', '.join(row.name for row in rows)}")
    return [row for row in rows if not patterns or any(fnmatch.fnmatch(row.name, pattern) for pattern in patterns)]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def check(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="The commit, or the folder of a checkout, to compare with.")
    ] = "",
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Compare this row; may be repeated; * works.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test: two small rows, five short pairs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All figures, for machines.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Describe the rows and measure nothing.")] = False,
) -> None:
    """Plays this checkout against BASE, in turns, and fails where this checkout is slower.

    For each row it prints new/old over 15 pairs of turns: lower quartile, median, upper quartile. It fails where the
    lower quartile is above 1.10. Rows (processor) are processor time of all processes of a job, which other programs
    hardly change. What is new is the working tree as it is, with changes that are not committed.

    Example:  python -m benchmarks.check main --only sync-2 --only "ring-*"
    """
    rows = choose(all_rows(), only or (SMOKE if quick else ()))
    console = Console(highlight=False)
    if names:
        for row in rows:
            console.print(f"{row.name}: {row.what}", markup=False, soft_wrap=True)
        return
    if not base:
        raise ConfigError("name the commit to compare with: make bench-check BASE=main")
    results: list[Result] = []
    with unpacked(base) as old, Console(stderr=True, highlight=False).status("") as status:
        new = Version("this checkout", ROOT / "src")
        for version in (new, old):
            version.check()
        for number, row in enumerate(rows, 1):
            status.update(f"{number} of {len(rows)}: {row.name}: {row.what}")
            results.append(check_row(row, new, old, QUICK if quick else FULL))
    if as_json:
        found = {"base": old.name, "limit": LIMIT, "machine": describe_machine(), "rows": to_json(results)}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        show(results, old.name, console)
    raise typer.Exit(1 if any(result.fails for result in results) else 0)


def to_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [
        {
            "name": result.row.name,
            "what": result.row.what,
            "fails": result.fails,
            "not_measured": result.not_measured,
            "error": result.error,
            "others_share": result.others_share,
            "figures": [{**dataclasses.asdict(one), "is_slower": one.is_slower} for one in result.verdicts],
        }
        for result in results
    ]


def show(results: Sequence[Result], base: str, console: Console) -> None:
    table = Table(box=None)
    table.add_column("row", no_wrap=True)
    for column in ("new", f"old ({base})", "new/old: lower", "median", "upper", "pairs", "others"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for result in results:
        share = "" if result.others_share is None else f"{result.others_share:.0%}"
        for one in result.verdicts:
            name = result.row.name if one.unit == "seconds" else f"{result.row.name} ({one.unit})"
            ratio = (f"{value:.2f}" for value in (one.ratio.lower, one.ratio.median, one.ratio.upper))
            verdict = "slower" if one.is_slower else "ok"
            figures = figure(one.new, one.unit), figure(one.old, one.unit)
            table.add_row(name, *figures, *ratio, str(one.num_pairs), share, verdict)
        if not result.verdicts:
            why = f"not measured: {result.not_measured}" if result.not_measured else "failed"
            table.add_row(result.row.name, *[""] * 7, why)
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    console.print(table)
    for result in results:
        if result.error:
            console.print(f"{result.row.name}: {result.error}", markup=False, soft_wrap=True)
    console.print(
        f"{in_words(describe_machine())}; slower: the lower quartile of new/old is above {LIMIT:.2f}; others: share "
        "of all cores that other programs used meanwhile",
        markup=False,
        soft_wrap=True,
    )


def main() -> None:
    try:
        app()
    except SynclineError as error:
        sys.exit(f"bench-check: {error}")


if __name__ == "__main__":
    main()
