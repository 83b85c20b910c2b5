"""Tensors of one file, written and read by many threads, each with its digest."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from syncline import faults
from syncline.config import num_cores
from syncline.core.checkpoint import tensor_file
from syncline.core.checkpoint.manifest import SavedFile, SavedTensor
from syncline.core.checkpoint.soundness import check_file_name
from syncline.errors import DamagedError, StoreError
from syncline.store.disk import PART, LocalFolder, create, discard, write_all
from syncline.store.folders import Folder
from syncline.store.trouble import MissingError, explained

#: A chunk is hashed and written, or read and hashed, while it is in the cache.
CHUNK_BYTES = 1 << 20
_MOST_VIEWS = 512  # per system call
_MOST_THREADS = 8

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]


def new_digest(data: bytes | memoryview = b"") -> xxhash.xxh3_128:
    """Detects damage at memory speed, not malice: a writer of the file could also write the manifest."""
    return xxhash.xxh3_128(data)


class TensorWriter:
    """Writes one safetensors file. Tensors may come in any order, from any thread, each once."""

    def __init__(
        self,
        folder: Folder,
        name: str,
        plan: Sequence[tensor_file.Planned],
        metadata: dict[str, str] | None = None,
    ) -> None:
        """Writes the header at once; the file gets its final name in `finish`."""
        check_file_name(name)
        self._folder, self._name = folder, name
        self._header, entries = tensor_file.plan(plan, metadata)
        self._entries = {entry.name: entry for entry in entries}
        self._digests: dict[str, str] = {}
        self._claimed: set[str] = set()
        self._lock = threading.Lock()
        self._trouble: StoreError | None = None
        self._descriptor = -1
        with self._explained():
            self._path, self._descriptor = _spool(folder, name)
            try:
                write_all(self._descriptor, memoryview(self._header), 0)
            except BaseException:
                self.abandon()
                raise

    @property
    def num_bytes(self) -> int:
        return len(self._header) + max((entry.end for entry in self._entries.values()), default=0)

    def write(self, name: str, data: Buffer) -> None:
        """Writes a tensor. An error fails the whole file: `finish` raises it again."""
        entry = self._claim(name)
        view = _bytes_of(data)
        try:
            if view.nbytes != entry.end - entry.begin:
                raise StoreError(f"{self._where}: {name!r} has {view.nbytes} bytes, not {entry.end - entry.begin}")
            with self._explained():
                digest = self._write(view, len(self._header) + entry.begin)
        except StoreError as error:
            self._trouble = error
            raise
        with self._lock:
            self._digests[name] = digest

    def finish(self) -> SavedFile:
        """Syncs the file and gives it its name. After any error nothing is left: StoreError."""
        try:
            if self._trouble is not None:
                raise StoreError(str(self._trouble))
            missing = [name for name in self._entries if name not in self._digests]
            if missing:
                raise StoreError(f"{self._where}: {len(missing)} tensors were not written, {missing[0]!r} first")
            with self._explained():
                self._settle()
        except BaseException:
            self.abandon()
            raise
        digest = new_digest(self._header).hexdigest()
        return SavedFile(self._name, self.num_bytes, digest, tuple(map(self._saved, self._entries.values())))

    def abandon(self) -> None:
        """Removes what was written; idempotent."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            discard(self._path)

    @property
    def _where(self) -> str:
        return f"{self._folder.url}/{self._name}"

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        return explained(self._where, "cannot be written")

    def _claim(self, name: str) -> tensor_file.Entry:
        with self._lock:
            if name not in self._entries or name in self._claimed:
                raise StoreError(f"{self._where}: {name!r} is not in the plan, or was written already")
            self._claimed.add(name)
        return self._entries[name]

    def _write(self, view: memoryview, offset: int) -> str:
        digest = new_digest()
        for begin in range(0, view.nbytes, CHUNK_BYTES):
            chunk = view[begin : begin + CHUNK_BYTES]
            digest.update(chunk)
            write_all(self._descriptor, chunk, offset + begin)
        return digest.hexdigest()

    def _settle(self) -> None:
        """Syncs the file before it gets its name; a failed fsync is never repeated on the same file."""
        if faults.armed is not None:
            faults.reach("save.written")
        if isinstance(self._folder, LocalFolder):
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            try:
                self._folder.bring(self._name, "save")
            except BaseException:
                discard(self._path)
                discard(self._folder.path / self._name)
                raise
        else:
            self._folder.put(self._path, self._name)
            if faults.armed is not None:
                faults.reach("save.renamed")
            self.abandon()

    def _saved(self, entry: tensor_file.Entry) -> SavedTensor:
        digest = self._digests[entry.name]
        return SavedTensor(entry.name, entry.dtype, entry.shape, entry.begin, entry.end, digest)


class TensorReader:
    """Reads the tensors of a file listed in a manifest. Thread-safe."""

    def __init__(self, folder: Folder, file: SavedFile) -> None:
        """Opens nothing yet: the header is checked before the first tensor."""
        check_file_name(file.name)
        self._folder, self._file = folder, file
        self._tensors = {tensor.name: tensor for tensor in file.tensors}
        self._begin = 0
        self._descriptor = -1
        self._is_open = False
        self._lock = threading.Lock()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor, self._is_open = self._descriptor, -1, False
        if descriptor >= 0:
            os.close(descriptor)

    def check(self) -> None:
        """Checks that the file exists with its size and the manifest's header."""
        with self._lock:
            if not self._is_open:
                try:
                    self._open()
                except MissingError as error:
                    raise DamagedError(f"{self._where} is missing: the checkpoint is damaged") from error
                self._is_open = True

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor in new memory, with a verified digest."""
        self.check()  # before memory is allocated
        found = np.empty(self._tensor(name).end - self._tensor(name).begin, np.uint8)
        self.read_into(name, [found.data])
        return found

    def read_into(self, name: str, views: Sequence[memoryview]) -> None:
        """Reads a tensor into consecutive buffers. After an error their content is invalid."""
        tensor = self._tensor(name)
        views = [_bytes_of(view) for view in views]
        if sum(view.nbytes for view in views) != tensor.end - tensor.begin:
            raise StoreError(f"{self._where}: {name!r} has {tensor.end - tensor.begin} bytes, others are asked for")
        self.check()
        if self._folder.is_local:
            with explained(self._where, "cannot be read"):
                digest = self._read_local(views, self._begin + tensor.begin)
        else:
            digest = self._read_remote(views, tensor)
        if digest != tensor.digest:
            raise DamagedError(f"{self._where} is damaged: {name!r} is not what was saved (its digest differs)")

    def verify(self, name: str) -> None:
        """Like `read`, keeping nothing."""
        self.check()
        tensor = self._tensor(name)
        scratch = _scratch().data
        whole, rest = divmod(tensor.end - tensor.begin, scratch.nbytes)
        self.read_into(name, [*[scratch] * whole, scratch[:rest]])

    @property
    def _where(self) -> str:
        return f"{self._folder.url}/{self._file.name}"

    def _tensor(self, name: str) -> SavedTensor:
        if name not in self._tensors:
            raise StoreError(f"{self._where} has no tensor {name!r}")
        return self._tensors[name]

    def _open(self) -> None:
        file = self._file
        with explained(self._where, "cannot be read"):
            size = self._folder.size(file.name)
            if size != file.num_bytes:
                raise DamagedError(f"{self._where} is damaged: it has {size} bytes, {file.num_bytes} were saved")
            first = self._folder.read(file.name, 0, tensor_file.LENGTH_BYTES)
            self._begin = tensor_file.header_bytes(first, size, self._where)
            header = self._folder.read(file.name, 0, self._begin)
            if new_digest(header).hexdigest() != file.header_digest:
                raise DamagedError(f"{self._where} is damaged: its header is not what was saved (its digest differs)")
            if list(map(_place, tensor_file.parse(header, size, self._where))) != list(map(_place, file.tensors)):
                raise DamagedError(f"{self._where} is damaged: its header has other tensors than the manifest")
            if self._folder.is_local:
                self._descriptor = os.open(self._folder.path / file.name, os.O_RDONLY | os.O_CLOEXEC)

    def _read_local(self, views: Iterable[memoryview], offset: int) -> str:
        digest = new_digest()
        for group in _groups(views):
            wanted = sum(view.nbytes for view in group)
            got = os.preadv(self._descriptor, group, offset)
            if got != wanted:  # rare: a signal, or the file was truncated
                self._read_rest(group, offset, got)
            for view in group:
                digest.update(view)
            offset += wanted
        return digest.hexdigest()

    def _read_rest(self, group: Sequence[memoryview], offset: int, got: int) -> None:
        begin = 0
        for view in group:
            done = min(max(got - begin, 0), view.nbytes)
            while done < view.nbytes:
                count = os.preadv(self._descriptor, [view[done:]], offset + begin + done)
                if not count:
                    raise DamagedError(f"{self._where} is damaged: it was cut while it was read")
                done += count
            begin += view.nbytes

    def _read_remote(self, views: Iterable[memoryview], tensor: SavedTensor) -> str:
        data = memoryview(self._folder.read(self._file.name, self._begin + tensor.begin, self._begin + tensor.end))
        if data.nbytes != tensor.end - tensor.begin:
            raise DamagedError(f"{self._where} is damaged: {tensor.name!r} is cut short")
        begin = 0
        for view in views:
            view[:] = data[begin : begin + view.nbytes]
            begin += view.nbytes
        return new_digest(data).hexdigest()


def in_threads(function: Callable[[Any], None], items: Iterable[Any], num_bytes: int = 1 << 62) -> None:
    """Calls the function for each item in several threads; the first error ends it and is raised.

    `num_bytes`: the total; small totals use no threads.
    """
    items = list(items)
    num_threads = min(max(2, num_cores()), _MOST_THREADS, len(items), num_bytes // CHUNK_BYTES)
    if num_threads <= 1:
        for item in items:
            function(item)
        return
    with concurrent.futures.ThreadPoolExecutor(num_threads, "syncline store") as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def _spool(folder: Folder, name: str) -> tuple[pathlib.Path, int]:
    """The temporary file: beside the final name, or local if it is uploaded later."""
    if folder.is_local:
        path = folder.path / f"{name}{PART}"
        return path, create(path)
    descriptor, text = tempfile.mkstemp(prefix="syncline-", suffix=PART)
    return pathlib.Path(text), descriptor


def _bytes_of(data: Buffer) -> memoryview:
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if not view.c_contiguous:
        raise StoreError("the bytes of a tensor must lie together; make it contiguous first")
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


def _groups(views: Iterable[memoryview]) -> Iterable[list[memoryview]]:
    """The same bytes in chunks for single system calls."""
    group: list[memoryview] = []
    room = CHUNK_BYTES
    for view in views:
        begin = 0
        while begin < view.nbytes:
            part = view[begin : begin + room]
            group.append(part)
            begin += part.nbytes
            room -= part.nbytes
            if not room or len(group) >= _MOST_VIEWS:
                yield group
                group, room = [], CHUNK_BYTES
    if group:
        yield group


def _place(entry: tensor_file.Entry | SavedTensor) -> tuple[str, str, tuple[int, ...], int, int]:
    return entry.name, entry.dtype, entry.shape, entry.begin, entry.end


_local = threading.local()


def _scratch() -> npt.NDArray[np.uint8]:
    """Scratch memory of this thread."""
    if not hasattr(_local, "scratch"):
        _local.scratch = np.empty(CHUNK_BYTES, np.uint8)
    found: npt.NDArray[np.uint8] = _local.scratch
    return found
