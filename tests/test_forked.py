"""A command that tests fork ends as one of a new interpreter does."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from tests import forked
from tests.patience import PATIENCE

LATE = """
import atexit, sys, threading, time
file = open("file", "w")
file.write("left open")
atexit.register(print, "handler")
def work():
    time.sleep(0.1)
    print("thread")
threading.Thread(target=work).start()
sys.stdout.write("written, ")
sys.stderr.write("no line")
"""
ENDS = {
    "at its end": "",
    "with a code": "sys.exit(3)",
    "with words": "sys.exit('that is all')",
    "with an error": "raise ValueError('wrong')",
    "by Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "without its output": "sys.stdout.close()",
}


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_a_new_interpreter_does(end: str, tmp_path: pathlib.Path) -> None:
    """It is not taken apart, which is most of what a short command would take. Threads are waited for, exit handlers
    run, and nothing that was written is lost all the same.
    """
    (tmp_path / "script.py").write_text(LATE + ENDS[end])
    words = [sys.executable, "script.py"]
    ends = []
    for run in (forked.run, subprocess.run):
        done = run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
        ends.append((done.returncode, done.stdout, done.stderr.split("script.py")[-1]))
        assert (tmp_path / "file").read_text() == "left open"
    assert ends[0] == ends[1]
