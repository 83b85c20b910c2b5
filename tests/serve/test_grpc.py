"""The six calls of the protocol over gRPC. The client has a process of its own: grpcio keeps threads and sockets."""

from __future__ import annotations

import hashlib
import importlib.resources
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from tests.patience import PATIENCE
from tests.serve.saved import MODEL, save
from tests.serve.test_command import serving

from syncline.serve.datatypes import DATATYPES

pytest.importorskip("grpc")

from google.protobuf import descriptor_pb2

VENDORED = importlib.resources.files("syncline.serve") / "_vendor" / "open_inference"

CLIENT = """
import sys
import grpc
import numpy as np
from syncline.serve.grpc_calls import SERVICE, message_class
from tests.serve.saved import expected

address, token = sys.argv[1], sys.argv[2]
channel = grpc.insecure_channel(address)

def call(which, token=token, /, **fields):
    request = message_class(which + "Request")(**fields)
    method = channel.unary_unary(
        f"/{SERVICE}/{which}", message_class(which + "Request").SerializeToString,
        message_class(which + "Response").FromString)
    return method(request, timeout=300, metadata=[("authorization", f"Bearer {token}")])

def refused(code, words, which, *token, **fields):
    try:
        call(which, *token, **fields)
    except grpc.RpcError as error:
        assert (error.code().name, words in error.details()) == (code, True), (error.code(), error.details())
    else:
        raise AssertionError(f"{which} was not refused: {fields}")

assert call("ServerLive").live and call("ServerReady", "x").ready and call("ModelReady", name="net").ready
assert call("ServerMetadata").name == "syncline"
told = call("ModelMetadata", name="net", version="3")
assert (told.versions, told.inputs[0].name, list(told.inputs[0].shape)) == (["3"], "input", [-1, 4])
rows = np.arange(8, dtype="f4").reshape(2, 4)
tensor = {"name": "input", "datatype": "FP32", "shape": rows.shape}
typed = {**tensor, "contents": {"fp32_contents": rows.ravel().tolist()}}
answer = call("ModelInfer", model_name="net", id="a", inputs=[typed])
assert (answer.model_version, answer.id, list(answer.outputs[0].shape)) == ("3", "a", [2, 3])
assert np.allclose(np.reshape(answer.outputs[0].contents.fp32_contents, (2, 3)), expected(3, rows))
wanted = [{"name": "output"}]
raw = call("ModelInfer", model_name="net", inputs=[tensor], outputs=wanted, raw_input_contents=[rows.tobytes()])
assert np.allclose(np.frombuffer(raw.raw_output_contents[0], "f4").reshape(2, 3), expected(3, rows))

refused("UNAUTHENTICATED", "send the server's token", "ServerMetadata", "x" * 43)
refused("UNAUTHENTICATED", "send the server's token", "ModelInfer", "", model_name="net", inputs=[typed])
refused("NOT_FOUND", "there is no model 'other'", "ModelInfer", model_name="other", inputs=[typed])
refused("NOT_FOUND", "there is no version '9'", "ModelInfer", model_name="net", model_version="9", inputs=[typed])
for words, fields in (
    ("input 'input' is missing", dict(inputs=[])),
    ("there is no input 'x'", dict(inputs=[{**typed, "name": "x"}])),
    ("the model takes FP32", dict(inputs=[{**typed, "datatype": "INT8"}])),
    ("the model takes [-1, 4]", dict(inputs=[{**typed, "shape": [2, 3]}])),
    ("at most 32 lengths", dict(inputs=[{**typed, "shape": [-2, 4]}])),
    ("it is empty", dict(inputs=[{**tensor, "shape": [0, 4]}])),
    ("8 numbers; its shape [3, 4] needs 12", dict(inputs=[{**typed, "shape": [3, 4]}])),
    ("0 numbers", dict(inputs=[tensor])),
    ("is given twice", dict(inputs=[typed, typed])),
    ("has NaN or Inf", dict(inputs=[{**typed, "contents": {"fp32_contents": [float("nan")] * 8}}])),
    ("contents and raw contents", dict(inputs=[typed], raw_input_contents=[rows.tobytes()])),
    ("1 inputs and 2 raw contents", dict(inputs=[tensor], raw_input_contents=[b"", b""])),
    ("the body ends after 3 of them", dict(inputs=[tensor], raw_input_contents=[b"abc"])),
    ("has 36 bytes; its shape needs 32", dict(inputs=[tensor], raw_input_contents=[rows.tobytes() + b"abcd"])),
    ("there is no output 'z'", dict(inputs=[typed], outputs=[{"name": "z"}])),
    ("classification", dict(inputs=[typed], outputs=[{"name": "output", "parameters": {
        "classification": {"int64_param": 3}}}])),
):
    refused("INVALID_ARGUMENT", words, "ModelInfer", model_name="net", **fields)
assert call("ModelInfer", model_name="net", inputs=[typed]).model_version == "3"
print("well")
"""


LIMITED = """
import tempfile, threading, urllib.request
import grpc
import numpy as np
import syncline.serve.application as application
from syncline.serve import Server
from syncline.serve.grpc_calls import SERVICE, message_class
from syncline.serve.limits import ByteBudget

asked, held = threading.Event(), threading.Event()

class Held:
    def __call__(self, x):
        if x[0][0] == 1.0:
            asked.set()
            held.wait(300)
        return x

def infer(channel, number):
    method = channel.unary_unary(
        f"/{SERVICE}/ModelInfer", message_class("ModelInferRequest").SerializeToString,
        message_class("ModelInferResponse").FromString)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 500]}
    raw = np.full((1, 500), number, "f4").tobytes()
    request = message_class("ModelInferRequest")(model_name="held", inputs=[tensor], raw_input_contents=[raw])
    return method.future(request, timeout=300)

def code(call):
    return call.exception().code().name, call.exception().details()

application.ByteBudget = lambda most_bytes: ByteBudget(3000)
settings = {"inputs": ["x:FP32:500"], "port": 0, "grpc_port": 0, "host": "localhost", "refresh": 0.0}
with Server(Held, runs=tempfile.mkdtemp(), **settings) as server:
    # gRPC would resolve the name by itself, and listen at all addresses that it finds.
    assert server.grpc_address.rpartition(":")[0] == server.url.partition("://")[2].rpartition(":")[0]
    with grpc.insecure_channel(server.grpc_address) as channel:
        first = infer(channel, 1.0)
        assert asked.wait(300)
        assert code(infer(channel, 2.0)) == ("UNAVAILABLE", "too many large requests at once; send it again later")
        held.set()
        assert first.result().model_name == "held"
        assert infer(channel, 2.0).result().model_name == "held"  # what was taken is given back
        broken = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(b"\\xff" * 10, timeout=300)
        assert code(broken)[0] == "INVALID_ARGUMENT" and "this is no ModelInferRequest" in code(broken)[1]
with Server(Held, runs=tempfile.mkdtemp(), rate="0.001/s", **settings) as server:
    assert urllib.request.urlopen(server.url + "/v2").status == 200
    with grpc.insecure_channel(server.grpc_address) as channel:
        assert code(infer(channel, 2.0))[0] == "RESOURCE_EXHAUSTED"
print("well")
"""


def test_vendored_files_are_those_that_their_origin_says() -> None:
    """The licence stands beside the file, and neither was edited."""
    told = dict(re.findall(r"\| `(\S+)` \| ([0-9a-f]{64}) \|", (VENDORED / "README.md").read_text()))
    assert told == {
        name: hashlib.sha256((VENDORED / name).read_bytes()).hexdigest()
        for name in ("grpc_predict_v2.proto", "LICENSE")
    }
    assert "Apache License" in (VENDORED / "LICENSE").read_text()


def test_the_descriptors_are_those_of_the_proto() -> None:
    """Every message, field and number of the vendored text."""
    (file,) = descriptor_pb2.FileDescriptorSet.FromString((VENDORED / "grpc_predict_v2.pb").read_bytes()).file
    text = re.sub(r"//.*", "", (VENDORED / "grpc_predict_v2.proto").read_text())
    assert file.package == "inference" and "package inference;" in text
    told = {tuple(found) for found in re.findall(r"(\w+)\s*=\s*(\d+);", text)}
    made: set[tuple[str, str]] = set()
    names: set[str] = set()

    def walk(messages: object) -> None:
        for message in messages:  # type: ignore[attr-defined]
            if not message.options.map_entry:
                names.add(message.name)
                made.update((field.name, str(field.number)) for field in message.field)
                walk(message.nested_type)

    walk(file.message_type)
    assert made == told and names == set(re.findall(r"message (\w+)", text))
    (service,) = file.service
    calls = [(m.name, m.input_type.rpartition(".")[2], m.output_type.rpartition(".")[2]) for m in service.method]
    assert calls == re.findall(r"rpc (\w+)\((\w+)\) returns \((\w+)\)", text)


def test_every_datatype_has_a_field_of_its_own_kind() -> None:
    from syncline.serve.grpc_calls import CONTENTS, message_class

    contents = message_class("InferTensorContents")
    assert CONTENTS.keys() == DATATYPES.keys() - {"FP16"}
    for datatype, field in CONTENTS.items():
        numbers = np.array([0, 1], DATATYPES[datatype])
        message = contents(**{field: numbers.tolist()})
        assert np.array_equal(np.array(getattr(message, field), DATATYPES[datatype]), numbers)


@pytest.mark.slow
def test_the_six_calls(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "token").write_text("x" * 20)
    (tmp_path / "token").chmod(0o600)
    save(tmp_path / "saves", 3)
    with serving(tmp_path, "--from", "saves", "--grpc-port", "0", "--token-file", "token") as (process, _):
        assert process.stderr is not None
        address = ""
        while not address:
            address = process.stderr.readline().partition("gRPC at ")[2].strip()
        goes_well(CLIENT, address, "x" * 20)


@pytest.mark.slow
def test_calls_have_the_limits_of_http() -> None:
    """One budget of bytes, one rate for each address, and the address at which HTTP listens."""
    goes_well(LIMITED)


def goes_well(script: str, *words: str) -> None:
    root = pathlib.Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "well\n", done.stderr
