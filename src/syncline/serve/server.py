"""A serving process: the model's versions and what answers with them, here or in replicas."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from syncline.config import num_threads
from syncline.errors import ConfigError
from syncline.serve.answering import Answering, inputs_of, limit_threads, url_of
from syncline.serve.control import TOKEN, Control, ControlRequest, ask, control_socket, folder_of, held
from syncline.serve.following import FollowedJob, JobSource, source_of
from syncline.serve.limits import make_token, parse_rate, read_token
from syncline.serve.listening import bind, is_loopback, reserved
from syncline.serve.loading import VersionLoading, keep_looking
from syncline.serve.model import LoadedModel, ModelFile
from syncline.serve.reading import Candidate, VersionSource
from syncline.serve.replicas.keeper import Keeper
from syncline.serve.replicas.messages import SetUp
from syncline.serve.settings import LEAST, ServeConfig, resolved
from syncline.serve.standing import change, told
from syncline.serve.versions import Version, Versions

log = logging.getLogger("syncline.serve")

__all__ = ["LEAST", "InferenceServer", "ServeConfig"]


class InferenceServer:
    """Serves a model over HTTP from `start` (or `with`) on. Known as `syncline.serve.Server`."""

    def __init__(
        self,
        model: str | Callable[[], Any],
        weights: str | os.PathLike[str] | None = None,
        config: ServeConfig | None = None,
        follow: FollowedJob | None = None,
        sock: socket.socket | None = None,
        **settings: Any,
    ) -> None:
        """`model`: `model.py:Net`, or a class or function that makes the model. `weights`: a folder of checkpoints,
        one of them, or a safetensors file; None: the model as it is made. `follow`: a running job, in their place.
        `sock`: listens already, in place of `host` and `port`. `settings`: fields of `ServeConfig`.
        """
        self.config = resolved(config or ServeConfig(), settings)
        given = os.fspath(weights) if weights is not None else None
        if self.config.rate:
            parse_rate(self.config.rate)
        source = source_of(given, self.config.pick, follow, self.config.name, copies=True)
        self._body: _InThisProcess | _InReplicas
        if self.config.replicas > 1:
            self._body = _InReplicas(self.config, model, given, follow)
        else:
            self._body = _InThisProcess(self.config, model, source)
        self.name = self._body.name
        self._stack = contextlib.ExitStack()
        self._given = sock
        self._url = ""
        self._token = ""

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
        return self._body.version

    @property
    def grpc_address(self) -> str:
        """`host:port` for clients of gRPC; '': there is none."""
        return self._body.grpc_address

    @property
    def trouble(self) -> str:
        """Why serving has ended by itself; '': it goes on."""
        return self._body.trouble

    def start(self) -> InferenceServer:
        """Loads the first version and listens; returns when requests are answered."""
        with contextlib.ExitStack() as stack:
            folder = folder_of(self.config.runs, self.name)
            stack.enter_context(held(folder))
            sock = stack.enter_context(self._given or bind(self.config.host, self.config.port))
            self._token = self._find_token(folder, sock)
            self._url = url_of(sock, self.config)
            self._body.start(folder, sock, self._token, self._url, stack)
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        """Answers open requests, then ends."""
        self._stack.close()

    def _find_token(self, folder: pathlib.Path, sock: socket.socket) -> str:
        if self.config.token_file:
            return read_token(pathlib.Path(self.config.token_file))
        if is_loopback(sock):
            return ""
        return make_token(folder / TOKEN)

    def control(self, request: ControlRequest) -> dict[str, Any]:
        """What `syncline serve-ctl` asks for; returns how the versions stand."""
        return self._body.control(request)

    def standing(self) -> dict[str, Any]:
        """How the versions stand."""
        return self.control(ControlRequest("status"))


class _InThisProcess:
    """One process answers: this one."""

    trouble = ""

    def __init__(self, config: ServeConfig, model: str | Callable[[], Any], source: VersionSource | None) -> None:
        self._config, self._source = config, source
        self._file = ModelFile(model) if isinstance(model, str) else ModelFile.of(model)
        self.name = config.name or self._file.name
        self._versions: Versions[Version] = Versions(config.keep)
        self._answering: Answering | None = None
        self._loading: VersionLoading | None = None
        self._url = ""

    @property
    def version(self) -> str:
        current = self._versions.current
        return current.name if current is not None else ""

    @property
    def grpc_address(self) -> str:
        return self._answering.grpc_address if self._answering is not None else ""

    def start(
        self, folder: pathlib.Path, sock: socket.socket, token: str, url: str, stack: contextlib.ExitStack
    ) -> None:
        config = self._config
        self._url = url
        limit_threads(config.threads)
        self._file.place_on(config.device, 0)
        inputs = inputs_of(self._file, config)
        answering = Answering(
            config, self._file, inputs, self._versions, name=self.name, token=token, guard=config.guard
        )
        self._answering = answering
        loading = self._loading = VersionLoading(self._source, self._versions, self._bring)
        if isinstance(self._source, JobSource):
            stack.callback(self._source.close)
        loading.first(self._file.where)
        answering.start_batches(stack)
        stack.callback(keep_looking(self._source, loading.look, config.refresh))
        control = Control(stack.enter_context(control_socket(folder)), self.control)
        control.start()
        stack.callback(control.close)
        answering.listen(sock, stack)

    def _bring(self, candidate: Candidate) -> None:
        """StoreError: this version must not answer."""
        assert self._answering is not None and self._loading is not None
        trial = self._answering.trial
        weights = None if candidate.is_as_made else candidate.read()

        def load() -> LoadedModel:
            return self._file.load(weights, candidate.where)

        model = trial.passed(load, candidate.name, candidate.where, self._config.trial_seconds)
        version = Version(candidate.name, candidate.digest, candidate.where, candidate.step, model)
        self._loading.say_loaded(version, self._versions.add(version))

    def control(self, request: ControlRequest) -> dict[str, Any]:
        assert self._loading is not None and self._answering is not None
        if request.verb == "load":
            if reasons := self._loading.look():
                raise ConfigError("; ".join(reasons[:3]))
        elif request.verb != "status":
            change(self._versions, request, is_followed=isinstance(self._source, JobSource))
        return told(self._versions, self._answering.totals(), self.name, self._url, self._source)


class _InReplicas:
    """Several processes answer, and this one keeps them."""

    def __init__(
        self, config: ServeConfig, model: str | Callable[[], Any], weights: str | None, follow: FollowedJob | None
    ) -> None:
        if not isinstance(model, str):
            raise ConfigError("replicas are processes that import your file: give 'model.py:Net', not a function")
        if sys.platform != "linux":
            raise ConfigError("--replicas needs Linux")
        path, colon, name = model.rpartition(":")
        if not colon or not name.isidentifier() or not pathlib.Path(path).is_file():
            raise ConfigError(f"{model!r}: name the model's file and what makes it, e.g. model.py:Net")
        self._config, self._model, self._weights, self._follow = config, model, weights, follow
        self.name = config.name or name.lower()
        self.grpc_address = ""
        self._folder = pathlib.Path()
        self._keeper: Keeper | None = None

    @property
    def trouble(self) -> str:
        found = self._keeper.trouble if self._keeper is not None else None
        return str(found) if found is not None else ""

    @property
    def version(self) -> str:
        standing = self._keeper.standing if self._keeper is not None else None
        if standing is None:
            return ""
        return next(one.name for one in standing.kept if one.digest == standing.current)

    def start(
        self, folder: pathlib.Path, sock: socket.socket, token: str, url: str, stack: contextlib.ExitStack
    ) -> None:
        config = self._config
        self._folder = folder
        if config.grpc_port >= 0:
            host = sock.getsockname()[0]
            port = stack.enter_context(reserved(host, config.grpc_port))
            self.grpc_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            config = msgspec.structs.replace(config, grpc_port=port)
        template = SetUp(
            config=config,
            model=self._model,
            weights=self._weights,
            follow=self._follow,
            name=self.name,
            number=0,
            threads=0,
            token=token,
            url=url,
        )
        threads = shares(config.threads or num_threads(), config.replicas)
        control = stack.enter_context(control_socket(folder))
        keeper = self._keeper = Keeper(template, config.replicas, threads, sock, control)
        stack.callback(keeper.close)
        keeper.start()

    def control(self, request: ControlRequest) -> dict[str, Any]:
        return ask(self._folder, request)


def shares(threads: int, replicas: int) -> tuple[int, ...]:
    """Threads of each replica: none has fewer than one."""
    return tuple(max(1, threads // replicas + (number < threads % replicas)) for number in range(replicas))
