"""What answers requests in one process: batches of a model's versions, with HTTP and gRPC around them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import pathlib
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from syncline.config import num_threads
from syncline.serve.application import AllTotals, Application, ServedModel
from syncline.serve.batch_policy import BatchPolicy
from syncline.serve.batching import Batcher
from syncline.serve.datatypes import TensorSpec, parse_spec
from syncline.serve.limits import Connections, Gate, parse_rate
from syncline.serve.listening import Beside, HttpListener
from syncline.serve.loading import VersionTrial
from syncline.serve.metrics import ServingMetrics, ServingTotals
from syncline.serve.model import ModelFile
from syncline.serve.protocol import Protocol
from syncline.serve.settings import ServeConfig
from syncline.serve.versions import Version, Versions

log = logging.getLogger("syncline.serve")


def inputs_of(file: ModelFile, config: ServeConfig) -> tuple[TensorSpec, ...]:
    """What the model takes."""
    return file.inputs(file.make(), [parse_spec(text) for text in config.inputs])


def limit_threads(threads: int) -> None:
    """How many threads the model's kernels use in this process; 0: one per core."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads or num_threads())


class Answering:
    """Answers from `listen` on with what `versions` holds."""

    def __init__(
        self,
        config: ServeConfig,
        file: ModelFile,
        inputs: tuple[TensorSpec, ...],
        versions: Versions[Version],
        *,
        name: str,
        token: str,
        guard: str,
        all_totals: AllTotals | None = None,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        """`guard`: what a new version must pass in this process. `all_totals`: of several replicas. `on_hang` is
        called in the event loop when the model does not return from a call.
        """
        self._config, self._file, self._inputs, self._name = config, file, inputs, name
        self._versions, self._token, self._all_totals = versions, token, all_totals
        self._metrics = ServingMetrics()
        self._batcher = Batcher(
            versions,
            BatchPolicy(config.max_batch, config.max_delay),
            self._metrics,
            most_queued=config.max_queue,
            knows_shapes=all(spec.shape is not None for spec in inputs),
            call_seconds=config.call_seconds,
            on_hang=on_hang,
        )
        self._connections = Connections(config.max_connections, config.head_seconds, config.idle_seconds)
        self._application: Application | None = None
        self._listener: HttpListener | None = None
        #: for new versions
        self.trial = VersionTrial(file, inputs, self._batcher.recent, guard=guard, warm_rows=(1, config.max_batch))
        self.grpc_address = ""  #: `host:port` for clients of gRPC; '': there is none

    def start_batches(self, stack: contextlib.ExitStack) -> None:
        """Starts the thread that calls the model."""
        self._batcher.start()
        stack.callback(self._batcher.close)

    def listen(self, sock: socket.socket, stack: contextlib.ExitStack, *, shares_port: bool = False) -> None:
        """Answers what arrives there. `shares_port`: other processes listen for gRPC on the same port."""
        config = self._config
        gate = Gate(self._token, parse_rate(config.rate) if config.rate else 0.0, config.host)
        messages = Protocol(self._name, self._inputs, config.max_body)
        model = ServedModel(
            name=self._name,
            platform=_platform(self._versions.current),
            inputs=self._inputs,
            outputs=lambda: self.trial.outputs,
            labels=self._file.labels,
        )
        application = Application(
            model,
            self._versions,
            self._batcher,
            self._metrics,
            gate,
            messages,
            self._connections,
            most_bytes=config.max_body,
            body_seconds=config.body_seconds,
            syncline_version=importlib.metadata.version("syncline"),
            all_totals=self._all_totals,
        )
        has_grpc = config.grpc_port >= 0
        listener = HttpListener(
            application,
            sock,
            self._connections,
            certificate=pathlib.Path(config.cert) if config.cert else None,
            key=pathlib.Path(config.key) if config.key else None,
            drain_seconds=config.drain_seconds,
            beside=self._grpc(application, messages, gate, sock, shares_port) if has_grpc else None,
            handshake_seconds=config.head_seconds,
            sweep=self._batcher.sweep,
        )
        self._application, self._listener = application, listener
        listener.start()
        stack.callback(listener.drain)
        stack.callback(application.drain)

    @property
    def hangs(self) -> bool:
        """Whether the model has not returned from a call for too long. Any thread may ask."""
        return self._batcher.hangs

    def totals(self) -> ServingTotals:
        """What this process has counted. Any thread may ask."""
        return self._application.own_totals() if self._application is not None else ServingTotals()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Calls it in the event loop. Any thread may ask."""
        assert self._listener is not None
        self._listener.call_soon(function)

    def _grpc(
        self, application: Application, messages: Protocol, gate: Gate, sock: socket.socket, shares_port: bool
    ) -> Beside:
        from syncline.serve.grpc_calls import GrpcCalls  # grpcio is large: only where it is used

        config = self._config
        calls = GrpcCalls(
            application,
            messages,
            self._metrics,
            gate,
            host=sock.getsockname()[0],  # a name may have several addresses, some of them not on loopback
            port=config.grpc_port,
            shares_port=shares_port,
            cert=config.cert,
            key=config.key,
            most_bytes=config.max_body,
            most_calls=config.max_queue,
            drain_seconds=config.drain_seconds,
        )

        async def start() -> Callable[[], Awaitable[None]]:
            self.grpc_address = await calls.start()
            return calls.close

        return start


def url_of(sock: socket.socket, config: ServeConfig) -> str:
    """Where clients find a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"{'https' if config.cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _platform(version: Version | None) -> str:
    model = type(version.model).__name__ if version is not None else ""
    return "pytorch_torch" if model == "TorchModel" else "python"
