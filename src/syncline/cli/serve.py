"""`syncline serve`: a trained model answers requests."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
import sys
import threading
from typing import Annotated, Any

import typer

from syncline.cli.model_options import InputOption, PickOption
from syncline.core.units import duration
from syncline.errors import ConfigError
from syncline.launch.folder import find_job
from syncline.launch.saving import parse_bytes

_LOOK_SECONDS = 0.5
_LIMITS = "30s, 10m, never"
_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


def serve(
    model: Annotated[
        str, typer.Argument(metavar="FILE.py:NAME", help="The class or function in your file that makes the model.")
    ],
    weights: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="A folder of checkpoints, one of them, or a .safetensors file; any path fsspec knows.",
        ),
    ] = None,
    follow: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help="In place of --from: a running job, by its name under --runs or its job file. Its parameters while "
            "it trains, one consistent cut at each --refresh, and its last ones.",
        ),
    ] = None,
    pick: PickOption = "best",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0: any free one. A socket of systemd counts more than both.")
    ] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Listen for gRPC too; 0: on any free port. [default: no]")
    ] = None,
    name: Annotated[
        str, typer.Option(help="The model's name in paths. [default: that of the class or function]")
    ] = "",
    inputs: InputOption = None,
    max_batch: Annotated[
        int, typer.Option(help="Rows of one call of the model, at most. A request with more is several calls.")
    ] = 32,
    max_delay: Annotated[
        str, typer.Option(metavar="TIME", help="How long a request may wait for others while the server is busy.")
    ] = "5ms",
    refresh: Annotated[
        str, typer.Option(metavar="TIME", help="How often to look for a new version; never: not at all.")
    ] = "2s",
    guard: Annotated[
        str,
        typer.Option(help='A new version must pass, e.g. "accuracy>=0.85" on what `validate` of the file returns.'),
    ] = "",
    keep: Annotated[int, typer.Option(metavar="N", help="Versions in memory, for a rollback; at least 2.")] = 3,
    call_timeout: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long one call of the model may take. Then requests get errors; of several replicas, the one "
            "that hangs starts again. never: any time.",
        ),
    ] = "2m",
    trial_timeout: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long the trial of a new version may take, `validate` included; what a model compiles at the "
            "start does not count. Then it is refused. never: any time.",
        ),
    ] = "10m",
    replicas: Annotated[
        int, typer.Option(help="Processes that answer behind the port. They share the memory of the weights.")
    ] = 1,
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="Of torch models: cpu, cuda, cuda:N or auto (a GPU if there is one). Replicas take GPUs in turn. "
            "[default: where the module is made]",
        ),
    ] = "",
    threads: Annotated[
        int, typer.Option(help="Threads for the model's kernels, of all replicas together; 0: one per core.")
    ] = 0,
    token_file: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="The bearer token. [default: none on loopback, else a new one under runs/serve/NAME]"
        ),
    ] = "",
    cert: Annotated[str, typer.Option(metavar="FILE", help="Certificate (PEM), for HTTPS.")] = "",
    key: Annotated[str, typer.Option(metavar="FILE", help="The certificate's key (PEM).")] = "",
    rate: Annotated[
        str, typer.Option(help="Most requests of one address, to each replica, e.g. 100/s. [default: any number]")
    ] = "",
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Most bytes of one request.")] = "64MiB",
    max_queue: Annotated[int, typer.Option(help="Requests that may wait, in each replica; more are refused.")] = 1024,
    max_connections: Annotated[int, typer.Option(help="Open connections of each replica, at most.")] = 1024,
    runs: Annotated[
        str, typer.Option(metavar="DIR", help="Folder for the token and the socket of serve-ctl.")
    ] = "runs",
) -> None:
    """Answers requests with a trained model: the Open Inference Protocol on /v2, and plain JSON on /predict.

    New checkpoints are loaded beside the version that answers, tried, and switched to. Ctrl-C answers open requests,
    then ends.

    Example:  syncline serve model.py:Net --from runs/mnist/checkpoints --input image:FP32:1,28,28
    Example:  syncline serve model.py:Net --follow mnist
    """
    settings: dict[str, Any] = {
        "host": host,
        "port": port,
        "grpc_port": -1 if grpc_port is None else grpc_port,
        "pick": pick,
        "name": name,
        "inputs": tuple(inputs or ()),
        "max_batch": max_batch,
        "max_delay": 0.0 if max_delay == "0" else duration("--max-delay", max_delay, "5ms, 0.1s, 0"),
        "refresh": 0.0 if refresh == "never" else duration("--refresh", refresh, "2s, 1m, never"),
        "guard": guard,
        "keep": keep,
        "call_seconds": 0.0 if call_timeout == "never" else duration("--call-timeout", call_timeout, _LIMITS),
        "trial_seconds": (0.0 if trial_timeout == "never" else duration("--trial-timeout", trial_timeout, _LIMITS)),
        "replicas": replicas,
        "device": device,
        "threads": threads,
        "token_file": token_file,
        "cert": cert,
        "key": key,
        "rate": rate,
        "max_body": parse_bytes("--max-body", max_body),
        "max_queue": max_queue,
        "max_connections": max_connections,
        "runs": runs,
    }
    logging.basicConfig(level=logging.INFO, format=_FORMAT, stream=sys.stderr)
    from syncline.serve.listening import given  # uvicorn, which is an extra
    from syncline.serve.server import InferenceServer

    followed = _followed(follow, runs) if follow is not None else None
    if weights is None and followed is None:
        typer.echo("syncline: no --from: the model is served as it is made", err=True)
    elif not pathlib.Path(model.rpartition(":")[0]).is_file():
        raise ConfigError(f"{model!r}: there is no such file; name the model's file and what makes it: model.py:Net")
    ends = threading.Event()

    def end(number: int, frame: object) -> None:
        if ends.is_set():
            os._exit(128 + number)  # asked twice
        ends.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with InferenceServer(model, weights, follow=followed, sock=given(), **settings) as server:
        say_where(server)
        while not ends.wait(_LOOK_SECONDS) and not server.trouble:
            pass
        typer.echo(f"syncline: {server.trouble or 'answers open requests, then ends'}", err=True)
    if server.trouble:
        raise typer.Exit(1)
    if any(thread.name.startswith("syncline serve") for thread in threading.enumerate()):
        os._exit(0)  # the operator's code still computes, and no request waits for it


def _followed(job: str, runs: str) -> Any:
    from syncline.serve.following import FollowedJob

    file = find_job(job, pathlib.Path(runs))
    return FollowedJob(job=file.job, token=file.token, host=file.host, port=file.port, name=file.folder.name)


def say_where(server: Any) -> None:
    if server.config.replicas > 1:
        typer.echo(f"syncline: {server.config.replicas} replicas answer", err=True)
    typer.echo(f"syncline: {server.name} version {server.version} at {server.url}", err=True)
    if server.grpc_address:
        typer.echo(f"syncline: gRPC at {server.grpc_address}", err=True)
    if server.token_path is not None:
        typer.echo(f"syncline: callers need the token in {server.token_path}", err=True)
        if not server.config.cert:
            typer.echo("syncline: token and answers travel in the clear; give --cert and --key for HTTPS", err=True)
