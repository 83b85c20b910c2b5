"""Requests of the protocol become arrays; what cannot be becomes an error with a sentence."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.saved import infer_body

from syncline.errors import ConfigError
from syncline.serve.datatypes import DATATYPES, RequestError, TensorSpec, parse_spec, spec_of
from syncline.serve.protocol import Protocol

PROTOCOL = Protocol("net", [TensorSpec("input", "FP32", (-1, 2, 2))], 1 << 16)
TWO = Protocol("net", [TensorSpec("a", "INT32", (-1, 2)), TensorSpec("b", "BOOL", (-1,))], 1 << 16)


def encoded(content: Any) -> bytes:
    return content if isinstance(content, bytes) else json.dumps(content).encode()


@pytest.mark.parametrize("nested", [False, True])
def test_flat_and_nested_data_are_the_same(nested: bool) -> None:
    rows = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    request = PROTOCOL.decode(
        encoded(infer_body(rows, data=rows.tolist() if nested else rows.ravel().tolist())), None
    )
    assert request.num_rows == 2 and request.id == "a"
    assert request.inputs["input"].dtype == np.float32 and (request.inputs["input"] == rows).all()


@given(st.sampled_from(sorted(DATATYPES)), st.integers(1, 5), st.integers(0, 4), st.randoms())
def test_any_array_comes_back_in_json_and_in_binary(datatype: str, rows: int, width: int, chance: Any) -> None:
    """Through a request and through an answer, bit by bit."""
    kind = DATATYPES[datatype]
    draw = np.random.default_rng(chance.getrandbits(32))
    data = draw.integers(0, 2 if kind.kind == "b" else 100, (rows, width + 1)).astype(kind)
    protocol = Protocol("m", [TensorSpec("x", datatype, (-1, -1))], 1 << 16)
    head = {"name": "x", "shape": list(data.shape), "datatype": datatype}
    by_json = protocol.decode(encoded({"inputs": [{**head, "data": data.ravel().tolist()}]}), None)
    text = encoded({"inputs": [{**head, "parameters": {"binary_data_size": data.nbytes}}],
                    "parameters": {"binary_data_output": True}})  # fmt: skip
    by_bytes = protocol.decode(text + data.tobytes(), str(len(text)).encode())
    for request in (by_json, by_bytes):
        assert request.inputs["x"].dtype == kind and (request.inputs["x"] == data).all()
        body, length = protocol.encode(request, {"y": request.inputs["x"]}, "3")
        (output,) = json.loads(body[:length])["outputs"]
        assert (output["name"], output["shape"], output["datatype"]) == ("y", list(data.shape), datatype)
        if length is None:
            assert np.array_equal(np.array(output["data"], kind).reshape(data.shape), data)
        else:
            assert output["parameters"]["binary_data_size"] == data.nbytes and body[length:] == data.tobytes()


ROWS = np.zeros((1, 2, 2))
WRONG = {
    "no JSON": (b"\xff{", "the body is not JSON"),
    "no object": (b"[]", "not as the protocol says"),
    "empty": (b"", "not JSON"),
    "deep": (b"[" * 100_000, "not"),
    "no inputs": ({}, "missing required field `inputs`"),
    "no input": ({"inputs": []}, "input 'input' is missing"),
    "another name": (infer_body(ROWS, name="image"), "there is no input 'image'; the model takes input"),
    "no name": (infer_body(ROWS, name=None), "missing required field `name`"),
    "no data": (infer_body(ROWS, data=None), "has no data"),
    "another datatype": (infer_body(ROWS, datatype="FP64"), "has datatype FP64; the model takes FP32"),
    "unknown datatype": (infer_body(ROWS, datatype="BYTES"), "served are BOOL"),
    "another shape": (infer_body(ROWS, shape=[1, 4]), "has shape [1, 4]; the model takes [-1, 2, 2]"),
    "negative shape": (infer_body(ROWS, shape=[-1, 2, 2]), "at most 32 lengths, from 0"),
    "an empty batch": (infer_body(np.zeros((0, 2, 2))), "it is empty"),
    "too few numbers": (infer_body(ROWS, data=[1.0]), "has 1 numbers; its shape [1, 2, 2] needs 4"),
    "ragged": (infer_body(ROWS, data=[[[1, 2], [3]]]), "cannot be used"),
    "nested otherwise": (infer_body(ROWS, data=[[1, 2], [3, 4]]), "is nested as [2, 2]; its shape is [1, 2, 2]"),
    "text": (infer_body(ROWS, data=["1", "2", "3", "4"]), "cannot be used"),
    "null": (infer_body(ROWS, data=[1, None, 3, 4]), "cannot be used"),
    "text in nested data": (infer_body(ROWS, data=[[[1, "2"], [3, 4]]]), "cannot be used"),
    "true in nested data": (infer_body(ROWS, data=[[[1, True], [3, 4]]]), "cannot be used"),
    "too deep": (infer_body(ROWS, data=[[[[1], [2]], [[3], [4]]]]), "is nested as [1, 2, 2, 1]"),
    "NaN as JSON": (encoded(infer_body(ROWS)).replace(b"0.0,", b"NaN,", 1), "not JSON"),
    "too large a number": (infer_body(ROWS, data=[1e39, 0, 0, 0]), "has NaN or Inf"),
    "the same in nested data": (infer_body(ROWS, data=[[[1e39, 0], [0, 0]]]), "has NaN or Inf"),
    "too large a number for any": (encoded(infer_body(ROWS)).replace(b"0.0,", b"1e400,", 1), "not as the protocol"),
    "a huge shape": (infer_body(ROWS, shape=[1 << 40, 2, 2]), "larger than a request may be"),
    "twice": ({"inputs": infer_body(ROWS)["inputs"] * 2}, "is given twice"),
    "classification": (
        {**infer_body(ROWS), "outputs": [{"name": "y", "parameters": {"classification": 3}}]},
        "classification is not served",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_requests_get_a_sentence(what: str) -> None:
    content, words = WRONG[what]
    with pytest.raises(RequestError) as caught:
        PROTOCOL.decode(encoded(content), None)
    assert words in str(caught.value) and caught.value.status in (400, 413)


@pytest.mark.parametrize(
    ("length", "size", "tail", "words"),
    [
        (b"x", 16, bytes(16), "must be a number"),
        (b"99999", 16, bytes(16), "must be a number up to the length"),
        (None, 16, bytes(15), "the body ends after 15 of them"),
        (None, 16, bytes(17), "1 bytes more"),
        (None, 15, bytes(15), "its shape needs 16 bytes"),
        (None, True, bytes(1), "binary_data_size True"),
        (None, 16, np.full(4, np.nan, np.float32).tobytes(), "has NaN or Inf"),
        (None, 16, np.full(4, np.inf, np.float32).tobytes(), "has NaN or Inf"),
    ],
)
def test_wrong_binary_requests_get_a_sentence(length: bytes | None, size: object, tail: bytes, words: str) -> None:
    head = encoded(infer_body(ROWS, data=None, parameters={"binary_data_size": size}))
    with pytest.raises(RequestError, match=words):
        PROTOCOL.decode(head + tail, length or str(len(head)).encode())


@pytest.mark.parametrize("data", [[1.5, 2], [True, False], [1 << 40, 0], ["1", "2"], [None, 1]])
def test_an_integer_input_takes_whole_numbers_of_its_size_only(data: list[object]) -> None:
    body = {"inputs": [{"name": "a", "shape": [1, 2], "datatype": "INT32", "data": data}]}
    with pytest.raises(RequestError, match="cannot be used"):
        TWO.decode(encoded(body), None)


def test_inputs_must_have_equally_many_rows() -> None:
    a = {"name": "a", "shape": [2, 2], "datatype": "INT32", "data": [1, 2, 3, 4]}
    b = {"name": "b", "shape": [1], "datatype": "BOOL", "data": [True]}
    with pytest.raises(RequestError, match="has 1 rows, another one 2"):
        TWO.decode(encoded({"inputs": [a, b]}), None)
    whole = TWO.decode(encoded({"inputs": [a, {**b, "shape": [2], "data": [True, False]}]}), None)
    assert whole.num_rows == 2 and whole.inputs["b"].dtype == bool


def test_plain_requests() -> None:
    request, version = PROTOCOL.decode_plain(encoded({"input": [[1, 2], [3, 4]], "version": "7"}))
    assert version == "7" and request.inputs["input"].tolist() == [[[1, 2], [3, 4]]]
    assert PROTOCOL.encode_plain(request, {"y": np.ones((1, 3), "f4")}, "7") == (
        b'{"output":[1.0,1.0,1.0],"model_name":"net","model_version":"7"}'
    )
    several, _ = PROTOCOL.decode_plain(encoded({"inputs": [[[1, 2], [3, 4]]] * 3}))
    assert several.num_rows == 3 and b'"outputs":[[1.0],' in PROTOCOL.encode_plain(
        several, {"y": np.ones((3, 1))}, ""
    )
    two, _ = TWO.decode_plain(encoded({"inputs": {"a": [[1, 2], [3, 4]], "b": [True, False]}}))
    assert two.num_rows == 2
    for wrong in ({}, {"input": 1, "inputs": 1}, {"x": 1}, {"input": [[1, 2]]}, {"input": [[1, "2"], [3, 4]]},
                  {"input": [[1, None], [3, 4]]}, {"input": [[1, True], [3, 4]]}, {"input": [[1, 2], [3]]},
                  {"input": [[1, 1e39], [3, 4]]}, {"inputs": [[1, 2], [3, 4]]}):  # fmt: skip
        with pytest.raises(RequestError):
            PROTOCOL.decode_plain(encoded(wrong))


def test_answers_have_the_wanted_outputs_only() -> None:
    outputs = {"y": np.ones((1, 1), "f4"), "z": np.array([np.nan], "f4")}
    request = PROTOCOL.decode(encoded({**infer_body(ROWS), "outputs": [{"name": "y"}]}), None)
    assert [one["name"] for one in json.loads(PROTOCOL.encode(request, outputs, "1")[0])["outputs"]] == ["y"]
    request.outputs = {"x": False}
    with pytest.raises(RequestError, match="there is no output 'x'; the model has y, z"):
        PROTOCOL.encode(request, outputs, "1")
    request.outputs = {"z": False}
    with pytest.raises(RequestError, match="ask for binary data"):
        PROTOCOL.encode(request, outputs, "1")


def test_inputs_that_are_said_at_launch() -> None:
    assert parse_spec("image:FP32:1,28,28") == TensorSpec("image", "FP32", (-1, 1, 28, 28))
    assert parse_spec("x:INT64:") == TensorSpec("x", "INT64", (-1,))
    assert parse_spec("x:BOOL") == TensorSpec("x", "BOOL", None)
    assert spec_of("x", np.zeros((4, 3), "i8")) == TensorSpec("x", "INT64", (-1, 3))
    for wrong in ("x", "x:FP31:1", "x:FP32:0", "x:FP32:-2", "x:FP32:1,,-", "x y:FP32:1", ":FP32:1"):
        with pytest.raises(ConfigError, match="--input"):
            parse_spec(wrong)
