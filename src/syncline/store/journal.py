"""The coordinator's journal: one SQLite file, one writer, every save durable on return.

Every save is moved into the main file at once (an SQLite checkpoint), so that the `-wal` file never has unique data:
if it is lost or damaged, no completed save is. Keep the file on a local disk: SQLite's locks and shared memory do not
work on network file systems.
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
# How long another process may hold the file. A save takes milliseconds; a process that takes this long is suspended.
BUSY_SECONDS: Final = 10.0
_NEW_NAME: Final = "put the file back, or start the job again under a new name"
_RESTORE: Final = "put back a good copy of it, or start the job again under a new name"
#: By SQLite's primary error codes.
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
    """The state that survives the coordinator. One writer: the process that opened it last.

    Not for two threads at once; the thread may change.
    """

    def __init__(self, path: pathlib.Path, job: str) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.job = job
        self.term = 0  #: incremented at every start
        with self._trouble("cannot be opened"):
            # connect would create a missing file; mode=rw does not.
            address = f"{path.absolute().as_uri()}?mode=rw"
            self._db = sqlite3.connect(
                address, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._file = _identity(path)

    @classmethod
    def create(cls, path: pathlib.Path, job: str) -> Journal:
        """Creates the journal of a new job, in term 1. Existing files are never overwritten."""
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
            # The file is ours and not announced yet: half of it would block the next attempt.
            for side in ("", "-wal", "-shm"):
                pathlib.Path(f"{path}{side}").unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, path: pathlib.Path, job: str) -> Journal:
        """Opens the journal of a running job, one term later: earlier holders can no longer save."""
        if not path.exists():
            raise _refused(path, job, "is not there: what the job knew is gone", _NEW_NAME)
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
        """The last saved state, None before the first save; and the segments by number."""
        with self._trouble("cannot be read"), self._transaction("DEFERRED"):
            return self._read()

    def save(self, state: bytes, segments: Mapping[int, bytes] = _NONE, drop: Collection[int] = ()) -> None:
        """Saves this state, adds segments and drops others: atomic, durable on return.

        After an error the last saved state stands, and a later save may succeed. (If a disk fails and the process
        dies too, the next term may find the failed save complete.)
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
        """Raises FencedError if a newer term has begun: this process must end."""
        with self._trouble("cannot be read"):
            self._check_term()

    def close(self) -> None:
        """Closes the file; idempotent."""
        self._db.close()

    def _fill(self) -> None:
        """Initializes a new file in one transaction: `open` refuses an unfinished one."""
        with self._trouble("cannot be written"):
            self._prepare()
            with self._transaction("IMMEDIATE"):
                for statement in TABLES:
                    self._db.execute(statement)
                self._db.execute("INSERT INTO head VALUES (?, 1)", (self.job,))
            self._settle()
            self.term = 1

    def _take_over(self) -> None:
        """Validates everything, then increments the term, durably."""
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
        # FULL: each commit waits for the disk. With NORMAL a power failure would lose the last saves.
        self._db.execute("PRAGMA synchronous = FULL")
        (mode,) = self._db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise self._refused(f"lies where SQLite cannot write ahead ({mode})", "use a local disk")

    def _settle(self) -> None:
        """Moves committed data into the main file. It is durable already: the next save tries again."""
        with contextlib.suppress(sqlite3.Error):
            # PASSIVE does not wait: a suspended reader must not block the coordinator.
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _read(self) -> tuple[bytes | None, list[bytes]]:
        states = self._whole(self._db.execute("SELECT content, digest FROM state"), "state")
        segments = self._whole(self._db.execute("SELECT content, digest FROM segments ORDER BY id"), "segments")
        return (states[0] if states else None), segments

    def _whole(self, rows: sqlite3.Cursor, table: str) -> list[bytes]:
        """Verifies digests: SQLite detects damage to its own pages, but not to our data."""
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
        """Checks that the file still exists: a deleted one could be written but never read."""
        if _identity(self.path) != self._file:
            words = "was removed or replaced while the job ran"
            raise self._refused(words, _NEW_NAME)

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
        """IMMEDIATE: excludes other writers, so that checks inside hold until the commit."""
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # Some errors have already ended the transaction.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _trouble(self, words: str) -> Iterator[None]:
        """Turns errors of the disk or SQLite into ours."""
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
    """The last saved state for a reader that changes nothing; None if there is none."""
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
    """The identity of the file at this path; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _make_file(path: pathlib.Path, job: str) -> None:
    """Creates an empty private file, durably."""
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
