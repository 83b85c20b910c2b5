"""Who has begun to write a checkpoint: it stands in its folder, should it come to no end."""

from __future__ import annotations

import os
import pathlib
import time

import msgspec

from syncline.store.folders import Folder
from syncline.store.trouble import MissingError

BEGUN = "begun.json"
#: Nobody writes at one checkpoint for so long.
_LONG_SECONDS = 24 * 3600.0


class BegunSave(msgspec.Struct, frozen=True):
    """Which job, and which of its processes."""

    lineage: str = ""
    token: str = ""  # the job's own, whichever process coordinates it
    machine: str = ""  # within which `pid` means one process
    pid: int = 0
    at: float = 0.0  # by the clock of the wall

    @property
    def is_over(self) -> bool:
        """Whether nobody can be at it any more. A process elsewhere is believed to live for a long while."""
        if not 0 <= time.time() - self.at < _LONG_SECONDS:
            return True
        return bool(self.machine) and self.machine == _machine() and not _is_alive(self.pid)


def begun_here(lineage: str, token: str) -> BegunSave:
    """As this process begins one."""
    return BegunSave(lineage, token, _machine(), os.getpid(), time.time())


def read_begun(folder: Folder) -> BegunSave:
    """Who began what is in this folder; nobody knows: all of it empty."""
    try:
        return msgspec.json.decode(folder.read(BEGUN), type=BegunSave)
    except (MissingError, msgspec.MsgspecError, ValueError, RecursionError):
        return BegunSave()


def _machine() -> str:
    """This start of this machine, and what in it has processes of its own (a container); empty: nobody knows."""
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
        return True  # it is somebody else's
    return True
