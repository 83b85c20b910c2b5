"""A local folder: writes are atomic, and durable on return."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil

from syncline import faults
from syncline.store.trouble import explained

#: `list` has another meaning inside a folder.
Names = list[str]
PART = ".part"
_COPY_BYTES = 16 << 20
#: Written last and removed first: a checkpoint exists only with it.
MANIFEST = "manifest.json"


class LocalFolder:
    """A folder of this machine."""

    is_local = True

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.url = str(path)
        self.name = path.name

    def __repr__(self) -> str:
        return f"LocalFolder({self.url!r})"

    def join(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def parent(self) -> LocalFolder:
        return LocalFolder(self.path.parent)

    def list(self) -> Names:
        """The names in it, sorted; empty if it does not exist."""
        with explained(self.url, "cannot be listed"):
            try:
                return sorted(os.listdir(self.path))
            except FileNotFoundError:
                return []
            except NotADirectoryError:
                return []

    def exists(self, name: str) -> bool:
        with explained(self.url, "cannot be looked at"):
            return (self.path / name).exists()

    def size(self, name: str) -> int:
        with explained(f"{self.url}/{name}", "cannot be looked at"):
            return (self.path / name).stat().st_size

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        with explained(f"{self.url}/{name}", "cannot be read"), open(self.path / name, "rb") as file:
            file.seek(begin)
            return file.read(-1 if end is None else end - begin)

    def write(self, name: str, data: bytes, point: str = "") -> None:
        """Atomic and durable on return. `point`: the name of its fault point, if any."""
        with explained(f"{self.url}/{name}", "cannot be written"):
            descriptor = create(self.path / f"{name}{PART}")
            try:
                with contextlib.closing(os.fdopen(descriptor, "wb", buffering=0)) as file:
                    write_all(file.fileno(), memoryview(data), 0)
                    if faults.armed is not None and point:
                        faults.reach(f"{point}.written")
                    os.fsync(file.fileno())
                self.bring(name, point)
            except BaseException:
                discard(self.path / f"{name}{PART}")
                raise

    def bring(self, name: str, point: str = "") -> None:
        """Renames a synced temporary file to its final name."""
        os.rename(self.path / f"{name}{PART}", self.path / name)
        if faults.armed is not None and point:
            faults.reach(f"{point}.renamed")
        sync_folder(self.path)

    def put(self, source: pathlib.Path, name: str) -> None:
        """Copies a file, durable on return."""
        with explained(f"{self.url}/{name}", "cannot be written"):
            target = self.path / f"{name}{PART}"
            try:
                with open(source, "rb") as read, open(create(target), "wb") as written:
                    shutil.copyfileobj(read, written, _COPY_BYTES)
                    written.flush()
                    os.fsync(written.fileno())
                self.bring(name)
            except BaseException:
                discard(target)
                raise

    def remove(self, name: str) -> None:
        """Removes a file; a missing one is no error."""
        with explained(f"{self.url}/{name}", "cannot be removed"):
            (self.path / name).unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Removes the folder with all files, the manifest first."""
        with explained(self.url, "cannot be removed"):
            if (self.path / MANIFEST).exists():
                (self.path / MANIFEST).unlink()
                sync_folder(self.path)
            if self.path.is_dir():
                shutil.rmtree(self.path)
                sync_folder(self.path.parent)

    def make(self) -> None:
        """Creates the folder and its parents, durable on return."""
        with explained(self.url, "cannot be made"):
            missing = [self.path, *self.path.parents]
            missing = [path for path in missing if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            for path in reversed(missing):
                sync_folder(path.parent)

    def claim(self, name: str, data: bytes) -> bool:
        """Creates the folder with this file in it; False if it exists."""
        self.parent().make()
        with explained(self.url, "cannot be made"):
            try:
                os.mkdir(self.path)
            except FileExistsError:
                return False
            sync_folder(self.path.parent)
        self.write(name, data)
        return True


def create(path: pathlib.Path) -> int:
    """Opens an empty file for writing and removes leftovers of an earlier attempt."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Writes everything at this offset."""
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def sync_folder(path: pathlib.Path) -> None:
    """Makes creations, renames and removals in a folder durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def discard(path: pathlib.Path) -> None:
    """Removes a useless file; errors are ignored."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
