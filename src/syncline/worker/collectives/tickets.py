"""What was called and not waited for: done one after the other, in a thread of its own."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

from syncline.errors import SynclineError, WaitTimeout


class Ticket:
    """A call under way."""

    def __init__(self, what: str, work: Callable[[], Any]) -> None:
        self._what, self._work = what, work
        self._over = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def wait(self, timeout_seconds: float | None = None) -> Any:
        """The result, or what went wrong. A WaitTimeout leaves it under way; the job's own deadline ends it."""
        if not self._over.wait(timeout_seconds):
            raise WaitTimeout(f"{self._what} is not done within {timeout_seconds:g} s")
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def give_up(self, error: SynclineError) -> None:
        self._error = error
        self._over.set()


class Lane:
    """Runs tickets in their order. The thread is there while there is something to do, and a moment longer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._change = threading.Condition()
        self._open: collections.deque[Ticket] = collections.deque()
        self._is_running = self._closed = False

    @property
    def is_idle(self) -> bool:
        return not self._open

    def add(self, ticket: Ticket) -> Ticket:
        with self._change:
            if self._closed:
                raise SynclineError("this worker has left the job")
            self._open.append(ticket)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._change.notify_all()
        return ticket

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._open or self._closed, 0.1)
                if not self._open:
                    self._is_running = False
                    return
                ticket = self._open[0]
            ticket.run()
            with self._change:
                if self._open:
                    self._open.popleft()
                self._change.notify_all()

    def settle(self) -> None:
        """Returns when all is done; each has its own deadline."""
        with self._change:
            self._change.wait_for(lambda: not self._open)

    def close(self) -> None:
        """What has not begun is given up."""
        with self._change:
            self._closed = True
            waiting = list(self._open)[1:]
            while len(self._open) > 1:
                self._open.pop()
            self._change.notify_all()
        for ticket in waiting:
            ticket.give_up(SynclineError("this worker has left the job before its turn"))
