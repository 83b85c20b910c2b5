"""Images, histograms and texts of a run: a table beside its readings, bounded.

Of a name that has many, every second goes, never the newest: so the steps that are left are spread over the run. When
all together are too large, those of the name that takes most are thinned.
"""

from __future__ import annotations

import sqlite3
from typing import Final

import msgspec

from syncline.core.media import MOST_MEDIA, MediaItem, thinned

#: Of one name; and the bytes of all together.
MOST_OF_A_NAME: Final = {"image": 30, "histogram": 120, "text": 100}
MOST_BYTES: Final = 24_000_000

_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS media (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, kind TEXT NOT NULL, "
    "step INTEGER NOT NULL, at REAL NOT NULL, member TEXT NOT NULL, content BLOB NOT NULL)"
)


class MediaEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one of them, without its content."""

    id: int  #: rises
    name: str
    kind: str  #: image, histogram, text
    step: int
    at: float  #: wall clock
    member: str  #: that reported it
    num_bytes: int


class MediaTable:
    """Writes them, inside the transactions of its owner."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.execute(_TABLE)
        self._ids: dict[str, list[tuple[int, int]]] = {}  # name -> id and bytes of each, oldest first
        self._num_bytes = 0
        for number, name, size in db.execute("SELECT id, name, length(content) FROM media ORDER BY id"):
            self._ids.setdefault(name, []).append((number, size))
            self._num_bytes += size

    def add(self, item: MediaItem, at: float, member: str) -> None:
        """Beyond the most names nothing is kept."""
        if item.name not in self._ids and len(self._ids) >= MOST_MEDIA:
            return
        values = (item.name, item.kind, item.step, at, member, item.content)
        query = "INSERT INTO media (name, kind, step, at, member, content) VALUES (?, ?, ?, ?, ?, ?)"
        number = self._db.execute(query, values).lastrowid or 0
        self._ids.setdefault(item.name, []).append((number, len(item.content)))
        self._num_bytes += len(item.content)
        if len(self._ids[item.name]) > MOST_OF_A_NAME[item.kind]:
            self._thin(item.name)
        while self._num_bytes > MOST_BYTES:
            self._thin(max(self._ids, key=lambda name: sum(size for _, size in self._ids[name][:-1])))

    def _thin(self, name: str) -> None:
        gone = set(thinned([number for number, _ in self._ids[name]]))
        if not gone:  # every name has one: the oldest name goes
            name = min(self._ids, key=lambda one: self._ids[one][-1][0])
            gone = {number for number, _ in self._ids[name]}
        self._db.executemany("DELETE FROM media WHERE id = ?", [(number,) for number in gone])
        self._num_bytes -= sum(size for number, size in self._ids[name] if number in gone)
        self._ids[name] = [one for one in self._ids[name] if one[0] not in gone]
        if not self._ids[name]:
            del self._ids[name]


def entries(db: sqlite3.Connection) -> list[MediaEntry]:
    """All of a run, oldest first; none of a run that was made before there were any."""
    if not _is_there(db):
        return []
    query = "SELECT id, name, kind, step, at, member, length(content) FROM media ORDER BY id"
    return [
        MediaEntry(id=number, name=name, kind=kind, step=step, at=at, member=member, num_bytes=size)
        for number, name, kind, step, at, member, size in db.execute(query)
    ]


def content(db: sqlite3.Connection, number: int) -> tuple[str, bytes] | None:
    """Kind and content; None if there is none of this id."""
    found = (
        db.execute("SELECT kind, content FROM media WHERE id = ?", (number,)).fetchone() if _is_there(db) else None
    )
    return (found[0], bytes(found[1])) if found is not None else None


def _is_there(db: sqlite3.Connection) -> bool:
    return bool(db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'media'").fetchone()[0])
