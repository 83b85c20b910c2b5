"""The runs under a folder that have readings: the one that goes on, and those that have ended."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec

from syncline.errors import StoreError
from syncline.stats import Event, JobLook
from syncline.store.lines import EVENTS, read_lines
from syncline.store.media import MediaEntry
from syncline.store.series import SERIES, CurvePoints, Series, SeriesReader

#: Runs that are listed, the newest first.
MOST_RUNS = 500
MOST_EVENTS = 2_000


class RunNotFound(Exception):
    """No such run, or a folder that is none."""


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list of runs."""

    name: str
    is_live: bool
    changed_at: float  #: wall clock


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a folder."""

    live: str | None  #: the run of the coordinator that answers
    runs: list[ListedRun]


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its last look, its settings and the names of what it has."""

    name: str
    is_live: bool
    look: JobLook | None
    settings: dict[str, Any]
    metrics: list[str]
    members: list[str]  #: with series of their own


class EventList(msgspec.Struct, frozen=True, kw_only=True):
    """Events of a run, oldest first."""

    events: list[Event]
    damage: str = ""  #: the file is damaged there: later events are not shown


class MediaList(msgspec.Struct, frozen=True, kw_only=True):
    """Images, histograms and texts of a run, oldest first."""

    media: list[MediaEntry]


class CurveSet(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics by name."""

    curves: dict[str, CurvePoints]


class Runs:
    """Reads the runs of a folder. `live`: the name of the one that goes on."""

    def __init__(self, folder: pathlib.Path, live: str | None = None) -> None:
        self._folder, self.live = folder, live

    def listed(self) -> RunList:
        found = []
        try:
            paths = [path for path in self._folder.iterdir() if (path / SERIES).is_file()]
        except OSError:
            paths = []
        for path in paths:
            try:
                at = (path / SERIES).stat().st_mtime
            except OSError:
                continue
            found.append(ListedRun(name=path.name, is_live=path.name == self.live, changed_at=at))
        found.sort(key=lambda run: (not run.is_live, -run.changed_at))
        return RunList(live=self.live, runs=found[:MOST_RUNS])

    def view(self, name: str, look: JobLook | None) -> RunView:
        """`look`: the newest one, of a run that goes on."""
        facts: dict[str, bytes] = {}
        metrics, members = [], []
        try:
            reader = self._reader(name)
            facts, metrics, members = reader.facts(), reader.metrics(), reader.subjects()
        except (StoreError, RunNotFound):
            if name != self.live:
                raise  # a run that has just begun has no file yet
        settings: dict[str, Any] = {}
        try:
            settings = msgspec.json.decode(facts.get("settings", b"{}"), type=dict[str, Any])
            look = look or (msgspec.json.decode(facts["look"], type=JobLook) if "look" in facts else None)
        except msgspec.MsgspecError:
            look = None  # of another version
        return RunView(
            name=name,
            is_live=name == self.live,
            look=look,
            settings=settings,
            metrics=metrics,
            members=members,
        )

    def rows(self, name: str, member: str, since: float) -> Series:
        return self._reader(name).rows(member, since=since)

    def curves(self, name: str, metrics: list[str], most: int) -> CurveSet:
        return CurveSet(curves=self._reader(name).curves(metrics, most=most))

    def metrics(self, name: str) -> list[str]:
        return self._reader(name).metrics()

    def media(self, name: str) -> MediaList:
        return MediaList(media=self._reader(name).media())

    def media_content(self, name: str, number: int) -> tuple[str, bytes]:
        """Kind and content. Raises RunNotFound."""
        found = self._reader(name).media_content(number)
        if found is None:
            raise RunNotFound(f"{name} has no media of id {number}; /api/v1/runs/{name}/media lists them")
        return found

    def events(self, name: str, after: int) -> EventList:
        """A damaged file is read up to the damage."""
        found = read_lines(self._path(name) / EVENTS, MOST_EVENTS)
        events, damage = [], found.damage
        for line in found.lines:
            try:
                event = msgspec.convert(line, Event)
            except msgspec.ValidationError as error:
                damage = damage or f"{EVENTS}: a line is no event: {error}"
                break
            if event.number > after:
                events.append(event)
        return EventList(events=events, damage=damage)

    def _reader(self, name: str) -> SeriesReader:
        return SeriesReader(self._path(name) / SERIES)

    def _path(self, name: str) -> pathlib.Path:
        path = self._folder / name
        if "/" in name or "\0" in name or name in ("", ".", "..") or len(name.encode()) > 255:
            raise RunNotFound(f"{name[:80]!r} is no name of a run")
        if not path.is_dir():
            raise RunNotFound(f"there is no run {name}")
        if not (path / SERIES).is_file() and not (path / EVENTS).is_file() and name != self.live:
            raise RunNotFound(f"{name} is a folder, but no run with readings")
        return path
