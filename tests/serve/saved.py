"""Checkpoints of a small model, as a job writes them; and calls of a server by plain HTTP."""

from __future__ import annotations

import http.client
import json
import pathlib
from typing import Any

import numpy as np
from tests.store.made import write_server

from syncline.core.checkpoint.manifest import Manifest
from syncline.core.checkpoint.soundness import checkpoint_name
from syncline.core.layout import Parameter, arrange, place
from syncline.core.rule import Rule
from syncline.store import checkpoints
from syncline.store.folders import open_folder

#: y = weight x + bias, 4 to 3.
MODEL = """
import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

example = torch.zeros(1, 4)

def validate(predict):
    return {"accuracy": float(predict([[1, 1, 1, 1]])[0][0]) / 100}
"""


def arrays(number: int, fill: float | None = None) -> dict[str, np.ndarray]:
    """The weights of version `number`: all its outputs are number * (sum of the row) + number."""
    value = float(number) if fill is None else fill
    return {"weight": np.full((3, 4), value, np.float32), "bias": np.full(3, value, np.float32)}


def expected(number: int, rows: Any) -> np.ndarray:
    return np.repeat((number * np.asarray(rows, np.float64).sum(1) + number)[:, None], 3, 1)


def save(path: pathlib.Path, number: int, weights: dict[str, np.ndarray] | None = None, best: bool = False) -> str:
    """Writes a checkpoint with these float32 arrays; returns its name."""
    weights = arrays(number) if weights is None else weights
    folder = open_folder(path)
    parameters = tuple(Parameter(name, "float32", array.shape) for name, array in weights.items())
    segment = arrange(parameters, [Rule("SGD", lr=0.1)], "mean", index=0, ordinal=0, first_parameter=0)
    segment, _ = place(segment, ["server-0"], {}, 1 << 20, 0)
    values = {name: array.tobytes() for name, array in weights.items()}
    name = checkpoint_name(number, 10 * number)
    own = checkpoints.begin(folder, number, 10 * number, "a")
    file, slices = write_server(own, "server-0", [part.id for part in segment.slices], [segment], values, values)
    manifest = Manifest(
        name=name,
        number=number,
        lineage="a",
        job="j",
        step=10 * number,
        syncline="0.1.0",
        kind="whole",
        segments=(segment,),
        files=(file,),
        slices=tuple(slices),
        scripts=(),
    )
    checkpoints.write_manifest(own, manifest)
    if best:
        checkpoints.point(folder, "best", name)
    return name


class Caller:
    """One connection to a server."""

    def __init__(self, url: str, token: str = "") -> None:
        host, _, port = url.partition("://")[2].rpartition(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=300)
        self.token = token

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def __call__(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        own = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self.connection.request(method, path, body, {**own, **(headers or {})})
        reply = self.connection.getresponse()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()

    def get(self, path: str) -> tuple[int, Any]:
        status, _, body = self("GET", path)
        return status, json.loads(body)

    def post(self, path: str, content: Any) -> tuple[int, Any]:
        status, _, body = self("POST", path, content if isinstance(content, bytes) else json.dumps(content).encode())
        return status, json.loads(body)


def infer_body(rows: Any, **changes: Any) -> dict[str, Any]:
    """A request of the protocol with one input, some of whose fields are changed; None leaves a field out."""
    rows = np.asarray(rows)
    tensor = {
        "name": "input",
        "shape": list(rows.shape),
        "datatype": "FP32",
        "data": rows.ravel().tolist(),
        **changes,
    }
    return {"id": "a", "inputs": [{key: value for key, value in tensor.items() if value is not None}]}
