"""The readings of a run: one SQLite file in its folder, written by its coordinator, read by anybody.

Nothing of the job depends on this file, and it is not synced to disk at every write: a machine that loses power may
lose the last seconds. `core/series.py` decides what is kept of old readings.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from syncline.core.media import MediaItem
from syncline.core.metrics import MOST_METRICS
from syncline.core.series import JOB, MEMBER, Curve, Point, Thinning, merged, most_points, slot_of
from syncline.errors import StoreError
from syncline.store import media as media_table
from syncline.store.media import MediaEntry, MediaTable

SERIES: Final = "series.db"
_APPLICATION: Final = 0x53594E53  # "SYNS"
_FORMAT: Final = 1
#: Another process reads for milliseconds.
_BUSY_SECONDS: Final = 5.0
#: How often old rows are merged.
THIN_SECONDS: Final = 30.0
#: Members that have rows of their own; further ones are in the figures of the job only.
MOST_MEMBERS: Final = 1_000

_TABLES: Final = (
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_FORMAT}",
    "CREATE TABLE columns (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    "CREATE TABLE rows (subject TEXT NOT NULL, tier INTEGER NOT NULL, at REAL NOT NULL, content BLOB NOT NULL, "
    "PRIMARY KEY (subject, tier, at)) WITHOUT ROWID",
    "CREATE TABLE metrics (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, stride INTEGER NOT NULL)",
    "CREATE TABLE points (metric INTEGER NOT NULL, number INTEGER NOT NULL, step REAL NOT NULL, at REAL NOT NULL, "
    "value REAL, low REAL, high REAL, count INTEGER NOT NULL, PRIMARY KEY (metric, number)) WITHOUT ROWID",
    "CREATE TABLE facts (name TEXT PRIMARY KEY, content BLOB NOT NULL) WITHOUT ROWID",
)
#: Each `stride` points of a metric as one: step and time of the last of them, and the mean, least and most of those
#: that have a value.
_MERGED: Final = (
    "SELECT step, at, mean, least, most FROM (SELECT max(number) AS last, "
    "sum(value * count) / sum(CASE WHEN value IS NULL THEN 0 ELSE count END) AS mean, "
    "min(low) AS least, max(high) AS most FROM points WHERE metric = :metric GROUP BY number / :stride) "
    "JOIN points ON metric = :metric AND number = last ORDER BY number"
)
#: Ids and values of a row's columns.
_CELLS: Final = np.dtype([("id", "<u2"), ("value", "<f4")])
#: The subject of rows about the job as a whole; others are names of members.
WHOLE: Final = ""


class SeriesWriter:
    """Writes the readings of one run. For one thread."""

    def __init__(self, path: pathlib.Path) -> None:
        """Opens the file, or makes it. One that is damaged is put aside. Raises StoreError."""
        self.path = path
        self.put_aside: pathlib.Path | None = None  #: a damaged file
        with _trouble(path):
            try:
                self._open()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self.put_aside = _put_aside(path)
                self._open()
        self._thinned_at = -math.inf
        self._curves: dict[str, tuple[int, Curve, int]] = {}  # metric -> id, curve, number of its next point
        self._columns: dict[str, int] = {}
        self._subjects: set[str] = set()
        with _trouble(path):
            self._learn()

    def _open(self) -> None:
        self._db = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            if self._db.execute("PRAGMA user_version").fetchone()[0] != _FORMAT:
                with self._transaction():
                    for statement in _TABLES:
                        self._db.execute(statement)
            self._db.execute("SELECT count(*) FROM facts").fetchone()
            self._media = MediaTable(self._db)
        except BaseException:
            self._db.close()
            raise

    def _learn(self) -> None:
        self._columns = dict(self._db.execute("SELECT name, id FROM columns"))
        self._subjects = {name for (name,) in self._db.execute("SELECT DISTINCT subject FROM rows")}
        for number, name, stride in self._db.execute("SELECT id, name, stride FROM metrics").fetchall():
            last = self._db.execute("SELECT max(number) FROM points WHERE metric = ?", (number,)).fetchone()[0]
            self._curves[name] = (number, Curve(stride), 0 if last is None else last + 1)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def write(
        self,
        at: float,
        rows: Mapping[str, Mapping[str, float]],
        points: Sequence[tuple[str, Point]] = (),
        facts: Mapping[str, bytes] = {},
        media: Sequence[tuple[MediaItem, float, str]] = (),
    ) -> None:
        """Adds a row per subject, points of metrics, facts, and media with time and member, all or none.

        Raises StoreError.
        """
        with _trouble(self.path):
            try:
                with self._transaction():
                    for subject, row in rows.items():
                        if subject in self._subjects or len(self._subjects) <= MOST_MEMBERS:
                            self._subjects.add(subject)
                            self._add_row(subject, 0, slot_of(at, _thinning(subject).tiers[0].seconds), row)
                    for name, point in points:
                        self._add_point(name, point)
                    self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", list(facts.items()))
                    for item, when, member in media:
                        self._media.add(item, when, member)
                    if at - self._thinned_at >= THIN_SECONDS:
                        self._thin(at)
                        self._thinned_at = at
            except sqlite3.Error:
                self._learn_again()
                raise

    def _learn_again(self) -> None:
        """What was rolled back is forgotten here too."""
        with contextlib.suppress(sqlite3.Error):
            self._curves, self._columns = {}, {}
            self._learn()
            self._media = MediaTable(self._db)

    # -- rows ---------------------------------------------------------------------------------------------

    def _add_row(self, subject: str, tier: int, at: float, row: Mapping[str, float]) -> None:
        cells = [(self._column(name), value) for name, value in row.items() if math.isfinite(value)]
        content = np.array([cell for cell in cells if cell[0] is not None], _CELLS).tobytes()
        self._db.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", (subject, tier, at, content))

    def _column(self, name: str) -> int | None:
        number = self._columns.get(name)
        if number is None and len(self._columns) < 1 << 15:
            number = self._columns[name] = len(self._columns)
            self._db.execute("INSERT INTO columns VALUES (?, ?)", (number, name))
        return number

    def _thin(self, now: float) -> None:
        names = {number: name for name, number in self._columns.items()}
        for subject in sorted(self._subjects):
            thinning = _thinning(subject)
            for tier, kind in enumerate(thinning.tiers[:-1]):
                longer = thinning.tiers[tier + 1].seconds
                before = slot_of(now - kind.kept_seconds, longer)
                self._merge(subject, tier, tier + 1, longer, before, names)
            self._merge_oldest(subject, thinning, names)

    def _merge(
        self, subject: str, tier: int, into: int, seconds: float, before: float, names: Mapping[int, str]
    ) -> None:
        """Merges the rows of a tier that are older than `before`; whole slots, so that none is merged twice."""
        where = "WHERE subject = ? AND tier = ? AND at < ?"
        found = self._db.execute(f"SELECT at, content FROM rows {where} ORDER BY at", (subject, tier, before))
        slots: dict[float, list[dict[str, float]]] = {}
        for at, content in found.fetchall():
            slots.setdefault(slot_of(at, seconds), []).append(_row(content, names))
        if not slots:
            return
        self._db.execute(f"DELETE FROM rows {where}", (subject, tier, before))
        for at, rows in slots.items():
            self._add_row(subject, into, at, merged(rows))

    def _merge_oldest(self, subject: str, thinning: Thinning, names: Mapping[int, str]) -> None:
        last = len(thinning.tiers) - 1
        where = (subject, last)
        query = "SELECT at, content FROM rows WHERE subject = ? AND tier = ? ORDER BY at"
        if self._db.execute("SELECT count(*) FROM rows WHERE subject = ? AND tier = ?", where).fetchone()[0] <= (
            thinning.most_rows
        ):
            return
        rows = [(at, _row(content, names)) for at, content in self._db.execute(query, where).fetchall()]
        self._db.execute("DELETE FROM rows WHERE subject = ? AND tier = ?", where)
        for k in range(0, len(rows), 2):
            self._add_row(subject, last, rows[k][0], merged(row for _, row in rows[k : k + 2]))

    # -- curves -------------------------------------------------------------------------------------------

    def _add_point(self, name: str, new: Point) -> None:
        if name not in self._curves:
            if len(self._curves) >= MOST_METRICS:
                return
            number = len(self._curves)
            self._db.execute("INSERT INTO metrics VALUES (?, ?, 1)", (number, name))
            self._curves[name] = (number, Curve(), 0)
        number, curve, place = self._curves[name]
        made = curve.add(new)
        if made is None:
            return
        self._insert(number, place, made)
        place += 1
        if place > most_points(len(self._curves)):
            place = self._halve(number, curve)
        self._curves[name] = (number, curve, place)

    def _insert(self, number: int, place: int, made: Point) -> None:
        values = (_finite(made.value), _finite(made.low), _finite(made.high), made.count)
        self._db.execute(
            "INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (number, place, made.step, made.at, *values),
        )

    def _halve(self, number: int, curve: Curve) -> int:
        rows = self._db.execute(
            "SELECT step, at, value, low, high, count FROM points WHERE metric = ? ORDER BY number", (number,)
        )
        points = curve.halve([_point(row) for row in rows.fetchall()])
        self._db.execute("DELETE FROM points WHERE metric = ?", (number,))
        for place, made in enumerate(points):
            self._insert(number, place, made)
        self._db.execute("UPDATE metrics SET stride = ? WHERE id = ?", (curve.stride, number))
        return len(points)

    def finish(self) -> None:
        """Keeps the points that are not complete. Raises StoreError."""
        with _trouble(self.path), self._transaction():
            for name, (number, curve, place) in self._curves.items():
                if (made := curve.flush()) is not None:
                    self._insert(number, place, made)
                    self._curves[name] = (number, curve, place + 1)

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()


class Series(msgspec.Struct, frozen=True):
    """Columns over time. A value that is not known is None."""

    at: list[float]
    columns: dict[str, list[float | None]]


class CurvePoints(msgspec.Struct, frozen=True):
    """One metric over the steps of a job. A value that is not finite is None."""

    step: list[float]
    at: list[float]
    value: list[float | None]
    low: list[float | None]
    high: list[float | None]


class SeriesReader:
    """Reads a run's file while its coordinator may write it. Each call sees one moment."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with _trouble(self.path):
            if not self.path.is_file():
                raise StoreError(f"there are no readings in {self.path.parent}/: {self.path.name} is missing")
            address = f"{self.path.absolute().as_uri()}?mode=ro"
            db = sqlite3.connect(address, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)
            try:
                if db.execute("PRAGMA user_version").fetchone()[0] != _FORMAT:
                    raise StoreError(f"{self.path} was written by another version of syncline, or is no series")
                db.execute("BEGIN")
                yield db
            finally:
                db.close()

    def facts(self) -> dict[str, bytes]:
        with self._reading() as db:
            return {name: bytes(content) for name, content in db.execute("SELECT name, content FROM facts")}

    def subjects(self) -> list[str]:
        """The members that have rows."""
        with self._reading() as db:
            found = db.execute("SELECT DISTINCT subject FROM rows WHERE subject != ''")
            return [name for (name,) in found]

    def rows(self, subject: str = WHOLE, *, since: float = 0.0, most: int = 1_200) -> Series:
        """All columns of a subject, oldest first. More rows than `most` are merged."""
        with self._reading() as db:
            names: dict[int, str] = dict(db.execute("SELECT id, name FROM columns").fetchall())
            query = "SELECT at, content FROM rows WHERE subject = ? AND at >= ? ORDER BY at"
            found = [(at, _row(content, names)) for at, content in db.execute(query, (subject, since))]
        step = -(-len(found) // max(1, most))
        if step > 1:
            groups = [found[k : k + step] for k in range(0, len(found), step)]
            found = [(group[-1][0], merged(row for _, row in group)) for group in groups]
        columns = sorted({name for _, row in found for name in row})
        return Series([at for at, _ in found], {name: [row.get(name) for _, row in found] for name in columns})

    def media(self) -> list[MediaEntry]:
        """Images, histograms and texts, oldest first."""
        with self._reading() as db:
            return media_table.entries(db)

    def media_content(self, number: int) -> tuple[str, bytes] | None:
        """Kind and content of one of them; None if it is not there, or not any more."""
        with self._reading() as db:
            return media_table.content(db, number)

    def metrics(self) -> list[str]:
        with self._reading() as db:
            return [name for (name,) in db.execute("SELECT name FROM metrics ORDER BY id")]

    def curve(self, metric: str, *, most: int = 1_200) -> CurvePoints:
        """The points of a metric; empty for one that is not there. More points than `most` are merged."""
        return self.curves([metric], most=most)[metric]

    def curves(self, metrics: Sequence[str], *, most: int = 1_200) -> dict[str, CurvePoints]:
        """Each of these metrics, as `curve`."""
        with self._reading() as db:
            return {metric: _curve(db, metric, most) for metric in metrics}


def _curve(db: sqlite3.Connection, metric: str, most: int) -> CurvePoints:
    """Points are merged in SQLite, as `merge_points` does it: a long run has many metrics."""
    found = db.execute("SELECT id, max(number) FROM points JOIN metrics ON id = metric WHERE name = ?", (metric,))
    number, last = found.fetchone()
    if last is None:
        return CurvePoints([], [], [], [], [])
    stride = -(-(last + 1) // max(1, most))
    rows = db.execute(_MERGED, {"metric": number, "stride": stride}).fetchall()
    step, at, value, low, high = (list(column) for column in zip(*rows, strict=True))
    return CurvePoints(step, at, value, low, high)


def _thinning(subject: str) -> Thinning:
    return MEMBER if subject else JOB


def _row(content: bytes, names: Mapping[int, str]) -> dict[str, float]:
    cells = np.frombuffer(content, _CELLS)
    pairs = zip(cells["id"].tolist(), cells["value"].tolist(), strict=True)
    return {names[number]: value for number, value in pairs if number in names}


def _point(row: tuple[Any, ...]) -> Point:
    step, at, value, low, high, count = row
    nan = math.nan
    return Point(
        step, at, nan if value is None else value, nan if low is None else low, nan if high is None else high, count
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _put_aside(path: pathlib.Path) -> pathlib.Path:
    """Renames a damaged file, over the last one that was."""
    aside = path.with_name(f"{path.name}.damaged")
    for side in ("-wal", "-shm"):
        pathlib.Path(f"{path}{side}").unlink(missing_ok=True)
    path.replace(aside)
    return aside


@contextlib.contextmanager
def _trouble(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, ValueError) as error:
        raise StoreError(f"the readings in {path} cannot be used: {error}") from None
