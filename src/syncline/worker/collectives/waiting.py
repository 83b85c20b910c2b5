"""Waiting for other workers: until when, what ends it, and what is said meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from syncline.core.collectives import described
from syncline.core.units import listed
from syncline.core.wire.collectives import Describe
from syncline.errors import WaitTimeout
from syncline.worker.calling import ValidationCalled
from syncline.worker.hearing import FromCoordinator
from syncline.worker.peers import Peers, Way

if TYPE_CHECKING:
    from syncline.worker.job import Job

T = TypeVar("T")
#: How often a wait looks at everything that may end it.
LOOK_SECONDS = 0.05
#: What a worker that is gone has sent may still be on its way.
_LAST_WORDS_SECONDS = 0.5


class Gone(Exception):
    """A worker that is waited for has left, or died."""

    def __init__(self, way: Way, reason: str) -> None:
        super().__init__(reason)
        self.way, self.reason = way, reason


class Waiting:
    """The waits of one call, in the thread that makes it: the script's own, or that of what is not waited for."""

    def __init__(self, job: Job, hearing: FromCoordinator, peers: Peers, what: str, *, is_script: bool) -> None:
        self._job, self._hearing, self._peers = job, hearing, peers
        self._what, self._is_script = what, is_script
        self._said: Describe | None = None
        self._ways: Iterable[Way] = ()
        self._told: contextlib.ExitStack | None = None
        self._for: list[str] = []
        self._gone_since: dict[Way, float] = {}

    def begin(self, ways: Iterable[Way], said: Describe | None = None) -> None:
        """These take part, in this."""
        self._ways, self._said = ways, said

    @property
    def what(self) -> str:
        return described(self._said) if self._said is not None else self._what

    def until(self, way: Way, ready: Callable[[], T | None]) -> T:
        """What `ready` returns, once it is not None; looked at under the lock, when something was heard."""
        change, began, looked = self._peers.change, 0.0, 0.0
        while True:
            with change:
                found = ready()
                if found is not None:
                    return found
                if way.lost:
                    raise Gone(way, way.lost)
                if not way.waiter_reads:
                    change.wait(LOOK_SECONDS)
            is_quiet = way.waiter_reads and not way.read(LOOK_SECONDS)
            now = time.monotonic()
            began, looked = began or now, looked or now - LOOK_SECONDS / 2
            if is_quiet or now - looked >= LOOK_SECONDS:
                looked = now
                self._look_for(way, now)
                self.look([way.name], now - began > self._job.config.wait_seconds)

    def until_any(self, ready: Callable[[], T | None], names: list[str]) -> T:
        """The same for something that no way brings: a new one, say."""
        change, deadline = self._peers.change, time.monotonic() + self._job.config.wait_seconds
        while True:
            found = ready()
            if found is not None:
                return found
            with change:
                change.wait(LOOK_SECONDS)
            self.look(names, time.monotonic() > deadline)

    def _look_for(self, way: Way, now: float) -> None:
        """A worker that the roster has no more: its last words count, if they are here soon."""
        if way.incarnation in self._peers.live:
            return
        if now - self._gone_since.setdefault(way, now) > (0.0 if way.waiter_reads else _LAST_WORDS_SECONDS):
            raise Gone(way, "it is no member of the job any more")

    def look(self, names: list[str], is_late: bool) -> None:
        """Now and then: how it has ended for this worker, what others say, a validation that waits for this one."""
        self._hearing.check()
        self._for = names
        if is_late:
            seconds = self._job.config.wait_seconds
            raise WaitTimeout(f"{self._job.name}: {self.what} has waited {seconds:g} s for {listed(names)}")
        for way in self._ways:
            while way.waiter_reads and not way.lost and way.read(0.0):
                pass
        if self._is_script:
            self._tell()

    def _tell(self) -> None:
        try:
            self._job.validating.while_waiting()
        except ValidationCalled as called:
            self.end()
            called.answer()
        if self._told is None:
            self._told = contextlib.ExitStack()
            self._told.enter_context(self._job.exchange.waits.of(self.what, why=lambda: f"for {listed(self._for)}"))
            self._told.enter_context(self._job.boundary.standing())

    def end(self) -> None:
        """The call is over, or does something else."""
        if self._told is not None:
            told, self._told = self._told, None
            told.close()
