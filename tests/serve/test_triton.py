"""NVIDIA's own client of the protocol, in its three modes; `make test-serve` installs it."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from tests.patience import PATIENCE
from tests.serve.saved import MODEL, save
from tests.serve.test_command import serving

pytestmark = pytest.mark.clients

CLIENT = """
import sys
import numpy as np
import tritonclient.grpc
import tritonclient.http
from tests.serve.saved import expected
from tritonclient.utils import InferenceServerException

rows = np.arange(8, dtype=np.float32).reshape(2, 4)
http = tritonclient.http.InferenceServerClient(sys.argv[1])
grpc = tritonclient.grpc.InferenceServerClient(sys.argv[2])

def check(answer):
    assert np.allclose(answer.as_numpy("output"), expected(3, rows)), answer.as_numpy("output")

for client in (http, grpc):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("net") and client.is_model_ready("net", "3")
for told in (http.get_model_metadata("net"), grpc.get_model_metadata("net", as_json=True)):
    assert told["inputs"][0]["name"] == "input" and told["versions"] == ["3"], told
assert http.get_server_metadata()["name"] == grpc.get_server_metadata(as_json=True)["name"] == "syncline"

for binary in (False, True):
    given = tritonclient.http.InferInput("input", [2, 4], "FP32")
    given.set_data_from_numpy(rows, binary_data=binary)
    for outputs in (None, [tritonclient.http.InferRequestedOutput("output", binary_data=binary)]):
        answer = http.infer("net", [given], outputs=outputs, request_id="7")
        check(answer)
        assert answer.get_response()["model_version"] == "3" and answer.get_response()["id"] == "7"
given = tritonclient.grpc.InferInput("input", [2, 4], "FP32")
given.set_data_from_numpy(rows)
for outputs in (None, [tritonclient.grpc.InferRequestedOutput("output")]):
    answer = grpc.infer("net", [given], outputs=outputs, request_id="7")
    check(answer)
    assert answer.get_response().model_version == "3" and answer.get_response().id == "7"

for client, kind in ((http, tritonclient.http), (grpc, tritonclient.grpc)):
    wrong = kind.InferInput("input", [1, 3], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 3), np.float32))
    for name, version, inputs, words in (
        ("net", "", [wrong], "the model takes [-1, 4]"),
        ("other", "", [wrong], "there is no model 'other'"),
        ("net", "9", [wrong], "the model takes [-1, 4]"),
    ):
        try:
            client.infer(name, inputs, model_version=version)
        except InferenceServerException as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
print("well")
"""


def test_the_triton_client_in_json_binary_and_grpc(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tritonclient.http")
    pytest.importorskip("tritonclient.grpc")
    (tmp_path / "model.py").write_text(MODEL)
    save(tmp_path / "saves", 3)
    with serving(tmp_path, "--from", "saves", "--grpc-port", "0") as (process, url):
        assert process.stderr is not None
        address = ""
        while not address:
            address = process.stderr.readline().partition("gRPC at ")[2].strip()
        command = [sys.executable, "-c", CLIENT, url.partition("://")[2], address]
        root = pathlib.Path(__file__).resolve().parents[2]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE)
        assert done.stdout == "well\n", done.stderr
