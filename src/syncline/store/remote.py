"""A folder on any fsspec file system: objects are written whole and checked afterwards."""

from __future__ import annotations

import importlib
import os
import pathlib
from typing import Any

from syncline import faults
from syncline.errors import StoreError
from syncline.store.disk import MANIFEST, Names
from syncline.store.trouble import explained

_DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "sftp": "paramiko"}


def open_remote(url: str) -> RemoteFolder:
    """Opens an address. A StoreError names a missing driver, or fsspec itself."""
    protocol = url.partition("://")[0]
    try:
        core: Any = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise StoreError(f'{url}: {protocol}:// needs fsspec: pip install "syncline[data]" ({error})') from error
    try:
        driver, root = core.url_to_fs(url)
    except ImportError as error:
        package = _DRIVERS.get(protocol, f"fsspec's driver for it ({error})")
        raise StoreError(f"{url}: no driver for {protocol}:// is installed: pip install {package}") from error
    except ValueError as error:
        raise StoreError(
            f"{url} cannot be opened: {error}; known are local paths, s3://, gs://, memory://, …"
        ) from error
    except Exception as error:  # drivers raise errors of their own libraries
        raise StoreError(f"{url} cannot be opened: {type(error).__name__}: {error}; check the address") from error
    return RemoteFolder(url.rstrip("/"), driver, root.rstrip("/"))


class RemoteFolder:
    """A folder, or a prefix of object names."""

    is_local = False

    def __init__(self, url: str, driver: Any, root: str) -> None:
        self.url, self._fs, self._root = url, driver, root
        self.name = url.rpartition("/")[2]
        self._made_in = os.getpid()

    def __repr__(self) -> str:
        return f"RemoteFolder({self.url!r})"

    @property
    def path(self) -> pathlib.Path:
        raise StoreError(f"{self.url} is not on this machine")

    @property
    def _driver(self) -> Any:
        """The driver; a new one after a fork, which leaves its threads behind."""
        if os.getpid() != self._made_in:
            self._fs = type(self._fs)(*self._fs.storage_args, **self._fs.storage_options)
            self._made_in = os.getpid()
        return self._fs

    def join(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.url}/{name}", self._fs, f"{self._root}/{name}")

    def parent(self) -> RemoteFolder:
        return RemoteFolder(self.url.rpartition("/")[0], self._fs, self._root.rpartition("/")[0])

    def list(self) -> Names:
        with explained(self.url, "cannot be listed"):
            try:
                names = self._driver.ls(self._root, detail=False, refresh=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            found = {name.rstrip("/").removeprefix(self._root).strip("/") for name in names}
            return sorted(name for name in found if name and "/" not in name)

    def exists(self, name: str) -> bool:
        with explained(self.url, "cannot be looked at"):
            self._driver.invalidate_cache(self._root)
            try:
                self._driver.info(f"{self._root}/{name}")  # drivers' `exists` treats any error as False
            except FileNotFoundError:
                return False
            return True

    def size(self, name: str) -> int:
        with explained(f"{self.url}/{name}", "cannot be looked at"):
            self._driver.invalidate_cache(self._root)
            return int(self._driver.info(f"{self._root}/{name}")["size"])

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        with explained(f"{self.url}/{name}", "cannot be read"):
            if end is not None and end <= begin:
                return b""
            return bytes(self._driver.cat_file(f"{self._root}/{name}", start=begin or None, end=end))

    def write(self, name: str, data: bytes, point: str = "") -> None:
        with explained(f"{self.url}/{name}", "cannot be written"):
            if faults.armed is not None and point:
                faults.reach(f"{point}.written")
            self._driver.pipe_file(f"{self._root}/{name}", data)
            if faults.armed is not None and point:
                faults.reach(f"{point}.renamed")
        self._check(name, len(data))

    def put(self, source: pathlib.Path, name: str) -> None:
        with explained(f"{self.url}/{name}", "cannot be written"):
            self._driver.put_file(str(source), f"{self._root}/{name}")
        self._check(name, source.stat().st_size)

    def remove(self, name: str) -> None:
        with explained(f"{self.url}/{name}", "cannot be removed"):
            if self.exists(name):
                self._driver.rm_file(f"{self._root}/{name}")

    def remove_all(self) -> None:
        """Removes all files, the manifest first."""
        with explained(self.url, "cannot be removed"):
            self.remove(MANIFEST)
            self._driver.invalidate_cache(self._root)
            if self._driver.exists(self._root):
                self._driver.rm(self._root, recursive=True)

    def make(self) -> None:
        """Creates the folder if the store has real folders."""
        with explained(self.url, "cannot be made"):
            self._driver.makedirs(self._root, exist_ok=True)

    def claim(self, name: str, data: bytes) -> bool:
        """Creates the folder with this file in it; False if it exists, as far as the store can tell."""
        if self.list():
            return False
        self.make()
        with explained(f"{self.url}/{name}", "cannot be written"):
            try:
                self._driver.pipe_file(f"{self._root}/{name}", data, mode="create")
            except FileExistsError:
                return False
            except (TypeError, NotImplementedError):  # not supported by the driver: the last writer wins
                self._driver.pipe_file(f"{self._root}/{name}", data)
        return self.read(name) == data

    def _check(self, name: str, size: int) -> None:
        found = self.size(name)
        if found != size:
            raise StoreError(f"{self.url}/{name} has {found} bytes, {size} were written; check the store")
