"""A bucket at a real S3 endpoint on this machine."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Bucket:
    """An empty bucket at an endpoint of its own."""

    url: str  #: s3://…
    options: dict[str, Any]  #: storage_options that reach it
    endpoint: str

    def write(self, name: str, content: bytes) -> str:
        import fsspec

        path = f"{self.url}/{name}"
        with fsspec.open(path, "wb", **self.options) as file:
            file.write(content)
        return path
