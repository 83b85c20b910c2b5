"""The coordinator's memory under real faults: SIGKILL in the middle of a save, disks that are full or read-only."""

from __future__ import annotations

import os
import pathlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from syncline.errors import StoreError
from syncline.store.journal import Journal

SAVING = """
import pathlib, sys
from syncline.store.journal import Journal
path, first, count = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
journal = Journal.open(path, "a")
for number in range(first, first + count):
    journal.save(b"%09d" % number * 20000, {number: b"%09d" % number * 3000}, drop=[number - 3])
    print(number, flush=True)
sys.stdin.read()
"""

LIMITED = """
import pathlib, resource, sys
from syncline.errors import StoreError
from syncline.store.journal import Journal
path = pathlib.Path(sys.argv[1])
journal = Journal.open(path, "a")
for kept in range(10**6):
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
    try:
        journal.save(b"%09d" % kept, {kept: bytes(30_000)})
    except StoreError as error:
        print(error)
        break
loaded = journal.load()
assert loaded[0] == b"%09d" % (kept - 1) and len(loaded[1]) == kept, (kept, loaded[0])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.save(b"%09d" % kept, {kept: bytes(30_000)})
print(kept)
"""


def number_of(path: pathlib.Path) -> int:
    """Which save it is that the journal holds; it must be whole, with the segments that belong to it."""
    journal = Journal.open(path, "a")
    state, segments = journal.load()
    journal.close()
    assert state is not None
    number = int(state[:9])
    assert state == b"%09d" % number * 20000
    assert segments == [b"%09d" % n * 3000 for n in range(max(1, number - 2), number + 1)]
    return number


def saves_until_killed(path: pathlib.Path, first: int, seconds: float = 0, count: int = 10**9) -> int:
    """The last save that returned in a process that was killed: this long after its first one, or after so many."""
    command = [sys.executable, "-c", SAVING, str(path), str(first), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(count if seconds == 0 else 1)]
        time.sleep(seconds)
        child.kill()
        lines += child.stdout.readlines()
    return int(lines[-1])


def test_killed_in_the_middle_of_saves(tmp_path: pathlib.Path) -> None:
    """SIGKILL at any moment: the last save that returned or the one under way is there, and whole."""
    path = tmp_path / "journal.db"
    journal = Journal.create(path, "a")
    journal.save(b"%09d" % 0 * 20000)
    journal.close()
    chance, found = random.Random(7), 0
    for _ in range(8):
        last = saves_until_killed(path, found + 1, chance.uniform(0.001, 0.15))
        found = number_of(path)
        assert found in (last, last + 1)
    again = Journal.open(path, "a")
    assert again.term == 18
    again.close()


@pytest.mark.parametrize("fault", ["lost", "damaged"])
def test_the_log_beside_the_file_takes_no_save_with_it(fault: str, tmp_path: pathlib.Path) -> None:
    """Only journal.db is copied to a new machine after a crash: every save that had returned is in it."""
    path, log = tmp_path / "journal.db", tmp_path / "journal.db-wal"
    Journal.create(path, "a").close()
    assert saves_until_killed(path, 1, count=5) == 5
    assert log.stat().st_size
    if fault == "lost":
        log.unlink()
    else:
        log.write_bytes(os.urandom(log.stat().st_size))
    (tmp_path / "journal.db-shm").unlink()
    assert number_of(path) == 5


def test_a_file_that_may_not_grow(tmp_path: pathlib.Path) -> None:
    """A quota or a failing disk: the save says so, the one before it stands, and the next works when it can again."""
    path = tmp_path / "journal.db"
    Journal.create(path, "a").close()
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    message, kept = done.stdout.splitlines()
    assert f"job a: {path} cannot keep the job's new state (9 bytes, 1 new segments)" in message
    assert "what was saved before is intact: disk I/O error; see that the disk is sound, has space" in message
    journal = Journal.open(path, "a")
    state, segments = journal.load()
    journal.close()
    assert state == b"%09d" % int(kept) and len(segments) == int(kept) + 1


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of its own, of one megabyte."""
    if not shutil.which("mount"):
        pytest.skip("there is no mount on this machine")
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # a test that failed may have files open


def test_a_full_disk(small_disk: pathlib.Path) -> None:
    """No space left: the save says so, the one before it stands, and the next works when there is space again."""
    path, ballast = small_disk / "journal.db", small_disk / "ballast"
    journal = Journal.create(path, "a")
    journal.save(b"before", {0: bytes(50_000)})
    with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    for _ in range(3):
        with pytest.raises(StoreError, match=rf"{path} cannot keep .* is full; make space on this disk"):
            journal.save(b"too much", {1: bytes(200_000)}, drop=[0])
        assert journal.load() == (b"before", [bytes(50_000)])
    ballast.unlink()
    journal.save(b"after", {1: bytes(200_000)}, drop=[0])
    journal.close()
    journal = Journal.open(path, "a")
    assert journal.load() == (b"after", [bytes(200_000)])
    journal.close()


def test_a_full_disk_at_the_start(small_disk: pathlib.Path) -> None:
    """No space for the first file: said at once, and nothing is left in the way of the next try."""
    ballast = small_disk / "ballast"
    with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(StoreError, match=r"cannot be written: .*; "):
        Journal.create(small_disk / "journal.db", "a")
    assert list(small_disk.iterdir()) == [ballast]


def test_a_disk_that_became_read_only(small_disk: pathlib.Path) -> None:
    """After an error many systems mount a disk read-only: a coordinator that cannot save must not start a term."""
    path = small_disk / "journal.db"
    Journal.create(path, "a").close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StoreError, match=rf"{path} cannot be taken up: .*; let this process .*write the file"):
        Journal.open(path, "a")
    with pytest.raises(StoreError, match="cannot be made: Read-only file system"):
        Journal.create(small_disk / "new.db", "a")
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    journal = Journal.open(path, "a")
    assert journal.term == 2
    # Linux makes no disk read-only while a file on it is open for writing; a disk's own error does.
    journal._db.execute("PRAGMA query_only = 1")
    with pytest.raises(StoreError, match=r"cannot keep .*readonly database; let this process write"):
        journal.save(b"x")
    journal._db.execute("PRAGMA query_only = 0")
    journal.save(b"y")
    journal.close()


def test_a_state_that_is_too_big(tmp_path: pathlib.Path) -> None:
    """SQLite takes 1 GB at most: said in our words, and the state before it stands."""
    journal = Journal.create(tmp_path / "journal.db", "a")
    journal.save(b"before")
    journal._db.setlimit(0, 1000)  # SQLITE_LIMIT_LENGTH: as if 1000 were a billion
    with pytest.raises(StoreError, match=r"cannot keep .*too big; a state or segment may have 1 GB"):
        journal.save(bytes(2000))
    assert journal.load()[0] == b"before"
    journal.close()
    with pytest.raises(StoreError, match=r"closed database\.; open it again"):
        journal.save(b"x")
