"""Which process computes on which device, as a table; and what a host without a GPU says."""

from __future__ import annotations

import pathlib

import pytest
import torch
from tests.serve.saved import MODEL, Caller, save

from syncline.errors import ConfigError
from syncline.serve import Server
from syncline.serve.devices import device_of


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "found"),
    [
        ("", 2, ["", "", ""]),
        ("cpu", 2, ["cpu", "cpu", "cpu"]),
        ("auto", 0, ["cpu", "cpu", "cpu"]),
        ("auto", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda", 1, ["cuda:0", "cuda:0", "cuda:0"]),
        ("cuda:1", 2, ["cuda:1", "cuda:1", "cuda:1"]),
    ],
)
def test_replicas_take_the_gpus_in_turn(wanted: str, num_gpus: int, found: list[str]) -> None:
    assert [device_of(wanted, number, num_gpus) for number in range(3)] == found


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "words"),
    [
        ("cuda", 0, "--device cuda: torch sees no GPU here"),
        ("cuda:0", 0, "--device cuda:0: torch sees no GPU here"),
        ("cuda:2", 2, "--device cuda:2: torch sees 2 GPUs here, cuda:0 to cuda:1"),
        ("gpu", 2, "--device 'gpu': give cpu, cuda, cuda:N or auto"),
        ("cuda:-1", 2, "give cpu"),
        ("cuda:0,1", 2, "give cpu"),
    ],
)
def test_a_device_that_there_is_not_is_refused_by_name(wanted: str, num_gpus: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        device_of(wanted, 0, num_gpus)


class Doubles:
    """No torch module."""

    def __call__(self, x: object) -> object:
        return x


def test_a_server_computes_where_it_was_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "linear.py").write_text(MODEL)
    model, runs = f"{tmp_path / 'linear.py'}:Net", str(tmp_path / "runs")
    save(tmp_path / "saves", 2)
    moved = []
    move = torch.nn.Module.to

    def to(module: torch.nn.Module, device: str) -> torch.nn.Module:
        moved.append(device)
        return move(module, device)

    monkeypatch.setattr(torch.nn.Module, "to", to)
    for device in ("cpu", "auto"):
        with (
            Server(model, tmp_path / "saves", device=device, port=0, refresh=0.0, runs=runs) as server,
            Caller(server.url) as call,
        ):
            assert call.post("/predict", {"input": [1, 1, 1, 1]})[1]["output"] == [10.0] * 3
    if not torch.cuda.is_available():
        assert set(moved) == {"cpu"}
        with pytest.raises(ConfigError, match="--device cuda: torch sees no GPU here"):
            Server(model, device="cuda", port=0, runs=runs).start()
    with pytest.raises(ConfigError, match="--device 'gpu': give cpu"):
        Server(model, device="gpu", port=0, runs=runs)
    with pytest.raises(ConfigError, match="--device cpu: Doubles is no torch module"):
        Server(Doubles, inputs=["x:FP32:2"], device="cpu", port=0, runs=runs).start()
    with Server(Doubles, inputs=["x:FP32:2"], device="auto", port=0, runs=runs) as server, Caller(server.url) as call:
        assert call.post("/predict", {"input": [1, 2]})[1]["output"] == [1.0, 2.0]
