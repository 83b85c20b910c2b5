"""The process of a detached job's launcher, `python -m syncline.cli.detached begin|again`, and how it is started."""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import subprocess
import sys
import time
from typing import Any

import msgspec

from syncline import config as configuration
from syncline.cli.screen import TerminalScreen
from syncline.config import JobConfig
from syncline.engines import detached
from syncline.engines.agent import THERE_ALREADY
from syncline.engines.detached import Kept, LauncherThere, StartCommands
from syncline.errors import ConfigError, SynclineError
from syncline.launch.running import Script

COMMANDS = StartCommands(
    launcher=[sys.executable, "-m", "syncline.cli.detached", "again"],
    agent=[sys.executable, "-m", "syncline.engines.agent"],
)
#: Beside the time for all agents to be there.
_START_SECONDS = 60.0
_STARTED, _ANSWER = b"started", "--answer"


class FirstLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What the first launcher is told, over its standard input."""

    given: dict[str, Any]
    script: Script


def start_launcher(beginning: FirstLaunch) -> None:
    """Starts a detached job's first launcher; returns when agents are on all hosts, else says what was wrong."""
    seconds = configuration.resolve(beginning.given).start_seconds + _START_SECONDS
    _start([*COMMANDS.launcher[:-1], "begin", _ANSWER], msgspec.json.encode(beginning), seconds)


def start_successor(folder: pathlib.Path) -> None:
    """Starts another launcher of a job that has none, nor an agent on this host."""
    seconds = configuration.resolve(detached.read(folder).file.given).start_seconds + _START_SECONDS
    _start([*COMMANDS.launcher, str(folder), _ANSWER], b"", seconds)


def _start(command: list[str], told: bytes, seconds: float) -> None:
    """The new process says on a pipe that it has started, or why not."""
    ours, theirs = os.pipe()
    with open(ours, "rb", buffering=0) as answers:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=theirs, start_new_session=True,
                env=configuration.inherited_environment({"PYTHONUNBUFFERED": "1"}),
            )  # fmt: skip
        finally:
            os.close(theirs)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(told)
            process.stdin.close()
        answer, until = b"", time.monotonic() + seconds
        while not answer.endswith(_STARTED):
            ready, _, _ = select.select([answers], [], [], max(0.0, until - time.monotonic()))
            chunk = answers.read(1 << 16) if ready else b""
            if not chunk:
                break
            answer += chunk
    if not answer.endswith(_STARTED):
        said = answer.decode("utf-8", "replace").strip().removeprefix("syncline: ")
        if process.poll() is None:
            process.terminate()
            raise ConfigError(
                f"the launcher has not started within {seconds:g} s; it was told to end"
                + (f": {said}" if said else "")
            )
        raise ConfigError(said or "it ended at once")


def _screen(config: JobConfig) -> TerminalScreen:
    return TerminalScreen(config.policy)


def main() -> int:
    """`begin` reads what to run from standard input; `again FOLDER [KEPT]` takes over a job.

    `--answer`: the process that starts this one reads on its standard error whether it has started.
    """
    words = [word for word in sys.argv[1:] if word != _ANSWER]
    waiting = os.dup(2) if len(words) + 1 < len(sys.argv) else -1

    def started() -> None:
        nonlocal waiting
        if waiting >= 0:
            with contextlib.suppress(OSError):
                os.write(waiting, _STARTED)
            os.close(waiting)
            waiting = -1

    try:
        if words[0] == "begin":
            beginning = msgspec.json.decode(sys.stdin.buffer.read(), type=FirstLaunch)
            return detached.begin(beginning.given, beginning.script, _screen, COMMANDS, started)
        kept = msgspec.json.decode(words[2], type=Kept) if len(words) > 2 else None
        return detached.take_over(pathlib.Path(words[1]), kept, _screen, COMMANDS, started)
    except LauncherThere:
        started()
        return THERE_ALREADY
    except SynclineError as error:
        text = f"syncline: {error}\n"
        if waiting >= 0:
            os.write(waiting, text.encode())
        else:
            sys.stderr.write(text)
        return 2


if __name__ == "__main__":
    sys.exit(main())
