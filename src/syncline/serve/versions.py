"""Which versions are in memory, and which one answers. Thread-safe; changes take effect at the next batch."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from syncline.errors import ConfigError
from syncline.serve.model import LoadedModel

#: Versions that were left, which are remembered.
_MOST_LEFT = 256


@dataclasses.dataclass(frozen=True)
class VersionFacts:
    """What a version is called, what makes it differ from others, and where it came from."""

    name: str
    digest: str
    where: str
    step: int


@dataclasses.dataclass(frozen=True)
class Version(VersionFacts):
    """A version in memory."""

    model: LoadedModel = dataclasses.field(compare=False, repr=False)


class VersionStanding(msgspec.Struct, frozen=True, kw_only=True):
    """How the versions stand, for other processes: versions by their digests."""

    kept: tuple[VersionFacts, ...]  #: oldest first
    current: str
    canary: str = ""
    share: float = 0.0
    is_pinned: bool = False
    left: tuple[str, ...] = ()


V = TypeVar("V", bound=VersionFacts)


class Versions(Generic[V]):
    """The current version answers. While there is a canary, a share of the requests goes to it."""

    def __init__(self, keep: int = 3) -> None:
        """`keep`: versions in memory: those that answer, and the ones before, for a rollback; at least two."""
        assert keep >= 2
        self._keep = keep
        self._lock = threading.Lock()
        self._kept: list[V] = []  # oldest first
        self._current: V | None = None
        self._canary: V | None = None
        self._share = 0.0
        self._owed = 0.0
        self._is_pinned = False
        self._left: dict[str, None] = {}  # digests that a rollback has left: never switched to again by themselves

    @property
    def current(self) -> V | None:
        return self._current

    @property
    def is_pinned(self) -> bool:
        return self._is_pinned

    @property
    def share(self) -> float:
        return self._share

    @property
    def canary(self) -> V | None:
        return self._canary

    def loaded(self) -> list[V]:
        """All in memory, oldest first."""
        with self._lock:
            return list(self._kept)

    def find(self, name: str) -> V | None:
        """The version of this name; '': the current one."""
        if not name:
            return self._current
        with self._lock:
            return next((one for one in reversed(self._kept) if one.name == name), None)

    def is_wanted(self, digest: str) -> bool:
        """Whether a version with this digest is new."""
        with self._lock:
            return digest not in self._left and all(one.digest != digest for one in self._kept)

    def add(self, version: V) -> str:
        """Takes a version that was checked; returns what became of it: `current`, `canary` or `beside`."""
        with self._lock:
            self._kept.append(version)
            if self._current is None:
                self._current, role = version, "current"
            elif self._share:
                self._canary, role = version, "canary"
            elif self._is_pinned:
                role = "beside"
            else:
                self._current, role = version, "current"
            self._forget()
            return role

    def draw(self) -> V | None:
        """The version of the next request that names none."""
        if not self._share:
            return self._current
        with self._lock:
            canary = self._canary
            if canary is None:
                return self._current
            self._owed += self._share
            if self._owed >= 1.0 - 1e-9:
                self._owed -= 1.0
                return canary
            return self._current

    def rollback(self, *, pins: bool = False) -> V:
        """Goes back to the version before the current one, and stays until a newer one comes; `pins`: even then."""
        with self._lock:
            place = self._place()
            if place == 0:
                raise ConfigError("there is no earlier version in memory to go back to")
            assert self._current is not None
            self._leave(self._current)
            self._kept.remove(self._current)
            self._end_canary()
            self._current = self._kept[place - 1]
            self._is_pinned = self._is_pinned or pins
            return self._current

    def pin(self, name: str) -> V:
        """Stays with this version; new ones are loaded beside it."""
        with self._lock:
            found = next((one for one in reversed(self._kept) if one.name == name), None)
            if found is None:
                raise ConfigError(
                    f"version {name!r} is not in memory; there are {', '.join(one.name for one in self._kept)}"
                )
            self._current, self._is_pinned = found, True
            self._end_canary()
            return found

    def unpin(self) -> V:
        """Goes to the newest version in memory, and follows new ones."""
        with self._lock:
            self._is_pinned = False
            self._current = self._kept[-1]
            self._end_canary()
            return self._current

    def set_canary(self, share: float) -> V | None:
        """Gives this share of the requests to the newest version beside the current one, or to the next that comes.
        1.0 makes it the current one, 0.0 leaves it.
        """
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"canary {share:.0%}: give a share from 0% to 100%")
        with self._lock:
            canary = self._canary
            if share and canary is None and self._current is not self._kept[-1]:
                canary = self._kept[-1]
            self._canary, self._share, self._owed = canary, share, 0.0
            if canary is not None and share == 0.0:
                self._leave(canary)
                self._kept.remove(canary)
            if canary is not None and share == 1.0:
                self._current = canary
            if share in (0.0, 1.0):
                self._end_canary()
            return canary

    def standing(self) -> VersionStanding:
        """The same for other processes. There must be a current version."""
        with self._lock:
            assert self._current is not None
            facts = tuple(VersionFacts(one.name, one.digest, one.where, one.step) for one in self._kept)
            return VersionStanding(
                kept=facts,
                current=self._current.digest,
                canary=self._canary.digest if self._canary is not None else "",
                share=self._share,
                is_pinned=self._is_pinned,
                left=tuple(self._left),
            )

    def follow(self, standing: VersionStanding, found: Mapping[str, V]) -> None:
        """Stands as another process said. `found`: its versions by their digests, as they are here."""
        with self._lock:
            self._kept = [found[one.digest] for one in standing.kept]
            if (standing.canary, standing.share) != (self._canary.digest if self._canary else "", self._share):
                self._owed = 0.0
            self._current = found[standing.current]
            self._canary = found[standing.canary] if standing.canary else None
            self._share, self._is_pinned = standing.share, standing.is_pinned
            self._left = dict.fromkeys(standing.left)

    def _leave(self, version: V) -> None:
        self._left[version.digest] = None
        if len(self._left) > _MOST_LEFT:
            del self._left[next(iter(self._left))]

    def _end_canary(self) -> None:
        self._canary, self._share, self._owed = None, 0.0, 0.0

    def _place(self) -> int:
        return next((index for index, one in enumerate(self._kept) if one is self._current), 0)

    def _forget(self) -> None:
        """The oldest go first. While one is pinned, those after it go first: the ones before are for a rollback."""
        while len(self._kept) > self._keep:
            waiting = self._kept[self._place() + 1 : -1] if self._is_pinned else []
            old = (one for one in self._kept if one not in (self._current, self._canary))
            gone = waiting[0] if waiting else next(old)
            self._kept = [one for one in self._kept if one is not gone]
