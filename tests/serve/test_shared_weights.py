"""Weights in memory that processes share, and modules that use them there."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import torch
from torch import nn

from syncline.errors import StoreError
from syncline.serve.model import SavedWeights
from syncline.serve.shared_weights import mapped, share
from syncline.serve.torch_model import load_weights, weights_of
from syncline.store.weights import Weight


def through(weights: SavedWeights) -> SavedWeights:
    memory = share(weights)
    found = mapped(memory.fd)
    memory.close()
    return found


def some() -> SavedWeights:
    draw = np.random.default_rng(0)
    found = {}
    for name, dtype, shape, size in (
        ("a", "float32", (3, 5), 60),
        ("b", "bool", (3,), 3),
        ("c.d", "bfloat16", (7,), 14),
        ("none", "float64", (0, 2), 0),
        ("scalar", "int64", (), 8),
    ):
        data = draw.integers(0, 2, size, np.uint8)
        found[name] = (Weight(name, dtype, shape), data)
    return found


def test_weights_come_back_as_they_were() -> None:
    weights = some()
    found = through(weights)
    assert list(found) == list(weights)
    for name, (weight, data) in found.items():
        assert weight == weights[name][0] and data.tobytes() == weights[name][1].tobytes()
        assert data.ctypes.data % 64 == 0 or not data.size


def test_nobody_can_change_them() -> None:
    """Neither through the descriptor nor through a mapping: who writes to a mapping has own pages then."""
    memory = share(some())
    first, second = mapped(memory.fd), mapped(memory.fd)
    was = second["a"][1].tobytes()
    first["a"][1][:] = 9
    assert second["a"][1].tobytes() == was and mapped(memory.fd)["a"][1].tobytes() == was
    fd = os.dup(memory.fd)
    memory.close()
    with pytest.raises(OSError):
        mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE)
    with pytest.raises(OSError):
        os.pwrite(fd, b"x", 100)
    with pytest.raises(OSError):
        os.truncate(fd, 0)
    os.close(fd)


class Tied(nn.Module):
    """Two names for one weight, a buffer, a layer of another datatype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.norm, self.narrow = nn.BatchNorm1d(4), nn.Linear(4, 2).half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.narrow(self.last(self.norm(self.first(x))).half())
        return found


def test_a_module_uses_weights_where_they_are() -> None:
    torch.manual_seed(0)
    source = Tied()
    source.norm.running_mean.fill_(3.0)  # type: ignore[union-attr]
    saved = dict(weights_of(source))
    assert "last.weight" not in saved
    weight, data = saved["narrow.weight"]  # saved wider than the model has it: the one that is copied
    wide = data.view(np.float16).astype(np.float32)
    saved["narrow.weight"] = (Weight(weight.name, "float32", weight.shape), wide.reshape(-1).view(np.uint8))
    weights = through(saved)
    module = Tied()
    load_weights(module, weights, "here", in_place=True)
    begin = {name: data.ctypes.data for name, (_, data) in weights.items()}
    state = module.state_dict()
    copied = {name for name, tensor in state.items() if tensor.data_ptr() != begin.get(name)}
    assert copied == {"last.weight", "narrow.weight"}
    assert state["last.weight"].data_ptr() == begin["first.weight"] and state["narrow.weight"].dtype == torch.float16
    rows = torch.randn(5, 4)
    assert torch.equal(module.eval()(rows), source.eval()(rows))
    with pytest.raises(StoreError, match="lacks 'first"):
        load_weights(
            Tied(), {name: weights[name] for name in weights if name != "first.weight"}, "here", in_place=True
        )
