"""examples/vision.py: its networks are the known ones, and train on servers and in a ring, BatchNorm included."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys
from types import ModuleType

import pytest
import torch
from tests import forked
from tests.patience import JOB_PATIENCE, PATIENT_TOML

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "vision.py"
#: Parameters for ten classes and pictures of 32 × 32, as published with the usual variants for CIFAR-10.
NUM_PARAMETERS = {"resnet18": 11_173_962, "vgg11": 9_231_114, "mobilenet": 3_217_226}


@pytest.fixture(scope="module")
def vision() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vision", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_a_network_has_the_known_number_of_parameters(vision: ModuleType, name: str) -> None:
    model = vision.MODELS[name]()
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[name]
    assert f"{NUM_PARAMETERS[name]:,} parameters" in vision.MODELS[name].__doc__
    with torch.no_grad():
        assert model.eval()(vision.prepared(torch.zeros(2, 28, 28, dtype=torch.uint8), "cpu")).shape == (2, 10)


def test_pictures_are_padded_with_black(vision: ModuleType) -> None:
    made = vision.prepared(torch.full((1, 28, 28), 255, dtype=torch.uint8), "cpu")
    assert made.shape == (1, 3, 32, 32)
    assert made[0, :, 2:-2, 2:-2].unique().tolist() == [0.5] and made[0, :, :2].unique().tolist() == [-0.5]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "way", "buffers"),
    [
        ("mobilenet", ("-s", "1"), "chief"),
        ("resnet18", ("-s", "1"), "mean"),
        ("vgg11", ("--exchange", "ring"), "chief"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_two_workers_train_it(model: str, way: tuple[str, ...], buffers: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "syncline.toml").write_text(PATIENT_TOML)
    sizes = ["--samples", "24", "--batch-size", "4", "--epochs", "1", "--out", "model.pt"]
    command = [sys.executable, "-m", "syncline", "run", "-w", "2", *way, str(SCRIPT), "--model", model, *sizes]
    command += ["--buffers", buffers]
    done = forked.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=JOB_PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{model}, {NUM_PARAMETERS[model]:,} parameters" in done.stdout
    assert re.search(r"test accuracy +\d+\.\d+%", done.stdout) and "24 samples read" in done.stdout
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    means = [value for name, value in state.items() if name.endswith("running_mean")]
    assert len(means) >= 8 and all(mean.abs().sum() > 0 for mean in means), "BatchNorm's statistics are of no step"
    assert all(bool(value.isfinite().all()) for value in state.values())
