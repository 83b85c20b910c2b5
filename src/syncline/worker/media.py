"""Images, histograms and texts of one worker on their way to the coordinator: the newest of each name, at most one a
second. Reporting does not wait; what a lost coordinator did not get is replaced by the next.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from syncline.core.media import MOST_MEDIA, GiveMedia, MediaItem, Reportable
from syncline.errors import SynclineError
from syncline.net.link import Link

#: Between two of one name that are sent.
LEAST_SECONDS = 1.0


class MediaReports:
    """The script's thread reports, another one sends what had to wait."""

    def __init__(self, link: Link, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._link, self._say, self._clock = link, say, clock
        self._lock = threading.Lock()
        self._unsent: dict[str, MediaItem] = {}
        self._sent_at: dict[str, float] = {}
        self._has_told = False

    def report(self, found: Mapping[str, Reportable], step: int) -> None:
        """Names are checked already. Raises ConfigError for what is no image, histogram or text."""
        for name, one in found.items():
            item = MediaItem(name, one.kind, step, one.content(name))
            with self._lock:
                is_known = name in self._unsent or name in self._sent_at
                if is_known or len(self._unsent.keys() | self._sent_at.keys()) < MOST_MEDIA:
                    self._unsent[name] = item
                elif not self._has_told:
                    self._has_told = True
                    self._say(
                        f"job.report: {name!r} would be image, histogram or text {MOST_MEDIA + 1}: it and other new "
                        "names are left out; give few, fixed names"
                    )
        self.flush()

    def flush(self, *, is_end: bool = False) -> None:
        """Sends what is due; at the end, everything."""
        if not self._link.is_open:
            return
        now = self._clock()
        with self._lock:
            due = [
                item
                for name, item in self._unsent.items()
                if is_end or name not in self._sent_at or now - self._sent_at[name] >= LEAST_SECONDS
            ]
            for item in due:
                del self._unsent[item.name]
                self._sent_at[item.name] = now
        for item in due:  # one by one: several large ones would hold up heartbeats
            with contextlib.suppress(SynclineError):
                self._link.tell(GiveMedia([item]))
