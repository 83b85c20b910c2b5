"""`syncline serve` and `serve-ctl`, as processes."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tests import forked
from tests.patience import PATIENCE
from tests.serve.saved import MODEL, Caller, expected, save

from syncline.errors import ConfigError
from syncline.serve import listening
from syncline.serve.listening import given

#: Answers nothing while there is a file `wait`; says with a file `busy` that it is asked.
SLOW = MODEL.replace(
    "        super().__init__(4, 3)\n",
    "        super().__init__(4, 3)\n\n    def forward(self, x):\n        import pathlib, time\n"
    "        while pathlib.Path('wait').exists():\n            pathlib.Path('busy').touch()\n"
    "            time.sleep(0.01)\n        return super().forward(x)\n",
)


@contextlib.contextmanager
def serving(folder: pathlib.Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "syncline", "serve", "model.py:Net", "--port", "0", *words]
    process = forked.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    try:
        while not (found := re.search(r"version (\S+) at (http://\S+)", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        yield process, found[2]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE)


def control(folder: pathlib.Path, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "syncline", "serve-ctl", *words]
    done = forked.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.slow
def test_versions_are_shown_and_switched_from_the_command_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    save(tmp_path / "saves", 1)
    with serving(tmp_path, "--from", "saves", "--refresh", "10ms") as (process, url):
        with Caller(url) as call:
            save(tmp_path / "saves", 2)
            deadline = time.monotonic() + PATIENCE
            while json.loads(control(tmp_path, "status", "--json"))["current"] != "2":
                assert time.monotonic() < deadline
            assert "answers" in control(tmp_path, "rollback", "--name", "net")
            status, answer = call.post("/predict", {"input": [1, 1, 1, 1]})
            assert status == 200 and answer["model_version"] == "1"
            assert np.allclose(answer["output"], expected(1, [[1, 1, 1, 1]])[0])
            told = json.loads(control(tmp_path, "pin", "1", "--json"))
            assert told["is_pinned"] and told["num_requests"] == 1
            assert "version '9' is not in memory" in control(tmp_path, "pin", "9", code=2)
            assert "give a share" in control(tmp_path, "canary", "often", code=2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert "no model is served here; start one with syncline serve" in control(tmp_path, "status", code=2)


@pytest.mark.slow
def test_ctrl_c_answers_open_requests_and_ends(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.py").write_text(SLOW)
    with serving(tmp_path) as (process, url):
        answers = []
        (tmp_path / "wait").touch()

        def ask() -> None:
            with Caller(url) as call:
                answers.append(call.post("/predict", {"input": [1, 1, 1, 1]})[0])

        threads = [threading.Thread(target=ask) for _ in range(3)]
        deadline = time.monotonic() + PATIENCE
        threads[0].start()
        while not (tmp_path / "busy").exists():  # the others come while it is
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for thread in threads[1:]:
            thread.start()
        with Caller(url) as call:
            while b"\nsyncline_queue_requests 2\n" not in call("GET", "/metrics")[2]:
                assert time.monotonic() < deadline and not answers
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        (tmp_path / "wait").unlink()
        assert process.wait(PATIENCE) == 0
        for thread in threads:
            thread.join(PATIENCE)
        assert answers == [200, 200, 200]


@pytest.mark.slow
def test_a_model_that_never_returns_does_not_hold_up_the_end(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.py").write_text(SLOW)
    with serving(tmp_path) as (process, url), Caller(url) as call:
        (tmp_path / "wait").touch()
        call.connection.request("POST", "/predict", b'{"input":[1,1,1,1]}')
        with Caller(url) as other:
            deadline = time.monotonic() + PATIENCE
            while b'\nsyncline_batch_rows_bucket{le="1.0"} 1\n' not in other("GET", "/metrics")[2]:
                assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_a_socket_of_a_supervisor_stays_open_while_the_server_is_dead(tmp_path: pathlib.Path) -> None:
    """As systemd gives it. A request that comes meanwhile waits, and the next server answers it."""
    (tmp_path / "model.py").write_text(MODEL)
    shell = 'exec 3<&"$0"; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"'
    serve = [sys.executable, "-m", "syncline", "serve", "model.py:Net", "--port", "1"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        descriptor, port = listener.fileno(), listener.getsockname()[1]
        command = ["bash", "-c", shell, str(descriptor), *serve]
        for is_first in (True, False):
            with (
                subprocess.Popen(
                    command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, pass_fds=[descriptor]
                ) as process,
                Caller(f"http://127.0.0.1:{port}") as call,
            ):
                try:
                    # The listener is ours too, so this connects at once, and is answered once there is a server.
                    assert call.post("/predict", {"input": [1, 1, 1, 1]})[0] == 200
                finally:
                    process.send_signal(signal.SIGKILL if is_first else signal.SIGTERM)
                    said = process.communicate(timeout=PATIENCE)[1]
                assert f"http://127.0.0.1:{port}" in said
                assert process.returncode == (-signal.SIGKILL if is_first else 0)


def test_what_a_supervisor_gives_must_be_one_socket_that_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "2")
    with pytest.raises(ConfigError, match="gives 2 sockets; give one"):
        given()
    with socket.socket() as sock:
        monkeypatch.setattr(listening, "FIRST_GIVEN", os.dup(sock.fileno()))
        monkeypatch.setenv("LISTEN_FDS", "1")
        with pytest.raises(ConfigError, match="does not listen for TCP"):
            given()
    with pytest.raises(ConfigError, match="cannot be used"):  # it was closed
        given()
    monkeypatch.setenv("LISTEN_PID", "1")  # a parent's
    assert given() is None


@pytest.mark.slow
def test_what_was_typed_wrongly_is_one_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    for words, said in (
        (("model.py:Nat",), "defines no 'Nat'"),
        (("model.py:Net", "--from", "nothing"), "holds no checkpoint"),
        (("model.py:Net", "--max-delay", "soon"), "--max-delay 'soon': give a duration"),
    ):
        command = [sys.executable, "-m", "syncline", "serve", *words]
        done = forked.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
        last = done.stderr.strip().splitlines()[-1]
        assert (
            done.returncode == 2 and last.startswith("syncline: ") and said in last and "Traceback" not in done.stderr
        )
