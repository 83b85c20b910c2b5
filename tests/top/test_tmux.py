"""`syncline run` and `syncline top` in a real terminal, tmux, with a real job: `make test-page`."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest
from tests.patience import JOB_PATIENCE, PATIENCE, PATIENT_TOML

pytestmark = pytest.mark.page

SCRIPT = """
    import os, time, numpy as np, syncline
    job = syncline.init()
    job.kv.register({"w": np.zeros(1_000, np.float32)}, syncline.Rule("SGD", lr=0.01))
    for k in job.steps(1_000_000):
        if os.path.exists("stop"):
            break
        time.sleep(0.02)
        job.kv.push_pull({"w": np.ones(1_000, np.float32)}).wait()
        job.report(loss=2.0 / (1 + k))
        if k == 20:
            print("twenty steps of", job.name)
"""
SYNCLINE = f"{shlex.quote(sys.executable)} -m syncline"


class Terminal:
    """A tmux server of its own; each window is 110 columns wide."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder, self._socket = folder, folder / "tmux"

    def tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self._socket), "-f", "/dev/null", *words],
            cwd=self._folder,
            env={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "TMUX")},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def open(self, window: str, command: str) -> None:
        """What the command leaves on its terminal stays there."""
        kept = f"{command}; echo ENDED $?; exec sleep {JOB_PATIENCE}"
        self.tmux("new-session", "-d", "-s", window, "-x", "110", "-y", "32", kept)

    def shown(self, window: str) -> str:
        return self.tmux("capture-pane", "-p", "-t", window)

    def press(self, window: str, *keys: str) -> None:
        self.tmux("send-keys", "-t", window, *keys)

    def wait_for(self, window: str, is_there: Callable[[str], object] | str) -> str:
        until = time.monotonic() + PATIENCE
        while True:
            text = self.shown(window)
            if is_there in text if isinstance(is_there, str) else is_there(text):
                return text
            assert time.monotonic() < until, f"not there: {is_there}\n{text}"
            time.sleep(0.1)


@pytest.fixture
def terminal(tmp_path: pathlib.Path) -> Iterator[Terminal]:
    (tmp_path / "syncline.toml").write_text(PATIENT_TOML)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    found = Terminal(tmp_path)
    found.open("run", f"{SYNCLINE} run -w 2 -s 1 --name now --sink off train.py")
    try:
        yield found
        (tmp_path / "stop").touch()
        found.wait_for("run", "ENDED 0")
    finally:
        found.tmux("kill-server")


def step_of(text: str) -> int:
    """Of the live line, and of the second line of `top`."""
    found = re.search(r"^(?:sync, 2 workers.*| )step ([\d,]+) ·", text, re.M)
    return int(found[1].replace(",", "")) if found else 0


def test_the_live_block_stays_below_what_members_print(terminal: Terminal) -> None:
    """There is one live line, and it moves on; prints stand above it, with the member's name."""
    text = terminal.wait_for("run", lambda text: "worker-1 | twenty steps of worker-1" in text and step_of(text) > 40)
    lines = [line for line in text.splitlines() if line]
    assert "twenty steps of worker-0" in lines
    live = [line for line in lines if line.startswith("sync, 2 workers")]
    assert len(live) == 1 and lines[-1] == live[0] and "loss" in live[0], text
    before = step_of(text)
    terminal.wait_for("run", lambda text: step_of(text) > before + 20)


def test_a_wait_stands_below_the_live_line(terminal: Terminal, tmp_path: pathlib.Path) -> None:
    """worker-1 is stopped: the line below says who is waited for. When it goes on, that line is gone."""
    terminal.wait_for("run", lambda text: step_of(text) > 40)
    pid = pid_of(tmp_path, "worker-1")
    os.kill(pid, signal.SIGSTOP)
    try:
        terminal.wait_for("run", lambda text: re.search(r"^sync, 2 workers.*\n.*wait\w* .*worker-1", text, re.M))
    finally:
        os.kill(pid, signal.SIGCONT)
    terminal.wait_for("run", lambda text: not re.search(r"^sync, 2 workers.*\n.*wait\w* .*worker-1", text, re.M))


def pid_of(folder: pathlib.Path, name: str) -> int:
    import json

    words = [sys.executable, "-m", "syncline", "status", "now", "--json"]
    told = subprocess.run(words, cwd=folder, capture_output=True, check=True, timeout=PATIENCE)
    return int(next(member["pid"] for member in json.loads(told.stdout)["members"] if member["name"] == name))


def test_top_is_driven_by_keys(terminal: Terminal) -> None:
    """Sorts, looks at one member, reads its log, goes back and ends; the job goes on."""
    terminal.wait_for("run", lambda text: step_of(text) > 40)
    terminal.open("top", f"{SYNCLINE} top now")
    text = terminal.wait_for("top", lambda text: "member ▲" in text and "worker-1" in text and "server-0" in text)
    assert "now: running" in text and "2 workers, 1 server" in text and "loss" in text
    before = step_of(text)
    terminal.wait_for("top", lambda text: step_of(text) > before + 20)
    terminal.press("top", "s")
    terminal.wait_for("top", lambda text: "member ▲" not in text and re.search("state +[▲▼]", text))
    terminal.press("top", "S")
    terminal.press("top", "r")
    terminal.wait_for("top", "member ▼")
    terminal.press("top", "Enter")
    text = terminal.wait_for("top", lambda text: re.search(r"^ (\S+)\s*\n.* pid \d+", text))
    name = text.split()[0]
    assert name in ("worker-0", "worker-1", "server-0") and "busy cores" in text
    terminal.press("top", "l")
    line = "twenty steps of worker-0" if name == "worker-0" else "twenty steps of worker-1"
    terminal.wait_for("top", line if name.startswith("worker") else lambda text: "busy cores" not in text)
    terminal.press("top", "Escape")
    terminal.wait_for("top", "busy cores")
    terminal.press("top", "Escape")
    terminal.wait_for("top", "member ▼")
    terminal.press("top", "q")
    terminal.wait_for("top", "ENDED 0")
    before = step_of(terminal.shown("run"))
    terminal.wait_for("run", lambda text: step_of(text) > before + 20)
