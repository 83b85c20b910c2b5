"""Several processes behind one port: which of them may die, and when."""

from __future__ import annotations

import errno
import http.client
import os
import pathlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import typer
from tests import forked
from tests.patience import PATIENCE
from tests.serve.saved import MODEL, Caller, arrays, expected, infer_body, save
from tests.serve.test_command import control, serving

from syncline.cli.serve import serve
from syncline.errors import ConfigError, StoreError
from syncline.serve import Server
from syncline.serve.control import ControlRequest, ask, folder_of
from syncline.serve.replicas.link import socket_pair

pytestmark = pytest.mark.slow
ROW = [1.0, 1.0, 1.0, 1.0]
NEW_INTERPRETER = subprocess.Popen


@pytest.fixture
def served(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Starts servers of two replicas that look for versions when they are asked to."""
    monkeypatch.setattr(subprocess, "Popen", forked.Popen)
    (tmp_path / "linear.py").write_text(MODEL)
    servers = []

    def start(weights: Any = None, model: str = f"{tmp_path / 'linear.py'}:Net", **settings: Any) -> Any:
        settings = {"port": 0, "refresh": 0.0, "runs": str(tmp_path / "runs"), "replicas": 2, **settings}
        server = Server(model, weights, **settings).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def process(server: Any, role: str, number: int = 0) -> dict[str, Any]:
    return next(one for one in server.standing()["processes"] if (one["role"], one["number"]) == (role, number))


def is_back(server: Any, role: str, pid: int, number: int = 0) -> bool:
    """Whether there is another one in the place of this process."""
    try:
        found = process(server, role, number)
    except (ConfigError, StopIteration):  # nobody answers just now, or it was not started again yet
        return False
    return bool(found["is_up"]) and found["pid"] != pid


def send(pid: int, number: int) -> None:
    """Returns when no thread of the process can accept a connection any more."""
    os.kill(pid, number)

    def is_still() -> bool:
        try:
            stats = [path.read_text() for path in pathlib.Path(f"/proc/{pid}/task").glob("*/stat")]
        except OSError:  # a thread, or all of them, have ended
            return not _runs(pid)
        return all(stat.rpartition(")")[2].split()[0] in "TZX" for stat in stats)

    wait_for(is_still)


class Load:
    """Clients that ask all the time, and try once more on a connection that breaks."""

    def __init__(self, url: str, num_clients: int = 3) -> None:
        self._url, self._ends = url, threading.Event()
        self.seen: list[str] = []
        self.wrong: list[object] = []
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _run(self, index: int) -> None:
        draw = np.random.default_rng(index)
        call = Caller(self._url)
        while not self._ends.is_set():
            rows = draw.random((int(draw.integers(1, 4)), 4)).tolist()
            for attempt in range(2):
                try:
                    status, answer = call.post("/v2/models/linear/infer", infer_body(rows))
                    break
                except (OSError, http.client.HTTPException) as error:
                    call.connection.close()
                    status, answer = 0, (attempt, error)
            if status != 200:
                self.wrong.append((status, answer))
                continue
            version = answer["model_version"]
            found = np.reshape(answer["outputs"][0]["data"], (len(rows), 3))
            if not np.allclose(found, expected(int(version), rows), rtol=1e-5, atol=1e-5):
                self.wrong.append((version, rows, found))
            self.seen.append(version)
        call.connection.close()

    def is_answered(self) -> None:
        """Waits until every client was most likely answered once more."""
        wanted = len(self.seen) + 4 * len(self._threads)
        wait_for(lambda: len(self.seen) >= wanted or bool(self.wrong))


def test_no_request_is_lost_whoever_dies(served: Any, tmp_path: pathlib.Path) -> None:
    """A replica is killed, one is stopped, the loader is killed, versions change: each answer is that of the version
    that it names, and a client that tries once more on a broken connection gets all of its answers.
    """
    saves = tmp_path / "saves"
    save(saves, 1)
    server = served(saves, name="linear", silence_seconds=20.0, max_batch=8)
    with Load(server.url) as load:
        load.is_answered()
        for number, sent in ((0, signal.SIGKILL), (1, signal.SIGSTOP)):
            pid = process(server, "replica", number)["pid"]
            send(pid, sent)
            with Caller(server.url) as call:  # a new connection goes to the other one
                assert call.post("/predict", {"input": ROW})[0] == 200
            wait_for(lambda pid=pid, number=number: is_back(server, "replica", pid, number))  # type: ignore[misc]
            load.is_answered()
        save(saves, 2)
        assert server.control(ControlRequest("load"))["current"] == "2" == server.version
        pid = process(server, "loader")["pid"]
        os.kill(pid, signal.SIGKILL)
        load.is_answered()
        wait_for(lambda: is_back(server, "loader", pid))
        assert server.standing()["current"] == "2"  # its successor knows
        save(saves, 3)
        assert server.control(ControlRequest("load"))["current"] == "3"
        before = len(load.seen)
        load.is_answered()
        load.is_answered()
        assert "3" in load.seen[before:]
        assert server.control(ControlRequest("rollback"))["current"] == "2"
        with Caller(server.url) as call:  # all replicas had switched before serve-ctl was answered
            assert call.post("/predict", {"input": ROW})[1]["model_version"] == "2"
        assert server.control(ControlRequest("load"))["current"] == "2"  # what was left does not come back
        server.control(ControlRequest("canary", share=0.5))
        save(saves, 4)
        assert server.control(ControlRequest("load"))["canary"] == "4"
        wait_for(lambda: "4" in load.seen or bool(load.wrong))
        assert server.control(ControlRequest("canary", share=1.0))["current"] == "4"
        load.is_answered()
    assert load.wrong == [] and set(load.seen) == {"1", "2", "3", "4"}


def test_counts_of_all_replicas_are_added_up(served: Any) -> None:
    """Also of one that is stopped, and of one that was killed. A replica that is slow to say its counts counts with
    those that it said before.
    """
    server = served(silence_seconds=PATIENCE)

    def num_answered() -> int:
        with Caller(server.url) as call:
            status, _, content = call("GET", "/metrics")
        text = content.decode()
        if status == 503:  # the counts did not come in time
            return -1
        assert 'syncline_version_loaded{version="1"} 1' in text.splitlines()
        found = text.partition('syncline_requests_total{version="1",status="200"} ')[2]
        return int(found.split()[0]) if found else 0

    def ask_once() -> None:
        with Caller(server.url) as call:
            assert call.post("/predict", {"input": ROW})[0] == 200

    for _ in range(10):
        ask_once()
    wait_for(lambda: num_answered() == 10)
    assert server.standing()["num_requests"] == 10
    pids = [process(server, "replica", number)["pid"] for number in range(2)]
    for number, pid in enumerate(pids):  # each of them must answer then
        send(pid, signal.SIGSTOP)
        ask_once()
        wait_for(lambda number=number: num_answered() == 11 + number)  # type: ignore[misc]
        os.kill(pid, signal.SIGCONT)
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: is_back(server, "replica", pids[0]))
    ask_once()
    wait_for(lambda: num_answered() == 13)

    def counts() -> tuple[int, int]:
        with Caller(server.url) as call:
            status, told = call.get("/status")
        return (told["num_answered"], told["num_replicas"]) if status == 200 else (-1, -1)

    wait_for(lambda: counts() == (13, 2))


FATAL = (
    MODEL
    + """
import os

def preprocess(inputs):
    return inputs["input"]

def predict(model, inputs):
    if float(model.bias[0]) == 2.0:
        os.abort()
    return model(inputs)
"""
)


def test_a_version_that_ends_its_process_is_refused(served: Any, tmp_path: pathlib.Path) -> None:
    """It ends the loader, twice; no replica gets to see it. The next version is served."""
    saves = tmp_path / "saves"
    (tmp_path / "fatal.py").write_text(FATAL)
    save(saves, 1)
    server = served(saves, f"{tmp_path / 'fatal.py'}:Net", name="fatal")
    replicas = [process(server, "replica", number)["pid"] for number in range(2)]
    save(saves, 2)
    for _ in range(2):
        pid = process(server, "loader")["pid"]
        with pytest.raises(ConfigError, match="nothing serves fatal here"):
            server.control(ControlRequest("load"))
        wait_for(lambda pid=pid: is_back(server, "loader", pid))  # type: ignore[misc]
    assert server.control(ControlRequest("load"))["current"] == "1"
    save(saves, 3)
    assert server.control(ControlRequest("load"))["current"] == "3"
    assert [process(server, "replica", number)["pid"] for number in range(2)] == replicas


def test_a_version_that_fails_on_recent_requests_is_refused_by_all(served: Any, tmp_path: pathlib.Path) -> None:
    """The loader knows the example only; the replica that got the request finds the overflow."""
    saves = tmp_path / "saves"
    save(saves, 1)
    server = served(saves)
    with Caller(server.url) as call:
        assert call.post("/predict", {"input": ROW})[0] == 200
        save(saves, 2, arrays(2, 3e38))
        with pytest.raises(ConfigError, match=r"version 2 is refused: replica \d: .* answers with NaN or Inf"):
            server.control(ControlRequest("load"))
        assert call.post("/predict", {"input": ROW})[1]["model_version"] == "1"
    save(saves, 3)
    assert server.control(ControlRequest("load"))["current"] == "3"


#: Does not return from calls of rows with a 7 while there is a file `hang`; of version 3 only if there are weights.
HANGING = """
import pathlib
import time
import numpy as np

class Net:
    number = 0

    def load(self, weights):
        self.number = float(weights["bias"][0])

    def __call__(self, x):
        while (x == 7).any() and self.number in (0, 3) and pathlib.Path(__file__).with_name("hang").exists():
            pathlib.Path(__file__).with_name("hangs").touch()
            time.sleep(0.01)
        return x + self.number

example = np.zeros((1, 4), np.float32)
"""


def test_a_replica_whose_model_hangs_starts_again(served: Any, tmp_path: pathlib.Path) -> None:
    """Its event loop goes on, so it gave signs of life for ever, and requests to it hung."""
    (tmp_path / "hanging.py").write_text(HANGING)
    server = served(None, f"{tmp_path / 'hanging.py'}:Net", name="hanging", call_seconds=1.0)
    pids = [process(server, "replica", number)["pid"] for number in range(2)]
    (tmp_path / "hang").touch()
    with Caller(server.url) as call:
        status, answer = call.post("/predict", {"input": [7, 7, 7, 7]})
        assert status == 503 and "has not returned from a call for 1 s" in answer["error"]
    wait_for(lambda: any(is_back(server, "replica", pid, number) for number, pid in enumerate(pids)))
    (tmp_path / "hang").unlink()
    with Caller(server.url) as call:
        assert call.post("/predict", {"input": [7, 7, 7, 7]})[0] == 200
    assert [process(server, "replica", number)["num_restarts"] for number in range(2)].count(1) == 1


def test_a_rollback_does_not_wait_for_replicas_that_load(served: Any, tmp_path: pathlib.Path) -> None:
    """A replica tries version 3 on a recent request for long. All go back to version 1 meanwhile."""
    (tmp_path / "hanging.py").write_text(HANGING)
    saves = tmp_path / "saves"
    save(saves, 1)
    server = served(saves, f"{tmp_path / 'hanging.py'}:Net", name="hanging")
    save(saves, 2)
    assert server.control(ControlRequest("load"))["current"] == "2"
    with Caller(server.url) as call:
        assert call.post("/predict", {"input": [7, 7, 7, 7]})[0] == 200
    (tmp_path / "hang").touch()
    save(saves, 3)
    loaded: list[str] = []
    loading = threading.Thread(target=lambda: loaded.append(server.control(ControlRequest("load"))["current"]))
    loading.start()
    try:
        wait_for((tmp_path / "hangs").exists)
        assert server.control(ControlRequest("rollback"))["current"] == "1" and not loaded
        for _ in range(4):
            with Caller(server.url) as call:
                assert call.post("/predict", {"input": ROW})[1]["model_version"] == "1"
    finally:
        (tmp_path / "hang").unlink()
        loading.join(PATIENCE)
    assert loaded == ["3"]


def test_replicas_share_the_memory_of_the_weights(served: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "large.py").write_text(
        "import torch\ndef Net():\n    return torch.nn.Linear(1024, 2048)\nexample = torch.zeros(1, 1024)\n"
    )
    server = served(None, f"{tmp_path / 'large.py'}:Net")
    answers = []
    for _ in range(2):
        for number in range(2):
            pid = process(server, "replica", number)["pid"]
            mapping = pathlib.Path(f"/proc/{pid}/smaps").read_text().partition("/memfd:syncline")[2]
            assert mapping, "the replica has a copy"
            sizes = {line.split(":")[0]: int(line.split()[1]) for line in mapping.splitlines()[1:20] if " kB" in line}
            assert sizes["Size"] >= 8192 and sizes["Private_Dirty"] == sizes["Anonymous"] == 0
        with Caller(server.url) as call:
            answers.append(call.post("/predict", {"input": [0.5] * 1024})[1]["output"])
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: is_back(server, "replica", pid, 1))  # type: ignore[misc]
    assert answers[0] == answers[1]  # weights of chance, made once


NUMPY = """
import numpy as np

class Net:
    def __call__(self, x):
        return x @ np.ones((4, 3), "f4")

example = np.zeros((1, 4), "f4")
"""


def test_libraries_of_a_replica_have_its_part_of_the_threads(
    served: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read it when they are loaded: OpenBLAS below NumPy would take all cores in each replica."""
    monkeypatch.setattr(subprocess, "Popen", NEW_INTERPRETER)
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    (tmp_path / "numbers.py").write_text(NUMPY)
    server = served(None, f"{tmp_path / 'numbers.py'}:Net", threads=3)
    with Caller(server.url) as call:
        assert call.post("/predict", {"input": ROW})[1]["output"] == [4.0] * 3
    for number, threads in ((0, "2"), (1, "1")):
        pid = process(server, "replica", number)["pid"]
        words = pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0")
        found = dict(word.split("=", 1) for word in words if "=" in word)
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "PJRT_NPROC")
        assert {found[name] for name in names} == {threads} and found["TF_NUM_INTEROP_THREADS"] == "7"


def test_both_protocols_and_their_ports(served: Any) -> None:
    grpc = pytest.importorskip("grpc")
    from syncline.serve.grpc_calls import SERVICE, message_class

    server = served(grpc_port=0)
    port = int(server.grpc_address.rpartition(":")[2])
    for _ in range(4):
        with grpc.insecure_channel(server.grpc_address) as channel:
            call = channel.unary_unary(
                f"/{SERVICE}/ModelReady",
                request_serializer=message_class("ModelReadyRequest").SerializeToString,
                response_deserializer=message_class("ModelReadyResponse").FromString,
            )
            assert call(message_class("ModelReadyRequest")(name="net"), timeout=PATIENCE).ready
    with pytest.raises(ConfigError, match="choose another port"):
        served(name="other", grpc_port=port)


def test_what_cannot_be_is_said_at_the_start(served: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "broken.py").write_text("1/0\n")
    (tmp_path / "ends.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "talks.py").write_text("def Net():\n    raise ValueError('x' * 200_000)\n")
    (tmp_path / "empty").mkdir()
    for weights, model, kind, words in (
        (None, f"{tmp_path}/broken.py:Net", ConfigError, "ZeroDivisionError"),
        (None, f"{tmp_path}/ends.py:Net", ConfigError, "did not start: it ended with code 7"),
        (None, f"{tmp_path}/talks.py:Net", ConfigError, " characters)"),
        (None, f"{tmp_path}/linear.py:Nat", ConfigError, "defines no 'Nat'; it has Net"),
        (None, "linear.py:", ConfigError, "name the model's file and what makes it"),
        (tmp_path / "empty", f"{tmp_path}/linear.py:Net", StoreError, "holds no checkpoint that can be served"),
    ):
        with pytest.raises(kind) as caught:
            served(weights, model)
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="replicas are processes that import your file"):
        Server(lambda: None, replicas=2)


#: Imports when there is a file `go`, and says which processes have tried. Says too which ones have ended in order.
SLOW = (
    MODEL
    + """
import logging, os, pathlib, time

folder = pathlib.Path(__file__).parent
(folder / f"pid-{os.getpid()}").touch()
while not (folder / "go").exists():
    time.sleep(0.01)

class Says(logging.NullHandler):
    def close(self):
        (folder / f"ended-{os.getpid()}").touch()

logging.getLogger().addHandler(Says())
"""
)


def test_ctrl_c_at_the_start_leaves_no_process(served: Any, tmp_path: pathlib.Path) -> None:
    """It is an exception, which may come while the replicas import the model's file."""
    (tmp_path / "slow.py").write_text(SLOW)

    def pids() -> list[int]:
        return [int(path.name.partition("-")[2]) for path in tmp_path.glob("pid-*")]

    def interrupt() -> None:
        wait_for(lambda: len(pids()) == 3)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            served(None, f"{tmp_path / 'slow.py'}:Net", drain_seconds=0.0)
        thread.join(PATIENCE)
    finally:
        signal.signal(signal.SIGINT, before)
    wait_for(lambda: not any(_runs(pid) for pid in pids()))


@pytest.mark.proof
def test_a_process_that_reads_nothing_for_a_while_hears_of_the_end(
    served: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket is full when the keeper tells all processes to end. It must be told when it reads again."""

    def small_socket_pair() -> tuple[socket.socket, socket.socket]:
        pair = socket_pair()
        pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        return pair

    monkeypatch.setattr("syncline.serve.replicas.keeper.socket_pair", small_socket_pair)
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "go").touch()
    server = served(None, f"{tmp_path / 'slow.py'}:Net", silence_seconds=PATIENCE, drain_seconds=PATIENCE)
    pids = [process(server, "replica", number)["pid"] for number in range(2)]
    send(pids[0], signal.SIGSTOP)
    for _ in range(30):  # each asks the replicas for their counts
        server.standing()
    closing = threading.Thread(target=server.close)
    closing.start()
    wait_for(lambda: not _runs(pids[1]))
    os.kill(pids[0], signal.SIGCONT)
    closing.join(2 * PATIENCE)
    assert not closing.is_alive() and (tmp_path / f"ended-{pids[0]}").exists()


def test_a_fault_of_the_keeper_ends_the_command(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All processes end with it: nothing is served, so the command must not wait for Ctrl-C."""
    monkeypatch.setattr(subprocess, "Popen", forked.Popen)
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    is_up, has_ended = threading.Event(), threading.Event()
    monkeypatch.setattr("syncline.cli.serve.say_where", lambda server: is_up.set())

    def fail(*given: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("syncline.serve.replicas.keeper.added_up", fail)
    (tmp_path / "model.py").write_text(MODEL)
    runs = str(tmp_path / "runs")

    def make_it_fail() -> None:
        assert is_up.wait(PATIENCE)
        with pytest.raises(ConfigError, match="nothing serves net here"):
            ask(folder_of(runs, "net"), ControlRequest("status"))
        if not has_ended.wait(PATIENCE):
            handlers[signal.SIGINT](signal.SIGINT, None)

    thread = threading.Thread(target=make_it_fail)
    thread.start()
    with pytest.raises(typer.Exit) as caught:
        serve(f"{tmp_path / 'model.py'}:Net", replicas=2, port=0, runs=runs)
    has_ended.set()
    thread.join(PATIENCE)
    said = capsys.readouterr().err
    assert caught.value.exit_code == 1
    assert "syncline: the process that keeps the replicas failed (OSError: [Errno 24] Too many open files)" in said


def test_the_command_and_its_end(tmp_path: pathlib.Path) -> None:
    """Ctrl-C ends all processes. So does the death of the one that was started: nothing is left behind."""
    (tmp_path / "model.py").write_text(MODEL)
    save(tmp_path / "saves", 1)
    for sent in (signal.SIGINT, signal.SIGKILL):
        with serving(tmp_path, "--from", "saves", "--replicas", "2") as (started, url):
            told = control(tmp_path, "status")
            pids = [int(line.split()[-1]) for line in told.splitlines() if " process " in line]
            assert len(pids) == 3, told
            with Caller(url) as call:
                assert call.post("/predict", {"input": ROW})[0] == 200
            started.send_signal(sent)
            assert started.wait(PATIENCE) == (0 if sent == signal.SIGINT else -sent)
            wait_for(lambda pids=pids: not any(_runs(pid) for pid in pids))  # type: ignore[misc]
            with pytest.raises(OSError), Caller(url) as call:
                call.get("/v2")


def _runs(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
