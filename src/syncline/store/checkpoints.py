"""Checkpoints of a folder: finding, reading, verifying, writing, pointers, pruning."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec

from syncline import faults
from syncline.core.checkpoint.manifest import Manifest, SavedFile
from syncline.core.checkpoint.schedule import SaveStanding, outdated
from syncline.core.checkpoint.soundness import check_manifest, checkpoint_name, decode_manifest, number_in
from syncline.errors import DamagedError, StoreError
from syncline.store.begun import BEGUN, begun_here, read_begun
from syncline.store.disk import MANIFEST
from syncline.store.folders import Folder
from syncline.store.tensors import TensorReader, in_threads
from syncline.store.trouble import MissingError

POINTERS = ("best", "last")
_MOST_MANIFEST_BYTES = 1 << 29
_MOST_POINTER_BYTES = 1 << 16
_MOST_CLAIMS = 100
_END = re.compile(rb"\n([0-9a-f]{64})\n\Z")


@dataclasses.dataclass(frozen=True)
class Found:
    """A folder whose name is that of a checkpoint."""

    name: str
    number: int
    manifest: Manifest | None = None  #: if it is valid
    digest: str = ""
    reason: str = ""  #: why there is no manifest
    is_unfinished: bool = False


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The checkpoint to resume from."""

    folder: Folder
    manifest: Manifest
    digest: str

    @property
    def name(self) -> str:
        return self.manifest.name


def find(folder: Folder) -> list[Found]:
    """All checkpoints in it, newest first."""
    return list(_each(folder))


def _each(folder: Folder) -> Iterator[Found]:
    numbers = {name: number for name in folder.list() if (number := number_in(name)) is not None}
    for name in sorted(numbers, key=lambda name: (-numbers[name], name)):
        yield _look(folder, name, numbers[name])


def _look(folder: Folder, name: str, number: int) -> Found:
    try:
        manifest, digest = read_manifest(folder.join(name))
    except MissingError:
        return Found(name, number, reason="has no manifest: it was not finished", is_unfinished=True)
    except StoreError as error:
        return Found(name, number, reason=str(error))
    if manifest.name != name:
        return Found(name, number, reason=f"its manifest is that of {manifest.name}")
    return Found(name, number, manifest, digest)


def read_manifest(folder: Folder, digest: str = "") -> tuple[Manifest, str]:
    """Reads and validates the manifest in a checkpoint's folder; returns it and its digest. `digest`: the expected
    one.

    DamagedError: it is invalid. MissingError: there is none. Any other StoreError tells nothing about it.
    """
    where = f"{folder.url}/{MANIFEST}"
    size = folder.size(MANIFEST)
    if size > _MOST_MANIFEST_BYTES:
        raise DamagedError(f"{where} is damaged: it has {size} bytes, at most {_MOST_MANIFEST_BYTES} are read")
    content = folder.read(MANIFEST)
    end = _END.search(content[-66:])
    text = content[:-65]
    found = hashlib.sha256(text).hexdigest()
    if end is None or end[1].decode() != found:
        raise DamagedError(f"{where} is damaged: its last line is not the sha256 of the rest")
    if digest and digest != found:
        raise StoreError(f"{where} is another one than expected: its digest is {found[:12]}…, not {digest[:12]}…")
    return decode_manifest(text, where), found


def files_of(manifest: Manifest) -> list[SavedFile]:
    """All files of a checkpoint except its manifest."""
    return [*manifest.files, *(script.file for script in manifest.scripts)]


def check_files(folder: Folder, manifest: Manifest) -> None:
    """Checks that every file exists with its size and header; does not read tensors."""
    for file in files_of(manifest):
        with TensorReader(folder, file) as reader:
            reader.check()


def verify(folder: Folder, manifest: Manifest) -> None:
    """Reads every tensor of every file, in threads; a StoreError names the first damaged one."""
    readers = [TensorReader(folder, file) for file in files_of(manifest)]
    try:
        for reader in readers:
            reader.check()
        every = [
            (reader, tensor.name)
            for reader, file in zip(readers, files_of(manifest), strict=True)
            for tensor in file.tensors
        ]
        num_bytes = sum(file.num_bytes for file in files_of(manifest))
        in_threads(lambda item: item[0].verify(item[1]), every, num_bytes)
    finally:
        for reader in readers:
            reader.close()


def candidates(folder: Folder, say: Callable[[str], None] = lambda words: None) -> Iterator[Chosen]:
    """The checkpoints that a path may mean: its own folder, a pointer, or a folder of checkpoints, newest first.

    Their manifests are valid, their tensors unread. `say` reports skipped ones.
    """
    if folder.exists(MANIFEST):
        yield Chosen(folder, *read_manifest(folder))
        return
    if folder.name in POINTERS and (fact := pointed(folder.parent(), folder.name)) is not None:
        target = folder.parent().join(fact["checkpoint"])
        try:
            yield Chosen(target, *read_manifest(target))
        except MissingError as error:
            raise StoreError(f"{folder.url} points at {target.url}, which is not there; name another") from error
        return
    for found in _each(folder):
        if found.manifest is not None:
            yield Chosen(folder.join(found.name), found.manifest, found.digest)
        elif not found.is_unfinished:
            say(f"{folder.url}/{found.name} is skipped: {found.reason}")


def choose(folder: Folder, say: Callable[[str], None], kind: str = "whole") -> Chosen | None:
    """The newest completely verified checkpoint of this kind, or None. Reports skipped ones and why."""
    for chosen in candidates(folder, say):
        if chosen.manifest.kind != kind:
            continue
        try:
            verify(chosen.folder, chosen.manifest)
            return chosen
        except StoreError as error:
            say(f"{chosen.folder.url} is skipped: {error}")
    return None


def next_number(folder: Folder) -> int:
    """Higher than the number of any checkpoint here, finished or not."""
    return 1 + max((number for name in folder.list() if (number := number_in(name)) is not None), default=0)


def begin(folder: Folder, number: int, step: int, lineage: str, token: str = "") -> Folder:
    """Creates the folder of a new checkpoint and records its writer.

    The folder and its number are unique: if another job saves here too, the number is higher than requested.
    """
    content = msgspec.json.encode(begun_here(lineage, token))
    for _ in range(_MOST_CLAIMS):
        made = folder.join(checkpoint_name(number, step))
        if made.claim(BEGUN, content):
            if not any(number_in(name) == number and name != made.name for name in folder.list()):
                return made
            made.remove_all()  # another one has this number: give way
        number = max(number + 1, next_number(folder))
    raise StoreError(f"{folder.url}: other jobs save here; give this one a folder of its own (--checkpoint)")


def abandon(folder: Folder, token: str) -> None:
    """Removes an unfinished checkpoint of this job; never one that another job has made under its name."""
    if read_begun(folder).token == token:
        folder.remove_all()


def write_manifest(folder: Folder, manifest: Manifest) -> str:
    """Completes a checkpoint; returns the manifest's digest. Call it when all files are there."""
    # JSON has only finite numbers
    finite = {name: value for name, value in manifest.metrics.items() if math.isfinite(value)}
    manifest = msgspec.structs.replace(manifest, metrics=finite)
    where = f"{folder.url}/{MANIFEST}"
    options = [spec.options for segment in manifest.segments for spec in segment.rules]
    if not _is_finite([manifest.steering, manifest.config, options]):
        raise StoreError(f"{where} cannot be written: its settings or rules have NaN or Inf, unknown to JSON")
    check_manifest(manifest, where)
    text = msgspec.json.encode(manifest) + b"\n"
    decode_manifest(text, where)  # never write an unreadable manifest
    digest = hashlib.sha256(text).hexdigest()
    folder.write(MANIFEST, b"%s%s\n" % (text, digest.encode()), "manifest")
    return digest


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def point(folder: Folder, name: str, checkpoint: str, **facts: Any) -> None:
    """Sets the pointer `best` or `last`."""
    assert name in POINTERS
    folder.write(name, msgspec.json.encode({"checkpoint": checkpoint, **facts}) + b"\n")


def pointed(folder: Folder, name: str) -> dict[str, Any] | None:
    """The content of `best` or `last`; None if it is unusable."""
    try:
        if folder.size(name) > _MOST_POINTER_BYTES:
            return None
        found = msgspec.json.decode(folder.read(name), type=dict[str, Any])
    except (MissingError, msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return found if number_in(str(found.get("checkpoint"))) is not None else None


def prune(
    folder: Folder, keep: int, lineage: str, best: Collection[str] = (), *, token: str = "", wholly: bool = False
) -> list[str]:
    """Removes checkpoints of this lineage by the retention rules; returns their names, oldest first. The target of
    `best` stays.

    `token`: unfinished ones of this job are removed; those of others when their writer is certainly gone. `wholly`:
    only fully read checkpoints count as sound; otherwise checking the files is enough.
    """
    fact = pointed(folder, "best")
    kept = {*best, *([fact["checkpoint"]] if fact else [])}
    gone = outdated([_standing(folder, found, token, wholly) for found in find(folder)], keep, lineage, kept)
    for name in gone:
        folder.join(name).remove_all()
        if faults.armed is not None:
            faults.reach("save.pruned")
    return gone


def _standing(folder: Folder, found: Found, token: str, wholly: bool) -> SaveStanding:
    if found.manifest is None:
        lineage = _left_by(folder.join(found.name), token) if found.is_unfinished else ""
        return SaveStanding(found.name, found.number, lineage, is_sound=False, is_unfinished=found.is_unfinished)
    try:
        (verify if wholly else check_files)(folder.join(found.name), found.manifest)
        is_sound = True
    except StoreError:
        is_sound = False
    is_whole = found.manifest.kind == "whole"
    return SaveStanding(found.name, found.number, found.manifest.lineage, is_sound, is_whole=is_whole)


def _left_by(folder: Folder, token: str) -> str:
    """The lineage of this unfinished checkpoint, if its writer is gone."""
    try:
        begun = read_begun(folder)
    except StoreError:
        return ""
    return begun.lineage if begun.token == token or begun.is_over else ""
