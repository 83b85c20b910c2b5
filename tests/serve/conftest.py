"""What the web server's libraries keep for the life of a process is there before the first test looks for leaks."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    import uvloop

    uvloop.new_event_loop().close()  # libuv's own pipe for signals
