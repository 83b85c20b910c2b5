"""What a job can be told on the command line: one set, for `syncline run` and for `syncline coordinator`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from syncline.errors import ConfigError
from syncline.launch.saving import parse_bytes


def _options(
    stages: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Cut the model into N parts: N workers are one pipeline, on one host. auto: as many as train most "
            "samples per second. [default: 1]",
        ),
    ] = None,
    micro_batches: Annotated[
        str | None,
        typer.Option(metavar="M|auto", help="Parts of a pipeline's batch. auto: planned. [default: 4 per stage]"),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Order of work in a pipeline: gpipe, 1f1b or interleaved. [default: 1f1b]"),
    ] = None,
    servers: Annotated[int | None, typer.Option("-s", "--servers", help="Number of servers. [default: 1]")] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="Servers that have each slice: 1 or 2. [default: 2 when servers are on several hosts, else 1]"
        ),
    ] = None,
    ack: Annotated[
        str | None,
        typer.Option(help="A push is acknowledged when its server has it (memory) or two have it (replicated)."),
    ] = None,
    exchange: Annotated[
        str | None,
        typer.Option(
            help="servers; ring: no servers of their own, every worker applies the rule itself (sync only). "
            "[default: servers]"
        ),
    ] = None,
    sums: Annotated[
        str | None,
        typer.Option(
            help="In a ring, what adds up gradients: ours; gloo or nccl (on GPUs), through torch.distributed. "
            "[default: ours]"
        ),
    ] = None,
    trust_network: Annotated[
        bool,
        typer.Option(
            "--trust-network", help="gloo and nccl may speak between hosts: in the clear, and to anyone who connects."
        ),
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            help="sync, sync:spare=N, bounded:K[,damped], async[,damped] or async:gather=N[,damped]. [default: sync]"
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="In bounded and async: count (a push is scaled by its number of samples) or ignore. [default: count]"
        ),
    ] = None,
    lr_per_worker: Annotated[
        bool,
        typer.Option("--lr-per-worker", help="In sync: each gradient counts by its own worker's learning rate."),
    ] = False,
    aggregate: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="In sync, how a round's gradients become one: mean, sum, median, trimmed:0.25, norm-clipped:C, "
            "package.module:name. [default: mean]",
        ),
    ] = None,
    sync_every: Annotated[
        str | None,
        typer.Option(
            metavar="H|auto",
            help="Step locally H times, then push the change: sync averages the workers' changes, bounded and async "
            "add each. auto: H from 1 to 64, by the time spent waiting. [default: 1]",
        ),
    ] = None,
    outer: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIMIZER",
            help="With --sync-every: the servers take the average by it: 'SGD(lr=0.7, momentum=0.9, nesterov=True)'.",
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(help="How pushes travel over sockets: bf16, fp16, int8, topk:0.01, package.module:name."),
    ] = None,
    pull_codec: Annotated[
        str | None,
        typer.Option(help="The same for the parameters that answer a push, in a ring for sums: bf16, fp16, int8."),
    ] = None,
    codec_exempt: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Parameters that are never encoded: '*.bias,norm*'.")
    ] = None,
    pull_every: Annotated[
        int | None,
        typer.Option(
            metavar="P",
            help="Push in every step, take new parameters in every P-th only (bounded, async). [default: 1]",
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(metavar="W", help="Commits a worker may leave unanswered (bounded, async).")
    ] = None,
    transport: Annotated[str | None, typer.Option(help="auto, shm or tcp. [default: auto]")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda:0, …  [default: cuda:LOCAL_RANK if there are enough GPUs, else cpu]")
    ] = None,
    cores: Annotated[
        str | None, typer.Option(metavar="auto", help="auto: every member of a host gets cores of its own.")
    ] = None,
    no_preload: Annotated[
        bool,
        typer.Option("--no-preload", help="Start every member as a new interpreter: torch is not loaded before."),
    ] = False,
    server_device: Annotated[
        str | None, typer.Option(help="Where servers hold slices and run rules: cpu, cuda, cuda:0, …  [default: cpu]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job and of its folder under runs/.")] = None,
    bind: Annotated[
        str | None, typer.Option(metavar="ADDRESS[:PORT]", help="Where the coordinator listens. [default: loopback]")
    ] = None,
    page: Annotated[
        str | None,
        typer.Option(
            metavar="off|[ADDRESS:]PORT",
            help="Where the web page is, or off. [default: a free port of loopback, with the extra `page`]",
        ),
    ] = None,
    page_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name by which browsers ask for the page, where it is behind a proxy. Several: with commas, or "
            "said several times.",
        ),
    ] = None,
    sink: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SINK",
            help="Where metrics go besides the run's folder: tensorboard, mlflow://HOST:PORT, mlflow:///FOLDER or "
            "off. Said several times: all of them. [default: tensorboard, where it is installed]",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Save there as it goes (any fsspec path), and take up the newest that it holds."
        ),
    ] = None,
    save_every: Annotated[
        str | None, typer.Option(metavar="10m|500steps", help="How often to save. [default: 10m]")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(metavar="K", help="Checkpoints to keep, the newest. [default: 3]")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, beside what --checkpoint holds.")] = False,
    resume: Annotated[
        str | None, typer.Option(metavar="OTHER", help="Start from another checkpoint, or the newest in a folder.")
    ] = None,
    checkpoint_mirror: Annotated[
        str | None, typer.Option(metavar="DIR", help="A verified second copy of every checkpoint, e.g. s3://….")
    ] = None,
    save_memory: Annotated[
        str | None,
        typer.Option(metavar="256MiB", help="Most that a server copies for a save. [default: as its slices have]"),
    ] = None,
    save_seconds: Annotated[
        float | None, typer.Option(help="For the save when SIGTERM ends the job. [default: 30]")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="At the end, show where the time of the steps went.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Keep when each phase of every step began and ended: see syncline trace.")
    ] = False,
    runs: Annotated[str | None, typer.Option(metavar="DIR", help="Folder for jobs' folders. [default: runs]")] = None,
    start_seconds: Annotated[
        float | None, typer.Option(help="Deadline for all members to be there. [default: 120]")
    ] = None,
    wait_seconds: Annotated[float | None, typer.Option(help="Deadline of every other wait. [default: 600]")] = None,
    deadline_seconds: Annotated[
        float | None, typer.Option(help="Of silence, at least, before a member counts as dead. [default: 2]")
    ] = None,
    stuck_seconds: Annotated[
        float | None,
        typer.Option(help="Others wait so long for a member that does not advance; it is evicted. [default: 600]"),
    ] = None,
    bad_pushes: Annotated[
        int | None, typer.Option(metavar="N", help="Quarantine a worker after N pushes with NaN or Inf. [default: 3]")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="Stop by what job.report or job.validate says: accuracy>=0.9, loss.plateau(5), "
            "loss.plateau(5, 0.01), max:NAME.plateau(5), with and, or, ( ). Said several times: any of them.",
        ),
    ] = None,
    on_plateau: Annotated[
        str | None,
        typer.Option(
            metavar="ACTION",
            help="What is tried before a plateau stops the job: lr*0.1 (once), or 'lr*0.1, at most 3 times'.",
        ),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(metavar="N", help="Stop after N steps of the job; exact in sync. 0: no limit.")
    ] = None,
    max_time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Stop after so long, earlier runs of it included: 90s, 30m, 2h."),
    ] = None,
    best: Annotated[
        str | None,
        typer.Option(metavar="METRIC", help="Keep the best checkpoint by this: accuracy, loss, min:NAME, max:NAME."),
    ] = None,
    average: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Merged weights as a candidate for the best: last:5, ema:0.999."),
    ] = None,
    no_check_finite: Annotated[
        bool, typer.Option("--no-check-finite", help="Let pushes with NaN or Inf count.")
    ] = False,
) -> None:
    """The options as a signature, which is all that is used of this."""


def takes_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """In the place of the command's `**said`, these options; they come by the names of the settings."""

    @functools.wraps(command)
    def run(**said: Any) -> None:
        command(**said)

    own = inspect.signature(command, eval_str=True)
    parameters = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters += inspect.signature(_options, eval_str=True).parameters.values()
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def settings_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were said at all."""
    settings = {key: value for key, value in said.items() if value is not None and value is not False}
    for name in ("check_finite", "preload"):
        if settings.pop(f"no_{name}", False):
            settings[name] = False
    if (every := settings.get("sync_every", "auto")) != "auto":
        settings["sync_every"] = _steps("--sync-every", every, "a number of steps")
    if (stages := settings.get("stages")) is not None:
        settings["stages"] = 0 if stages == "auto" else _steps("--stages", stages, "a number")
    if (count := settings.get("micro_batches", "auto")) != "auto":
        settings["micro_batches"] = _steps("--micro-batches", count, "a number")
    if "save_memory" in settings:
        settings["save_memory"] = parse_bytes("--save-memory", settings["save_memory"])
    return settings


def _steps(option: str, said: str, what: str) -> int:
    try:
        return int(said)
    except ValueError:
        raise ConfigError(f"{option} {said!r}: must be {what}, or auto") from None
