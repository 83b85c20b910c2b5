"""The versions that are installed on this host."""

from __future__ import annotations

import functools
import importlib.metadata
import platform

from syncline.core.versions import InstalledVersions, differing, torch_told

__all__ = ["InstalledVersions", "differing", "torch_told", "versions_here"]


@functools.cache
def versions_here() -> InstalledVersions:
    def of(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    return InstalledVersions(platform.python_version(), of("syncline"), of("torch"))
