"""Parquet and Arrow IPC (Feather) files as tables; a chunk is a row group, or a record batch."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from syncline.data.extra import needed
from syncline.data.files import Files, explained
from syncline.data.table import TableFile, TableSource
from syncline.errors import DataError

_NUM_OPENED_AT_ONCE = 16
_STREAM = b"\xff" * 4  # the magic of an Arrow stream; a file starts with its name
PIECE_BYTES, LEAST_ROWS = 1 << 19, 256


class ParquetFile:
    """One Parquet file. Only its footer is kept; the file is opened for each row group."""

    def __init__(self, files: Files, path: str) -> None:
        self.path, self._files = path, files
        with self._opened() as file:
            self._footer = file.metadata
            self.types, self.doubled = _types(file.schema_arrow)
        self.chunk_sizes: Sequence[int] = [
            self._footer.row_group(i).num_rows for i in range(self._footer.num_row_groups)
        ]

    def read_chunk(self, index: int, columns: list[str]) -> Iterator[Any]:
        nested = needed("pyarrow", "Parquet files").types.is_nested
        with self._opened(metadata=self._footer) as file:
            if any(nested(self.types[name]) for name in columns):
                # pyarrow assembles lists faster in pieces that fit into the processor's cache.
                group = self._footer.row_group(index)
                num_rows = max(LEAST_ROWS, PIECE_BYTES * group.num_rows // max(group.total_byte_size, 1))
                yield from file.iter_batches(num_rows, row_groups=[index], columns=columns)
            else:
                yield file.read_row_group(index, columns=columns)

    @contextlib.contextmanager
    def _opened(self, **options: Any) -> Iterator[Any]:
        parquet = needed("pyarrow.parquet", "Parquet files")
        # Not mapped: truncating a mapped file would kill this process.
        with (
            whole(self.path, "Parquet"),
            _opened(self._files, self.path, "OSFile") as raw,
            parquet.ParquetFile(raw, pre_buffer=not self._files.is_local, **options) as file,
        ):
            yield file


class ArrowFile:
    """One Arrow IPC (Feather) file; memory-mapped if it is local."""

    def __init__(self, files: Files, path: str) -> None:
        self.path, self._files = path, files
        try:
            with self._opened() as reader:
                self._names = list(reader.schema.names)
                self.types, self.doubled = _types(reader.schema)
        except DataError as error:
            if self._is_stream():
                raise DataError(
                    f"{path}: an Arrow stream, which is read from its beginning only; write it as a file, with "
                    "pyarrow.ipc.new_file or pyarrow.feather.write_feather"
                ) from error
            raise
        # A footer has no row counts; reading one column of each record batch is the cheapest way.
        with self._opened([0]) as reader:
            self.chunk_sizes: Sequence[int] = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]

    def read_chunk(self, index: int, columns: list[str]) -> Iterator[Any]:
        fields = sorted(self._names.index(name) for name in columns)
        with self._opened(fields) as reader:
            yield reader.get_batch(index)

    def _is_stream(self) -> bool:
        with self._files.open(self.path) as file:
            return file.read(len(_STREAM)) == _STREAM

    @contextlib.contextmanager
    def _opened(self, fields: list[int] | None = None) -> Iterator[Any]:
        ipc = needed("pyarrow.ipc", "Arrow files")
        options = ipc.IpcReadOptions(included_fields=fields or [])
        with (
            whole(self.path, "Arrow IPC"),
            _opened(self._files, self.path, "memory_map") as raw,
            ipc.open_file(raw, options=options) as reader,
        ):
            yield reader


def _types(schema: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """The type of each column, and the duplicate column names."""
    doubled = frozenset(name for name, count in collections.Counter(schema.names).items() if count > 1)
    return dict(zip(schema.names, schema.types, strict=True)), doubled


def _opened(files: Files, path: str, local: str) -> Any:
    """Opens a file: by Arrow itself if it is local, else through the driver."""
    return getattr(needed("pyarrow", "Arrow files"), local)(path) if files.is_local else files.open(path)


@contextlib.contextmanager
def whole(path: str, kind: str) -> Iterator[None]:
    """Turns Arrow's errors about a file into a DataError that names it."""
    arrow = needed("pyarrow", f"{kind} files")
    with explained(path):
        try:
            yield
        except (arrow.ArrowException, EOFError) as error:
            raise DataError(
                f"{path}: not a whole {kind} file ({error}); it may have been cut short: copy or write it again"
            ) from error
        except OSError as error:
            if isinstance(error, FileNotFoundError | PermissionError):
                raise
            raise DataError(f"{path}: damaged, or not a {kind} file ({error}); copy or write it again") from error


def _each(kind: Callable[[Files, str], TableFile], files: Files) -> list[TableFile]:
    """Opens all files; remote ones concurrently."""
    if files.is_local or len(files.paths) == 1:
        return [kind(files, path) for path in files.paths]
    with concurrent.futures.ThreadPoolExecutor(min(_NUM_OPENED_AT_ONCE, len(files.paths))) as pool:
        return list(pool.map(lambda path: kind(files, path), files.paths))


def open_parquet(files: Files, columns: Sequence[str] | None = None) -> TableSource:
    """Parquet files as one source."""
    return TableSource("Parquet", _each(ParquetFile, files), columns)


def open_arrow(files: Files, columns: Sequence[str] | None = None) -> TableSource:
    """Arrow IPC (Feather) files as one source."""
    return TableSource("Arrow", _each(ArrowFile, files), columns)
