"""Where files lie: a path, a glob or a folder, on this machine or wherever fsspec has a driver.

Paths of this machine, plain or `file://`, need no driver; all others (`s3://`, `memory://`, …) go through fsspec.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
from collections.abc import Iterator, Mapping
from typing import IO, Any

from syncline.data.extra import needed
from syncline.errors import ConfigError, DataError

_MAGIC = "*?["
_DRIVERS = {  # protocol -> the package that speaks it
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "adl": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "hf": "huggingface_hub",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
    "oci": "ocifs",
    "oss": "ossfs",
    "hdfs": "pyarrow",
}
_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, log in with `aws configure`, or pass "
    'storage_options={"key": …, "secret": …}; for public data storage_options={"anon": True}'
)


@dataclasses.dataclass(frozen=True)
class Files:
    """The files that a path means, in the order of their names."""

    path: str  #: as it was asked for
    paths: tuple[str, ...]
    driver: Any = None  #: fsspec's file system; None: this machine's
    made_in: int = dataclasses.field(default_factory=os.getpid)

    @property
    def is_local(self) -> bool:
        return self.driver is None

    def open(self, path: str) -> IO[bytes]:
        """One of the files, to be read. Raises DataError, which names it."""
        with explained(path):
            return open(path, "rb") if self.driver is None else self._driver_here().open(path, "rb")

    def _driver_here(self) -> Any:
        """A driver may have threads, which a fork leaves behind: then one like it, which fsspec keeps."""
        if os.getpid() == self.made_in:
            return self.driver
        return type(self.driver)(*self.driver.storage_args, **self.driver.storage_options)


def found(path: str | os.PathLike[str], suffixes: tuple[str, ...], options: Mapping[str, Any] | None = None) -> Files:
    """The files behind a path, a glob, or a folder (of which those with such a suffix count); at least one."""
    path = os.fspath(path)
    protocol, separator, rest = path.partition("://")
    if not separator or protocol == "file":
        if options:
            raise ConfigError(
                f"{path}: storage_options are for remote paths; leave them out for this machine's files"
            )
        names = _local(os.path.expanduser(rest if separator else path), suffixes)
        driver = None
    else:
        with explained(path, protocol):
            driver, root = needed("fsspec.core", f"paths of the form {protocol}://").url_to_fs(
                path, **(options or {})
            )
            names = [driver.unstrip_protocol(name) for name in _remote(driver, root, suffixes)]
    if not names:
        what = "matches no file" if _has_magic(path) else f"is a folder without {' or '.join(suffixes)} files"
        raise DataError(f"{path}: {what}; check the path, or list it with `ls`")
    return Files(path, tuple(names), driver)


@contextlib.contextmanager
def explained(path: str, protocol: str = "") -> Iterator[None]:
    """What goes wrong with a path inside is a DataError or a ConfigError that says what to do."""
    protocol = protocol or path.partition("://")[0]
    try:
        yield
    except (ConfigError, DataError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file or folder; check the path") from error
    except ImportError as error:
        package = _DRIVERS.get(protocol)
        remedy = f"pip install {package}" if package else f"install fsspec's driver for it ({error})"
        raise ConfigError(f"{path}: no driver for {protocol}:// is installed: {remedy}") from error
    except Exception as error:  # drivers raise whatever their own libraries raise
        kind = type(error).__name__
        if "Credentials" in kind:
            raise DataError(f"{path}: there are no credentials for {protocol}://: {_CREDENTIALS}") from error
        if isinstance(error, PermissionError):
            raise DataError(f"{path}: access was refused ({error}); check whose credentials these are") from error
        if isinstance(error, ValueError) and "Protocol not known" in str(error):
            known = ", ".join(sorted({"file", "memory", *_DRIVERS}))
            raise ConfigError(f"{path}: {protocol}:// is not known; known are {known}") from error
        raise DataError(f"{path}: cannot be read: {kind}: {error}") from error


def _has_magic(path: str) -> bool:
    return any(sign in path for sign in _MAGIC)


def _local(path: str, suffixes: tuple[str, ...]) -> list[str]:
    if os.path.isdir(path):
        walked = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
        return sorted(name for name in walked if _counts(name, path, suffixes))
    if os.path.exists(path):
        return [path]
    if _has_magic(path):
        return sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
    raise DataError(f"{path}: there is no such file or folder; check the path")


def _remote(driver: Any, root: str, suffixes: tuple[str, ...]) -> list[str]:
    if _has_magic(root.replace("?", "") if root.startswith("http") else root):  # a URL's query is no glob
        return sorted(name for name, entry in driver.glob(root, detail=True).items() if entry["type"] == "file")
    if driver.isdir(root):
        return sorted(name for name in driver.find(root) if _counts(name, root, suffixes))
    if not driver.exists(root):
        raise FileNotFoundError(root)
    return [root]


def _counts(name: str, folder: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file of a folder is data: by its suffix, and neither it nor its folders hidden (`.x`, `_x`)."""
    inside = name.removeprefix(folder).strip("/").split("/")
    return name.lower().endswith(suffixes) and not any(part.startswith((".", "_")) for part in inside)
