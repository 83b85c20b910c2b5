"""Where checkpoints are stored: a local folder, or any that fsspec has a driver for."""

from __future__ import annotations

import os
import pathlib
from typing import Protocol

from syncline.errors import StoreError
from syncline.store.disk import LocalFolder, Names
from syncline.store.remote import open_remote


class Folder(Protocol):
    """What both kinds guarantee. Every error is a StoreError that names the place and the remedy."""

    is_local: bool
    url: str
    name: str

    @property
    def path(self) -> pathlib.Path:
        """Only for local folders."""

    def join(self, name: str) -> Folder:
        """A folder in it."""

    def parent(self) -> Folder:
        """The folder that it is in."""

    def list(self) -> Names:
        """The names in it, sorted; empty if it does not exist."""

    def exists(self, name: str) -> bool: ...

    def size(self, name: str) -> int: ...

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes of a file; fewer if it ends earlier."""

    def write(self, name: str, data: bytes, point: str = "") -> None:
        """Writes a small file: atomic and durable on return."""

    def put(self, source: pathlib.Path, name: str) -> None:
        """Copies a local file, durable on return."""

    def remove(self, name: str) -> None:
        """Removes a file; a missing one is no error."""

    def remove_all(self) -> None:
        """Removes the folder with all files, the manifest first."""

    def make(self) -> None:
        """Creates the folder and missing parents."""

    def claim(self, name: str, data: bytes) -> bool:
        """Creates the folder with this file in it; False if it exists."""


def check_writable(folder: Folder) -> None:
    """Makes the folder and writes to it. Raises StoreError, with the remedy, where that fails: at launch, not at the
    first save."""
    folder.make()
    probe = f".syncline-{os.getpid()}"
    folder.write(probe, b"syncline")
    folder.remove(probe)


def open_folder(url: str | os.PathLike[str]) -> Folder:
    """A folder by path or address; it need not exist."""
    url = os.fspath(url)
    protocol, separator, rest = url.partition("://")
    if not separator:
        rest = url
    elif protocol != "file":
        return open_remote(url)
    if not rest:
        raise StoreError("the path of a folder is empty; name one")
    return LocalFolder(pathlib.Path(os.path.abspath(os.path.expanduser(rest))))
