"""The coordinator's memory: what was saved is there after any death, and only the newest coordinator writes."""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.patience import PATIENCE

from syncline.errors import FencedError, StoreError
from syncline.store import journal as module
from syncline.store.journal import Journal


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "journal.db"


@pytest.fixture
def kept() -> Iterator[Callable[[Journal], Journal]]:
    """Closes behind the test what it has opened."""
    opened: list[Journal] = []

    def keep(journal: Journal) -> Journal:
        opened.append(journal)
        return journal

    yield keep
    for journal in opened:
        journal.close()


Keep = Callable[[Journal], Journal]


def closed(path: pathlib.Path, state: bytes = b"state") -> pathlib.Path:
    """A journal in its term 1 with a state and two segments; nobody has it open."""
    journal = Journal.create(path, "a")
    journal.save(state, {0: b"zero" * 5000, 1: b"one"})
    journal.close()
    return path


def term_on_disk(path: pathlib.Path) -> int:
    db = sqlite3.connect(path)
    (term,) = db.execute("SELECT term FROM head").fetchone()
    db.close()
    return int(term)


def test_what_was_saved_is_there_in_the_next_term(path: pathlib.Path, kept: Keep) -> None:
    """A coordinator ends and another comes: the same state, segments by number, and a term that only grows."""
    first = kept(Journal.create(path, "a"))
    assert first.term == 1 and first.load() == (None, [])
    first.save(b"one", {10: b"ten", 2: b"two"})
    first.save(b"two", {3: b""}, drop=[2, 99])
    assert first.load() == (b"two", [b"", b"ten"])
    first.close()
    first.close()
    for term in (2, 3):
        later = kept(Journal.open(path, "a"))
        assert later.term == term and later.load() == (b"two", [b"", b"ten"])
        later.close()


def test_an_empty_state_is_a_state(path: pathlib.Path, kept: Keep) -> None:
    """None means that nothing was ever saved; b"" was."""
    journal = kept(Journal.create(path, "a"))
    journal.save(b"")
    assert journal.load() == (b"", [])


def test_the_term_is_on_disk_before_anybody_acts_in_it(path: pathlib.Path, kept: Keep) -> None:
    """A coordinator that dies right after its start, before any save, has used up its term."""
    closed(path)
    kept(Journal.open(path, "a"))
    assert term_on_disk(path) == 2


def test_each_commit_waits_for_the_disk(path: pathlib.Path, kept: Keep) -> None:
    """No test can cut the power: that SQLite is told to sync every commit is what can be checked."""
    journals = [kept(Journal.create(path, "a")), kept(Journal.open(path, "a"))]
    for journal in journals:
        assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_only_the_owner_may_read_it(path: pathlib.Path, kept: Keep) -> None:
    """What a job knows is its owner's, and so is the log beside it while the job runs."""
    kept(Journal.create(path, "a")).save(b"x")
    files = sorted(path.parent.iterdir())
    assert len(files) == 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_the_thread_may_change(path: pathlib.Path, kept: Keep) -> None:
    """The coordinator saves from whichever thread an event came in on."""
    journal = kept(Journal.create(path, "a"))
    thread = threading.Thread(target=journal.save, args=(b"from there",))
    thread.start()
    thread.join()
    assert journal.load() == (b"from there", [])


def test_a_new_job_never_writes_over_an_old_one(path: pathlib.Path, kept: Keep) -> None:
    """The same name used twice: the second start must not wipe what the first knows."""
    closed(path)
    with pytest.raises(StoreError, match=r"job b: .*journal\.db is there already.*choose a new name"):
        Journal.create(path, "b")
    assert kept(Journal.open(path, "a")).load()[0] == b"state"


def test_a_folder_that_is_not_there(path: pathlib.Path) -> None:
    with pytest.raises(StoreError, match=r"job a: .*cannot be made: No such file.*choose a folder"):
        Journal.create(path.parent / "none" / "journal.db", "a")


def test_creation_that_fails_leaves_nothing_in_the_way(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full at the first start: after a clean-up the same command must work."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "TABLES", (*module.TABLES, "INSERT INTO nowhere VALUES (1)"))
        with pytest.raises(StoreError, match="cannot be written: no such table"):
            Journal.create(path, "a")
    assert not list(path.parent.iterdir())
    Journal.create(path, "a").close()


# What open() refuses.


def cut(path: pathlib.Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def flip(path: pathlib.Path, needle: bytes) -> None:
    content = path.read_bytes()
    place = content.index(needle)
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


def newer_format(path: pathlib.Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 7")
    db.close()


def another_database(path: pathlib.Path) -> None:
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE head (job, term)")
    db.execute("INSERT INTO head VALUES ('a', 1)")
    db.commit()
    db.close()


def wrong_free_pages(path: pathlib.Path) -> None:
    """The list of free pages names a page in use: nothing is wrong yet, but the next save would write over it."""
    db = sqlite3.connect(path)
    db.execute("DELETE FROM segments WHERE id = 0")
    db.commit()
    db.close()
    content = path.read_bytes()
    path.write_bytes(content[:32] + (2).to_bytes(4, "big") + content[36:])


FAULTS: dict[str, tuple[Callable[[pathlib.Path], object], str]] = {
    "wiped": (
        lambda p: p.unlink(),
        "is not there: what the job knew is gone; put the file back, or start the job again",
    ),
    "emptied": (lambda p: cut(p, 0), "is empty or no file at all.*put back a good copy"),
    "header cut": (lambda p: cut(p, 50), "not a journal.*put back a good copy"),
    "cut by a page": (lambda p: cut(p, p.stat().st_size - 4096), "malformed.*put back a good copy"),
    "cut by a byte": (lambda p: cut(p, p.stat().st_size - 1), "damaged|malformed"),
    "one page left": (lambda p: cut(p, 4096), "malformed.*put back a good copy"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "is empty or no file at all"),
    "text": (lambda p: p.write_text("not a database " * 999), "not a database.*put back a good copy"),
    "another program's": (another_database, "not a journal of Syncline.*put back a good copy"),
    "newer": (newer_format, "has format 7, this Syncline knows formats up to 1; .*Syncline that wrote it"),
    "free pages": (wrong_free_pages, "is damaged: .*put back a good copy"),
    "a bit of the state": (lambda p: flip(p, b"state of the job"), "is damaged: its state .*put back a good copy"),
    "a bit of a segment": (lambda p: flip(p, b"zerozero"), "is damaged: its segments .*put back a good copy"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_open_refuses_what_it_cannot_rely_on(fault: str, path: pathlib.Path) -> None:
    """A damaged memory must not become a job that forgot half: path, job and remedy are named, nothing is mended."""
    closed(path, b"state of the job")
    damage, words = FAULTS[fault]
    damage(path)
    before = path.read_bytes() if path.is_file() else None
    for _ in range(2):
        with pytest.raises(StoreError, match=words) as caught:
            Journal.open(path, "a")
        assert f"job a: {path} " in str(caught.value)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_any_cut_is_noticed(path: pathlib.Path) -> None:
    """A copy that was interrupted, a file system that lost the tail: at whatever size it ends, it is refused."""
    whole = closed(path).read_bytes()
    for size in [*range(0, len(whole), 509), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(StoreError, match=r"job a: .*journal\.db .*;"):
            Journal.open(path, "a")


def test_the_journal_of_another_job(path: pathlib.Path, kept: Keep) -> None:
    """A path mixed up: the other job's term must not grow by it, or its coordinator would be fenced."""
    other = kept(Journal.create(path, "a"))
    with pytest.raises(StoreError, match=r"job b: .* is the journal of another job, a; name the file of this job"):
        Journal.open(path, "b")
    other.save(b"goes on")


def test_a_wal_without_its_file_is_no_journal(path: pathlib.Path, kept: Keep) -> None:
    """`rm journal.db` while the job ran: what is beside it must not pass for a job."""
    kept(Journal.create(path, "a")).save(b"x")
    path.unlink()
    with pytest.raises(StoreError, match="is not there"):
        Journal.open(path, "a")


def test_a_file_that_vanishes_while_it_is_opened(path: pathlib.Path) -> None:
    """Wiped between the look and the opening: SQLite must not make a new, empty one in its place."""
    with pytest.raises(StoreError, match="cannot be opened"):
        Journal(path, "a")
    assert not path.exists()


# Two coordinators.


def test_the_older_coordinator_can_save_nothing_more(path: pathlib.Path, kept: Keep) -> None:
    """The old one was only slow, not dead: whatever it still decides must not reach the disk."""
    old = kept(Journal.create(path, "a"))
    old.save(b"old", {0: b"zero"})
    new = kept(Journal.open(path, "a"))
    for _ in range(2):
        with pytest.raises(FencedError, match=r"job a: a newer coordinator, term 2, has taken over .*journal\.db"):
            old.save(b"late", {1: b"late"}, drop=[0])
    assert new.load() == (b"old", [b"zero"])
    new.save(b"new")
    newest = kept(Journal.open(path, "a"))
    with pytest.raises(FencedError, match="term 3"):
        old.save(b"late")
    with pytest.raises(FencedError, match="term 3"):
        new.save(b"late")
    old.close()
    newest.save(b"newest")
    assert newest.load() == (b"newest", [b"zero"])


def test_who_was_replaced_learns_it_by_looking(tmp_path: pathlib.Path) -> None:
    with contextlib.closing(Journal.create(tmp_path / "journal.db", "a")) as first:
        first.save(b"one")
        first.check()
        with contextlib.closing(Journal.open(tmp_path / "journal.db", "a")) as second:
            second.check()
            with pytest.raises(FencedError, match="a newer coordinator, term 2, has taken over"):
                first.check()


def test_a_takeover_while_a_save_waits_for_its_turn(path: pathlib.Path, kept: Keep) -> None:
    """The old one asks for the lock, the new one has it and takes over: a term looked at earlier does not count."""
    old = kept(Journal.create(path, "a"))
    old.save(b"old")
    raised: list[BaseException] = []
    asked = threading.Event()

    def late() -> None:
        try:
            old.save(b"late")
        except BaseException as error:
            raised.append(error)

    new = sqlite3.connect(path, isolation_level=None)
    new.execute("BEGIN IMMEDIATE")
    old._db.set_trace_callback(lambda statement: asked.set() if statement.startswith("BEGIN") else None)
    thread = threading.Thread(target=late)
    thread.start()
    assert asked.wait(PATIENCE)
    new.execute("UPDATE head SET term = term + 1")
    new.execute("COMMIT")
    thread.join()
    assert [type(error) for error in raised] == [FencedError]
    assert new.execute("SELECT content FROM state").fetchone() == (b"old",)
    new.close()


def test_takeovers_under_fire(path: pathlib.Path, kept: Keep) -> None:
    """Old ones save as fast as they can while new ones take over: what a new one loads, no old one changes."""
    current = kept(Journal.create(path, "a"))
    for term in range(2, 12):
        ended: list[str] = []
        enough = threading.Event()

        def fire(mine: Journal, ended: list[str] = ended, enough: threading.Event = enough) -> None:
            try:
                while not enough.is_set():
                    mine.save(b"of term %d" % mine.term)
            except FencedError as error:
                ended.append(str(error))

        thread = threading.Thread(target=fire, args=(current,))
        thread.start()
        following = kept(Journal.open(path, "a"))
        found = following.load()
        thread.join(PATIENCE)
        enough.set()
        thread.join()
        assert following.term == term and len(ended) == 1 and f"term {term}," in ended[0]
        assert following.load() == found
        current = following


def test_a_process_that_sits_on_the_file(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kept: Keep) -> None:
    """A coordinator stopped in the middle of a save holds the lock: the next says so and does not wait for ever."""
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.05)
    first = kept(Journal.create(path, "a"))
    stopped = sqlite3.connect(path, isolation_level=None)
    stopped.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match=r"locked; another process has held the file.*end it"):
        Journal.open(path, "a")
    with pytest.raises(StoreError, match=r"locked; another process has held the file.*end it"):
        first.save(b"x")
    stopped.execute("ROLLBACK")
    stopped.close()
    first.save(b"x")


def test_a_reader_holds_up_nobody(path: pathlib.Path, kept: Keep) -> None:
    """Somebody looks into the file with a tool and leaves it open: saves go on, and are safe in the end."""
    journal = kept(Journal.create(path, "a"))
    journal.save(b"0")
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM state").fetchall()
    for number in range(20):
        journal.save(b"%d" % number)
    reader.close()
    journal.close()
    assert kept(Journal.open(path, "a")).load()[0] == b"19"


def test_a_file_that_vanishes_under_a_running_coordinator(path: pathlib.Path, kept: Keep) -> None:
    """`rm -r runs/a` while it runs: writing on into a deleted file would be success that nobody can ever load."""
    journal = kept(Journal.create(path, "a"))
    journal.save(b"x")
    at_barrier = path.with_name("away.db")
    path.rename(at_barrier)
    with pytest.raises(StoreError, match=r"was removed or replaced while the job ran; put the file back"):
        journal.save(b"y")
    at_barrier.rename(path)
    journal.save(b"z")


def test_a_file_that_went_back_in_time(path: pathlib.Path, kept: Keep) -> None:
    """An old copy put in place while the job runs: it must not count as the memory of this term."""
    journal = kept(Journal.create(path, "a"))
    journal.close()
    journal = kept(Journal.open(path, "a"))
    journal._db.execute("UPDATE head SET term = 1")
    with pytest.raises(StoreError, match="went back from term 2 to term 1"):
        journal.save(b"x")
