"""Looks at a running job, passed on to browsers as they come. A slow browser misses some; nothing waits for it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from syncline.stats import JobLook

#: Streams at a time; another one is refused.
MOST_STREAMS = 64
#: Looks that wait for a browser; beyond this it gets the newest ones.
MOST_UNSENT = 3
#: A word that keeps the connection, where there is nothing to tell.
QUIET_SECONDS = 10.0


class LiveJob(Protocol):
    """A running job that is looked at."""

    @property
    def latest(self) -> JobLook | None:
        """The newest look."""

    def watch(self, watcher: Callable[[JobLook], None]) -> Callable[[], None]:
        """Calls it with each look, in any thread; returns what ends that."""


class Streams:
    """Passes looks on to all streams. Lives in the thread of one event loop, but for `_hear`."""

    def __init__(self, job: LiveJob) -> None:
        self._job = job
        self._open: set[_Unsent] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: Callable[[], None] = lambda: None
        self._is_closed = False

    @property
    def num_streams(self) -> int:
        return len(self._open)

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events: each look, the newest one at once."""
        self._begin()
        own = _Unsent()
        if (latest := self._job.latest) is not None:
            own.add(event_of(latest))
        self._open.add(own)
        try:
            yield b"retry: 1000\n\n"
            while not self._is_closed:
                while own.looks:
                    yield own.looks.popleft()
                own.is_there.clear()
                try:
                    await asyncio.wait_for(own.is_there.wait(), QUIET_SECONDS)
                except TimeoutError:
                    yield b": quiet\n\n"
        finally:
            self._open.discard(own)
            if not self._open:
                self._end()
                self._end, self._loop = lambda: None, None

    def _begin(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._end = self._job.watch(self._hear)

    def _hear(self, look: JobLook) -> None:
        """In the thread that looks: encodes once for all."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(self._spread, event_of(look))

    def _spread(self, data: bytes) -> None:
        for one in self._open:
            one.add(data)

    def close(self) -> None:
        """Ends all streams. In the thread of the loop."""
        self._is_closed = True
        for one in self._open:
            one.is_there.set()


class _Unsent:
    """What one browser has still to get."""

    def __init__(self) -> None:
        self.looks: collections.deque[bytes] = collections.deque(maxlen=MOST_UNSENT)
        self.is_there = asyncio.Event()

    def add(self, data: bytes) -> None:
        self.looks.append(data)
        self.is_there.set()


def event_of(look: JobLook) -> bytes:
    return b"id: %d\nevent: look\ndata: %b\n\n" % (look.number, msgspec.json.encode(look))
