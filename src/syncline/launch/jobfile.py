"""The job file: the coordinator's address and the secret token. Mode 0600; never on a command line."""

from __future__ import annotations

import os
import pathlib
import secrets
from typing import Any

import msgspec

from syncline.errors import ConfigError


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to find its job and to authenticate."""

    job: str  #: public id
    token: str  #: secret, hexadecimal
    host: str  #: address of the coordinator
    port: int
    given: dict[str, Any] = {}  #: settings said at launch or in syncline.toml

    @property
    def token_bytes(self) -> bytes:
        return bytes.fromhex(self.token)

    def __repr__(self) -> str:
        return f"JobFile(job={self.job!r}, host={self.host!r}, port={self.port})"

    @property
    def folder(self) -> pathlib.Path:
        return pathlib.Path(str(self.given.get("runs", "runs"))) / str(self.given.get("name") or self.job)


def new(host: str, port: int, given: dict[str, Any]) -> JobFile:
    """A new job with a new token."""
    return JobFile(job=secrets.token_hex(8), token=secrets.token_hex(32), host=host, port=port, given=given)


def write(path: pathlib.Path, file: msgspec.Struct) -> None:
    """Writes a file with a token atomically, readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # O_EXCL: refuses an existing file or link of that name.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(msgspec.json.format(msgspec.json.encode(file), indent=2))
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"the job file {path} cannot be written: {error.strerror or error}") from None


def read(path: pathlib.Path) -> JobFile:
    """Reads a job file; refuses an invalid one, or one that others can read."""
    return parse(read_own(path), str(path))


def read_own(path: pathlib.Path) -> bytes:
    """The text of a file with a token; refuses one that others can read or write."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(1 << 20)
    except OSError as error:
        raise ConfigError(f"the job file {path} cannot be read: {error.strerror or error}") from None
    mode = status.st_mode & 0o777
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"the job file {path} belongs to another user (id {status.st_uid})")
    if mode & 0o077:
        raise ConfigError(f"the job file {path} can be read by others (mode {mode:o}); run chmod 600 {path}")
    return data


def parse(data: bytes, source: str) -> JobFile:
    try:
        file = msgspec.json.decode(data, type=JobFile)
        if len(file.token_bytes) < 16:
            raise ValueError("the token is too short")
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{source} is not a job file: {error}") from None
    return file
