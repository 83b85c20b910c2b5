"""Where versions come from: a folder of checkpoints, one checkpoint, or a safetensors file."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from syncline.core.checkpoint import tensor_file
from syncline.core.checkpoint.soundness import number_in
from syncline.errors import ConfigError, StoreError
from syncline.serve.model import SavedWeights
from syncline.store.checkpoints import POINTERS, Chosen, candidates, pointed
from syncline.store.folders import Folder, open_folder
from syncline.store.trouble import explained
from syncline.store.weights import AVERAGE, PARAMETERS, Weight, Weights

PICKS = ("best", "last")
AS_MADE = "as made"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A version that can be loaded: its name, what makes it differ from others, and where it is."""

    name: str
    digest: str
    where: str
    step: int
    read: Callable[[], SavedWeights] = dataclasses.field(compare=False)
    is_stand_in: bool = False  #: for a preferred one that must not answer; only while no version answers

    @property
    def is_as_made(self) -> bool:
        """It is no saved version, but the model as it is made."""
        return self.digest == AS_MADE


def as_made(where: str) -> Candidate:
    """The model as it is made there."""
    return Candidate("1", AS_MADE, where, 0, dict)


class VersionSource(Protocol):
    """Where versions come from."""

    def look(self) -> Iterator[Candidate]:
        """What can be served now, the preferred one first. StoreError if there is nothing."""

    def resume(self, name: str, digest: str) -> None:
        """Another process has tried this version last; names go on from there."""

    @property
    def trouble(self) -> str:
        """Why nothing new can come now, for people; '': nothing is known of any."""


def open_source(path: str | os.PathLike[str], pick: str = "best") -> VersionSource:
    """The source that a path means: a `.safetensors` file, a checkpoint's folder, or a folder of checkpoints."""
    if pick not in PICKS:
        raise ConfigError(f"--pick {pick}: must be one of {', '.join(PICKS)}")
    text = os.fspath(path)
    if text.endswith((".pt", ".pth", ".pkl", ".bin")):
        raise ConfigError(
            f"{text}: files of torch.save can run code when they are read; serve a checkpoint's folder, or a "
            ".safetensors file (`syncline export DIR --safetensors model.safetensors`)"
        )
    if text.endswith(".safetensors"):
        return TensorFileSource(pathlib.Path(text))
    return CheckpointSource(open_folder(text), pick)


class CheckpointSource:
    """A folder of checkpoints, `best` first or the newest; or the folder of one, or a pointer."""

    def __init__(self, folder: Folder, pick: str) -> None:
        self._folder, self._pick = folder, pick
        self.trouble = ""  #: why `best` cannot be read

    def look(self) -> Iterator[Candidate]:
        reasons: list[str] = []
        num_found = 0
        is_stand_in, self.trouble = False, ""
        if self._pick == "best" and self._folder.name not in POINTERS and self._folder.exists("best"):
            best = self._folder.join("best")
            if pointed(self._folder, "best") is None:
                reasons.append(f"{best.url} names no checkpoint")
            else:
                for candidate in self._of(best, reasons):
                    num_found += 1
                    yield candidate
            is_stand_in = True
            if not num_found:
                self.trouble = next(iter(reasons), f"{best.url} cannot be read")
        for candidate in self._of(self._folder, reasons):
            num_found += 1
            yield dataclasses.replace(candidate, is_stand_in=is_stand_in)
        if not num_found:
            raise StoreError(
                f"{self._folder.url} holds no checkpoint that can be served"
                f"{''.join(f'; {reason}' for reason in reasons[:3])}; see `syncline checkpoint ls`"
            )

    def resume(self, name: str, digest: str) -> None:
        """Names are those of the checkpoints."""

    def _of(self, folder: Folder, reasons: list[str]) -> Iterator[Candidate]:
        which = PARAMETERS
        if folder.name in POINTERS:
            fact = pointed(folder.parent(), folder.name)
            which = AVERAGE if fact is not None and fact.get("weights") == AVERAGE else PARAMETERS
        found = candidates(folder, reasons.append)
        while True:
            try:
                chosen = next(found, None)
            except StoreError as error:
                reasons.append(str(error))
                return
            if chosen is None:
                return
            yield _candidate(chosen, which)


class TensorFileSource:
    """One safetensors file; a file that replaces it is a new version."""

    trouble = ""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._num_seen = 0
        self._last = ""

    def resume(self, name: str, digest: str) -> None:
        if name:
            self._num_seen, self._last = int(name), digest

    def look(self) -> Iterator[Candidate]:
        with explained(str(self._path), "cannot be read"):
            stat = self._path.stat()
        digest = hashlib.sha256(f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
        if digest != self._last:
            self._last = digest
            self._num_seen += 1
        yield Candidate(str(self._num_seen), digest, str(self._path), 0, self.read)

    def read(self) -> SavedWeights:
        """All tensors of the file. StoreError: it cannot be read."""
        where = str(self._path)
        with explained(where, "cannot be read"), self._path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = tensor_file.header_bytes(file.read(tensor_file.LENGTH_BYTES), size, where)
            file.seek(0)
            entries = tensor_file.parse(file.read(header), size, where)
            found = {}
            for entry in entries:
                data = np.empty(entry.end - entry.begin, np.uint8)
                if file.readinto(data.data) != data.size:
                    raise StoreError(f"{where} was cut while it was read")
                found[entry.name] = (Weight(entry.name, entry.dtype, entry.shape), data)
        return found


def _candidate(chosen: Chosen, which: str) -> Candidate:
    # An average of the same checkpoint is another version.
    digest = chosen.digest if which == PARAMETERS else f"{chosen.digest} {which}"
    number = number_in(chosen.name)
    name = f"{number if number is not None else chosen.name}{'' if which == PARAMETERS else '-average'}"

    def read() -> SavedWeights:
        return Weights(chosen, weights=which).read()

    return Candidate(name, digest, chosen.folder.url, chosen.manifest.step, read)
