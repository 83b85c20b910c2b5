"""`python -m benchmarks`, from the root of a checkout."""

from __future__ import annotations

import sys

from benchmarks.command import app
from syncline.errors import SynclineError

if __name__ == "__main__":
    try:
        app()
    except SynclineError as error:
        sys.exit(f"benchmarks: {error}")
