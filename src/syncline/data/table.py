"""Tables in files, cut into chunks: only those chunks are read in which the asked samples lie."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from syncline.data.columns import as_array, empty, unequal
from syncline.data.source import Array, check_samples, counted, put, run, taken
from syncline.errors import ConfigError, DataError

_CACHE_BYTES = 256 << 20
_Rows: TypeAlias = slice | npt.NDArray[np.int64]


class TableFile(Protocol):
    """One file of a table: its schema, how many rows each chunk has, and a chunk's columns as Arrow has them, in one
    piece or in several."""

    path: str
    types: dict[str, Any]  #: column -> Arrow's type
    doubled: frozenset[str]  #: names that several columns have: none of them can be asked for
    chunk_sizes: Sequence[int]

    def read_chunk(self, index: int, columns: list[str]) -> Iterator[Any]: ...


@dataclasses.dataclass(frozen=True)
class _Decoded:
    """A chunk that is kept."""

    arrays: dict[str, Array]
    num_bytes: int  #: as Arrow counts: of strings, an array has the references only


class TableSource:
    """The rows of several files with equal columns, as one source of samples.

    Decoded chunks are kept, the latest used ones up to `cache_bytes` and never fewer than two: a batch that
    straddles two chunks finds both the next time.
    """

    def __init__(
        self, kind: str, files: Sequence[TableFile], columns: Sequence[str] | None, cache_bytes: int = _CACHE_BYTES
    ) -> None:
        self._kind, self.files, self.cache_bytes = kind, files, cache_bytes
        self._columns = _common_columns(files, columns)
        self._chunks = [(file, index) for file in files for index in range(len(file.chunk_sizes))]
        self.chunk_sizes: Sequence[int] = tuple(itertools.chain.from_iterable(file.chunk_sizes for file in files))
        sizes = np.asarray(self.chunk_sizes, dtype=np.int64)
        self._stops = np.cumsum(sizes)
        self._starts = self._stops - sizes
        self._decoded: collections.OrderedDict[int, _Decoded] = collections.OrderedDict()
        self._lock = threading.Lock()  # of the kept chunks: several threads may read
        if len(self) == 0:
            names = ", ".join(file.path for file in files[:3])
            raise DataError(
                f"{names}: no row in {counted(len(files), f'{kind} file')}; write some, or check the path"
            )

    def __getstate__(self) -> dict[str, Any]:
        """For another process, e.g. a data process of torch: what is decoded here stays here."""
        return {**self.__dict__, "_decoded": collections.OrderedDict(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def describe(self) -> str:
        rows, files = counted(len(self), "row"), counted(len(self.files), f"{self._kind} file")
        return f"{files}, {rows}: columns {', '.join(self._columns)}"

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    @property
    def num_kept(self) -> int:
        """Chunks that are kept decoded."""
        return len(self._decoded)

    def read(self, samples: npt.NDArray[np.int64]) -> dict[str, Array]:
        samples = check_samples(samples, len(self))
        pieces = list(self._pieces(samples))
        if len(pieces) == 1:
            _, chunk, rows = pieces[0]
            return {name: taken(values, rows) for name, values in self._chunk(chunk).items()}
        batch: dict[str, Array] = {}
        for places, chunk, rows in pieces:
            for name, values in self._chunk(chunk).items():
                if name not in batch:
                    batch[name] = np.empty((samples.size, *values.shape[1:]), dtype=values.dtype)
                if batch[name].shape[1:] != values.shape[1:]:
                    raise DataError(
                        f"{self._chunks[chunk][0].path}: column '{name}' has lists of {values.shape[1:]} values, "
                        f"elsewhere of {batch[name].shape[1:]}; only lists of one length become an array"
                    )
                put(batch[name], places, values, rows)
        return batch

    def where(self, sample: int) -> str:
        chunk = int(np.searchsorted(self._stops, sample, side="right"))
        file, index = self._chunks[chunk]
        row = sample - int(self._stops[chunk]) + sum(file.chunk_sizes[: index + 1])
        return f"{file.path}, row {row}"

    def _pieces(self, samples: npt.NDArray[np.int64]) -> Iterator[tuple[_Rows, int, _Rows]]:
        """For each chunk that is needed: the samples' places in the batch, the chunk, their rows in it."""
        starts = self._starts
        least, most = (samples.min(), samples.max()) if samples.size else (0, 0)
        first, last = np.searchsorted(self._stops, [least, most], side="right").tolist()
        if first == last:
            yield slice(None), first, run(samples - starts[first])
            return
        chunks = np.searchsorted(self._stops, samples, side="right")
        for chunk in np.flatnonzero(np.bincount(chunks)).tolist():
            places = np.flatnonzero(chunks == chunk)
            yield run(places), chunk, run(samples[places] - starts[chunk])

    def _chunk(self, number: int) -> dict[str, Array]:
        """A chunk's columns as arrays: kept from the last time, or read now."""
        with self._lock:
            known = self._decoded.get(number)
            if known is not None:
                self._decoded.move_to_end(number)
                return known.arrays
        file, index = self._chunks[number]
        decoded = _decoded(file, index, self._columns)
        with self._lock:
            self._decoded[number] = decoded
            while (
                len(self._decoded) > 2 and sum(each.num_bytes for each in self._decoded.values()) > self.cache_bytes
            ):
                self._decoded.popitem(last=False)
        return decoded.arrays


def _decoded(file: TableFile, index: int, columns: tuple[str, ...]) -> _Decoded:
    """A chunk's columns as arrays, put together where they come in pieces."""
    whole: dict[str, Array] = {}
    num_rows, num_bytes, at = file.chunk_sizes[index], 0, 0
    for piece in file.read_chunk(index, list(columns)):
        arrays = {name: as_array(piece.column(name), name, file.path) for name in columns}
        num_bytes += piece.nbytes
        if piece.num_rows == num_rows:
            return _Decoded(arrays, num_bytes)
        for name, values in arrays.items():
            if name not in whole:
                whole[name] = empty((num_rows, *values.shape[1:]), values.dtype)
            if whole[name].shape[1:] != values.shape[1:]:
                raise DataError(unequal(name, file.path))
            whole[name][at : at + len(values)] = values
        at += piece.num_rows
    return _Decoded(whole, num_bytes)


def _common_columns(files: Sequence[TableFile], columns: Sequence[str] | None) -> tuple[str, ...]:
    """The columns to read, if every file has them, each with one type."""
    first = files[0]
    wanted = tuple(first.types) if columns is None else tuple(columns)
    if not wanted:
        raise ConfigError(f"{first.path}: no columns to read; name at least one in columns=, or leave it out for all")
    for name in wanted:
        if name not in first.types:
            raise ConfigError(f"{first.path}: there is no column '{name}'; there are {', '.join(first.types)}")
    for file in files:
        if both := file.doubled.intersection(wanted):
            raise DataError(
                f"{file.path}: there are several columns '{min(both)}'; write it with names of their own, or choose "
                "others with columns="
            )
    for file in files[1:]:
        others = [name for name in file.types if name not in first.types] if columns is None else []
        for name in (*wanted, *others):
            left, right = first.types.get(name, "missing"), file.types.get(name, "missing")
            if left != right:
                raise DataError(
                    f"column '{name}' is {left} in {first.path} and {right} in {file.path}; write both with one "
                    "schema, or choose columns that all files share with columns="
                )
    return wanted
