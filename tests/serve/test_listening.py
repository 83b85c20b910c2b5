"""What clients see of a model that hangs, and of the end; what the model sees of clients that are gone."""

from __future__ import annotations

import pathlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.patience import PATIENCE
from tests.serve.arrays import INPUTS, ROW, Held
from tests.serve.saved import Caller

from syncline.serve import Server


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.free.set()


@pytest.fixture
def served(tmp_path: pathlib.Path, held: Held) -> Iterator[Callable[..., Any]]:
    servers = []

    def start(**settings: Any) -> Any:
        given = {"name": "net", "port": 0, "runs": str(tmp_path / "runs"), "inputs": INPUTS, **settings}
        server = Server(held.make, **given).start()
        servers.append(server)
        held.sizes.clear()  # of the trial
        return server

    yield start
    held.free.set()
    while servers:  # gRPC's sockets are closed when nothing refers to them
        servers.pop().close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Asking:
    """A request in a thread of its own."""

    def __init__(self, url: str) -> None:
        self.answer: tuple[int, Any] | None = None
        self._url = url
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with Caller(self._url) as call:
            self.answer = call.post("/predict", {"input": ROW})

    def end(self) -> tuple[int, Any]:
        self._thread.join(PATIENCE)
        assert self.answer is not None
        return self.answer


def gauge(url: str, name: str) -> int:
    with Caller(url) as call:
        content = call("GET", "/metrics")[2].decode()
    return int(content.partition(f"\n{name} ")[2].split()[0])


def test_a_model_that_hangs_is_not_ready(served: Any, held: Held) -> None:
    """The port answers, the batches do not: a load balancer must hear of it, and clients must not wait."""
    server = served(call_seconds=0.1)
    held.free.clear()
    first = Asking(server.url)
    wait_for(lambda: bool(held.sizes))
    status, answer = first.end()
    assert status == 503 and "has not returned from a call for 0.1 s" in answer["error"]
    with Caller(server.url) as call:
        for path in ("/v2/health/ready", "/v2/models/net/ready"):
            assert call("GET", path)[0] == 503
        assert call.get("/v2/health/live")[0] == 200
        assert call.post("/predict", {"input": ROW})[0] == 503
        held.free.set()
        wait_for(lambda: call("GET", "/v2/health/ready")[0] == 200)
        assert call.post("/predict", {"input": ROW})[0] == 200


def test_the_model_is_not_called_for_clients_that_are_gone(served: Any, held: Held) -> None:
    server = served(max_batch=1)
    held.free.clear()
    first = Asking(server.url)
    wait_for(lambda: held.sizes == [1])
    gone = [Caller(server.url) for _ in range(3)]
    for call in gone:
        call.connection.request("POST", "/predict", b'{"input":[1,1,1,1]}')
    wait_for(lambda: gauge(server.url, "syncline_queue_requests") == 3)
    for call in gone:
        call.connection.close()
    wait_for(lambda: gauge(server.url, "syncline_connections") == 2)  # the first one, and who asks for it
    held.free.set()
    assert first.end()[0] == 200
    last = Asking(server.url)
    assert last.end()[0] == 200 and held.sizes == [1, 1]


def test_both_protocols_drain_at_once(served: Any, held: Held) -> None:
    """One after the other they would have twice the time that the end may take. The HTTP port closes while a gRPC
    call is open; then both get their answers.
    """
    grpc = pytest.importorskip("grpc")
    from syncline.serve.grpc_calls import SERVICE, message_class

    server = served(grpc_port=0, drain_seconds=PATIENCE, max_batch=1)
    held.free.clear()
    over_http = Asking(server.url)
    wait_for(lambda: held.sizes == [1])
    with grpc.insecure_channel(server.grpc_address) as channel:
        infer = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=message_class("ModelInferRequest").SerializeToString,
            response_deserializer=message_class("ModelInferResponse").FromString,
        )
        request = message_class("ModelInferRequest")(model_name="net")
        tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        tensor.contents.fp32_contents.extend(ROW)
        over_grpc = infer.future(request, timeout=PATIENCE)
        wait_for(lambda: gauge(server.url, "syncline_queue_requests") == 1)
        closing = threading.Thread(target=server.close)
        closing.start()
        try:
            wait_for(lambda: not accepts(server.url))
            assert not over_grpc.done()
        finally:
            held.free.set()
        assert over_grpc.result().model_version == "1"
        closing.join(PATIENCE)
    assert over_http.end()[0] == 200


def accepts(url: str) -> bool:
    host, _, port = url.partition("://")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return False
    return True
