"""The files of the working folder for hosts that do not see it: their list, as one stream, and on the other side."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import pathlib
import secrets
import stat
import tarfile
from collections.abc import Sequence
from typing import IO, NamedTuple

from syncline.core.units import counted
from syncline.errors import ConfigError

#: What is sent at most.
MOST_BYTES, MOST_FILES = 64 << 20, 10_000
#: One pattern per line, of names or paths that are not sent.
IGNORED = ".synclineignore"
_NEVER = (
    "__pycache__",
    ".git",
    ".hg",
    ".svn",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "node_modules",
    "*.pyc",
)
#: A folder that has this is a virtual environment.
_ENVIRONMENT = "pyvenv.cfg"
_MOST_LARGE = 3


class File(NamedTuple):
    """One file to send."""

    path: str  # below the folder
    size_bytes: int


def collect(folder: pathlib.Path, left_out: Sequence[pathlib.Path]) -> list[File]:
    """All files of the working folder but `left_out`, version control, environments, caches and what
    `.synclineignore` names. A ConfigError where they are too large or too many.
    """
    patterns = [*_NEVER, *_ignored(folder)]
    excluded = {path.resolve() for path in left_out}
    found: list[File] = []
    for root, folders, names in os.walk(folder):
        here = pathlib.Path(root)
        below = here.relative_to(folder)
        folders[:] = sorted(
            name for name in folders
            if not _matches(below / name, patterns) and (here / name).resolve() not in excluded
            and not (here / name / _ENVIRONMENT).exists()
        )  # fmt: skip
        for name in folders:
            if (here / name).is_symlink():
                raise _linked(below / name, "folder")
        for name in sorted(names):
            if _matches(below / name, patterns) or (here / name).resolve() in excluded:
                continue
            with contextlib.suppress(OSError):
                status = (here / name).stat()
                if (here / name).is_symlink() and not (here / name).resolve().is_relative_to(folder.resolve()):
                    raise _linked(below / name, "file outside of the working folder")
                if stat.S_ISREG(status.st_mode):
                    found.append(File(str(below / name), status.st_size))
        if len(found) > 10 * MOST_FILES:
            break
    _check(folder, found)
    return found


def _linked(path: pathlib.Path, what: str) -> ConfigError:
    return ConfigError(
        f"--sync-code: {path} is a link to a {what}, which is not sent; copy it here, or name it in {IGNORED}"
    )


def _ignored(folder: pathlib.Path) -> list[str]:
    try:
        lines = (folder / IGNORED).read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder / IGNORED} cannot be read: {error}") from None
    return [line.strip().rstrip("/") for line in lines if line.strip() and not line.startswith("#")]


def _matches(path: pathlib.PurePath, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path.name, one) or fnmatch.fnmatch(str(path), one) for one in patterns)


def _check(folder: pathlib.Path, files: Sequence[File]) -> None:
    total = sum(file.size_bytes for file in files)
    if total <= MOST_BYTES and len(files) <= MOST_FILES:
        return
    sizes: dict[str, int] = {}
    for file in files:
        first, *rest = pathlib.PurePath(file.path).parts
        sizes[first + ("/" if rest else "")] = sizes.get(first + ("/" if rest else ""), 0) + file.size_bytes
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_MOST_LARGE]
    names = ", ".join(f"{name} {sizes[name] / (1 << 20):.0f} MiB" for name in largest)
    raise ConfigError(
        f"--sync-code: {folder} has {total / (1 << 20):.0f} MiB in {counted(len(files), 'file')} ({names}); at most "
        f"{MOST_BYTES >> 20} MiB in {MOST_FILES:,} files are sent. Keep data elsewhere, or name what the other hosts "
        f"do not need in {IGNORED}, one name or pattern per line"
    )


def send(folder: pathlib.Path, files: Sequence[File], out: IO[bytes]) -> None:
    """Writes them as one stream. A file that has grown since is sent as it was; one that is gone is left out."""
    with tarfile.open(fileobj=out, mode="w|") as stream:
        for file in files:
            try:
                descriptor = os.open(folder / file.path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ConfigError(f"--sync-code: {file.path} cannot be read: {error.strerror or error}") from None
            with open(descriptor, "rb") as source:
                status = os.fstat(source.fileno())
                about = tarfile.TarInfo(file.path)
                about.size = min(file.size_bytes, status.st_size)
                about.mode, about.mtime = status.st_mode & 0o777, int(status.st_mtime)
                stream.addfile(about, source)


def receive(folder: pathlib.Path, stream: IO[bytes]) -> int:
    """Writes files below this folder, each at once or not at all; their number. Nothing is removed."""
    num_files = num_bytes = 0
    with tarfile.open(fileobj=stream, mode="r|") as files:
        for about in files:
            num_files, num_bytes = num_files + 1, num_bytes + about.size
            if num_files > MOST_FILES or num_bytes > MOST_BYTES:
                raise ConfigError(f"more than {MOST_BYTES >> 20} MiB or {MOST_FILES:,} files are sent")
            path = pathlib.PurePath(about.name)
            if not about.isreg() or path.is_absolute() or ".." in path.parts:
                raise ConfigError(f"{about.name!r} is not a file of the working folder")
            source = files.extractfile(about)
            assert source is not None
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
            try:
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, about.mode & 0o777), "wb") as out:
                    while data := source.read(1 << 20):
                        out.write(data)
                os.utime(temporary, (about.mtime, about.mtime))
                os.replace(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
    return num_files
