"""Whole jobs of real processes that are hurt, with a ledger that knows what became of every push."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest
from tests import forked
from tests.patience import JOB_PATIENCE, PATIENCE, PATIENT_START, PATIENT_TOML

from syncline.core.wire.control import AskStatus, GivenStatus
from syncline.errors import SynclineError
from syncline.launch.folder import find_job
from syncline.launch.watching import ask
from syncline.stats import JobStatus

LEDGER = pathlib.Path(__file__).parents[2] / "examples" / "chaos_ledger.py"
SECONDS = JOB_PATIENCE


class Hurt:
    """A job under way: its output so far, its members, and ways to hurt them. Only what it started is touched."""

    def __init__(
        self, folder: pathlib.Path, prefix: Sequence[str], words: Sequence[str], environment: dict[str, str]
    ) -> None:
        self.folder, self._prefix = folder, prefix
        self.output = ""
        self._process = forked.Popen(
            [*prefix, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line

    def until(self, text: str | Callable[[], object], seconds: float = SECONDS) -> None:
        """Until its output has this text, or this is so."""
        look = (lambda: re.search(text, self.output)) if isinstance(text, str) else text
        deadline = time.monotonic() + seconds
        while not look():
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {text}\n{self.output}"
            assert self._process.poll() is None or look(), f"ended before: {text}\n{self.output}"
            time.sleep(0.02)

    def until_at_work(self, *members: str) -> None:
        """Until these workers push, and every slice has its backup, if it is to have one."""
        for member in members:
            self.until(rf"{member} has row")
        self.until(self._has_backups)

    def until_stepped(self) -> None:
        """Until workers have made some steps: before the first one is answered none has a copy of anything."""

        def have_stepped() -> bool:
            status = self._status()
            steps = (
                [member.step for member in status.members if member.role == "worker"] if status is not None else []
            )
            return bool(steps) and min(steps) > 2

        self.until(have_stepped)

    def _has_backups(self) -> bool:
        status = self._status()
        if status is None:
            return False
        primaries, backups = (sum(getattr(m, key) for m in status.members) for key in ("num_primary", "num_backup"))
        return bool(primaries) and (status.replicas < 2 or primaries == backups)

    def _status(self) -> JobStatus | None:
        """Asked on the job's own host, by `syncline status` if that is another one; none while it cannot be asked."""
        if not self._prefix:
            try:
                return ask(find_job("hurt", self.folder / "runs"), AskStatus(), GivenStatus, 20.0).status
            except SynclineError:
                return None
        words = [*self._prefix, sys.executable, "-m", "syncline", "status", "hurt", "--json"]
        asked = forked.run(words, cwd=self.folder, capture_output=True, text=True, timeout=SECONDS)
        return None if asked.returncode else msgspec.json.decode(asked.stdout, type=JobStatus)

    def until_back(self, member: str) -> None:
        """Until a later life of this member is at work. (That of the first is not said.)"""
        if member == "coordinator":
            self.until(r"the coordinator is back")
        else:
            self.until(rf"{member} \(incarnation \d+\) has joined")

    def pid(self, member: str) -> int:
        """The live process of a member of this job."""
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().decode().split("\0")
                    here = pathlib.Path(os.readlink(entry / "cwd")) == self.folder
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if here and state != "Z" and "syncline.launch.member" in words and member in words:
                    return int(entry.name)
        raise AssertionError(f"{member} has no process\n{self.output}")

    def hit(self, member: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(member), number)

    def enough(self) -> None:
        """The ledger closes."""
        (self.folder / "enough").touch()

    def evicted(self) -> list[str]:
        """Who was put out, in order."""
        return re.findall(r"(\S+) \(incarnation \d+\) is out", self.output)

    def ends_well(self, seconds: float = SECONDS, *, may_lose: bool = False) -> str:
        """The whole output; every acknowledged push is applied once (or is said to be lost), and none twice."""
        self.enough()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over within {seconds:g} s\n{self.output}") from None
        self._reader.join(PATIENCE)
        assert self._process.returncode == 0, self.output
        found = re.findall(r"ledger: (\d+) acknowledged, (\d+) lost, (\d+) doubled(.*)", self.output)
        assert found, self.output
        acknowledged, lost, doubled, rest = found[-1]
        assert int(acknowledged) > 0 and doubled == "0", self.output
        assert may_lose or (lost, rest) == ("0", ""), self.output
        return self.output

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def hurt(tmp_path: pathlib.Path) -> Iterator[Callable[..., Hurt]]:
    """Starts a job of the ledger: hurt("-w", "3", …, fault="server-1@replicate.sent=kill").

    It pushes until `ends_well`, or for so many seconds.
    """
    made: list[Hurt] = []

    def start(
        *flags: str,
        seconds: float = 2 * JOB_PATIENCE,
        fault: str = "",
        prefix: Sequence[str] = (),
        script: Sequence[str] = (),
        ledger: pathlib.Path = LEDGER,
        before: Sequence[str] = (),
        only_kills: bool = False,
        **environment: str,
    ) -> Hurt:
        run = [sys.executable, "-m", "syncline", "run", "--name", "hurt", *flags]
        # Processors that are busy to the last make a new process wait: some time is left to them.
        pushes = ["--seconds", str(seconds), "--until", "enough", "--think", "0.02"]
        words = [*run, str(ledger), *before, *pushes, *script]
        if not (toml := tmp_path / "syncline.toml").exists():
            # Where a kill is meant, who is silent is not dead: a machine may stand still for seconds.
            toml.write_text(PATIENT_TOML if only_kills or fault.endswith("=kill") else PATIENT_START)
        made.append(Hurt(tmp_path.resolve(), prefix, words, {"SYNCLINE_FAULT": fault, **environment}))
        return made[-1]

    yield start
    for job in made:
        job.close()
