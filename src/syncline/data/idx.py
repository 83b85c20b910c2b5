"""Reads idx files, the format of the MNIST family: magic number, dimensions, data."""

from __future__ import annotations

import gzip
import io
import math
import pathlib
import zlib

import numpy as np
import numpy.typing as npt

from syncline.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"
_UBYTE = 0x08
_MOST_DIMENSIONS = 8  # far beyond any real file


def read_idx(path: str | pathlib.Path, most_bytes: int = 1 << 30) -> npt.NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes, gzipped or not.

    Anything else, and a file over `most_bytes`, is a DataError that names the file.
    """
    return parse_idx(unzipped(read_bounded(path, most_bytes), str(path), most_bytes), str(path))


def read_bounded(path: str | pathlib.Path, most_bytes: int) -> bytes:
    """A file's bytes; a longer file is refused."""
    try:
        with open(path, "rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(content) > most_bytes:
        raise DataError(f"{path}: longer than the {most_bytes} bytes expected at most")
    return content


def unzipped(content: bytes, name: str, most_bytes: int) -> bytes:
    """Unzips gzip content, up to `most_bytes`; other content is returned unchanged.

    The content decides, not the name: idx files never look like gzip, and browsers unzip silently.
    """
    if not content.startswith(_GZIP_MAGIC):
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            inside = file.read(most_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name}: cannot be unzipped: {error}") from error
    if len(inside) > most_bytes:
        raise DataError(f"{name}: longer than the {most_bytes} bytes expected at most, unzipped")
    return inside


def parse_idx(content: bytes, name: str) -> npt.NDArray[np.uint8]:
    """The array in an idx file; read-only, since it shares the memory of `content`."""
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(f"{name}: not an idx file: it starts with {content[:4].hex(' ') or 'nothing'}")
    if content[2] != _UBYTE:
        raise DataError(f"{name}: elements of type 0x{content[2]:02x}; only unsigned bytes (0x08) are read")
    num_dimensions = content[3]
    if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
        raise DataError(f"{name}: {num_dimensions} dimensions; 1 to {_MOST_DIMENSIONS} are read")
    offset = 4 + 4 * num_dimensions
    if len(content) < offset:
        raise DataError(f"{name}: cut short: {len(content)} bytes, the dimensions alone take {offset}")
    shape = tuple(int(size) for size in np.frombuffer(content, dtype=">u4", count=num_dimensions, offset=4))
    if 0 in shape:
        raise DataError(f"{name}: dimensions {list(shape)}: there is nothing in it")
    expected = offset + math.prod(shape)
    if len(content) != expected:
        wrong = "cut short" if len(content) < expected else "too long"
        raise DataError(f"{name}: {wrong}: {len(content)} bytes, dimensions {list(shape)} want {expected}")
    return np.frombuffer(content, dtype=np.uint8, offset=offset).reshape(shape)
