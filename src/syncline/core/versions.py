"""Versions that all processes of a job have in common, and the words where they do not."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class InstalledVersions(msgspec.Struct, frozen=True):
    """What all hosts of a job have in common, or else is named."""

    python: str
    syncline: str
    torch: str  #: empty: not installed


def differing(there: InstalledVersions, here: InstalledVersions, host: str) -> str:
    """What has to be the same on all hosts and is not, in words."""
    return _differing(there, here, f"host {host}", "this host")


def _differing(there: InstalledVersions, here: InstalledVersions, who: str, own: str) -> str:
    if there.syncline != here.syncline:
        return f"{who} has syncline {there.syncline}, {own} {here.syncline}: install one version"
    ours, theirs = (version.rpartition(".")[0] for version in (here.python, there.python))
    if ours != theirs:
        return f"{who} has Python {there.python}, {own} {here.python}: use one version on all hosts"
    return ""


def torch_told(there: InstalledVersions, here: InstalledVersions, host: str) -> str:
    """Another torch is no error, and worth a line."""
    return _torch_told(there, here, f"host {host}", "this host")


def _torch_told(there: InstalledVersions, here: InstalledVersions, who: str, own: str) -> str:
    if there.torch == here.torch:
        return ""
    return f"{who} has torch {there.torch or 'not installed'}, {own} {here.torch or 'not'}"


class MemberVersions:
    """The versions of members that say theirs when they join. All are compared with those of the first one."""

    def __init__(self, first: str) -> None:
        self._first = first
        self._known: dict[str, tuple[str, InstalledVersions]] = {}  # by member, with its host

    def add(self, name: str, host: str, versions: InstalledVersions) -> None:
        self._known[name] = ("" if host == "local" else host, versions)

    def forget(self, name: str) -> None:
        self._known.pop(name, None)

    def differing(self) -> Mapping[str, str]:
        """Members that cannot work with the first one, and why not."""
        if self._first not in self._known:
            return {}
        here, own = self._known[self._first][1], self._describe(self._first)
        found = {name: _differing(there, here, self._describe(name), own) for name, (_, there) in self._known.items()}
        return {name: told for name, told in found.items() if told}

    def torch_told(self) -> list[str]:
        """A line for each member with another torch than the first one."""
        if self._first not in self._known:
            return []
        here, own = self._known[self._first][1], self._describe(self._first)
        found = [_torch_told(there, here, self._describe(name), own) for name, (_, there) in self._known.items()]
        return [told for told in found if told]

    def _describe(self, name: str) -> str:
        host = self._known[name][0]
        return f"{name} on host {host}" if host else name
