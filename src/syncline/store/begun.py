"""Records in a checkpoint's folder who began to write it, in case it is never finished."""

from __future__ import annotations

import os
import pathlib
import time

import msgspec

from syncline.store.folders import Folder
from syncline.store.trouble import MissingError

BEGUN = "begun.json"
#: No checkpoint takes this long to write.
_LONG_SECONDS = 24 * 3600.0


class BegunSave(msgspec.Struct, frozen=True):
    """Which job, and which of its processes."""

    lineage: str = ""
    token: str = ""  # of the job, whichever process coordinates it
    machine: str = ""  # within which `pid` is unique
    pid: int = 0
    at: float = 0.0  # wall clock

    @property
    def is_over(self) -> bool:
        """Whether the writer is certainly gone. A process on another machine counts as alive for a long time."""
        if not 0 <= time.time() - self.at < _LONG_SECONDS:
            return True
        return bool(self.machine) and self.machine == _machine() and not _is_alive(self.pid)


def begun_here(lineage: str, token: str) -> BegunSave:
    """The record of this process."""
    return BegunSave(lineage, token, _machine(), os.getpid(), time.time())


def read_begun(folder: Folder) -> BegunSave:
    """Who began this folder; empty if unknown."""
    try:
        return msgspec.json.decode(folder.read(BEGUN), type=BegunSave)
    except (MissingError, msgspec.MsgspecError, ValueError, RecursionError):
        return BegunSave()


def _machine() -> str:
    """Identifies this boot of the machine and its PID namespace (container); empty if unknown."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # another user's process
    return True
