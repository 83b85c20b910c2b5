"""A second copy of a checkpoint, verified before it counts."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

import msgspec

from syncline.core.checkpoint.manifest import Manifest
from syncline.core.checkpoint.soundness import number_in
from syncline.errors import DamagedError, StoreError
from syncline.store.begun import BEGUN, begun_here, read_begun
from syncline.store.checkpoints import files_of, read_manifest, verify
from syncline.store.disk import MANIFEST, discard
from syncline.store.folders import Folder
from syncline.store.trouble import MissingError, explained

_COPY_BYTES = 16 << 20


def copy_checkpoint(source: Folder, target: Folder, name: str) -> str:
    """Copies a checkpoint to another folder: files first, the manifest last; returns its digest.

    The copy is read back and all digests are compared before the manifest is written. An existing copy is kept; a
    different checkpoint of the same name is never overwritten.
    """
    if number_in(name) is None:
        raise StoreError(f"{name!r} is not the name of a checkpoint")
    here, there = source.join(name), target.join(name)
    manifest, digest = read_manifest(here)
    if _has(there, digest):
        return digest
    _claim(here, there, manifest)
    for file in files_of(manifest):
        with _on_this_machine(here, file.name) as path:
            there.put(path, file.name)
    verify(there, manifest)
    content = here.read(MANIFEST)
    there.write(MANIFEST, content)
    read_manifest(there, digest)
    return digest


def _claim(here: Folder, there: Folder, manifest: Manifest) -> None:
    """Records the owner of the copy first, so that retention can remove an unfinished one."""
    begun = begun_here(manifest.lineage, read_begun(here).token)
    data = msgspec.json.encode(begun)
    if there.claim(BEGUN, data):
        return
    other = read_begun(there)
    if other.token != begun.token and not other.is_over:
        raise StoreError(f"{there.url} is being copied by another job; mirror this one to a folder of its own")
    there.make()
    there.write(BEGUN, data)


def _has(folder: Folder, digest: str) -> bool:
    """Whether this checkpoint is already there; anything else in its place must not be a checkpoint.

    If the store only returns errors, nothing is removed: StoreError.
    """
    try:
        manifest, found = read_manifest(folder)
    except MissingError:
        return False
    except DamagedError:
        folder.remove(MANIFEST)  # it was no checkpoint
        return False
    if found != digest:
        raise StoreError(f"{folder.url} is another checkpoint of that name; mirror this job to a folder of its own")
    try:
        verify(folder, manifest)
        return True
    except DamagedError:
        folder.remove(MANIFEST)
        return False


@contextlib.contextmanager
def _on_this_machine(folder: Folder, name: str) -> Iterator[pathlib.Path]:
    """A local path of the file; a remote one is downloaded for the duration."""
    if folder.is_local:
        yield folder.path / name
        return
    with explained(f"{folder.url}/{name}", "cannot be copied"):
        descriptor, text = tempfile.mkstemp(prefix="syncline-", suffix=".part")
        path = pathlib.Path(text)
        try:
            with open(descriptor, "wb") as file:
                size = folder.size(name)
                for begin in range(0, size, _COPY_BYTES):
                    file.write(folder.read(name, begin, min(begin + _COPY_BYTES, size)))
            yield path
        finally:
            discard(path)
