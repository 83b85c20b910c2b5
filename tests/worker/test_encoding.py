"""A script's state goes to JSON and tensors and comes back the same; nothing else is read, and nothing runs."""

from __future__ import annotations

import collections
import datetime
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from syncline.errors import ConfigError, StoreError
from syncline.worker.checkpoint import rng_state
from syncline.worker.checkpoint.encoding import Encoder, decode, from_json, to_json


def through(value: Any) -> Any:
    encoder = Encoder()
    tree = to_json(encoder.encode(value, "job.state['x']"))
    tensors = [data for _, _, data in encoder.tensors]
    return decode(from_json(tree), lambda number: tensors[number])


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 1 << 53, -(1 << 200), 0.1, 1.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, "",
        "ä\ud7ff", b"",
        b"\x00\xff", [], [[1, 2.0], "x"], (1, (2,)), {1, 2}, frozenset({"a"}), {},
        {"a": 1, 2: "b", (1, 2): None, None: 3},
        {"int": 5}, {"tensor": [0, "float32", [1], "cpu"]}, collections.OrderedDict(b=1, a=2),
        collections.Counter("hello"),
        datetime.datetime(2024, 2, 29, 12, 30, 1, 5, datetime.UTC), np.float32(0.1), np.int64(-5), np.bool_(True),
        np.arange(6, dtype=">i4").reshape(2, 3), np.array("text"), np.zeros((0, 3)), np.array(3.5, np.float16),
        np.array([1 + 2j]), np.array(["2024-01-01"], "M8[D]"), np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        torch.arange(6).reshape(2, 3).t(), torch.tensor(0.5, dtype=torch.bfloat16), torch.zeros(0, 2),
        torch.tensor(True),
        torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj().resolve_conj(),
        torch.tensor([3], dtype=torch.uint8),
    ],
)  # fmt: skip
def test_a_value_comes_back_the_same(value):
    assert same(through(value), value), through(value)


def test_what_is_kept_is_a_copy():
    array, tensor, encoder = np.zeros(3), torch.zeros(3), Encoder()
    tree = encoder.encode([array, tensor], "x")
    array += 1
    tensor += 1
    found = decode(tree, lambda number: encoder.tensors[number][2])
    assert not found[0].any() and not found[1].any()


def test_a_parameter_and_a_shape_come_back_plain():
    assert same(through(torch.nn.Parameter(torch.ones(2))), torch.ones(2))
    assert through(torch.Size([1, 2])) == (1, 2)


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "where", "what"),
    [
        ({"sched": [1, lambda: 0]}, "job.state['x']['sched'][1]", "a function"),
        ({"a": (Thing(),)}, "job.state['x']['a'][0]", "a Thing"),
        (Thing, "job.state['x']", "a class"),
        ({Thing(): 1}, "job.state['x'][", "a Thing"),
        (np.array([None]), "job.state['x']", "an array of object"),
        (torch.zeros(2).to_sparse(), "job.state['x']", "a tensor of torch.sparse_coo, cpu"),
        (collections.defaultdict(int), "job.state['x']", "a defaultdict"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(value, where, what):
    for copies in (True, False):
        with pytest.raises(ConfigError) as caught:
            Encoder(copies=copies).encode(value, "job.state['x']")
        assert str(caught.value).startswith(where) and f": {what} cannot be saved; " in str(caught.value)


def test_what_holds_itself_is_refused():
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ConfigError, match="nested too deeply"):
        Encoder().encode(value, "job.state['x']")


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor": [0, "qint8", [8], "cpu"]},
        {"array": [0, "<f8", [2]]}, {"array": [0, "O", [1]]}, {"array": [0, "V8", [1]]},
        {"array": [0, "<f4", [-1, -2]]},
        {"array": [0, "<f4", [1 << 62, 1 << 62, 0]]}, {"array": [7, "<f4", [2]]}, {"tensor": [0, "load", [1], "cpu"]},
        {"tensor": [0, "float32", ["2"], "cpu"]}, {"tensor": [0, "float32", [3], "cpu"]}, {"tensor": 5},
        {"code": "x"},
        {"int": "5z"}, {"int": 5}, {"float": "x"}, {"dict": [[[1], 2]]}, {"dict": [5]}, {"set": [[1]]},
        {"a": 1, "b": 2}, {},
        {"bytes": "0"}, {"datetime": "now"}, {"tuple": 5}, {"array": ["0", "<f4", [2]]},
        {"array": [0, "<f4", [2] * 65]},
    ],
)  # fmt: skip
def test_what_is_no_tree_of_ours_is_a_named_error(tree):
    def read(number: int) -> Any:
        if number != 0 or type(number) is not int:
            raise StoreError("there is none")
        return np.zeros(8, np.uint8)

    with pytest.raises(StoreError):
        decode(tree, read)


def test_a_deep_or_damaged_text_is_a_named_error():
    for text in (b"[" * 100_000, b"[" * 300 + b"]" * 300, b"{", b"\xff", b""):
        with pytest.raises(StoreError):
            decode(from_json(text), lambda number: np.zeros(0, np.uint8))


def test_random_states_go_on_where_they_were():
    def draw() -> tuple[Any, ...]:
        return random.random(), np.random.rand(), np.random.randn(), torch.rand(2).tolist()

    draw()
    np.random.randn()  # so that one normal number is kept for the next call
    taken = rng_state.take()
    first = draw()
    draw()
    rng_state.put_back(through(taken))
    assert draw() == first


@pytest.mark.parametrize(
    "states", [{"python": 5}, {"numpy": {}}, {"torch": torch.zeros(3)}, {"python": (3, (1, 2), None)}]
)
def test_random_states_that_are_none_are_a_named_error(states):
    before = rng_state.take()
    try:
        with pytest.raises(StoreError, match="random states"):
            rng_state.put_back(states)
    finally:
        rng_state.put_back(before)
