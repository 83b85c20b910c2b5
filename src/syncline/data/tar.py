"""WebDataset shards: tar files in which the files of one sample stand together and share their name.

`dir/0007.jpg` and `dir/0007.cls` are the sample `dir/0007` with the fields `jpg` and `cls`. What the extension says
is decoded: `npy` to an array, `json`, `txt` to text, `cls` to an int; images to a uint8 array where Pillow is
installed. Everything else stays bytes. The key is in the field `__key__`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from syncline.data.files import Files, explained
from syncline.data.plain import objects_in
from syncline.data.source import Sample, counted
from syncline.errors import ConfigError, DataError

KEY = "__key__"
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp")


class TarSource:
    """Tar shards, plain or compressed, read in sequence; `decode=False` leaves every field as its bytes."""

    def __init__(self, files: Files, columns: Sequence[str] | None = None, *, decode: bool = True) -> None:
        if columns is not None and not columns:
            raise ConfigError(f"{files.path}: no columns to read; name at least one, or leave columns= out for all")
        self._files, self._columns = files, None if columns is None else tuple(columns)
        self._decoders = _decoders() if decode else {}

    def describe(self) -> str:
        fields = "" if self._columns is None else f": fields {', '.join(self._columns)}"
        return f"{counted(len(self._files.paths), 'tar shard')}{fields}"

    @property
    def shards(self) -> Sequence[str]:
        return self._files.paths

    def iter_shard(self, index: int, skip: int = 0) -> Iterator[Sample]:
        path = self._files.paths[index]
        number = -1
        with _whole(path), self._files.open(path) as raw, _archive(raw) as archive:
            members = (member for member in archive if not (member.isdir() or _is_hidden(member.name)))
            for number, (key, group) in enumerate(itertools.groupby(members, lambda member: _split(member.name)[0])):
                if number >= skip:
                    yield self._sample(archive, key, group, f"{path}, sample {number} ({key})")
        if number < 0:
            raise DataError(f"{path}: there is no sample in it; write some, or leave the shard out")

    def _sample(self, archive: tarfile.TarFile, key: str, members: Iterator[tarfile.TarInfo], where: str) -> Sample:
        sample: Sample = {KEY: key}
        for member in members:
            field = _split(member.name)[1]
            if self._columns is not None and field not in self._columns:
                continue
            if not member.isfile():  # read in sequence, what it leads to may be behind us
                raise DataError(
                    f"{where}: {member.name} is a link, not a file; write the shard with "
                    "`tar --dereference --hard-dereference`"
                )
            if field in sample:
                raise DataError(f"{where}: there are two of '{field}' in it; give one of them another name")
            file = archive.extractfile(member)
            assert file is not None, member.name
            sample[field] = self._decoded(field, file.read(), where)
        missing = [name for name in self._columns or () if name not in sample]
        if missing:
            raise DataError(f"{where}: there is no '{missing[0]}'; choose fields that every sample has")
        return sample

    def _decoded(self, field: str, content: bytes, where: str) -> Any:
        decode = self._decoders.get(field.rpartition(".")[2])
        if decode is None:
            return content
        try:
            return decode(content)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"{where}: '{field}' cannot be decoded ({error}); decode=False leaves bytes") from error


class _Header(tarfile.TarInfo):
    """A header that must be there: Python's tarfile takes a file that was cut between two members for whole."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _Header:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise  # the block of zeros that ends every tar file
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"no end of the archive: {error}") from error


def _archive(raw: Any) -> tarfile.TarFile:
    return tarfile.open(fileobj=raw, mode="r|*", tarinfo=_Header)


@contextlib.contextmanager
def _whole(path: str) -> Iterator[None]:
    with explained(path):
        try:
            yield
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path}: not a whole tar file ({error}); it may have been cut short: copy or write it again"
            ) from error


def _split(name: str) -> tuple[str, str]:
    """The key and the field: the name up to the first dot behind its last slash, and what follows."""
    folder, slash, file = name.rpartition("/")
    stem, _, field = file.partition(".")
    return f"{folder}{slash}{stem}", field.lower()


def _is_hidden(name: str) -> bool:
    return name.rpartition("/")[2].startswith((".", "_"))


def _array(content: bytes) -> Any:
    objects = objects_in(io.BytesIO(content))
    if objects:
        raise ValueError(objects)
    return np.load(io.BytesIO(content), allow_pickle=False)


def _decoders() -> dict[str, Callable[[bytes], Any]]:
    known: dict[str, Callable[[bytes], Any]] = {
        "npy": _array,
        "json": json.loads,
        "txt": lambda content: content.decode("utf-8"),
        "cls": lambda content: int(content.decode("ascii")),
    }
    try:
        pillow = importlib.import_module("PIL.Image")
    except ImportError:
        return known

    def image(content: bytes) -> Any:
        with pillow.open(io.BytesIO(content)) as opened:
            return np.asarray(opened.convert("RGB"))

    return known | dict.fromkeys(_IMAGES, image)
