"""`syncline export`: weights in files that need no Syncline. Programs: tests/serve/test_exporting.py."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import safetensors.numpy
import torch
from tests.report.made import make_run
from tests.serve.saved import MODEL, arrays, save
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.errors import ConfigError, StoreError


def export(*words: object) -> str:
    result = CliRunner().invoke(app, ["export", *map(str, words)])
    if isinstance(result.exception, StoreError | ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def number_in(path: pathlib.Path) -> float:
    """Which of the saved versions a file holds."""
    found = safetensors.numpy.load_file(path)
    number = float(found["bias"][0])
    assert all(np.array_equal(found[name], array) for name, array in arrays(int(number)).items())
    return number


def test_of_a_run_the_best_is_taken_and_of_a_folder_too(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "runs/net"
    for number in (1, 2, 3):
        save(run / "checkpoints", number, best=number == 2)
    out = tmp_path / "model.safetensors"
    for source, words, number in (
        (run, (), 2),
        (run / "checkpoints", (), 2),
        (run, ("--pick", "last"), 3),
        (run / "checkpoints/best", (), 2),
        (run / "checkpoints/000001-step-10", (), 1),
    ):
        said = export(source, *words, "--safetensors", out)
        assert number_in(out) == number and "KiB" in said, source


def test_a_run_that_has_ended_and_saved_elsewhere_is_found_by_its_settings(tmp_path: pathlib.Path) -> None:
    saves = tmp_path / "saves"
    save(saves, 4)
    make_run(tmp_path / "with", checkpoint=str(saves))
    make_run(tmp_path / "without")
    export(tmp_path / "with", "--safetensors", tmp_path / "a.safetensors")
    assert number_in(tmp_path / "a.safetensors") == 4
    with pytest.raises(ConfigError, match="has saved nothing"):
        export(tmp_path / "without", "--safetensors", tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


def test_a_state_dict_is_read_by_torch_alone(tmp_path: pathlib.Path) -> None:
    save(tmp_path / "saves", 5)
    export(tmp_path / "saves", "--state-dict", tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {name: tensor.tolist() for name, tensor in state.items()} == {
        name: array.tolist() for name, array in arrays(5).items()
    }


def test_what_cannot_be_is_said(tmp_path: pathlib.Path) -> None:
    save(tmp_path / "saves", 1)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "array.py").write_text(
        "class Net:\n    def load(self, weights): pass\n    def __call__(self, x): return x\n"
    )
    other = MODEL.replace("4, 3", "4, 2").replace("1, 4", "1, 5")
    (tmp_path / "other.py").write_text(other)
    (tmp_path / "open.py").write_text(MODEL.replace("example = torch.zeros(1, 4)", ""))
    saves, out = tmp_path / "saves", tmp_path / "out"
    for words, said in (
        ((saves,), "say what to write"),
        ((tmp_path / "nothing", "--safetensors", out), "holds no checkpoint"),
        ((saves, "--onnx", out), "--onnx writes the model itself"),
        ((saves, "--safetensors", out, "--model", "model.py:Net"), "--model is for --onnx"),
        ((saves, "--safetensors", out, "--pick", "worst"), "must be best or last"),
        (("a.safetensors", "--safetensors", out), "is a file of weights already"),
        ((saves, "--torch-export", out, "--model", tmp_path / "none.py:Net"), "there is no file"),
        ((saves, "--torch-export", out, "--model", f"{tmp_path / 'array.py'}:Net"), "only torch modules"),
        ((saves, "--torch-export", out, "--model", f"{tmp_path / 'other.py'}:Net"), "has shape"),
        (
            (saves, "--torch-export", out, "--model", f"{tmp_path / 'open.py'}:Net"),
            "which batches does the model take",
        ),
        ((saves, "--safetensors", tmp_path / "no/such/out"), "cannot be written"),
    ):
        with pytest.raises((ConfigError, StoreError), match=said):
            export(*words)
        assert not out.exists(), words
