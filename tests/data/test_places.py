"""Every kind of file from every kind of place: the same samples, one line that says what was taken, the same words
for what is cut short."""

from __future__ import annotations

import gzip
import io
import itertools
import pathlib
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.data.endpoint import Bucket

import syncline.data
from syncline.data import ShardSource, Source, batches
from syncline.errors import DataError

fsspec = pytest.importorskip("fsspec")
arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")

NUM_SAMPLES = 40
X = np.arange(NUM_SAMPLES, dtype=np.int64)


def written(write: Callable[[io.BytesIO], object]) -> bytes:
    content = io.BytesIO()
    write(content)
    return content.getvalue()


def tar() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for n in range(NUM_SAMPLES):
            inside = written(lambda file, n=n: np.save(file, X[n]))  # type: ignore[misc]
            member = tarfile.TarInfo(f"{n:04}.x.npy")
            member.size = len(inside)
            archive.addfile(member, io.BytesIO(inside))
    return content.getvalue()


TABLE = arrow.table({"x": X})
#: The content of a file by its suffix, and how it describes itself.
KINDS = {
    "parquet": (
        written(lambda file: parquet.write_table(TABLE, file, row_group_size=16)),
        f"1 Parquet file, {NUM_SAMPLES} rows: columns x",
    ),
    "feather": (
        written(lambda file: feather.write_feather(TABLE, file, chunksize=16)),
        f"1 Arrow file, {NUM_SAMPLES} rows: columns x",
    ),
    "npy": (written(lambda file: np.save(file, X)), f"{NUM_SAMPLES} samples: array 0 int64[]"),
    "npz": (written(lambda file: np.savez(file, x=X)), f"{NUM_SAMPLES} samples: x int64[]"),
    "tar": (tar(), "1 tar shard"),
    "tar.gz": (gzip.compress(tar()), "1 tar shard"),
}


class Place:
    """Somewhere to write files to, and the path and the options to open them with."""

    def __init__(
        self, url: str, write: Callable[[str, bytes], object], options: dict[str, Any] | None = None
    ) -> None:
        self.url, self.write, self.options = url, write, options

    def open(self, name: str) -> Source | ShardSource:
        return syncline.data.open(f"{self.url}/{name}", storage_options=self.options)


PLACES = ("plain", "file", "memory", "s3")


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Place]:
    def write(name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)

    if request.param == "s3":
        bucket: Bucket = request.getfixturevalue("bucket")
        yield Place(bucket.url, bucket.write, bucket.options)
    elif request.param == "memory":
        memory = fsspec.filesystem("memory")
        yield Place("memory://places", lambda name, content: memory.pipe(f"/places/{name}", content))
        memory.rm("/places", recursive=True)
    else:
        yield Place(f"file://{tmp_path}" if request.param == "file" else str(tmp_path), write)


def values(source: Source | ShardSource, **options: Any) -> list[int]:
    read = [next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
            for batch in batches(without_keys(source), 7, **options)]  # fmt: skip
    return list(itertools.chain.from_iterable(array.tolist() for array in read))


def without_keys(source: Source | ShardSource) -> Source | ShardSource:
    if isinstance(source, Source):
        return source
    return syncline.data.mapped(source, lambda sample: {"x": sample["x.npy"]})


def ways(*at_s3: str) -> list[Any]:
    """Every kind at every place; at S3 these ones only, the others in proof."""
    return [
        pytest.param(place, suffix, marks=[pytest.mark.proof] if place == "s3" and suffix not in at_s3 else [])
        for place in PLACES
        for suffix in KINDS
    ]


@pytest.mark.parametrize(("place", "suffix"), ways("parquet"), indirect=["place"])
def test_every_kind_is_read_from_every_place(place: Place, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    content, described = KINDS[suffix]
    place.write(f"set.{suffix}", content)
    source = place.open(f"set.{suffix}")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "taken as" in line]
    assert line.startswith(f"syncline: {place.url}/set.{suffix}: taken as ") and line.endswith(described)
    assert values(source) == X.tolist() and values(place.open(f"*.{suffix}")) == X.tolist()
    assert sorted(values(source, shuffle=True, seed=1)) == X.tolist()


@pytest.mark.parametrize(("place", "suffix"), ways("tar"), indirect=["place"])
def test_a_file_that_was_cut_short_is_named_wherever_it_lies(place: Place, suffix: str) -> None:
    content, _ = KINDS[suffix]
    place.write(f"cut.{suffix}", content[: len(content) * 2 // 3])
    with pytest.raises(DataError, match=rf"cut\.{suffix}: .*(copy or write it again|write it again with numpy)"):
        values(place.open(f"cut.{suffix}"))


def test_files_with_different_schemas_are_both_named_wherever_they_lie(place: Place) -> None:
    place.write("a.parquet", KINDS["parquet"][0])
    other = arrow.table({"x": X.astype(np.float32)})
    place.write("b.parquet", written(lambda file: parquet.write_table(other, file)))
    with pytest.raises(
        DataError, match=r"column 'x' is int64 in .*a\.parquet and float in .*b\.parquet; write both with one schema"
    ):
        place.open("*.parquet")


def test_what_leads_nowhere_is_said_wherever_it_would_lie(place: Place) -> None:
    place.write("x.npy", KINDS["npy"][0])
    with pytest.raises(DataError, match=r"\*\.parquet: matches no file; check the path"):
        place.open("*.parquet")
    with pytest.raises(DataError, match=r"y\.npy: there is no such file or folder; check the path"):
        place.open("y.npy")


def test_a_file_that_is_cut_short_after_it_was_opened_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "later.parquet"
    random = np.random.default_rng(0).random(200_000)
    parquet.write_table(arrow.table({"x": random}), path, row_group_size=1000)
    source = syncline.data.open(path)
    assert isinstance(source, Source)
    source.read(np.array([0]))
    path.write_bytes(path.read_bytes()[: 1 << 16])
    with pytest.raises(DataError, match=r"later\.parquet: .*copy or write it again"):
        source.read(np.array([199_999]))
    path.unlink()
    with pytest.raises(DataError, match=r"later\.parquet: there is no such file"):
        source.read(np.array([100_000]))
