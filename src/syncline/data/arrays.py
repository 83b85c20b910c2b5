"""Arrays as a source: in memory, in `.npy` and `.npz` files, or mapped from disk."""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from syncline.data.files import Files, explained
from syncline.data.plain import objects_in
from syncline.data.source import Array, Batch, check_samples, counted, run, taken
from syncline.errors import ConfigError, DataError


class ArraySource:
    """Arrays of equal length with one element per sample: one array, a tuple of them, or a dict."""

    def __init__(self, arrays: Array | Sequence[Array] | Mapping[str, Array], name: str = "") -> None:
        if isinstance(arrays, Mapping):
            self._names = tuple(str(key) for key in arrays)
            self.arrays = tuple(np.asanyarray(value) for value in arrays.values())
        else:
            given = (arrays,) if isinstance(arrays, np.ndarray) else tuple(arrays)
            self._names = ()
            self.arrays = tuple(np.asanyarray(value) for value in given)
        self._name = name or "arrays"
        self._length = self._checked_length()
        self._mapped_from = ""  # the file that all of it is mapped from

    def __getstate__(self) -> dict[str, Any]:
        """For another process: a mapped file is mapped there, not sent."""
        return {**self.__dict__, "arrays": ()} if self._mapped_from else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._mapped_from:
            self.arrays = (_mapped(self._mapped_from),)

    def describe(self) -> str:
        return f"{self._name}, {counted(self._length, 'sample')}: {', '.join(self._labels())}"

    def __len__(self) -> int:
        return self._length

    @property
    def chunk_sizes(self) -> Sequence[int]:
        return (self._length,)

    def read(self, samples: npt.NDArray[np.int64]) -> Batch:
        rows = run(check_samples(samples, self._length))
        values = tuple(taken(array, rows) for array in self.arrays)
        return dict(zip(self._names, values, strict=True)) if self._names else values

    def only(self, columns: Sequence[str] | None) -> ArraySource:
        """The same samples with some of their columns; None: all."""
        if columns is None:
            return self
        known = dict(zip(self._names, self.arrays, strict=False))
        for name in columns:
            if name not in known:
                there = f"there are {', '.join(known)}" if known else "its arrays have no names"
                raise ConfigError(f"{self._name}: there is no column '{name}'; {there}")
        return ArraySource({name: known[name] for name in columns}, self._name)

    def where(self, sample: int) -> str:
        return f"{self._name}, element {sample}"

    def _labels(self) -> list[str]:
        names = self._names or tuple(f"array {number}" for number in range(len(self.arrays)))
        pairs = zip(names, self.arrays, strict=True)
        return [f"{name} {array.dtype}{list(array.shape[1:])}" for name, array in pairs]

    def _checked_length(self) -> int:
        if not self.arrays:
            raise DataError(f"{self._name}: there is no array in it; give at least one")
        labels = self._labels()
        for label, array in zip(labels, self.arrays, strict=True):
            if array.ndim == 0:
                raise DataError(f"{self._name}: {label} is a single value; give arrays with one element per sample")
        lengths = [len(array) for array in self.arrays]
        for label, length in zip(labels, lengths, strict=True):
            if length != lengths[0]:
                raise DataError(
                    f"{self._name}: {labels[0]} has {lengths[0]:,} samples and {label} has {length:,}; "
                    "all arrays need the same length"
                )
        if lengths[0] == 0:
            raise DataError(f"{self._name}: there is no sample in it; give arrays with at least one element")
        return lengths[0]


def open_numpy(files: Files) -> ArraySource:
    """A `.npy` file, memory-mapped if it is local, or the arrays of an `.npz` file by name."""
    if len(files.paths) > 1:
        raise DataError(
            f"{files.path}: {len(files.paths)} NumPy files; one is read at a time: put the arrays into one .npz"
        )
    (path,) = files.paths
    with explained(path):
        try:
            source = ArraySource(_loaded(files, path), path)
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            objects = _objects(files, path)
            raise DataError(
                objects or f"{path}: not a whole NumPy file ({error}); write it again with numpy.save"
            ) from error
    if files.is_local and not path.endswith(".npz"):
        source._mapped_from = path
    return source


def _objects(files: Files, path: str) -> str:
    """Names the array of a file that holds Python objects; empty: none."""
    with files.open(path) as file:
        if not path.endswith(".npz"):
            objects = objects_in(file)
            return f"{path}: {objects}" if objects else ""
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                with archive.open(name) as part:
                    if objects := objects_in(part):
                        return f"{path}, array '{name.removesuffix('.npy')}': {objects}"
    return ""


def _mapped(path: str) -> Array:
    return cast("Array", np.load(path, mmap_mode="r", allow_pickle=False))


def _loaded(files: Files, path: str) -> Array | dict[str, Array]:
    if files.is_local and not path.endswith(".npz"):
        return _mapped(path)
    with files.open(path) as file:
        content = io.BytesIO(file.read())
    loaded = np.load(content, allow_pickle=False)
    return cast("Array", loaded) if isinstance(loaded, np.ndarray) else dict(loaded.items())
