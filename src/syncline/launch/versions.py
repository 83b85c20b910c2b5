"""The versions that all hosts of a job have in common, and the words where they do not."""

from __future__ import annotations

import functools
import importlib.metadata
import platform

import msgspec


class InstalledVersions(msgspec.Struct, frozen=True):
    """What all hosts of a job have in common, or else is named."""

    python: str
    syncline: str
    torch: str  #: empty: not installed


@functools.cache
def versions_here() -> InstalledVersions:
    def of(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    return InstalledVersions(platform.python_version(), of("syncline"), of("torch"))


def differing(there: InstalledVersions, here: InstalledVersions, host: str) -> str:
    """What has to be the same on all hosts and is not, in words."""
    if there.syncline != here.syncline:
        return f"host {host} has syncline {there.syncline}, this host {here.syncline}: install one version"
    ours, theirs = (version.rpartition(".")[0] for version in (here.python, there.python))
    if ours != theirs:
        return f"host {host} has Python {there.python}, this host {here.python}: use one version on all hosts"
    return ""


def torch_told(there: InstalledVersions, here: InstalledVersions, host: str) -> str:
    """Another torch is no error, and worth a line."""
    if there.torch == here.torch:
        return ""
    return f"host {host} has torch {there.torch or 'not installed'}, this host {here.torch or 'not'}"
