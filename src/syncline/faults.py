"""Named points of the protocol at which a test ends a process: `SYNCLINE_FAULT=server-1@replicate.sent#3=kill`.

Without a fault set, a point costs one attribute check.
"""

from __future__ import annotations

import os
import pathlib
import signal
import time

from syncline.config import fault
from syncline.errors import ConfigError

#: Every point that code of ours passes, by the role that passes it.
POINTS = {
    "coordinator": (
        "reconfigure.kept", "reconfigure.prepared", "reconfigure.installed", "seed.done", "register.kept",
        "save.expected", "snapshot_barrier.closed", "save.marked", "save.answered",
        "manifest.written", "manifest.renamed", "save.pruned",
    ),
    "server": (
        "commit.staged", "commit.decided", "replicate.sent", "replicate.got", "replicate.acknowledged",
        "slice.applied", "commit.answered", "prepare.held", "install.begun", "install.done", "seed.sent", "seed.got",
        "save.written", "save.renamed", "save.closed", "save.marked",
    ),
    "worker": (
        "commit.staged", "commit.told", "commit.landed", "refresh.done", "enter.asked",
        "save.noted", "script.written",
    ),
}  # fmt: skip
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

#: The point at which this process is to end, how often it is passed before that, and how it ends.
armed: tuple[str, int, str] | None = None
_passed = 0
_noted = pathlib.Path()


def arm(member: str, folder: pathlib.Path) -> None:
    """Reads what is to happen to this member, if anything: MEMBER@POINT[#HOW_OFTEN]=kill|stop|sleep:SECONDS.

    To one life of it: that it has happened is noted in the job's folder.
    """
    global armed, _noted
    text, noted = fault(), folder / f"fault-{member}"
    if not text or noted.exists():
        return
    for one in text.split(","):
        where, _, how = one.partition("=")
        name, _, point = where.partition("@")
        point, _, count = point.partition("#")
        known = [p for points in POINTS.values() for p in points]
        if point not in known or (how not in _SIGNALS and not how.startswith("sleep:")):
            raise ConfigError(
                f"SYNCLINE_FAULT={text!r}: points are {', '.join(known)}; then =kill, =stop or =sleep:1.5"
            )
        if name == member:
            armed, _noted = (point, int(count or 1), how), noted


def reach(point: str) -> None:
    """Reports that a fault point is reached. Call it only if `armed` is set."""
    global armed, _passed
    if armed is None or armed[0] != point:
        return
    _passed += 1
    if _passed < armed[1]:
        return
    how, armed = armed[2], None
    _noted.touch()
    if how.startswith("sleep:"):
        time.sleep(float(how.removeprefix("sleep:")))
    else:
        os.kill(os.getpid(), _SIGNALS[how])
