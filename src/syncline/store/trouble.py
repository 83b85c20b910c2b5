"""Turns errors of disks and stores into ours."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from syncline.errors import StoreError

_WRITE = "let this process write there (`chmod`, `chown`), or choose another folder"
_REMEDIES = {
    errno.ENOSPC: "make space there",
    errno.EDQUOT: "make space there: this user's quota is used up",
    errno.EFBIG: "see that files of this size are allowed there",
    errno.EACCES: _WRITE,
    errno.EPERM: _WRITE,
    errno.EROFS: "choose a folder that can be written to",
    errno.EIO: "see that the disk is sound",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path: a file is in its way",
    errno.EEXIST: "check the path: a file is in its way",
    errno.EISDIR: "check the path: a folder is in its way",
    errno.EMFILE: "allow this process more open files (`ulimit -n`)",
    errno.ENAMETOOLONG: "choose a shorter path",
}
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in with `aws configure`",
    "gs": "log in with `gcloud auth application-default login`",
    "gcs": "log in with `gcloud auth application-default login`",
    "abfs": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


class MissingError(StoreError):
    """The file does not exist."""


@contextlib.contextmanager
def explained(place: str, words: str) -> Iterator[None]:
    """Turns errors inside into a StoreError that names the place and the remedy."""
    try:
        yield
    except (StoreError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise MissingError(f"{place} {words}: there is no such file or folder; check the path") from error
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "see that the disk or store is sound")
        raise StoreError(f"{place} {words}: {error.strerror or error}; {remedy}") from error
    except Exception as error:  # drivers raise errors of their own libraries
        kind = type(error).__name__
        remedy = "see that the store can be reached"
        if "Credentials" in kind:
            remedy = _CREDENTIALS.get(
                place.partition("://")[0], "give this process credentials, as its driver takes them"
            )
        raise StoreError(f"{place} {words}: {kind}: {error}; {remedy}") from error
