"""Programs that `syncline export` writes, in the real onnxruntime and in torch.export; `make test-serve`."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from tests import forked
from tests.patience import PATIENCE
from torch import nn

pytestmark = pytest.mark.clients

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRANSFORMER = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 64)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
        self.head = nn.Linear(64, 7)

    def forward(self, words):
        return self.head(self.layers(self.words(words)).mean(1))

example = {"words": torch.zeros(1, 12, dtype=torch.int64)}
"""
MODELS = {
    "lenet": f"""
import sys
import torch
sys.path.insert(0, {str(ROOT / "examples")!r})
from fashion_mnist import lenet as Net
example = {{"image": torch.zeros(1, 1, 28, 28)}}
""",
    "resnet18": f"""
import sys
import torch
sys.path.insert(0, {str(ROOT / "examples")!r})
import vision
def Net():
    return vision.resnet18()
example = {{"image": torch.zeros(1, 3, 32, 32)}}
""",
    "transformer": TRANSFORMER,
}


def made(folder: pathlib.Path, source: str) -> nn.Module:
    """The model of a file, with random weights and running statistics, which are saved beside it."""
    import safetensors.torch

    (folder / "model.py").write_text(source)
    space: dict[str, Any] = {"__name__": "made"}
    exec(compile(source, str(folder / "model.py"), "exec"), space)  # our own text, above
    torch.manual_seed(3)
    module: nn.Module = space["Net"]()
    for name, buffer in module.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    safetensors.torch.save_file(module.state_dict(), folder / "model.safetensors")
    return module.eval()


def export(folder: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "syncline", "export", "model.safetensors", "--model", "model.py:Net", *words]
    return forked.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)


def rows_for(name: str, num_rows: int) -> torch.Tensor:
    if name == "transformer":
        return torch.randint(0, 100, (num_rows, 12))
    return torch.randn((num_rows, 3, 32, 32) if name == "resnet18" else (num_rows, 1, 28, 28))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_onnx_computes_what_the_module_does(tmp_path: pathlib.Path, name: str) -> None:
    """For any number of rows: an example of one row must not make a program for one row."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    module = made(tmp_path, MODELS[name])
    done = export(tmp_path, "--onnx", "model.onnx")
    assert done.returncode == 0 and "in onnxruntime" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (given,), (answer,) = session.get_inputs(), session.get_outputs()
    assert given.name == ("words" if name == "transformer" else "image") and answer.name == "output"
    worst = 0.0
    for num_rows in (1, 2, 7, 33):
        rows = rows_for(name, num_rows)
        with torch.inference_mode():
            expected = module(rows).numpy()
        (found,) = session.run(None, {given.name: rows.numpy()})
        assert found.shape == expected.shape
        worst = max(worst, float(np.abs(found - expected).max()))
    print(f"\n{name}: largest difference {worst:.1e}")
    assert worst <= 1e-5


def test_torch_export_is_loaded_without_the_file(tmp_path: pathlib.Path) -> None:
    module = made(tmp_path, TRANSFORMER)
    done = export(tmp_path, "--torch-export", "model.pt2")
    assert done.returncode == 0, done.stderr
    (tmp_path / "model.py").unlink()
    program = torch.export.load(tmp_path / "model.pt2").module()
    for num_rows in (1, 5):
        rows = rows_for("transformer", num_rows)
        with torch.inference_mode():
            assert torch.allclose(program(rows), module(rows), atol=1e-6)


def test_a_batch_that_the_module_does_not_take_is_said(tmp_path: pathlib.Path) -> None:
    made(tmp_path, MODELS["lenet"])
    done = export(tmp_path, "--torch-export", "model.pt2", "--input", "image:FP32:2,28,28")
    assert done.returncode == 2 and "does not take the batch image [2, 2, 28, 28]" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_module_that_looks_at_its_numbers_cannot_become_a_program(tmp_path: pathlib.Path) -> None:
    made(tmp_path, TRANSFORMER)
    source = TRANSFORMER.replace(
        "        return", "        if words.sum() > 3:\n            words = words * 0\n        return"
    )
    (tmp_path / "model.py").write_text(source)
    done = export(tmp_path, "--onnx", "model.onnx")
    assert done.returncode == 2 and "cannot become a program" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "model.onnx").exists()
