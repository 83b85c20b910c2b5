"""Where checkpoints lie: a folder of this machine, or any that fsspec has a driver for."""

from __future__ import annotations

import os
import pathlib
from typing import Protocol

from syncline.errors import StoreError
from syncline.store.disk import LocalFolder, Names
from syncline.store.remote import open_remote


class Folder(Protocol):
    """What both kinds promise. Every error is a StoreError that names the place and the remedy."""

    is_local: bool
    url: str
    name: str

    @property
    def path(self) -> pathlib.Path:
        """On this machine only."""

    def join(self, name: str) -> Folder:
        """A folder in it."""

    def parent(self) -> Folder:
        """The folder that it is in."""

    def list(self) -> Names:
        """Names of what is in it, sorted; none when it is not there."""

    def exists(self, name: str) -> bool: ...

    def size(self, name: str) -> int: ...

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes of a file; fewer where it ends before."""

    def write(self, name: str, data: bytes, point: str = "") -> None:
        """A small file: whole or not at all, durable when it returns."""

    def put(self, source: pathlib.Path, name: str) -> None:
        """A copy of a file of this machine, durable when it returns."""

    def remove(self, name: str) -> None:
        """A file; one that is not there is no error."""

    def remove_all(self) -> None:
        """The folder with all files in it; of a checkpoint first what makes it one."""

    def make(self) -> None:
        """The folder and those above it, where they are missing."""

    def claim(self, name: str, data: bytes) -> bool:
        """Makes the folder, with this file in it; False: somebody else has made it."""


def check_writable(folder: Folder) -> None:
    """Makes the folder and writes to it. Raises StoreError, with the remedy, where that fails: at launch, not at the
    first save."""
    folder.make()
    probe = f".syncline-{os.getpid()}"
    folder.write(probe, b"syncline")
    folder.remove(probe)


def open_folder(url: str | os.PathLike[str]) -> Folder:
    """A folder by its path or address; it need not be there yet."""
    url = os.fspath(url)
    protocol, separator, rest = url.partition("://")
    if not separator:
        rest = url
    elif protocol != "file":
        return open_remote(url)
    if not rest:
        raise StoreError("the path of a folder is empty; name one")
    return LocalFolder(pathlib.Path(os.path.abspath(os.path.expanduser(rest))))
