"""What is wrong with the data of a loader is said with the sample and where it lies, and what to do about it."""

from __future__ import annotations

import io
import multiprocessing.reduction
import pathlib
import tarfile
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from tests.leased import alone
from torch.utils.data import Dataset, Subset

import syncline.data
from syncline.data import ArraySource, IterableSource, Source, mapped
from syncline.errors import DataError
from syncline.launch.tracebacks import describe
from syncline.torch.data import DataLoader


class Odd(Dataset[torch.Tensor]):
    """Sample 9 cannot be transformed; samples 4 and 5 cannot be put together."""

    def __init__(self, num_samples: int = 16) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            raise KeyError("no such colour")
        return torch.zeros(3 if index == 5 else 2)


class Pictures(Odd):
    """As torchvision's folders: a list of paths and classes."""

    @property
    def samples(self) -> list[tuple[str, int]]:
        return [(f"pictures/{n}.png", 0) for n in range(len(self))]


class Telling(Odd):
    def where(self, index: int) -> str:
        return f"part-{index // 10}.bin, record {index % 10}"


#: Torch waits five seconds for the data processes of a loop that failed.
WITH_PROCESSES = [0, pytest.param(1, marks=pytest.mark.proof)]


def said(loader: DataLoader[Any]) -> str:
    """What is printed when a loop over it fails."""
    try:
        for _ in loader:
            pass
    except Exception as error:
        return describe(error)
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("num_workers", WITH_PROCESSES)
@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Odd(), "raised by the data set Odd for sample 9"),
        (Pictures(), "raised by the data set Pictures for sample 9 (pictures/9.png)"),
        (Telling(), "raised by the data set Telling for sample 9 (part-0.bin, record 9)"),
        (Subset(Telling(), [0, 9]), "raised by the data set Subset for sample 0 (part-0.bin, record 0), sample 1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_transform_that_raises_is_told_with_its_sample(dataset: Any, expected: str, num_workers: int) -> None:
    text = said(DataLoader(dataset, 2, num_workers=num_workers, collate_fn=list, job=alone()))
    assert expected in text and "KeyError" in text and "no such colour" in text


@pytest.mark.parametrize("num_workers", WITH_PROCESSES)
@pytest.mark.parametrize("collate_fn", [None, torch.stack])
def test_a_collate_fn_that_raises_is_told_with_its_samples(collate_fn: Any, num_workers: int) -> None:
    loader: DataLoader[Any] = DataLoader(Pictures(), 6, num_workers=num_workers, collate_fn=collate_fn, job=alone())
    text = said(loader)
    assert "RuntimeError" in text and "equal size" in text
    assert (
        "raised by the collate_fn for sample 0 (pictures/0.png), sample 1 (pictures/1.png), sample 2 "
        "(pictures/2.png), sample 3 (pictures/3.png) and 2 more" in text
    )


def test_an_error_keeps_its_type_and_its_text() -> None:
    """A script may catch it: the samples are a note on it."""
    with pytest.raises(KeyError) as caught:
        list(DataLoader(Odd(), 2, collate_fn=list, job=alone()))
    assert caught.value.args == ("no such colour",) and len(caught.value.__notes__) == 1


def test_evaluations_say_it_too() -> None:
    with torch.no_grad():
        assert "raised by the data set Odd for sample 9" in said(DataLoader(Odd(), 1, job=alone()))


@pytest.mark.parametrize("num_workers", WITH_PROCESSES)
def test_a_sources_transform_and_collate_fn_name_the_file(tmp_path: pathlib.Path, num_workers: int) -> None:
    np.save(tmp_path / "x.npy", np.arange(12))
    source = syncline.data.open(tmp_path / "x.npy")
    assert isinstance(source, Source)

    def fails(sample: Any) -> Any:
        if sample[0] == 7:
            raise ValueError("odd")
        return sample

    text = said(DataLoader(mapped(source, fails), 4, num_workers=num_workers, job=alone()))  # type: ignore[arg-type]
    assert "fails raised ValueError on sample 7" in text and "x.npy, element 7" in text

    def collate(batch: Any) -> Any:
        raise ValueError("odd")

    text = said(DataLoader(source, 2, collate_fn=collate, num_workers=num_workers, job=alone()))  # type: ignore[arg-type]
    assert "raised by the collate_fn for sample 0 (" in text and "x.npy, element 0)" in text


class Shards(torch.utils.data.IterableDataset[int]):
    def __init__(self) -> None:
        self.shards = ["good.txt", "bad.txt"]

    def __iter__(self) -> Iterator[int]:
        for shard in self.shards:
            for n in range(10):
                if shard == "bad.txt" and n == 5:
                    raise OSError("cannot be parsed")
                yield n


def test_a_shard_that_raises_is_told_with_the_sample_in_it() -> None:
    text = said(DataLoader(Shards(), 4, job=alone()))
    assert "OSError: cannot be parsed" in text and "raised for sample 5 of bad.txt" in text


def test_a_collate_fn_that_raises_on_samples_of_a_shard_is_told_with_the_shard() -> None:
    def collate(samples: list[Any]) -> Any:
        return 1 / (samples[0]["n"] - 4)

    source = IterableSource({"first": lambda: ({"n": n} for n in range(8))})
    text = said(DataLoader(source, 4, collate_fn=collate, job=alone()))  # type: ignore[arg-type]
    assert "raised by the collate_fn for samples 4 to 7 of first" in text


def test_a_tar_shard_that_was_cut_short_is_named_in_the_loop(tmp_path: pathlib.Path) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for n in range(8):
            member = tarfile.TarInfo(f"{n}.cls")
            member.size = 1
            archive.addfile(member, io.BytesIO(str(n).encode()))
    (tmp_path / "cut.tar").write_bytes(content.getvalue()[:5000])
    loader: DataLoader[Any] = DataLoader(syncline.data.open(tmp_path / "cut.tar"), 2, job=alone())  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"cut\.tar: not a whole tar file .*copy or write it again"):
        list(loader)


def test_there_is_nothing_to_train_on_in_an_empty_data_set() -> None:
    loader = DataLoader(Odd(0), 4, job=alone())
    with pytest.raises(DataError, match="the data set Odd is empty: there is nothing to train on; check the path"):
        iter(loader)
    with torch.no_grad():
        assert list(loader) == [], "an evaluation over nothing is nothing, as in torch"


def test_the_script_sees_its_own_data_set_and_functions() -> None:
    """What names the samples stands between torch and the data set only: in no attribute, and in no data process."""

    def collate(samples: list[Any]) -> Any:
        return samples

    def begin(number: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None and isinstance(info.dataset, Opened)
        info.dataset.file = "opened"

    class Opened(Dataset[str]):
        file = "closed"

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> str:
            return self.file

    dataset = Opened()
    loader = DataLoader(dataset, 2, num_workers=1, collate_fn=collate, worker_init_fn=begin, job=alone())
    assert list(loader) == [["opened", "opened"]] * 2
    assert loader.dataset is dataset and loader.collate_fn is collate and loader.worker_init_fn is begin


@pytest.mark.parametrize("suffix", ["parquet", "feather", "npy", "npz"])
def test_data_processes_read_files_however_they_are_started(tmp_path: pathlib.Path, suffix: str) -> None:
    """Forked, or from what is sent to them (spawn): what is open, locked or decoded here does not go over, and what
    is mapped is mapped there."""
    feather, parquet = pytest.importorskip("pyarrow.feather"), pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    x, path = np.arange(20_000), tmp_path / f"x.{suffix}"
    {
        "parquet": lambda: parquet.write_table(arrow.table({"x": x}), path, row_group_size=5000),
        "feather": lambda: feather.write_feather(arrow.table({"x": x}), path, chunksize=5000),
        "npy": lambda: np.save(path, x),
        "npz": lambda: np.savez(path, x=x),
    }[suffix]()
    source: Any = syncline.data.open(path)
    source.read(np.array([3]))
    sent = bytes(multiprocessing.reduction.ForkingPickler.dumps(source))
    assert len(sent) < 10_000 or suffix == "npz"
    for there in (source, multiprocessing.reduction.ForkingPickler.loads(sent)):
        loader: DataLoader[Any] = DataLoader(there, 4096, True, num_workers=1, persistent_workers=True, job=alone())
        for _ in range(2):
            read = [batch["x"] if isinstance(batch, dict) else batch[0] for batch in loader]
            assert sorted(torch.cat(read).tolist()) == x.tolist()


def test_pinned_memory_comes_with_leases_where_there_is_a_gpu_and_without_one_is_left_out() -> None:
    arrays = ArraySource((np.arange(12.0), np.arange(12)))
    loader: DataLoader[Any] = DataLoader(arrays, 4, pin_memory=True, job=alone())  # type: ignore[arg-type]
    for x, y in loader:
        assert x.tolist() == y.tolist() and x.is_pinned() == torch.cuda.is_available()


def test_a_note_is_part_of_what_a_launched_worker_prints() -> None:
    error = ValueError("odd")
    error.add_note("raised for sample 3")
    assert "raised for sample 3" in describe(error) == "".join(traceback.format_exception(error))
