"""Files behind a path, a glob or a folder, local or on any fsspec file system.

Local paths, plain or `file://`, need no driver; all others (`s3://`, `memory://`, …) use fsspec.
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
_HIDDEN = (".", "_")
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
_S3 = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, log in with `aws configure`, or pass "
    'storage_options={"key": …, "secret": …}; for public data storage_options={"anon": True}'
)
_GOOGLE = (
    "log in with `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS to the file of a "
    'service account, or pass storage_options={"token": …}; for public data storage_options={"token": "anon"}'
)
_AZURE = (
    "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or pass "
    'storage_options={"account_name": …, "account_key": …}; for public data storage_options={"anon": True}'
)
_CREDENTIALS = {  # protocol -> where to put them
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GOOGLE),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), _AZURE),
}


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of a path, sorted by name."""

    path: str  #: as given
    paths: tuple[str, ...]
    driver: Any = None  #: fsspec's file system; None: local
    made_in: int = dataclasses.field(default_factory=os.getpid)

    @property
    def is_local(self) -> bool:
        return self.driver is None

    def open(self, path: str) -> IO[bytes]:
        """Opens one of the files. Raises a DataError that names it."""
        with explained(path):
            return open(path, "rb") if self.driver is None else self._driver_here().open(path, "rb")

    def _driver_here(self) -> Any:
        """The driver; a new one after a fork, which leaves its threads behind."""
        if os.getpid() == self.made_in:
            return self.driver
        return type(self.driver)(*self.driver.storage_args, **self.driver.storage_options)


def found(path: str | os.PathLike[str], suffixes: tuple[str, ...], options: Mapping[str, Any] | None = None) -> Files:
    """The files of a path, a glob, or a folder (those with these suffixes); at least one."""
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
    """Turns errors about a path into a DataError or ConfigError with the remedy."""
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
    except Exception as error:  # drivers raise errors of their own libraries
        kind = type(error).__name__
        if "Credentials" in kind:
            raise DataError(f"{path}: there are no credentials for {protocol}://: {_remedy(protocol)}") from error
        if isinstance(error, PermissionError):
            raise DataError(f"{path}: access was refused ({error}); {_refused(path, protocol)}") from error
        if isinstance(error, ValueError) and "Protocol not known" in str(error):
            known = ", ".join(sorted({"file", "memory", *_DRIVERS}))
            raise ConfigError(f"{path}: {protocol}:// is not known; known are {known}") from error
        raise DataError(f"{path}: cannot be read: {kind}: {error}") from error


def _remedy(protocol: str) -> str:
    """Where credentials go."""
    driver = _DRIVERS.get(protocol, "its driver")
    return _CREDENTIALS.get(protocol, f"pass them in storage_options= as {driver} takes them")


def _refused(path: str, protocol: str) -> str:
    """What to do about a refused access."""
    if "://" not in path or protocol == "file":
        return "let this user read it (`chmod`, `chown`), or run as one who may"
    return f"check whose credentials these are; for others: {_remedy(protocol)}"


def _has_magic(path: str) -> bool:
    return any(sign in path for sign in _MAGIC)


def _local(path: str, suffixes: tuple[str, ...]) -> list[str]:
    if os.path.isdir(path):
        return sorted(name for name in _walked(path, set()) if _counts(name, path, suffixes))
    if os.path.exists(path):
        return [path]
    if _has_magic(path):
        return sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
    raise DataError(f"{path}: there is no such file or folder; check the path")


def _walked(folder: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    """The files below a folder, following links: each folder once, no hidden ones."""
    with explained(folder):
        found = os.stat(folder)
        if (found.st_dev, found.st_ino) in seen:
            return
        seen.add((found.st_dev, found.st_ino))
        with os.scandir(folder) as entries:
            inside = sorted(entries, key=lambda entry: (entry.is_symlink(), entry.name))  # real entries before links
        for entry in inside:
            if not entry.is_dir():
                yield entry.path
            elif not entry.name.startswith(_HIDDEN):
                yield from _walked(entry.path, seen)


def _remote(driver: Any, root: str, suffixes: tuple[str, ...]) -> list[str]:
    if _has_magic(root.replace("?", "") if root.startswith("http") else root):  # a URL's query is not a glob
        return sorted(name for name, entry in driver.glob(root, detail=True).items() if entry["type"] == "file")
    if driver.isdir(root):
        return sorted(name for name in driver.find(root) if _counts(name, root, suffixes))
    if not driver.exists(root):
        raise FileNotFoundError(root)
    return [root]


def _counts(name: str, folder: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file of a folder is data: by its suffix, and neither it nor its folders hidden (`.x`, `_x`)."""
    inside = name.removeprefix(folder).strip("/").split("/")
    return name.lower().endswith(suffixes) and not any(part.startswith(_HIDDEN) for part in inside)
