"""A served model over real HTTP, in this process."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import logging
import pathlib
import select
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.patience import PATIENCE
from tests.serve.saved import MODEL, Caller, arrays, expected, infer_body, save
from torch import nn

from syncline.core.checkpoint import tensor_file
from syncline.errors import ConfigError, StoreError
from syncline.serve import Server
from syncline.serve.control import ControlRequest, ask, folder_of
from syncline.serve.limits import ByteBudget

ROWS = [[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.5]]


@pytest.fixture
def model(tmp_path: pathlib.Path) -> str:
    (tmp_path / "linear.py").write_text(MODEL)
    return f"{tmp_path / 'linear.py'}:Net"


@pytest.fixture
def served(tmp_path: pathlib.Path, model: str) -> Iterator[Callable[..., Any]]:
    """Starts servers that do not look for versions by themselves."""
    with_servers = []

    def start(make: Any = model, weights: Any = None, **settings: Any) -> Any:
        settings = {"port": 0, "refresh": 0.0, "runs": str(tmp_path / "runs"), **settings}
        server = Server(make, weights, **settings).start()
        with_servers.append(server)
        return server

    yield start
    Counting.held.set()
    for server in with_servers:
        server.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_protocol_over_http(served: Any, tmp_path: pathlib.Path) -> None:
    save(tmp_path / "saves", 3)
    server = served(weights=tmp_path / "saves")
    with Caller(server.url) as call:
        assert call.get("/v2") == (
            200,
            {"name": "syncline", "version": "0.1.0", "extensions": ["binary_tensor_data"]},
        )
        for path in (
            "/v2/health/live",
            "/v2/health/ready",
            "/v2/models/net/ready",
            "/v2/models/net/versions/3/ready",
        ):
            assert call.get(path)[0] == 200
        told = {
            "name": "net",
            "versions": ["3"],
            "platform": "pytorch_torch",
            "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 3]}],
        }
        assert call.get("/v2/models/net") == call.get("/v2/models/net/versions/3") == (200, told)
        for path in ("/v2/models/net/infer", "/v2/models/net/versions/3/infer"):
            status, answer = call.post(path, infer_body(ROWS))
            assert status == 200 and (answer["model_version"], answer["id"]) == ("3", "a")
            (output,) = answer["outputs"]
            assert output["shape"] == [2, 3]
            assert np.allclose(np.reshape(output["data"], (2, 3)), expected(3, ROWS))
        data = np.array(ROWS, "f4")
        head = json.dumps(infer_body(ROWS, data=None, parameters={"binary_data_size": data.nbytes})).encode()
        body = head[:-1] + b',"parameters":{"binary_data_output":true}}'
        status, headers, content = call(
            "POST",
            "/v2/models/net/infer",
            body + data.tobytes(),
            {"Inference-Header-Content-Length": str(len(body))},
        )
        length = int(headers["inference-header-content-length"])
        assert status == 200 and json.loads(content[:length])["outputs"][0]["parameters"] == {"binary_data_size": 24}
        assert np.allclose(np.frombuffer(content[length:], "f4").reshape(2, 3), expected(3, ROWS))
        status, answer = call.post("/predict", {"input": ROWS[0]})
        assert (
            status == 200 and np.allclose(answer["output"], expected(3, ROWS)[0]) and answer["model_version"] == "3"
        )


def test_bad_input_gets_error_objects(served: Any) -> None:
    server = served(max_body=4096)
    infer = "/v2/models/net/infer"
    good = json.dumps(infer_body(ROWS)).encode()
    for method, path, body, headers, status, words in (
        ("POST", "/v2/models/other/infer", good, {}, 404, "there is no model 'other'; this server has 'net'"),
        ("GET", "/v2/models/other", None, {}, 404, "there is no model 'other'"),
        ("POST", "/v2/models/net/versions/9/infer", good, {}, 404, "there is no version '9' in memory; there are 1"),
        ("GET", "/v2/models/net/versions/9/ready", None, {}, 404, "there is no version '9'"),
        ("POST", "/predict", b'{"input":[1,2,3,4],"version":"9"}', {}, 404, "there is no version '9'"),
        ("GET", "/nothing", None, {}, 404, "there is no /nothing"),
        ("POST", "/nothing", b"x", {}, 404, "/nothing"),
        ("GET", infer, None, {}, 405, "takes POST"),
        ("DELETE", "/v2", None, {}, 405, "does not take DELETE"),
        ("POST", infer, b"{", {}, 400, "not JSON"),
        ("POST", infer, b"", {}, 400, "not JSON"),
        ("POST", infer, json.dumps(infer_body([[1.0, 2.0]])).encode(), {}, 400, "the model takes [-1, 4]"),
        ("POST", infer, good, {"Content-Encoding": "gzip"}, 415, "must not be compressed"),
        ("POST", infer, bytes(5000), {}, 413, "at most 4096"),
        ("POST", "/predict", b'{"inputs":[]}', {}, 400, "shape [0]"),
    ):
        with Caller(server.url) as call:
            found, kinds, content = call(method, path, body, headers)
            assert (found, kinds["content-type"]) == (status, "application/json"), (path, content)
            assert words in json.loads(content)["error"]
    for chunks in ([bytes(3000)] * 3, [bytes(5000)]):  # without a length in front
        with Caller(server.url) as call:
            call.connection.request("POST", infer, iter(chunks), encode_chunked=True)
            reply = call.connection.getresponse()
            assert reply.status == 413 and b"more than 4096 bytes" in reply.read()
    with Caller(server.url) as call:
        assert call.post(infer, infer_body(ROWS))[0] == 200


class Counting(nn.Module):
    """Doubles its input; tells how many rows each call had, and can be held up."""

    held = threading.Event()
    sizes: list[int] = []  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.sizes.append(len(x))
        assert Counting.held.wait(PATIENCE)
        if (x < 0).any():
            raise ValueError("negative")
        return 2 * x


def in_threads(number: int, function: Callable[[int], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    return threads


def test_requests_that_wait_become_a_batch_and_each_gets_its_own_rows(served: Any) -> None:
    """The first is taken alone: the server was idle. One that the model refuses does not harm its batch."""
    Counting.sizes, Counting.held = [], threading.Event()
    Counting.held.set()
    server = served(Counting, inputs=("x:FP32:2",), max_batch=4)
    Counting.held.clear()
    answers: dict[int, tuple[int, Any]] = {}

    def ask_for(index: int) -> None:
        with Caller(server.url) as call:
            answers[index] = call.post("/predict", {"input": [index if index != 5 else -1, 1]})

    threads = in_threads(1, ask_for)
    wait_for(lambda: bool(Counting.sizes[1:]))  # the first call tried the version
    threads += in_threads(7, lambda index: ask_for(index + 1))
    wait_for(lambda: server.standing()["num_requests"] == 0 and _queued(server) == 7)
    Counting.held.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert Counting.sizes[1:4] == [1, 4, 3] or sorted(Counting.sizes[1:]) == [1, 1, 1, 1, 1, 3, 4]
    assert {index: answers[index][0] for index in range(8)} == {**dict.fromkeys(range(8), 200), 5: 500}
    assert "negative" in answers[5][1]["error"]
    assert all(answers[index][1]["output"] == [2 * index, 2] for index in range(8) if index != 5)


def _queued(server: Any) -> int:
    with Caller(server.url) as call:
        _, _, content = call("GET", "/metrics")
    return int(content.decode().partition("\nsyncline_queue_requests ")[2].split()[0])


def test_a_full_queue_refuses_and_says_when_to_come_again(served: Any) -> None:
    Counting.sizes, Counting.held = [], threading.Event()
    Counting.held.set()
    server = served(Counting, inputs=("x:FP32:1",), max_queue=1)
    Counting.held.clear()
    codes: list[int] = []

    def ask_for(index: int) -> None:
        with Caller(server.url) as call:
            codes.append(call.post("/predict", {"input": [1.0]})[0])

    threads = in_threads(1, ask_for)
    wait_for(lambda: len(Counting.sizes) == 2)
    threads += in_threads(1, ask_for)
    wait_for(lambda: _queued(server) == 1)
    with Caller(server.url) as call:
        status, headers, content = call("POST", "/predict", b'{"input":[1]}')
    assert status == 503 and int(headers["retry-after"]) >= 1 and b"wait already" in content
    Counting.held.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert codes == [200, 200]


def test_versions_switch_under_load_and_every_answer_is_of_the_version_that_it_names(
    served: Any, tmp_path: pathlib.Path
) -> None:
    saves = tmp_path / "saves"
    save(saves, 1)
    server = served(weights=saves, max_batch=8)
    ends = threading.Event()
    seen: list[str] = []
    wrong: list[object] = []

    def load(index: int) -> None:
        draw = np.random.default_rng(index)
        with Caller(server.url) as call:
            while not ends.is_set():
                rows = draw.random((int(draw.integers(1, 4)), 4)).tolist()
                status, answer = call.post("/v2/models/net/infer", infer_body(rows))
                if status != 200:
                    wrong.append(answer)
                    continue
                version = answer["model_version"]
                seen.append(version)
                found = np.reshape(answer["outputs"][0]["data"], (len(rows), 3))
                if not np.allclose(found, expected(int(version), rows), rtol=1e-5, atol=1e-5):
                    wrong.append((version, rows, found))

    def answered_by(version: str) -> None:
        wait_for(lambda: version in seen[-4:])

    threads = in_threads(4, load)
    try:
        folder = folder_of(server.config.runs, "net")
        answered_by("1")
        for number in (2, 3, 4):
            save(saves, number)
            assert ask(folder, ControlRequest("load"))["current"] == str(number)
            answered_by(str(number))
        assert ask(folder, ControlRequest("rollback"))["current"] == "3"
        answered_by("3")
        assert ask(folder, ControlRequest("load"))["current"] == "3"  # what was left does not come back
        ask(folder, ControlRequest("canary", share=0.5))
        save(saves, 5)
        assert ask(folder, ControlRequest("load"))["canary"] == "5"
        answered_by("5")
        answered_by("3")
        assert ask(folder, ControlRequest("canary", share=1.0))["current"] == "5"
    finally:
        ends.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert wrong == [] and set(seen) == {"1", "2", "3", "4", "5"}


def damage(saves: pathlib.Path, name: str) -> None:
    file = saves / name / "server-0.safetensors"
    content = bytearray(file.read_bytes())
    for place in range(8 + int.from_bytes(content[:8], "little"), len(content)):
        content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("how", ["damaged", "NaN", "another model", "below the guard", "torn"])
def test_a_bad_version_is_refused_and_the_old_one_goes_on(
    served: Any, tmp_path: pathlib.Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    saves = tmp_path / "saves"
    save(saves, 5)
    server = served(weights=saves, pick="last", guard="accuracy>=0.2")
    weights = {
        "NaN": arrays(6, float("nan")),
        "another model": {"weight": np.ones((3, 5), "f4"), "bias": np.ones(3, "f4")},
        "below the guard": arrays(6, 1.0),
    }.get(how)
    name = save(saves, 6, weights)
    if how == "damaged":
        damage(saves, name)
    elif how == "torn":
        (saves / name / "server-0.safetensors").write_bytes(b"")
    folder = folder_of(server.config.runs, "net")
    with caplog.at_level(logging.WARNING, "syncline.serve"), pytest.raises(ConfigError, match="version 6 is refused"):
        ask(folder, ControlRequest("load"))
    words = {
        "damaged": "is damaged",
        "NaN": "NaN or Inf",
        "another model": "'weight' has shape [3, 5], the model's has [3, 4]",
        "below the guard": "does not pass --guard 'accuracy>=0.2': it has accuracy 0.05",
        "torn": "is damaged",
    }[how]
    assert words in caplog.text and "version 5 goes on" in caplog.text
    with Caller(server.url) as call:
        assert call.post("/predict", {"input": ROWS[0]})[1]["model_version"] == "5"
    assert ask(folder, ControlRequest("load"))["current"] == "5"  # it is not tried again
    save(saves, 7, arrays(7))
    assert ask(folder, ControlRequest("load"))["current"] == "7"


def test_best_is_served_before_the_newest(served: Any, tmp_path: pathlib.Path) -> None:
    saves = tmp_path / "saves"
    save(saves, 1, best=True)
    save(saves, 2)
    server = served(weights=saves, name="a")
    assert server.version == "1"
    save(saves, 3)
    assert server.control(ControlRequest("load"))["current"] == "1"
    save(saves, 4, best=True)
    assert server.control(ControlRequest("load"))["current"] == "4"
    assert served(weights=saves, name="b", pick="last").version == "4"
    assert served(weights=saves / "000002-step-20", name="c").version == "2"


def test_new_versions_are_found_without_being_asked_for(served: Any, tmp_path: pathlib.Path) -> None:
    saves = tmp_path / "saves"
    save(saves, 1)
    server = served(weights=saves, refresh=0.01)
    save(saves, 2)
    wait_for(lambda: server.version == "2")
    shutil.rmtree(saves)  # a folder that is away is no reason to stop
    time.sleep(0.05)
    with Caller(server.url) as call:
        assert call.post("/predict", {"input": ROWS[0]})[1]["model_version"] == "2"


def test_a_safetensors_file_is_served(served: Any, tmp_path: pathlib.Path) -> None:
    def write(number: int) -> None:
        weights = arrays(number)
        header, entries = tensor_file.plan([(name, "float32", array.shape) for name, array in weights.items()])
        part = tmp_path / "part"
        part.write_bytes(header + b"".join(weights[entry.name].tobytes() for entry in entries))
        part.rename(tmp_path / "model.safetensors")

    write(3)
    server = served(weights=tmp_path / "model.safetensors")
    with Caller(server.url) as call:
        assert np.allclose(call.post("/predict", {"inputs": ROWS})[1]["outputs"], expected(3, ROWS))
        write(4)
        assert server.control(ControlRequest("load"))["current"] == "2"
        assert np.allclose(call.post("/predict", {"inputs": ROWS})[1]["outputs"], expected(4, ROWS))


def test_a_token_is_needed_where_others_can_connect(served: Any) -> None:
    """Not on loopback: a token by default. Only health is open, for probes."""
    server = served(host="0.0.0.0")
    assert len(server.token) >= 32 and server.token_path.read_text().strip() == server.token
    url = server.url.replace("0.0.0.0", "127.0.0.1")
    for token in ("", "x" * 43):
        with Caller(url, token) as call:
            assert call.get("/v2/health/ready")[0] == 200
        for method, path in (("POST", "/predict"), ("GET", "/v2"), ("GET", "/metrics"), ("GET", "/nothing")):
            with Caller(url, token) as call:
                status, headers, content = call(method, path, b"{}" if method == "POST" else None)
                assert (
                    status == 401
                    and headers["www-authenticate"] == "Bearer"
                    and b"send the server's token" in content
                )
    with Caller(url, server.token) as call:
        assert call.post("/predict", {"input": ROWS[0]})[0] == 200


def test_rates_and_tls(served: Any, tmp_path: pathlib.Path) -> None:
    cert, key = own_certificate(tmp_path)
    server = served(cert=str(cert), key=str(key), rate="2/m")
    context = ssl.create_default_context(cafile=str(cert))
    port = int(server.url.rpartition(":")[2])
    codes = []
    for _ in range(3):
        with (
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
        ):
            sock.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            codes.append(int(sock.recv(4096).split()[1]))
    assert server.url.startswith("https://") and codes[0] == 200 and codes[-1] == 429


@pytest.fixture(params=["uvloop", "asyncio"])
def event_loop_of_tls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop that is used where uvloop and httptools are installed, and the one that is used elsewhere."""
    find = importlib.util.find_spec
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    else:
        monkeypatch.setattr(
            "importlib.util.find_spec",
            lambda name, *rest: None if name in ("uvloop", "httptools") else find(name, *rest),
        )


@pytest.mark.usefixtures("event_loop_of_tls")
def test_handshakes_that_do_not_end_count_as_connections(served: Any, tmp_path: pathlib.Path) -> None:
    """Else they would be bounded by nothing, and stay for a minute."""
    cert, key = own_certificate(tmp_path)
    server = served(cert=str(cert), key=str(key), max_connections=3, head_seconds=10 * PATIENCE)
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    context = ssl.create_default_context(cafile=str(cert))
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address, timeout=PATIENCE)) for _ in range(6)]
        for sock in silent[:3]:
            assert is_closed(sock)
        plain = stack.enter_context(socket.create_connection(address, timeout=PATIENCE))
        sock = stack.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1"))
        sock.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert is_closed(silent[3])
    other = served(name="other", cert=str(cert), key=str(key), head_seconds=0.3)
    address = ("127.0.0.1", int(other.url.rpartition(":")[2]))
    for said in (b"", b"GET /v2 HTTP/1.1\r\n\r\n"):  # nothing, and no handshake
        with socket.create_connection(address, timeout=PATIENCE) as sock:
            sock.sendall(said)
            while not is_closed(sock):
                pass


def is_closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(4096)
    except ConnectionResetError:
        return True


@pytest.mark.usefixtures("event_loop_of_tls")
def test_a_request_may_come_with_the_end_of_the_handshake(served: Any, tmp_path: pathlib.Path) -> None:
    """It is decrypted before the connection is passed on."""
    cert, key = own_certificate(tmp_path)
    server = served(cert=str(cert), key=str(key), head_seconds=PATIENCE)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=str(cert))
    client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock:

        def exchange(step: Callable[[], Any]) -> Any:
            while True:
                try:
                    return step()
                except ssl.SSLWantReadError:
                    sock.sendall(outgoing.read())
                    content = sock.recv(1 << 16)
                    assert content
                    incoming.write(content)

        exchange(client.do_handshake)  # its last part waits in `outgoing`
        body = json.dumps({"input": ROWS[0]}).encode()
        head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.write(head + body)
        assert exchange(lambda: client.read(4096)).startswith(b"HTTP/1.1 200 ")


def test_other_sites_may_not_ask_without_a_token(served: Any) -> None:
    server = served()
    row = json.dumps({"input": ROWS[0]}).encode()
    for headers, status in (
        ({"Host": "evil.example"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": server.url}, 200),
        ({"Host": "localhost:9000"}, 200),
    ):
        for method, path, body in (("POST", "/predict", row), ("GET", "/v2", None), ("GET", "/", None)):
            with Caller(server.url) as call:
                assert call(method, path, body, headers)[0] == status, (headers, path)


def test_the_page_does_not_use_up_the_rate_of_its_user(served: Any) -> None:
    server = served(rate="1/m")
    with Caller(server.url) as call:
        assert call("GET", "/")[0] == 200
        assert call.post("/predict", {"input": ROWS[0]})[0] == 200
    for path in ("/status", "/v2"):  # each bucket is empty now
        with Caller(server.url) as call:
            assert call("GET", path)[0] == 429


def own_certificate(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A certificate for 127.0.0.1 that signs itself."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(secret, hashes.SHA256())
    )
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        secret.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return cert, key


def test_slow_and_senseless_connections_harm_no_other(served: Any) -> None:
    """Heads that never end, random bytes, a large body without a token, connections that say nothing."""
    server = served(head_seconds=0.3, max_connections=20)
    port = int(server.url.rpartition(":")[2])
    draw = np.random.default_rng(0)
    sockets = []
    try:
        for index in range(40):
            sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            sockets.append(sock)
            try:
                if index % 3 == 0:
                    sock.sendall(draw.bytes(300))
                elif index % 3 == 1:
                    sock.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nX: ")
            except OSError:
                pass  # closed already: it was one too many
        with Caller(server.url) as call:
            assert call.post("/predict", {"input": ROWS[0]})[0] == 200
            for sock in sockets:
                sock.settimeout(PATIENCE)
                try:
                    while sock.recv(4096):
                        pass
                except OSError:
                    pass
            assert call.post("/predict", {"input": ROWS[0]})[0] == 200  # the good one is still open
    finally:
        for sock in sockets:
            sock.close()


def test_bytes_of_a_body_count_as_they_come(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body in chunks does not say its length: many of them at once must not fill the memory before they count."""
    monkeypatch.setattr("syncline.serve.application.ByteBudget", lambda most_bytes: ByteBudget(1000))
    server = served(head_seconds=PATIENCE, body_seconds=PATIENCE)
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with (
        socket.create_connection(address, timeout=PATIENCE) as first,
        socket.create_connection(address, timeout=PATIENCE) as second,
    ):
        for sock in (first, second):
            sock.sendall(head + b"258\r\n" + b" " * 600 + b"\r\n")
        (refused,), _, _ = select.select([first, second], [], [], PATIENCE)
        assert refused.recv(4096).startswith(b"HTTP/1.1 503 ")
        other = second if refused is first else first
        body = json.dumps({"input": ROWS[0]}).encode()
        other.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert other.recv(4096).startswith(b"HTTP/1.1 200 ")
    with Caller(server.url) as call:  # all was given back
        assert call.post("/predict", b" " * 900 + body)[0] == 200


def test_a_body_that_does_not_come_is_not_waited_for(served: Any) -> None:
    """Neither one that never begins, nor one that stops in the middle."""
    server = served(body_seconds=0.2)
    for part in (b"", b'{"input":'):
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE) as sock:
            sock.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n" + part)
            content = b""
            while more := sock.recv(4096):
                content += more
        assert content.startswith(b"HTTP/1.1 408 ") and b"did not come within 0.2 s" in content


def test_the_end_answers_what_is_open(served: Any) -> None:
    Counting.sizes, Counting.held = [], threading.Event()
    Counting.held.set()
    server = served(Counting, inputs=("x:FP32:1",))
    Counting.held.clear()
    answers: list[Any] = []

    def ask_for(index: int) -> None:
        with Caller(server.url) as call:
            answers.append(call.post("/predict", {"input": [float(index)]}))

    threads = in_threads(1, ask_for)
    wait_for(lambda: len(Counting.sizes) == 2)
    threads += in_threads(2, ask_for)
    wait_for(lambda: _queued(server) == 2)
    closing = threading.Thread(target=server.close)
    closing.start()
    time.sleep(0.05)
    Counting.held.set()
    for thread in (*threads, closing):
        thread.join(PATIENCE)
    assert [status for status, _ in answers] == [200, 200, 200]


def test_metrics_are_open_metrics(served: Any) -> None:
    server = served()
    with Caller(server.url) as call:
        for _ in range(3):
            call.post("/predict", {"inputs": ROWS})
        call.post("/predict", {"inputs": 1})
        status, headers, content = call("GET", "/metrics")
    lines = content.decode().splitlines()
    assert (
        status == 200 and headers["content-type"].startswith("application/openmetrics-text") and lines[-1] == "# EOF"
    )
    assert 'syncline_requests_total{version="1",status="200"} 3' in lines
    assert 'syncline_requests_total{version="",status="400"} 1' in lines
    assert 'syncline_batch_rows_bucket{le="2.0"} 3' in lines and "syncline_batch_rows_sum 6.0" in lines
    assert "syncline_request_seconds_count 3" in lines and 'syncline_version_loaded{version="1"} 1' in lines


class Mean:
    """A NumPy model: two inputs, two outputs."""

    def __init__(self) -> None:
        self.weight = np.ones((3, 4), np.float32)

    def load(self, weights: dict[str, np.ndarray]) -> None:
        self.weight = weights["weight"]

    def __call__(self, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
        return {"product": a @ self.weight.T, "sum": a.sum(1) + b}


def test_a_numpy_model_with_two_inputs(served: Any, tmp_path: pathlib.Path) -> None:
    save(tmp_path / "saves", 2)
    server = served(Mean, tmp_path / "saves", inputs=("a:FP32:4", "b:INT64:"))
    with Caller(server.url) as call:
        status, answer = call.post("/predict", {"inputs": {"a": ROWS, "b": [1, 2]}})
        assert status == 200 and answer["outputs"] == {"product": [[20.0] * 3, [1.0] * 3], "sum": [11.0, 2.5]}
        # the model is called by position, and callers name their inputs in any order
        assert call.post("/predict", {"inputs": {"b": [1, 2], "a": ROWS}})[1]["outputs"] == answer["outputs"]


class Compiled:
    """As a model of a framework that compiles calls, once for each size of a batch."""

    made: list[set[int]]

    def __init__(self) -> None:
        self.sizes: set[int] = set()  # of all versions that come from this one
        self.factor = 0.0
        type(self).made.append(self.sizes)

    def another_version(self) -> Compiled:
        return copy.copy(self)

    def load(self, weights: dict[str, np.ndarray]) -> None:
        self.factor = float(weights["factor"][0])

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.sizes.add(len(x))
        return x * self.factor


def test_versions_share_what_is_compiled(served: Any, tmp_path: pathlib.Path) -> None:
    """A job that is followed gives a version every two seconds: none must compile each size of a batch again. The
    smallest and the largest are compiled before the first request.
    """
    Compiled.made = []
    saves = tmp_path / "saves"
    for number in (1, 2):
        save(saves, number, {"factor": np.full(1, number, np.float32)})
        if number == 1:
            server = served(Compiled, saves, inputs=("x:FP32:2",), max_batch=8)
    assert Compiled.made == [{1, 8}]
    assert server.control(ControlRequest("load"))["current"] == "2"
    assert Compiled.made == [{1, 8}]
    with Caller(server.url) as call:
        for version in (1, 2):
            path = f"/v2/models/compiled/versions/{version}/infer"
            status, answer = call.post(path, infer_body([[1.0, 3.0]], name="x"))
            assert status == 200 and answer["outputs"][0]["data"] == [1.0 * version, 3.0 * version]


class CompiledSlowly(Compiled):
    """The first call of each size takes longer than a trial may."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if len(x) not in self.sizes:
            time.sleep(3.2)
        return super().__call__(x)


def test_what_is_compiled_once_is_no_part_of_a_trial(served: Any, tmp_path: pathlib.Path) -> None:
    """Else a large model of JAX, which takes minutes to compile, would be refused at its first version."""
    CompiledSlowly.made = []
    save(tmp_path / "saves", 1, {"factor": np.ones(1, np.float32)})
    server = served(CompiledSlowly, tmp_path / "saves", inputs=("x:FP32:2",), max_batch=1, trial_seconds=3.0)
    assert server.version == "1" and CompiledSlowly.made == [{1}]


def test_hooks_of_the_file(served: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "hooked.py").write_text(
        MODEL
        + "def preprocess(inputs):\n    return {'input': inputs['input'] * 2}\n"
        + "def predict(model, inputs):\n    return model(inputs['input'])\n"
        + "def postprocess(outputs):\n    return {'label': outputs.argmax(1), 'most': outputs.amax(1)}\n"
    )
    save(tmp_path / "saves", 1)
    server = served(f"{tmp_path / 'hooked.py'}:Net", tmp_path / "saves")
    with Caller(server.url) as call:
        assert call.post("/predict", {"input": ROWS[0]})[1]["output"] == {"label": 0, "most": 21.0}
        assert [one["name"] for one in call.get("/v2/models/net")[1]["outputs"]] == ["label", "most"]


def test_what_cannot_be_is_said_at_the_start(served: Any, tmp_path: pathlib.Path, model: str) -> None:
    (tmp_path / "broken.py").write_text("1/0\n")
    (tmp_path / "same.py").write_text("from torch import nn\none = nn.Linear(4, 3)\ndef Net():\n    return one\n")
    save(tmp_path / "other", 1, {"w": np.ones((2, 2), "f4")})
    (tmp_path / "empty").mkdir()
    first = served()
    for make, weights, settings, kind, words in (
        ("model.py", None, {}, ConfigError, "name the model's file and what makes it"),
        ("none.py:Net", None, {}, ConfigError, "there is no file"),
        (model.replace(":Net", ":Nat"), None, {}, ConfigError, "defines no 'Nat'; it has Net"),
        (f"{tmp_path}/broken.py:Net", None, {}, ConfigError, "ZeroDivisionError"),
        (f"{tmp_path}/same.py:Net", None, {}, ConfigError, "the same model twice"),
        (model, tmp_path / "empty", {}, StoreError, "holds no checkpoint that can be served"),
        (model, tmp_path / "other", {}, StoreError, "does not fit the model"),
        (model, "model.pt", {}, ConfigError, "can run code when they are read"),
        (model, tmp_path / "x.safetensors", {}, StoreError, "x.safetensors"),
        (model, tmp_path / "other", {"pick": "worst"}, ConfigError, "must be one of best, last"),
        (model, None, {"max_batch": 0}, ConfigError, "max_batch = 0: must be from 1"),
        (model, None, {"batch": 1}, ConfigError, "unknown setting 'batch'"),
        (model, None, {"rate": "fast"}, ConfigError, "--rate 'fast'"),
        (model, None, {"guard": "loss.plateau(5)"}, ConfigError, "only comparisons"),
        (model, None, {"inputs": ("x",)}, ConfigError, "--input 'x'"),
        (model, None, {"cert": "none.pem"}, ConfigError, "--cert and --key go together"),
        (model, None, {"cert": "none.pem", "key": "none.pem"}, ConfigError, "cannot be used"),
        (model, None, {"token_file": "none"}, ConfigError, "--token-file none: cannot be read"),
        (model, None, {"port": int(first.url.rpartition(":")[2])}, ConfigError, "choose another port"),
        (model, None, {"name": "net"}, ConfigError, "net is served already"),
        (model, None, {"name": "a/b"}, ConfigError, "no '/'"),
    ):
        with pytest.raises(kind) as caught:
            served(make, weights, **{"name": "second", **settings})
        assert words in str(caught.value)
