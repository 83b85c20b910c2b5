"""The look at other hosts before a job starts. The prefix starts the other side on this machine."""

from __future__ import annotations

import pathlib
import sys

import pytest
from tests.patience import PATIENCE

from syncline.errors import ConfigError
from syncline.launch import greeting
from syncline.launch.greeting import greet
from syncline.launch.versions import InstalledVersions, versions_here


@pytest.fixture
def here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "train.py").write_text("pass")
    monkeypatch.chdir(folder)
    return folder


def test_a_host_with_the_same_versions_and_the_script_is_fine(here: pathlib.Path) -> None:
    assert greet(["local", "a", "b"], "env HOST={host}", "train.py", PATIENCE) == []
    assert greet(["local", "localhost"], "false", "train.py", PATIENCE) == []
    told = greet(["a"], "env HOST={host}", "train.py", PATIENCE, sync_code=True)
    assert told == ["a sees this folder: nothing is sent there"]
    assert [path.name for path in here.iterdir()] == ["train.py"], "the mark is gone"


def test_a_host_without_the_script_is_named_and_gets_it(
    here: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side's folder has another path here: the prefix puts it in place of the real one."""
    there = tmp_path / "there"
    (tmp_path / "prefix").write_text(f"#!{sys.executable}\n{SWAPPED.format(here=here, there=there)}")
    (tmp_path / "prefix").chmod(0o700)
    remote = f"{tmp_path / 'prefix'} {{host}}"
    with pytest.raises(ConfigError, match=r"host a does not see .*train\.py: .*add --sync-code"):
        greet(["a"], remote, "train.py", PATIENCE)
    assert not there.exists()
    (here / "net.py").write_text("x = 1")
    told = greet(["a"], remote, "train.py", PATIENCE, sync_code=True)
    assert told == ["sent 2 files (0.0 MiB) to a"]
    assert sorted(path.name for path in there.iterdir()) == ["net.py", "train.py"]


#: Hands the greeting on with another folder.
SWAPPED = """
import os, subprocess, sys
line = os.fdopen(os.dup(0), "rb", buffering=0).readline().replace(b"{here}", b"{there}")
child = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE)
child.stdin.write(line)
child.stdin.flush()
while data := os.read(0, 1 << 16):
    child.stdin.write(data)
child.stdin.close()
sys.exit(child.wait())
"""


def test_versions_that_differ_are_named_before_anything_is_sent(
    here: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = versions_here()
    monkeypatch.setattr(greeting, "versions_here", lambda: InstalledVersions("3.9.1", mine.syncline, mine.torch))
    with pytest.raises(ConfigError, match=r"host a has Python 3\.\d+\.\d+, this host 3\.9\.1"):
        greet(["a"], "env HOST={host}", "train.py", PATIENCE, sync_code=True)
    monkeypatch.setattr(greeting, "versions_here", lambda: InstalledVersions(mine.python, mine.syncline, "0.1"))
    (told,) = greet(["a"], "env HOST={host}", "train.py", PATIENCE)
    assert told.startswith("host a has torch ") and told.endswith("this host 0.1")


@pytest.mark.parametrize(
    ("remote", "seconds", "said"),
    [
        ("false {host}", PATIENCE, r"host a: false a .* ended with exit code 1; each host needs the same Python"),
        ("no-such-command {host}", PATIENCE, r"host a: no-such-command .* cannot be started"),
        ("sh -c 'echo not allowed >&2; exit 3' {host}", PATIENCE, r"ended with exit code 3: not allowed; each"),
        ("sh -c 'echo welcome; exec sleep 600' {host}", 2.0, r"has not answered within 2 s"),
    ],
)
def test_a_host_that_does_not_answer_is_named(here: pathlib.Path, remote: str, seconds: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        greet(["a"], remote, "train.py", seconds)


def test_files_have_a_deadline_of_their_own(
    here: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow line does not take the time of the greeting; here the other side takes the greeting, and no file."""
    monkeypatch.setattr(greeting, "SEND_SECONDS", 0.5)
    remote = tmp_path / "prefix"
    remote.write_text(f"#!{sys.executable}\n{SWAPPED.format(here=here, there=tmp_path / 'there')}")
    remote.write_text(remote.read_text().replace("while data", "import time; time.sleep(600)\nwhile data"))
    remote.chmod(0o700)
    with pytest.raises(ConfigError, match=r"host a: .* has not taken the files within 0\.5 s"):
        greet(["a"], f"{remote} {{host}}", "train.py", PATIENCE, sync_code=True)
