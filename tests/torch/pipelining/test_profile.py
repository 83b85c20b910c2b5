"""What layers cost: what is counted exactly, what is remembered, and what stays as it was."""

from __future__ import annotations

import pathlib

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from syncline.core.pipelining.costs import ModelCosts
from syncline.errors import ConfigError
from syncline.torch.pipelining import plan_only, profile
from syncline.torch.pipelining.plan_only import PlanMade, PlanQuestion, answer_if_asked
from syncline.torch.pipelining.profile import profile_model


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


X, Y = torch.randn(16, 32), torch.randint(0, 4, (16,))


def test_bytes_are_counted_for_every_layer_and_size(tmp_path: pathlib.Path) -> None:
    costs = profile_model(mlp(), F.cross_entropy, (X,), Y, cache=tmp_path)
    assert [batch.num_samples for batch in costs.measured] == [2, 4, 8, 16]
    assert costs.names == ("0", "2", "3", "4")
    for batch in costs.measured:
        first, second, norm, last = batch.layers
        assert first.parameter_bytes == (32 * 64 + 64) * 4 and norm.parameter_bytes == 2 * 16 * 4
        assert first.output_bytes == batch.num_samples * 64 * 4 and second.output_bytes == batch.num_samples * 16 * 4
        assert last.output_bytes == 0
        # The input, which a weight's gradient needs, and the output of the ReLU.
        assert first.kept_bytes == batch.num_samples * (32 + 64) * 4
        assert all(layer.forward_seconds > 0 and layer.backward_seconds > 0 for layer in batch.layers)


def test_a_heavier_layer_costs_more(tmp_path: pathlib.Path) -> None:
    """Ten thousand times the work: on any machine, however busy."""
    model = nn.Sequential(nn.Linear(8, 1600), nn.Linear(1600, 1600), nn.Linear(1600, 2))
    costs = profile_model(model, None, (torch.randn(64, 8),), cache=tmp_path)
    first, heavy, last = costs.at(64)
    assert heavy.forward_seconds > max(first.forward_seconds, last.forward_seconds)
    assert heavy.backward_seconds > max(first.backward_seconds, last.backward_seconds)


def test_the_model_stays_as_it_is(tmp_path: pathlib.Path) -> None:
    model = mlp()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    profile_model(model, F.cross_entropy, (X,), Y, threads=1, cache=tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state) and torch.get_num_threads() == threads


def test_a_profile_is_measured_once_for_a_model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = profile_model(mlp(), F.cross_entropy, (X,), Y, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    assert msgspec.json.decode(path.read_bytes(), type=ModelCosts) == first
    assert profile_model(mlp(), F.cross_entropy, (X,), Y, cache=tmp_path) == first  # other numbers, the same model
    other = mlp()
    other.append(nn.Linear(4, 4))
    profile_model(other, F.cross_entropy, (X,), Y, cache=tmp_path)
    profile_model(mlp(), F.cross_entropy, (X[:8],), Y[:8], cache=tmp_path)
    profile_model(mlp().eval(), F.cross_entropy, (X,), Y, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    path.write_bytes(b'{"measured": [')  # damaged: measured again, and written whole
    again = profile_model(mlp(), F.cross_entropy, (X,), Y, cache=tmp_path)
    assert msgspec.json.decode(path.read_bytes(), type=ModelCosts) == again
    monkeypatch.setattr(profile, "FORMAT", 2)
    profile_model(mlp(), F.cross_entropy, (X,), Y, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_a_model_on_meta_is_measured_layer_by_layer(tmp_path: pathlib.Path) -> None:
    with torch.device("meta"):
        model = mlp()
    costs = profile_model(model, F.cross_entropy, (X,), Y, cache=tmp_path)
    assert costs.names == ("0", "2", "3", "4")
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_a_tied_parameter_is_told(tmp_path: pathlib.Path) -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    costs = profile_model(model, None, (torch.randint(0, 10, (4, 3)),), cache=tmp_path)
    layers = costs.at(4)
    assert [[each.name for each in layer.tied] for layer in layers] == [["0.weight"], [], ["0.weight"]]
    assert layers[0].parameter_bytes == 0 and layers[0].tied[0].num_bytes == 160


def test_an_example_must_have_samples() -> None:
    with pytest.raises(ConfigError, match="the example must be a tuple of tensors"):
        profile_model(mlp(), None, ())
    with pytest.raises(ConfigError, match=r"have \[15, 16\] samples; give as many in each"):
        profile_model(mlp(), None, (X,), Y[:15])


def test_a_pipeline_answers_only_if_it_is_asked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    answer_if_asked(mlp(), F.cross_entropy, (X,), Y)
    plan_only.ask(PlanQuestion(workers=2, stages=2, micro_batches=4))
    try:
        with pytest.raises(PlanMade) as made:
            answer_if_asked(mlp(), F.cross_entropy, (X,), Y)
    finally:
        plan_only.ask(None)
    assert made.value.plan.num_workers == 2 and made.value.plan.batch == 16
    assert len(list((tmp_path / "syncline" / "pipelines").iterdir())) == 1
