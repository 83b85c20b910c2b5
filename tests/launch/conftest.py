"""Whole jobs of real processes, started as a user starts them."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence

import pytest
from tests import forked
from tests.patience import JOB_PATIENCE, PATIENCE, PATIENT_TOML

SECONDS = JOB_PATIENCE


@dataclasses.dataclass
class Result:
    """How a command ended, and all that it wrote."""

    code: int
    output: str
    seconds: float


class Commands:
    """Runs `syncline …` in a folder of its own; nothing it started may be left at the end."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []
        # Whoever is silent is not dead here: a machine that stands still for seconds is no death.
        (folder / "syncline.toml").write_text(PATIENT_TOML)

    def script(self, text: str, name: str = "train.py") -> str:
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def start(
        self, *arguments: str, program: Sequence[str] = ("-m", "syncline"), is_forked: bool = True
    ) -> subprocess.Popen[str]:
        """`is_forked`: with torch loaded already; otherwise it is a new interpreter, as are its members."""
        process = (forked.Popen if is_forked else subprocess.Popen)(
            [sys.executable, *program, *arguments],
            cwd=self.folder,
            env={**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], seconds: float = SECONDS) -> Result:
        began = time.monotonic()
        output, _ = process.communicate(timeout=seconds)
        return Result(process.returncode, output, time.monotonic() - began)

    def run(self, *arguments: str, seconds: float = SECONDS, is_forked: bool = True) -> Result:
        return self.finish(self.start(*arguments, is_forked=is_forked), seconds)

    def members(self, module: str = "syncline.launch.member") -> dict[str, int]:
        """Live member processes of jobs started in this folder, by name."""
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if pathlib.Path(os.readlink(entry / "cwd")) != self.folder:
                    continue
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if module in words and state != "Z":
                found[words[words.index(module) + 1]] = int(entry.name)
        return found

    def wait_for(self, text: str, name: str, seconds: float = SECONDS) -> str:
        """Waits until a member's log under runs/ has this text; the log. Jobs that have ended bring it no more."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            has_ended = bool(self._started) and all(process.poll() is not None for process in self._started)
            for log in self.folder.glob(f"runs/*/{name}.log"):
                content = log.read_text()
                if text in content:
                    return content
            if has_ended:
                told = [
                    process.stdout.read() for process in self._started if process.stdout and not process.stdout.closed
                ]
                raise AssertionError(f"{text!r} is not in the log of {name}, and the job has ended: {told}")
            time.sleep(0.05)
        raise TimeoutError(f"{text!r} did not appear in the log of {name}")

    def check_nothing_left(self, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while (left := self.members() | self.members("syncline.launch.preloaded")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == {}

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()
        self.check_nothing_left()


@pytest.fixture
def commands(tmp_path: pathlib.Path) -> Iterator[Commands]:
    made = Commands(tmp_path.resolve())
    try:
        yield made
    finally:
        made.close()
