"""The protocol's six gRPC calls, in the event loop of HTTP. Their messages come from the vendored descriptors."""

from __future__ import annotations

import functools
import importlib.resources
import logging
import pathlib
import time
import urllib.parse
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from syncline.errors import ConfigError
from syncline.serve.application import Application
from syncline.serve.datatypes import Array, RequestError, datatype_of
from syncline.serve.limits import Gate
from syncline.serve.metrics import ServingMetrics
from syncline.serve.protocol import InferRequest, Protocol

try:
    import grpc
    import grpc.aio
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.message import DecodeError
except ImportError as error:
    raise ConfigError(f"--grpc-port needs grpcio and protobuf: pip install 'syncline[serve]' ({error})") from error

log = logging.getLogger("syncline.serve")

SERVICE = "inference.GRPCInferenceService"
CALLS = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")
#: For probes, as over HTTP.
_OPEN = ("ServerLive", "ServerReady")
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}
#: Where numbers are if they are not raw bytes; FP16 has no such field.
CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


@functools.cache
def message_class(name: str) -> Any:
    """A message of the protocol. They are in a pool of their own: a client in this process has the same names."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"inference.{name}"))


@functools.cache
def _pool() -> Any:
    place = importlib.resources.files("syncline.serve") / "_vendor" / "open_inference" / "grpc_predict_v2.pb"
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(place.read_bytes()).file:
        pool.Add(file)
    return pool


class GrpcCalls:
    """Answers them from the same batches as HTTP."""

    def __init__(
        self,
        application: Application,
        messages: Protocol,
        metrics: ServingMetrics,
        gate: Gate,
        *,
        host: str,
        port: int,
        shares_port: bool,
        cert: str,
        key: str,
        most_bytes: int,
        most_calls: int,
        drain_seconds: float,
    ) -> None:
        """`shares_port`: other processes listen on it too, and the kernel gives each a part of the connections."""
        self._shares_port = shares_port
        self._application, self._protocol, self._metrics, self._gate = application, messages, metrics, gate
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._credentials = _credentials(cert, key) if cert else None
        self._most_bytes, self._most_calls, self._drain_seconds = most_bytes, most_calls, drain_seconds
        self._server: Any = None

    async def start(self) -> str:
        """Listens; returns `host:port`."""
        server = grpc.aio.server(
            interceptors=[_TokenCheck(self._gate)],
            options=[
                # beside the numbers a message has names and shapes
                ("grpc.max_receive_message_length", self._most_bytes + (1 << 16)),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", int(self._shares_port)),
            ],
            maximum_concurrent_rpcs=self._most_calls,
        )
        handlers = {name: self._handler(name, getattr(self, f"_{_snake(name)}")) for name in CALLS}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            if self._credentials is not None:
                port = server.add_secure_port(self._address, self._credentials)
            else:
                port = server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise ConfigError(
                f"--grpc-port: cannot listen on {self._address}: {error}; choose another port"
            ) from None
        await server.start()
        self._server = server
        return f"{self._address.rpartition(':')[0]}:{port}"

    async def close(self) -> None:
        """Answers open calls, then ends."""
        await self._server.stop(self._drain_seconds)

    def _handler(self, name: str, answer: Callable[[Any], Awaitable[Any]]) -> Any:
        parse = message_class(f"{name}Request").FromString

        async def handle(content: bytes, context: Any) -> Any:
            try:
                if name not in _OPEN:
                    self._gate.check_rate(_address_of(context.peer()), time.monotonic())
                with self._application.hold_bytes() as held:
                    held.take(len(content))
                    try:
                        request = parse(content)
                    except DecodeError as error:
                        raise RequestError(400, f"this is no {name}Request: {error}") from None
                    del content
                    return await answer(request)
            except RequestError as error:
                self._metrics.count("", error.status)
                await context.abort(_CODES.get(error.status, grpc.StatusCode.INTERNAL), str(error))
            except Exception:
                log.exception("a gRPC call failed by a fault of syncline; please report it")
                self._metrics.count("", 500)
                await context.abort(grpc.StatusCode.INTERNAL, "the server failed on this call; its log says where")

        return grpc.unary_unary_rpc_method_handler(
            handle,  # it parses the request itself, when it is known that there is room for it
            response_serializer=message_class(f"{name}Response").SerializeToString,
        )

    async def _server_live(self, request: Any) -> Any:
        return message_class("ServerLiveResponse")(live=True)

    async def _server_ready(self, request: Any) -> Any:
        return message_class("ServerReadyResponse")(ready=self._application.is_ready)

    async def _model_ready(self, request: Any) -> Any:
        self._application.check_name(request.name)
        self._application.check_version(request.version)
        return message_class("ModelReadyResponse")(ready=self._application.is_ready)

    async def _server_metadata(self, request: Any) -> Any:
        return message_class("ServerMetadataResponse")(**self._application.server_metadata())

    async def _model_metadata(self, request: Any) -> Any:
        self._application.check_name(request.name)
        self._application.check_version(request.version)
        return message_class("ModelMetadataResponse")(**self._application.metadata())

    async def _model_infer(self, message: Any) -> Any:
        began = time.monotonic()
        self._application.check_name(message.model_name)
        request = self._request(message)
        answer = await self._application.answer(request, message.model_version)
        reply = self._reply(message, request, answer.outputs, answer.version)
        self._metrics.count(answer.version, 200)
        self._metrics.latency.observe(time.monotonic() - began)
        return reply

    def _request(self, message: Any) -> InferRequest:
        raw = message.raw_input_contents
        if raw and len(raw) != len(message.inputs):
            raise RequestError(400, f"{len(message.inputs)} inputs and {len(raw)} raw contents; send one for each")
        found: dict[str, Array] = {}
        for index, one in enumerate(message.inputs):
            if one.name in found:
                raise RequestError(400, f"input {one.name!r} is given twice")
            shape = list(one.shape)
            if raw:
                if one.HasField("contents"):
                    raise RequestError(400, f"input {one.name!r} has contents and raw contents; send one of them")
                found[one.name] = self._protocol.from_bytes(one.name, one.datatype, shape, raw[index])
            else:
                field = CONTENTS.get(one.datatype)
                if field is None:
                    raise RequestError(400, f"input {one.name!r} of datatype {one.datatype}: send raw_input_contents")
                numbers = getattr(one.contents, field)
                found[one.name] = self._protocol.from_numbers(one.name, one.datatype, shape, numbers)
        for one in message.outputs:
            if "classification" in one.parameters:
                raise RequestError(400, f"output {one.name!r}: classification is not served; take the numbers")
        outputs = {one.name: bool(raw) for one in message.outputs} or None
        return self._protocol.checked(found, message.id, outputs, bool(raw))

    def _reply(self, message: Any, request: InferRequest, outputs: dict[str, Array], version: str) -> Any:
        names = list(outputs if request.outputs is None else request.outputs)
        if unknown := set(names) - outputs.keys():
            raise RequestError(400, f"there is no output {min(unknown)!r}; the model has {', '.join(outputs)}")
        datatypes = {name: datatype_of(outputs[name].dtype) or "" for name in names}
        reply = message_class("ModelInferResponse")(
            model_name=message.model_name, model_version=version, id=message.id
        )
        is_raw = request.is_binary or "FP16" in datatypes.values()
        for name in names:
            array = np.ascontiguousarray(outputs[name])
            one = reply.outputs.add(name=name, datatype=datatypes[name], shape=array.shape)
            if is_raw:
                reply.raw_output_contents.append(array.tobytes())
            else:
                getattr(one.contents, CONTENTS[datatypes[name]]).extend(array.ravel().tolist())
        return reply


class _TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses a call before its message is read."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

        async def refuse(requests: Any, context: Any) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "send the server's token: authorization: Bearer TOKEN"
            )

        self._refuse = grpc.stream_unary_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        if details.method.rpartition("/")[2] not in _OPEN:
            said = dict(details.invocation_metadata or ()).get("authorization", "")
            try:
                self._gate.check_token(said.encode() if isinstance(said, str) else said)
            except RequestError:
                return self._refuse
        return await continuation(details)


def _address_of(peer: str) -> str:
    """As HTTP calls it: `127.0.0.1` of `ipv4:127.0.0.1:1234`, `::1` of `ipv6:%5B::1%5D:1234`."""
    host, _, _ = urllib.parse.unquote(peer.partition(":")[2]).rpartition(":")
    return host.removeprefix("[").removesuffix("]")


def _credentials(cert: str, key: str) -> Any:
    try:
        pair = (pathlib.Path(key).read_bytes(), pathlib.Path(cert).read_bytes())
    except OSError as error:
        raise ConfigError(f"--cert {cert} --key {key}: cannot be used: {error}") from None
    return grpc.ssl_server_credentials([pair])


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
