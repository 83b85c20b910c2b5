"""The HTTP of a serving process, as an ASGI application: the protocol's routes, /predict and /metrics."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

import syncline.serve.protocol as protocol
from syncline.serve.batching import BatchAnswer, Batcher
from syncline.serve.datatypes import RequestError, TensorSpec
from syncline.serve.limits import ByteBudget, Connections, Gate, RequestBytes
from syncline.serve.metrics import ServingMetrics, ServingTotals
from syncline.serve.openapi import METRICS, description
from syncline.serve.page_files import HEADERS, is_page, page_file
from syncline.serve.versions import Version, Versions

log = logging.getLogger("syncline.serve")

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
#: The totals of all processes behind a port, and how many processes there are. RequestError: they cannot be had.
AllTotals = Callable[[], Awaitable[tuple[ServingTotals, int]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_JSON, _BINARY = b"application/json", b"application/octet-stream"
_OPENMETRICS = f"{METRICS}; version=1.0.0; charset=utf-8".encode()
_PLACES = ("/v2", "/metrics", "/status", "/openapi.json", "/v2/health/live", "/v2/health/ready")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What callers can know of the model."""

    name: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: Callable[[], tuple[TensorSpec, ...]]  #: known when a version was called
    labels: tuple[str, ...] = ()  #: what the classes are called, for people


@dataclasses.dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    body: bytes
    content_type: bytes = _JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Application:
    """Routes requests. One instance serves one model."""

    def __init__(
        self,
        model: ServedModel,
        versions: Versions[Version],
        batcher: Batcher,
        metrics: ServingMetrics,
        gate: Gate,
        messages: protocol.Protocol,
        connections: Connections,
        *,
        most_bytes: int,
        body_seconds: float,
        syncline_version: str,
        all_totals: AllTotals | None = None,
    ) -> None:
        """`all_totals`: of all processes behind this port, where there are several."""
        self._all_totals = all_totals
        self._model, self._versions, self._batcher, self._metrics = model, versions, batcher, metrics
        self._gate, self._connections = gate, connections
        self._most_bytes, self._body_seconds, self._release = most_bytes, body_seconds, syncline_version
        self._budget = ByteBudget(max(4 * most_bytes, 256 << 20))
        self._protocol = messages
        self._infer_path = f"/v2/models/{model.name}/infer"  # paths come here decoded
        self._is_ending = False

    def drain(self) -> None:
        """From now on the server says that it is not ready."""
        self._is_ending = True

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            return
        peer = scope.get("client")
        self._connections.begins(peer)
        began = time.monotonic()
        version = ""
        must_close = False
        with self._budget.request() as held:
            try:
                length, header_length = self._head(scope, began)
                path, method = scope["path"], scope["method"]
                if path == self._infer_path or path == "/predict" or path.endswith("/infer"):
                    if method != "POST":
                        raise RequestError(405, f"{path} takes POST")
                    must_close = True  # until the body was read
                    body = await self._body(receive, length, held)
                    must_close = False
                    reply, version = await self._infer(path, body, header_length, peer)
                else:
                    if method not in ("GET", "HEAD"):
                        raise RequestError(405 if self._knows(path) else 404, f"{path} does not take {method}")
                    reply = await self._look(path)
            except RequestError as error:
                headers: tuple[tuple[bytes, bytes], ...] = ()
                if error.retry_seconds:
                    headers = ((b"retry-after", b"%d" % max(1, round(error.retry_seconds + 0.5))),)
                if error.status == 401:
                    headers = ((b"www-authenticate", b"Bearer"),)
                # a body that was not read is not waited for
                must_close = must_close or error.status in (401, 403, 413, 415, 421, 429)
                if error.status == 405:
                    headers = ((b"allow", b"POST" if "takes POST" in str(error) else b"GET, HEAD"),)
                reply = _Reply(error.status, protocol.error_body(str(error)), _JSON, headers)
                self._metrics.count("", error.status)
            except _Gone:
                return
            except Exception:
                log.exception("a request failed by a fault of syncline; please report it")
                reply = _Reply(500, protocol.error_body("the server failed on this request; its log says where"))
                self._metrics.count("", 500)
        if version:
            self._metrics.count(version, 200)
            self._metrics.latency.observe(time.monotonic() - began)
        self._connections.ends(peer, is_proven=reply.status < 400)
        headers_out = [
            (b"content-type", reply.content_type),
            (b"content-length", b"%d" % len(reply.body)),
            *reply.headers,
        ]
        if must_close:
            headers_out.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers_out})
        await send({"type": "http.response.body", "body": reply.body})

    def _head(self, scope: _Scope, now: float) -> tuple[int | None, bytes | None]:
        """The length of the body and the length of its JSON. Nothing of the body is read before this passes."""
        length, authorization, header_length = None, b"", None
        host = origin = b""
        for name, value in scope["headers"]:
            if name == b"content-length":
                length = int(value) if value.isdigit() and len(value) < 19 else None
            elif name == b"authorization":
                authorization = value
            elif name == b"host":
                host = value
            elif name == b"origin":
                origin = value
            elif name == protocol.HEADER_LENGTH:
                header_length = value
            elif name == b"content-encoding" and value.lower() not in (b"", b"identity"):
                raise RequestError(415, "the body must not be compressed")
        path = scope["path"]
        self._gate.check_site(host, origin)
        if not path.startswith("/v2/health/"):
            if not is_page(path):
                self._gate.check_token(authorization)
            client = scope.get("client")
            address = client[0] if client else ""
            # The page asks how the server stands once a second: that must not use up what its user may ask.
            self._gate.check_rate(f"{address} page" if is_page(path) or path == "/status" else address, now)
        if length is not None and length > self._most_bytes:
            raise RequestError(413, f"the body has {length} bytes; at most {self._most_bytes} are read (--max-body)")
        return length, header_length

    async def _body(self, receive: _Receive, length: int | None, held: RequestBytes) -> bytes:
        """`held` takes the bytes before they come, or as they come where the length is unknown."""
        if length == 0:
            return b""
        held.take(length or 0)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if length is None:
                        held.take(len(parts[-1]))
                    if size > self._most_bytes:
                        raise RequestError(413, f"the body has more than {self._most_bytes} bytes (--max-body)")
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise RequestError(408, f"the body did not come within {self._body_seconds:g} s") from None
        return b"".join(parts)

    def hold_bytes(self) -> RequestBytes:
        """For a request that comes another way than HTTP: what it takes of the same budget."""
        return self._budget.request()

    async def answer(self, request: protocol.InferRequest, version: str) -> BatchAnswer:
        """Waits for a batch with this request; '' is the version that is current then."""
        loop = asyncio.get_running_loop()
        return await self._batcher.submit(request.inputs, request.num_rows, version, loop)

    async def _answer_http(self, request: protocol.InferRequest, version: str, peer: object) -> BatchAnswer:
        """The same; _Gone if the connection ends before. Then the batch does without this request."""
        future = self._batcher.submit(request.inputs, request.num_rows, version, asyncio.get_running_loop())
        self._connections.waits(peer, future)
        try:
            return await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the server ends
            raise _Gone from None

    async def _infer(self, path: str, body: bytes, header_length: bytes | None, peer: object) -> tuple[_Reply, str]:
        if path == "/predict":
            plain, named = self._protocol.decode_plain(body)
            answer = await self._answer_http(plain, named, peer)
            return _Reply(200, self._protocol.encode_plain(plain, answer.outputs, answer.version)), answer.version
        named = "" if path == self._infer_path else self._version_in(path)
        request = self._protocol.decode(body, header_length)
        answer = await self._answer_http(request, named, peer)
        content, json_bytes = self._protocol.encode(request, answer.outputs, answer.version)
        if json_bytes is None:
            return _Reply(200, content), answer.version
        headers = ((protocol.HEADER_LENGTH, b"%d" % json_bytes),)
        return _Reply(200, content, _BINARY, headers), answer.version

    def _version_in(self, path: str) -> str:
        """The version in a path below /v2/models/NAME; raises RequestError for another model or another path."""
        match path.split("/")[1:]:
            case ["v2", "models", name, *rest]:
                self.check_name(name)
                match rest:
                    case ["infer" | "ready"] | []:
                        return ""
                    case ["versions", version] | ["versions", version, "infer" | "ready"]:
                        return version
        raise RequestError(404, f"there is no {path}; see /v2 and /v2/models/{self._model.name}")

    def check_version(self, version: str) -> None:
        """Raises RequestError for a version that is not in memory; '' is the current one."""
        if self._versions.find(version) is None:
            raise RequestError(
                404, f"there is no version {version!r} in memory; there are {', '.join(self._loaded())}"
            )

    def check_name(self, name: str) -> None:
        """Raises RequestError for another model than this one."""
        if name != self._model.name:
            raise RequestError(404, f"there is no model {name!r}; this server has {self._model.name!r}")

    def _knows(self, path: str) -> bool:
        return path in _PLACES or path.startswith("/v2/models/") or is_page(path)

    async def _look(self, path: str) -> _Reply:
        if path == "/v2/health/live":
            return _Reply(200, b'{"live":true}')
        if path == "/v2/health/ready":
            is_ready = self.is_ready
            return _Reply(200 if is_ready else 503, b'{"ready":true}' if is_ready else b'{"ready":false}')
        if path == "/v2":
            return _Reply(200, msgspec.json.encode(self.server_metadata()))
        if path == "/metrics":
            totals, num_replicas = await self._totals()
            current = self._versions.current
            text = totals.text(
                current=current.name if current is not None else "", loaded=self._loaded(), num_replicas=num_replicas
            )
            return _Reply(200, text, _OPENMETRICS)
        if path == "/status":
            return _Reply(200, msgspec.json.encode(self.status(*await self._totals())))
        if path == "/openapi.json":
            told = description(
                self._model.name, self._model.inputs, self._release, needs_token=self._gate.needs_token
            )
            return _Reply(200, msgspec.json.encode(told))
        if is_page(path):
            content, kind = page_file(path)
            return _Reply(200, content, kind, HEADERS)
        self.check_version(self._version_in(path))
        if path.endswith("/ready"):
            return _Reply(200, b'{"ready":true}') if self.is_ready else _Reply(503, b'{"ready":false}')
        return _Reply(200, msgspec.json.encode(self.metadata()))

    @property
    def is_ready(self) -> bool:
        return not self._is_ending and self._versions.current is not None and not self._batcher.hangs

    def server_metadata(self) -> dict[str, Any]:
        """The protocol's description of the server."""
        return {"name": "syncline", "version": self._release, "extensions": ["binary_tensor_data"]}

    def metadata(self) -> dict[str, Any]:
        """The protocol's description of the model."""
        return {
            "name": self._model.name,
            "versions": self._loaded(),
            "platform": self._model.platform,
            "inputs": [spec.described() for spec in self._model.inputs],
            "outputs": [spec.described() for spec in self._model.outputs()],
        }

    def own_totals(self) -> ServingTotals:
        """What this process has counted. Any thread may ask."""
        self._metrics.forget(self._loaded())
        return self._metrics.totals(num_queued=self._batcher.num_queued, num_connections=len(self._connections))

    async def _totals(self) -> tuple[ServingTotals, int]:
        """What all processes behind this port have counted, and how many they are."""
        return (self.own_totals(), 1) if self._all_totals is None else await self._all_totals()

    def status(self, totals: ServingTotals, num_replicas: int) -> dict[str, Any]:
        """Versions, latency and queue, for the page."""
        versions, latency, batch_rows = self._versions, totals.latency, totals.batch_rows
        current, canary = versions.current, versions.canary
        num_answered = latency.count
        return {
            "name": self._model.name,
            "current": current.name if current is not None else "",
            "canary": canary.name if canary is not None else "",
            "share": versions.share,
            "is_pinned": versions.is_pinned,
            "versions": [{"name": one.name, "step": one.step} for one in versions.loaded()],
            "labels": self._model.labels,
            "num_answered": num_answered,
            "num_refused": max(0, totals.num_requests - num_answered),
            "num_queued": totals.num_queued,
            "num_connections": totals.num_connections,
            "num_batches": batch_rows.count,
            "num_rows": round(batch_rows.total),
            "num_replicas": num_replicas,
            "p50_seconds": latency.quantile(0.5),
            "p99_seconds": latency.quantile(0.99),
        }

    def _loaded(self) -> list[str]:
        return [one.name for one in self._versions.loaded()]


class _Gone(Exception):
    """The client went away."""
