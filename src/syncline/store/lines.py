"""Files of JSON lines that grow with a run and stay bounded: `metrics.jsonl` and `events.jsonl`.

Lines are appended to NAME.jsonl. A file that is full becomes a part: NAME.1.jsonl, NAME.2.jsonl, …, the oldest first.
When there are too many parts, two neighbours become one with every second of their lines, NAME.2-1.jsonl. So the
newest lines are all kept, and of older ones the fewer the older they are.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, TypeVar

import msgspec

from syncline.errors import StoreError

METRICS: Final = "metrics.jsonl"
EVENTS: Final = "events.jsonl"
SPANS: Final = "spans.jsonl"
#: What both may take in a run's folder together: 100 MB.
METRICS_BYTES: Final = 80_000_000
EVENTS_BYTES: Final = 20_000_000
#: Of a run with `--trace`, besides.
SPANS_BYTES: Final = 100_000_000
#: Parts of a file at most, with the one that grows.
NUM_PARTS: Final = 8
#: The longest line; a longer one is left out.
MOST_LINE_BYTES: Final = 1 << 20


class LinesWriter:
    """Appends lines. A line that was cut off by a crash is taken away first. For one thread."""

    def __init__(self, path: pathlib.Path, most_bytes: int) -> None:
        """Raises StoreError."""
        self.path, self._most_bytes = path, most_bytes
        self._part_bytes = most_bytes // NUM_PARTS
        with _trouble(path):
            self._open()

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, 0o644)
        try:
            size = _end_of_last_line(descriptor)
            os.ftruncate(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self._size = descriptor, size

    def write(self, lines: Iterable[Any]) -> None:
        """Appends each as one line of JSON. Raises StoreError; then none of them is in the file."""
        encoded = [line for line in map(_line, lines) if len(line) <= MOST_LINE_BYTES]
        data = b"".join(encoded)
        if not data:
            return
        with _trouble(self.path):
            if self._size and self._size + len(data) > self._part_bytes:
                self._rotate()
            try:
                written = 0
                while written < len(data):
                    written += os.write(self._descriptor, data[written:])
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)  # no half line
                raise
            self._size += len(data)

    def _rotate(self) -> None:
        found = parts(self.path)
        number = _number(found[-1]) + 1 if found else 1
        os.close(self._descriptor)
        self._descriptor = -1
        try:
            self.path.rename(self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}"))
            self._thin()
        finally:
            self._open()

    def _thin(self) -> None:
        """Makes room for another part: joins the oldest two neighbours that were thinned equally often."""
        while len(found := parts(self.path)) >= NUM_PARTS:
            pairs = list(itertools.pairwise(found))
            old, new = next((pair for pair in pairs if _level(pair[0]) == _level(pair[1])), pairs[0])
            kept = self.path.with_name(f"{self.path.stem}.{_number(new)}-{_level(old) + 1}{self.path.suffix}")
            temporary = self.path.with_name(f".{kept.name}")
            with open(temporary, "wb") as out:
                for number, line in enumerate(itertools.chain(_lines_of(old), _lines_of(new))):
                    if number % 2 == 0:
                        out.write(line)
            temporary.replace(kept)
            new.unlink()
            old.unlink()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LinesFound(msgspec.Struct, frozen=True):
    """Lines of a run's file, oldest first."""

    lines: list[dict[str, Any]]
    damage: str = ""  #: where reading ended before the end of the file, and why


def read_lines(path: pathlib.Path, most: int) -> LinesFound:
    """The newest lines, at most so many, up to the first one that is damaged. A missing file has none.

    Only the newest parts that have so many lines are read.
    """
    found: list[dict[str, Any]] = []
    lines = Lines(path, dict[str, Any], most)
    for line in lines:
        found.append(line)
        if len(found) > 2 * most:
            del found[:-most]
    return LinesFound(found[-most:], lines.damage)


T = TypeVar("T")


class Lines(Generic[T]):
    """The lines of a file and of its parts, oldest first, up to the first one that is damaged."""

    def __init__(self, path: pathlib.Path, kind: type[T], least: int | None = None) -> None:
        """`kind`: what each line is. `least`: only the newest parts, which have so many lines or more."""
        self._path, self._decoder, self._least = path, msgspec.json.Decoder(kind), least
        self.damage = ""  #: where reading ended before the end of the file, and why

    def __iter__(self) -> Iterator[T]:
        path = self._path
        try:
            for part in self._parts():
                with open(part, "rb") as file:
                    for number, line in enumerate(_bounded(file), 1):
                        if not line.endswith(b"\n"):
                            if part == path and len(line) < MOST_LINE_BYTES:
                                break  # is being written
                            self.damage = f"{part.name}, line {number}: it is cut off"
                            return
                        try:
                            decoded = self._decoder.decode(line)
                        except msgspec.MsgspecError as error:
                            self.damage = f"{part.name}, line {number}: {error}"
                            return
                        except (UnicodeDecodeError, RecursionError) as error:
                            self.damage = f"{part.name}, line {number}: {type(error).__name__}"
                            return
                        yield decoded
        except OSError as error:
            self.damage = f"{path.name}: {error.strerror or error}"

    def _parts(self) -> list[pathlib.Path]:
        """The files to read, oldest first."""
        found = [part for part in (*parts(self._path), self._path) if part.exists()]
        if self._least is None:
            return found
        num_lines = 0
        for place in range(len(found) - 1, -1, -1):
            if num_lines >= self._least:
                return found[place + 1 :]
            num_lines += found[place].read_bytes().count(b"\n")
        return found


def _bounded(file: Any) -> Iterator[bytes]:
    while line := file.readline(MOST_LINE_BYTES + 1):
        yield line


def parts(path: pathlib.Path) -> list[pathlib.Path]:
    """The full files, oldest first."""
    found = [part for part in path.parent.glob(f"{path.stem}.*{path.suffix}") if _number(part) > 0]
    return sorted(found, key=_number)


_PART: Final = re.compile(r"\.(\d{1,9})(?:-(\d{1,3}))?\.jsonl$")


def _number(part: pathlib.Path) -> int:
    found = _PART.search(part.name)
    return int(found[1]) if found else 0


def _level(part: pathlib.Path) -> int:
    """How often every second line of it went."""
    found = _PART.search(part.name)
    return int(found[2] or 0) if found else 0


def _lines_of(part: pathlib.Path) -> Iterator[bytes]:
    with open(part, "rb") as file:
        yield from _bounded(file)


def _line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _end_of_last_line(descriptor: int) -> int:
    size = os.fstat(descriptor).st_size
    while size:
        begin = max(0, size - (1 << 16))
        at = os.pread(descriptor, size - begin, begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        size = begin
    return 0


@contextlib.contextmanager
def _trouble(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {error.strerror or error}; make space, or let us write"
        ) from None
