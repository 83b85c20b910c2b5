"""A serving process: the model's versions, their batches, HTTP around them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import pathlib
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from syncline.config import num_threads
from syncline.errors import ConfigError
from syncline.serve.application import Application, ServedModel
from syncline.serve.batch_policy import BatchPolicy
from syncline.serve.batching import Batcher
from syncline.serve.control import TOKEN, Control, ControlRequest, folder_of, held
from syncline.serve.datatypes import parse_spec
from syncline.serve.limits import Connections, Gate, make_token, parse_rate, read_token
from syncline.serve.listening import Beside, HttpListener, bind, is_loopback
from syncline.serve.loading import Refresher, VersionLoading
from syncline.serve.metrics import ServingMetrics
from syncline.serve.model import ModelFile
from syncline.serve.protocol import Protocol
from syncline.serve.reading import open_source
from syncline.serve.versions import Version, Versions

log = logging.getLogger("syncline.serve")


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is served."""

    name: str = ""  #: of the model, in paths; default: that of the class or function
    host: str = "127.0.0.1"
    port: int = 8000  #: 0: any free one
    grpc_port: int = -1  #: -1: no gRPC; 0: any free one
    pick: str = "best"  #: of a folder of checkpoints: `best` (the newest if there is none) or `last`
    inputs: tuple[str, ...] = ()  #: `NAME:DATATYPE:SHAPE` of one row each; default: those of `example`
    max_batch: int = 32  #: rows of one call of the model
    max_delay: float = 0.005  #: seconds that a request may wait for others while the server is busy
    max_queue: int = 1024  #: requests that may wait
    max_body: int = 64 << 20  #: bytes of one request
    max_connections: int = 1024
    head_seconds: float = 5.0  #: for the head of a request to arrive
    body_seconds: float = 30.0  #: for its body
    idle_seconds: float = 75.0  #: that a connection may stay open between two requests
    rate: str = ""  #: requests of one address, e.g. `100/s`; default: any number
    token_file: str = ""  #: default: none on loopback, else a new one in the folder of this name
    cert: str = ""  #: a PEM file; with `key`: HTTPS
    key: str = ""
    refresh: float = 2.0  #: seconds between two looks for a new version; 0.0: none
    guard: str = ""  #: a condition on what the file's `validate` returns, e.g. `accuracy>=0.85`
    threads: int = 0  #: for the model's kernels; default: one per core
    drain_seconds: float = 4.0  #: for open requests at the end
    runs: str = "runs"  #: the folder under which the socket of `serve-ctl` and the token are


LEAST: dict[str, float] = {
    "port": 0,
    "grpc_port": -1,
    "max_batch": 1,
    "max_delay": 0.0,
    "max_queue": 1,
    "max_body": 1024,
    "max_connections": 1,
    "head_seconds": 0.01,
    "body_seconds": 0.01,
    "idle_seconds": 0.01,
    "refresh": 0.0,
    "threads": 0,
    "drain_seconds": 0.0,
}
_MOST = {"port": 65535, "grpc_port": 65535, "max_batch": 1 << 20, "max_body": 1 << 34, "threads": 4096}


class InferenceServer:
    """Serves a model over HTTP from `start` (or `with`) on. Known as `syncline.serve.Server`."""

    def __init__(
        self,
        model: str | Callable[[], Any],
        weights: str | os.PathLike[str] | None = None,
        config: ServeConfig | None = None,
        **settings: Any,
    ) -> None:
        """`model`: `model.py:Net`, or a class or function that makes the model. `weights`: a folder of checkpoints,
        one of them, or a safetensors file; None: the model as it is made. `settings`: fields of `ServeConfig`.
        """
        self.config = _resolved(config or ServeConfig(), settings)
        self._file = ModelFile(model) if isinstance(model, str) else ModelFile.of(model)
        self.name = self.config.name or self._file.name
        self._rate = parse_rate(self.config.rate) if self.config.rate else 0.0
        self._source = open_source(weights, self.config.pick) if weights is not None else None
        self._stack = contextlib.ExitStack()
        self._versions = Versions()
        self._metrics = ServingMetrics()
        self._url = ""
        self._token = ""
        self._grpc_address = ""
        self._loading: VersionLoading | None = None

    def __enter__(self) -> InferenceServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self._url

    @property
    def token(self) -> str:
        """The bearer token; '': none is needed."""
        return self._token

    @property
    def token_path(self) -> pathlib.Path | None:
        """The file that has the token."""
        if not self._token:
            return None
        return pathlib.Path(self.config.token_file or folder_of(self.config.runs, self.name) / TOKEN)

    @property
    def version(self) -> str:
        """The name of the version that answers."""
        current = self._versions.current
        return current.name if current is not None else ""

    def start(self) -> InferenceServer:
        """Loads the first version and listens; returns when requests are answered."""
        with contextlib.ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        """Answers open requests, then ends."""
        self._stack.close()

    def _start(self, stack: contextlib.ExitStack) -> None:
        config = self.config
        folder = folder_of(config.runs, self.name)
        stack.enter_context(held(folder))
        sock = stack.enter_context(bind(config.host, config.port))
        self._token = self._find_token(folder, sock)
        _limit_threads(config.threads)
        inputs = self._file.inputs(self._file.make(), [parse_spec(text) for text in config.inputs])
        knows_shapes = all(spec.shape is not None for spec in inputs)
        policy = BatchPolicy(config.max_batch, config.max_delay)
        batcher = Batcher(
            self._versions, policy, self._metrics, most_queued=config.max_queue, knows_shapes=knows_shapes
        )
        loading = VersionLoading(self._file, inputs, self._source, self._versions, batcher.recent, guard=config.guard)
        self._loading = loading
        loading.first()
        batcher.start()
        stack.callback(batcher.close)
        if self._source is not None and config.refresh:
            refresher = Refresher(loading.look, config.refresh)
            refresher.start()
            stack.callback(refresher.close)
        control = Control(folder, self.control)
        control.start()
        stack.callback(control.close)
        connections = Connections(config.max_connections, config.head_seconds, config.idle_seconds)
        model = ServedModel(
            name=self.name,
            platform=_platform(self._versions.current),
            inputs=inputs,
            outputs=lambda: loading.outputs,
            labels=self._file.labels,
        )
        gate = Gate(self._token, self._rate)
        messages = Protocol(self.name, inputs, config.max_body)
        application = Application(
            model,
            self._versions,
            batcher,
            self._metrics,
            gate,
            messages,
            connections,
            most_bytes=config.max_body,
            body_seconds=config.body_seconds,
            syncline_version=_release(),
        )
        listener = HttpListener(
            application,
            sock,
            connections,
            certificate=pathlib.Path(config.cert) if config.cert else None,
            key=pathlib.Path(config.key) if config.key else None,
            drain_seconds=config.drain_seconds,
            beside=self._grpc(application, messages, gate) if config.grpc_port >= 0 else None,
        )
        host, port = sock.getsockname()[:2]
        self._url = f"{'https' if config.cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
        listener.start()
        stack.callback(listener.drain)
        stack.callback(application.drain)

    def _grpc(self, application: Application, messages: Protocol, gate: Gate) -> Beside:
        from syncline.serve.grpc_calls import GrpcCalls  # grpcio is large: only where it is used

        config = self.config
        calls = GrpcCalls(
            application,
            messages,
            self._metrics,
            gate,
            host=config.host,
            port=config.grpc_port,
            cert=config.cert,
            key=config.key,
            most_bytes=config.max_body,
            most_calls=config.max_queue,
            drain_seconds=config.drain_seconds,
        )

        async def start() -> Callable[[], Awaitable[None]]:
            self._grpc_address = await calls.start()
            return calls.close

        return start

    @property
    def grpc_address(self) -> str:
        """`host:port` for clients of gRPC; '': there is none."""
        return self._grpc_address

    def _find_token(self, folder: pathlib.Path, sock: socket.socket) -> str:
        if self.config.token_file:
            return read_token(pathlib.Path(self.config.token_file))
        if is_loopback(sock):
            return ""
        return make_token(folder / TOKEN)

    def control(self, request: ControlRequest) -> dict[str, Any]:
        """What `syncline serve-ctl` asks for; returns how the versions stand."""
        match request.verb:
            case "status":
                pass
            case "load":
                assert self._loading is not None
                if reasons := self._loading.look():
                    raise ConfigError("; ".join(reasons[:3]))
            case "rollback":
                version = self._versions.rollback()
                log.info("rolled back to version %s", version.name)
            case "pin":
                log.info("pinned to version %s", self._versions.pin(request.version).name)
            case "unpin":
                log.info("unpinned; version %s answers", self._versions.unpin().name)
            case "canary":
                canary = self._versions.set_canary(request.share)
                log.info("canary: %.3g%% to %s", 100 * request.share, canary.name if canary else "the next version")
            case _:
                raise ConfigError(f"there is no verb {request.verb!r}")
        return self.standing()

    def standing(self) -> dict[str, Any]:
        """How the versions stand."""
        current, canary = self._versions.current, self._versions.canary
        return {
            "name": self.name,
            "url": self._url,
            "current": current.name if current is not None else "",
            "canary": canary.name if canary is not None else "",
            "share": self._versions.share,
            "is_pinned": self._versions.is_pinned,
            "versions": [{"name": v.name, "step": v.step, "where": v.where} for v in self._versions.loaded()],
            "num_requests": self._metrics.num_requests,
            "p50_seconds": self._metrics.latency.quantile(0.5),
            "p99_seconds": self._metrics.latency.quantile(0.99),
        }


def _resolved(config: ServeConfig, settings: dict[str, Any]) -> ServeConfig:
    if unknown := settings.keys() - set(ServeConfig.__struct_fields__):
        raise ConfigError(f"unknown setting {min(unknown)!r}; there are {', '.join(ServeConfig.__struct_fields__)}")
    given = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in settings.items()}
    config = msgspec.structs.replace(config, **given)
    try:
        config = msgspec.convert(msgspec.to_builtins(config), ServeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings of serving: {error}") from None
    for name, least in LEAST.items():
        value = getattr(config, name)
        if not least <= value <= _MOST.get(name, 1 << 40):
            raise ConfigError(f"{name} = {value}: must be from {least:g} to {_MOST.get(name, 1 << 40)}")
    return config


def _limit_threads(threads: int) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads or num_threads())


def _platform(version: Version | None) -> str:
    model = type(version.model).__name__ if version is not None else ""
    return "pytorch_torch" if model == "TorchModel" else "python"


def _release() -> str:
    return importlib.metadata.version("syncline")
