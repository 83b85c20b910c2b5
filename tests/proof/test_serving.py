"""`make proof`: 20,000 requests while versions change and processes die."""

from __future__ import annotations

import http.client
import json
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests import forked
from tests.patience import PATIENCE
from tests.serve.saved import Caller, infer_body, save
from tests.serve.test_replicas import is_back, process, send

from syncline.serve import Server
from syncline.serve.control import ControlRequest

pytestmark = pytest.mark.proof
NUM_REQUESTS, NUM_CLIENTS, NUM_INPUTS = 20_000, 8, 16
MODEL = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 5))

example = torch.zeros(1, 16)
"""


def made() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(NUM_INPUTS, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))


def save_version(folder: pathlib.Path, number: int) -> torch.nn.Module:
    torch.manual_seed(number)
    module = made()
    save(folder, number, {name: value.numpy() for name, value in module.state_dict().items()})
    return module


class Clients:
    """Each asks one request after the other, by one of two protocols, and tries once more on a broken connection."""

    def __init__(self, url: str, versions: dict[str, torch.nn.Module]) -> None:
        self._url, self._versions = url, versions
        self._lock = threading.Lock()
        self.num_asked = self.num_retried = 0
        self.may_end = False  # not before the last event
        self.failed: list[object] = []
        self.wrong: list[object] = []
        self.seen: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(NUM_CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.may_end = True
        for thread in self._threads:
            thread.join(PATIENCE)

    def _run(self, index: int) -> None:
        draw, call = np.random.default_rng(index), Caller(self._url)
        while True:
            with self._lock:
                if self.may_end and self.num_asked >= NUM_REQUESTS:
                    break
                self.num_asked += 1
            rows = draw.random((int(draw.integers(1, 4)), NUM_INPUTS), dtype=np.float32)
            self._ask(call, rows, draw.random() < 0.5)
        call.connection.close()

    def _ask(self, call: Caller, rows: Any, is_plain: bool) -> None:
        path, body = "/v2/models/net/infer", infer_body(rows)
        if is_plain:
            path, body = "/predict", {"inputs": rows.tolist()}
        for attempt in range(2):
            try:
                status, answer = call.post(path, body)
                break
            except (OSError, http.client.HTTPException) as error:
                call.connection.close()
                status, answer = 0, error
                self.num_retried += attempt == 0
        if status != 200:
            self.failed.append((status, answer))
            return
        found = answer["outputs"] if is_plain else answer["outputs"][0]["data"]
        version = answer["model_version"]
        self.seen[version] += 1
        with torch.no_grad():
            wanted = self._versions[version](torch.from_numpy(rows)).numpy()
        if not np.allclose(np.reshape(found, wanted.shape), wanted, rtol=0, atol=1e-5):
            self.wrong.append((version, found, wanted))


def test_20_000_requests_while_versions_change_and_processes_die(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request fails after one retry, and every answer is the offline output of the version that it names."""
    monkeypatch.setattr(subprocess, "Popen", forked.Popen)
    (tmp_path / "model.py").write_text(MODEL)
    saves = tmp_path / "saves"
    versions = {"1": save_version(saves, 1)}
    settings: dict[str, Any] = {"refresh": 0.2, "replicas": 3, "silence_seconds": 20.0}
    with Server(f"{tmp_path / 'model.py'}:Net", saves, port=0, runs=str(tmp_path / "runs"), **settings) as server:

        def new_version() -> None:
            number = len(versions) + 1
            versions[str(number)] = save_version(saves, number)
            wait_for(lambda: server.version == str(number))

        def kill(number: int, sent: int) -> None:
            pid = process(server, "replica", number)["pid"]
            send(pid, sent)
            wait_for(lambda: is_back(server, "replica", pid, number))

        def kill_loader() -> None:
            pid = process(server, "loader")["pid"]
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: is_back(server, "loader", pid))

        def rollback() -> None:
            assert server.control(ControlRequest("rollback"))["current"] == str(len(versions) - 1)

        events: list[Callable[[], None]] = [
            new_version,
            lambda: kill(0, signal.SIGKILL),
            new_version,
            lambda: kill(1, signal.SIGSTOP),
            new_version,
            kill_loader,
            new_version,
            rollback,
            new_version,
        ]
        began = time.monotonic()
        with Clients(server.url, versions) as clients:
            for number, event in enumerate(events, 1):
                wait_for(lambda number=number: clients.num_asked >= number * NUM_REQUESTS // 11)  # type: ignore[misc]
                event()
        seconds = time.monotonic() - began
    told = {"seconds": round(seconds, 1), "retried": clients.num_retried, "by version": dict(clients.seen)}
    print(f"{clients.num_asked} requests: {json.dumps(told)}")
    assert clients.failed == [] and clients.wrong == []
    assert (
        sum(clients.seen.values()) == clients.num_asked >= NUM_REQUESTS
        and set(clients.seen) == set(versions)
        and len(versions) == 6
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
