"""`syncline.data.open`: what a name or a path is taken for, and that it says so."""

from __future__ import annotations

import hashlib
import pathlib
import struct

import numpy as np
import pytest

import syncline.data
import syncline.data.datasets as datasets
from syncline.data import ArraySource, Source
from syncline.errors import ConfigError, DataError
from syncline.testing import local_job

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
LABELS = np.array([3, 1, 4, 1, 5], dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_iris_is_the_table_that_fisher_printed() -> None:
    """Sums over all 150 flowers, and the two rows that circulate with errors, as in R's table."""
    source = syncline.data.open("iris")
    assert isinstance(source, ArraySource) and len(source) == 150
    everything = source.read(np.arange(150))
    assert isinstance(everything, dict)
    sums = {name: round(float(values.sum()), 1) for name, values in everything.items()}
    assert sums == {
        "sepal_length": 876.5,
        "sepal_width": 458.6,
        "petal_length": 563.7,
        "petal_width": 179.9,
        "species": 150.0,
    }
    assert np.bincount(everything["species"]).tolist() == [50, 50, 50]
    measured = np.stack([everything[name] for name in list(everything)[:4]], axis=1)
    assert measured[34].tolist() == [4.9, 3.1, 1.5, 0.2] and measured[37].tolist() == [4.9, 3.6, 1.4, 0.1]
    assert source.describe().startswith("iris, 150 samples: sepal_length float64[]")
    with pytest.raises(ConfigError, match="iris has no splits"):
        syncline.data.open("iris", split="test")
    with pytest.raises(ConfigError, match="iris: storage_options are for remote paths; leave them out for iris"):
        syncline.data.open("iris", storage_options={"anon": True})
    with pytest.raises(ConfigError, match=r"columns= is a list of names; use columns=\['species'\]"):
        syncline.data.open("iris", columns="species")


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A machine that has small stand-ins of both image sets under $SYNCLINE_DATA."""
    monkeypatch.setenv("SYNCLINE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, table, shift in (("mnist", "MNIST_SHA256", 1), ("fashion-mnist", "SHA256", 0)):
        files = {
            "train-images-idx3-ubyte": idx(IMAGES + np.uint8(shift)),
            "train-labels-idx1-ubyte": idx(LABELS + np.uint8(shift)),
            "t10k-images-idx3-ubyte": idx(IMAGES[:2]),
            "t10k-labels-idx1-ubyte": idx(LABELS[:2]),
        }
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_bytes(content)
        monkeypatch.setattr(datasets, table, {file: hashlib.sha256(c).hexdigest() for file, c in files.items()})
    return tmp_path


@pytest.mark.parametrize(("name", "shift"), [("mnist", 1), ("fashion-mnist", 0)])
def test_image_sets_have_a_name_and_splits(folder: pathlib.Path, name: str, shift: int) -> None:
    train, test = syncline.data.open(name), syncline.data.open(name, split="test", columns=["label"])
    assert isinstance(train, Source) and isinstance(test, Source)
    assert train.describe() == f"{name} (train), 5 samples: image uint8[28, 28], label int64[]"
    assert test.describe() == f"{name} (test), 2 samples: label int64[]"
    batch = train.read(np.array([2, 0]))
    assert isinstance(batch, dict)
    assert np.array_equal(batch["image"], IMAGES[[2, 0]] + np.uint8(shift)) and batch["label"].tolist() == [
        4 + shift,
        3 + shift,
    ]
    with pytest.raises(ConfigError, match=f"{name}: there is no split 'dev'; there are train and test"):
        syncline.data.open(name, split="dev")


def test_mnist_is_believed_by_its_own_checksums(folder: pathlib.Path) -> None:
    """The files of both sets have the same names and sizes: one in the folder of the other is not taken."""
    fashion = (folder / "fashion-mnist" / "train-images-idx3-ubyte").read_bytes()
    (folder / "mnist" / "train-images-idx3-ubyte").write_bytes(fashion)

    def fetch(url: str, most_bytes: int) -> bytes:
        raise OSError("no network in this test")

    with pytest.raises(
        DataError, match=r"(?s)MNIST: train-images.*wrong checksum.*no network.*SYNCLINE_DATA"
    ) as caught:
        datasets.mnist(fetch=fetch)
    assert "cvdf-datasets/mnist/train-images-idx3-ubyte.gz" in str(caught.value)


def test_one_line_says_what_was_taken(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To people who have configured nothing; in a job once, however often it is opened."""
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((4, 2)))
    taken = f"{path}: taken as {path}, 4 samples: array 0 float64[2]"
    syncline.data.open(path)
    assert capsys.readouterr().err == f"syncline: {taken}\n"
    with local_job(workers=2) as jobs:
        jobs.run(lambda job: [syncline.data.open(path) for _ in range(2)])
        lines = [line for line in capsys.readouterr().err.splitlines() if "taken as" in line]
    assert lines == [f"syncline: worker-0: {taken}"]


def test_a_name_that_says_nothing_needs_a_kind(tmp_path: pathlib.Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(4))
    (tmp_path / "x.npy").rename(tmp_path / "x.data")
    with pytest.raises(ConfigError, match=r"x\.data: the file type is not clear from its name; give kind= parquet"):
        syncline.data.open(tmp_path / "x.data")
    assert len(syncline.data.open(tmp_path / "x.data", kind="numpy")) == 4  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kind 'csv' is not known; known are parquet, arrow, numpy, tar"):
        syncline.data.open(tmp_path / "x.data", kind="csv")


def test_a_folder_of_two_kinds_needs_a_kind(tmp_path: pathlib.Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(4))
    (tmp_path / "y.tar").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"x\.npy is numpy and .*y\.tar is tar; choose with kind="):
        syncline.data.open(tmp_path)
    assert len(syncline.data.open(tmp_path, kind="numpy")) == 4  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"split= is for fashion-mnist and mnist"):
        syncline.data.open(tmp_path, kind="numpy", split="train")
