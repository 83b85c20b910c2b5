"""The coordinator's memory on disk: one SQLite file, one writer, every save durable when it returns.

Every save is brought into the file itself at once (a checkpoint, in SQLite's words), so the `-wal` beside it never
holds anything that only it knows: lost, cut or damaged, it takes no save with it that had returned. Keep the file on
a local disk: SQLite's locks and shared memory do not work over network file systems.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from syncline.errors import FencedError, StoreError

_APPLICATION: Final = 0x53594E43  # "SYNC", in the header of every journal
_FORMAT: Final = 1
# How long another process may sit on the file. A save takes milliseconds: one that takes this long is stopped.
BUSY_SECONDS: Final = 10.0
_ANEW: Final = "put the file back, or start the job again under a new name"
_RESTORE: Final = "put back a good copy of it, or start the job again under a new name"
#: By SQLite's primary codes.
_REMEDIES: Final = {
    sqlite3.SQLITE_FULL: "make space on this disk",
    sqlite3.SQLITE_IOERR: "see that the disk is sound, has space and allows files of this size",
    sqlite3.SQLITE_READONLY: "let this process write the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "let this process read and write the file and its folder",
    sqlite3.SQLITE_BUSY: f"another process has held the file for {BUSY_SECONDS:g} s: find it (fuser) and end it",
    sqlite3.SQLITE_TOOBIG: "a state or segment may have 1 GB",
}
_NONE: Final[Mapping[int, bytes]] = MappingProxyType({})

TABLES: Final = (
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_FORMAT}",
    "CREATE TABLE head (job TEXT NOT NULL, term INTEGER NOT NULL)",
    "CREATE TABLE state (id INTEGER PRIMARY KEY, content BLOB NOT NULL, digest BLOB NOT NULL)",
    "CREATE TABLE segments (id INTEGER PRIMARY KEY, content BLOB NOT NULL, digest BLOB NOT NULL)",
)


class Journal:
    """What the coordinator must remember through its own death. One writer: whoever opened it last.

    Not for two threads at once; the thread may change.
    """

    def __init__(self, path: pathlib.Path, job: str) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.job = job
        self.term = 0  #: grows with every start
        with self._trouble("cannot be opened"):
            # Of a file that is not there, connect would make a new one: mode=rw does not.
            address = f"{path.absolute().as_uri()}?mode=rw"
            self._db = sqlite3.connect(
                address, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._file = _identity(path)

    @classmethod
    def create(cls, path: pathlib.Path, job: str) -> Journal:
        """The journal of a new job, in its term 1. A file that is there already is never written over."""
        _make_file(path, job)
        try:
            journal = cls(path, job)
            try:
                journal._fill()
                return journal
            except BaseException:
                journal.close()
                raise
        except BaseException:
            # The file is ours and nobody knows of it yet: half of it would only be in the way of the next try.
            for side in ("", "-wal", "-shm"):
                pathlib.Path(f"{path}{side}").unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, path: pathlib.Path, job: str) -> Journal:
        """The journal of a job that goes on, one term later: from now on whoever had it open cannot save."""
        if not path.exists():
            raise _refused(path, job, "is not there: what the job knew is gone", _ANEW)
        if not path.is_file() or not path.stat().st_size:
            # SQLite takes an empty file for a new database.
            raise _refused(path, job, "is empty or no file at all: not a journal, or cut off", _RESTORE)
        journal = cls(path, job)
        try:
            journal._take_over()
            return journal
        except BaseException:
            journal.close()
            raise

    def load(self) -> tuple[bytes | None, list[bytes]]:
        """The state that was saved last, None before the first save; the segments, by their numbers."""
        with self._trouble("cannot be read"), self._transaction("DEFERRED"):
            return self._read()

    def save(self, state: bytes, segments: Mapping[int, bytes] = _NONE, drop: Collection[int] = ()) -> None:
        """Keeps this state, adds these segments and drops those: all or nothing, durable when it returns.

        After an error the last state that was saved stands, and a later save may well succeed. (When a disk fails
        and the process dies on top of it, the next term may find what the failed save was to keep, whole.)
        """
        what = f"the job's new state ({len(state)} bytes, {len(segments)} new segments)"
        with self._trouble(f"cannot keep {what}; what was saved before is intact"):
            self._check_file()
            with self._transaction("IMMEDIATE"):
                self._check_term()
                self._db.executemany("DELETE FROM segments WHERE id = ?", [(number,) for number in drop])
                rows = ((number, content, _digest(content)) for number, content in segments.items())
                self._db.executemany("INSERT OR REPLACE INTO segments VALUES (?, ?, ?)", rows)
                self._db.execute("INSERT OR REPLACE INTO state VALUES (1, ?, ?)", (state, _digest(state)))
            self._settle()

    def check(self) -> None:
        """Raises FencedError when a newer term has begun: whoever has this open must end."""
        with self._trouble("cannot be read"):
            self._check_term()

    def close(self) -> None:
        """Gives the file back; what was saved stays. A second time does nothing."""
        self._db.close()

    def _fill(self) -> None:
        """Makes a new file a journal, all at once: what is cut short here is no journal for `open`."""
        with self._trouble("cannot be written"):
            self._prepare()
            with self._transaction("IMMEDIATE"):
                for statement in TABLES:
                    self._db.execute(statement)
                self._db.execute("INSERT INTO head VALUES (?, 1)", (self.job,))
            self._settle()
            self.term = 1

    def _take_over(self) -> None:
        """Looks at all there is before it changes anything; then the term, which is durable when this returns."""
        with self._trouble("cannot be taken up"):
            self._check_format()
            self._prepare()
            with self._transaction("IMMEDIATE"):
                self._check_content()
                term = self._head_term() + 1
                self._db.execute("UPDATE head SET term = ?", (term,))
            self._settle()
            self.term = term

    def _prepare(self) -> None:
        # FULL: each commit waits for the disk. With NORMAL a power cut would take the last saves with it.
        self._db.execute("PRAGMA synchronous = FULL")
        (mode,) = self._db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise self._refused(f"lies where SQLite cannot write ahead ({mode})", "use a local disk")

    def _settle(self) -> None:
        """Brings what is committed into the file itself. It is durable already: the next save tries again."""
        with contextlib.suppress(sqlite3.Error):
            # PASSIVE waits for nobody: a stopped reader must not hold up the coordinator.
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _read(self) -> tuple[bytes | None, list[bytes]]:
        states = self._whole(self._db.execute("SELECT content, digest FROM state"), "state")
        segments = self._whole(self._db.execute("SELECT content, digest FROM segments ORDER BY id"), "segments")
        return (states[0] if states else None), segments

    def _whole(self, rows: sqlite3.Cursor, table: str) -> list[bytes]:
        """SQLite notices a damaged page of its own tree, but not a damaged byte in what we gave it."""
        found = []
        for content, digest in rows:
            if not isinstance(content, bytes) or digest != _digest(content):
                raise self._refused(f"is damaged: its {table} are not what was saved", _RESTORE)
            found.append(content)
        return found

    def _head_term(self) -> int:
        heads = self._db.execute("SELECT job, term FROM head").fetchall()
        if len(heads) != 1 or not isinstance(heads[0][1], int):
            raise self._refused("is damaged: it does not say whose it is", _RESTORE)
        job, term = heads[0]
        if job != self.job:
            raise self._refused(f"is the journal of another job, {job}", "name the file of this job")
        return int(term)

    def _check_format(self) -> None:
        (application,) = self._db.execute("PRAGMA application_id").fetchone()
        if application != _APPLICATION:
            words = "is not a journal of Syncline, or was cut off while it was made"
            raise self._refused(words, _RESTORE)
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > _FORMAT:
            words = f"has format {version}, this Syncline knows formats up to {_FORMAT}"
            raise self._refused(words, "take the job up with the Syncline that wrote it")

    def _check_content(self) -> None:
        self._head_term()
        (found,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise self._refused(f"is damaged: {' '.join(found.split())}", _RESTORE)
        self._read()

    def _check_file(self) -> None:
        """A file that was deleted can still be written to by whoever has it open; nobody would ever read that."""
        if _identity(self.path) != self._file:
            words = "was removed or replaced while the job ran"
            raise self._refused(words, _ANEW)

    def _check_term(self) -> None:
        term = self._head_term()
        if term > self.term:
            raise FencedError(
                f"job {self.job}: a newer coordinator, term {term}, has taken over {self.path}; "
                f"this one, term {self.term}, must end"
            )
        if term < self.term:
            words = f"went back from term {self.term} to term {term} while the job ran"
            raise self._refused(words, "leave the file alone while the job runs; start the job again")

    @contextlib.contextmanager
    def _transaction(self, kind: str) -> Iterator[None]:
        """IMMEDIATE: nobody else writes from here on, so what is checked inside holds until the commit."""
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # Some errors have ended the transaction already.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _trouble(self, words: str) -> Iterator[None]:
        """Whatever the disk or SQLite has against it, in our words."""
        try:
            yield
        except (sqlite3.Error, OSError, OverflowError) as error:
            remedy = _REMEDIES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, _RESTORE)
            if isinstance(error, sqlite3.ProgrammingError):
                remedy = "open it again"
            raise self._refused(f"{words}: {error}", remedy) from error

    def _refused(self, words: str, remedy: str) -> StoreError:
        return _refused(self.path, self.job, words, remedy)


def look(path: pathlib.Path) -> bytes | None:
    """The state that was saved last, for a reader that changes nothing; None where there is none that can be read."""
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)
        with contextlib.closing(db):
            row = db.execute("SELECT content, digest FROM state").fetchone()
    except sqlite3.Error:
        return None
    is_whole = row is not None and isinstance(row[0], bytes) and row[1] == _digest(row[0])
    return row[0] if is_whole else None


def _refused(path: pathlib.Path, job: str, words: str, remedy: str) -> StoreError:
    return StoreError(f"job {job}: {path} {words}; {remedy}")


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _identity(path: pathlib.Path) -> tuple[int, int] | None:
    """Which file it is that has this name now; None: none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _make_file(path: pathlib.Path, job: str) -> None:
    """An empty file for us alone, durable in its folder."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileExistsError as error:
        words = "is there already: another job's, or an earlier run's"
        raise _refused(path, job, words, "take that job up again, or choose a new name for this one") from error
    except OSError as error:
        words = f"cannot be made: {error.strerror}"
        raise _refused(path, job, words, "choose a folder that exists and can be written to") from error
