"""The frame of a process that a keeper starts: what it hears becomes tasks of its main thread, one after another."""

from __future__ import annotations

import abc
import contextlib
import itertools
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from syncline.errors import StoreError, SynclineError, WaitTimeout
from syncline.serve.replicas.link import KeeperLink, fitting
from syncline.serve.replicas.messages import (
    AskTotals,
    EndServing,
    Failed,
    FromKeeper,
    SetUp,
    TotalsOfAll,
)

log = logging.getLogger("syncline.serve")

_FORMAT = "%(asctime)s %(name)s %(levelname)s {}: %(message)s"
_LATE_SECONDS = 2.0  # beyond the draining of requests


class KeptProcess(abc.ABC):
    """A process of a served model. `run` is all that its main thread does."""

    named = ""  #: in the log, with its number

    def __init__(self, sock: socket.socket) -> None:
        self._tasks: queue.SimpleQueue[tuple[FromKeeper, list[int]]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._asked: dict[int, Callable[[TotalsOfAll], None]] = {}
        self._drain_seconds = 0.0
        self.link = KeeperLink(sock, self._heard, self._lost)
        self.stack = contextlib.ExitStack()  #: closed at the end

    def run(self) -> int:
        """The exit code."""
        self.link.start()
        try:
            with self.stack:
                while True:
                    message, descriptors = self._tasks.get()
                    if isinstance(message, EndServing):
                        break
                    if isinstance(message, SetUp):
                        self._drain_seconds = message.config.drain_seconds
                        name = self.named.format(message.number)
                        logging.basicConfig(
                            level=logging.INFO, format=_FORMAT.format(name), stream=sys.stderr, force=True
                        )
                        self.set_up(message, descriptors)
                    else:
                        self.take(message, descriptors)
        except SynclineError as error:
            self.link.send(Failed(words=fitting(str(error)), is_store=isinstance(error, StoreError)))
            self.link.close()
            return 3
        self.link.close()
        return 0

    @abc.abstractmethod
    def set_up(self, message: SetUp, descriptors: list[int]) -> None:
        """The first message."""

    @abc.abstractmethod
    def take(self, message: FromKeeper, descriptors: list[int]) -> None:
        """A task for the main thread."""

    @abc.abstractmethod
    def take_at_once(self, message: FromKeeper) -> bool:
        """Called in the thread that reads; False: it is a task for the main thread."""

    def ask_totals(self, answered: Callable[[TotalsOfAll], None]) -> int:
        """Calls `answered` with what all replicas have counted, in the thread that reads. Returns its number."""
        number = next(self._numbers)
        self._asked[number] = answered
        self.link.send(AskTotals(number=number))
        return number

    def forget_question(self, number: int) -> None:
        """These totals are not needed any more."""
        self._asked.pop(number, None)

    def _heard(self, message: FromKeeper, descriptors: list[int]) -> None:
        if isinstance(message, TotalsOfAll):
            answered = self._asked.pop(message.number, None)
            if answered is not None:
                answered(message)
        elif isinstance(message, EndServing):
            self._end()
        elif not self.take_at_once(message):
            self._tasks.put((message, descriptors))

    def _lost(self) -> None:
        """The keeper is gone, and nothing else would ever end this process."""
        log.warning("the main process has ended; this one answers open requests and exits")
        self._end()

    def _end(self) -> None:
        self._tasks.put((EndServing(), []))
        timer = threading.Timer(self._drain_seconds + _LATE_SECONDS, os._exit, (4,))  # the main thread may be stuck
        timer.daemon = True
        timer.start()


def main(kind: Callable[[socket.socket], KeptProcess]) -> NoReturn:
    """The descriptor of the keeper's socket is the only argument."""
    process = kind(socket.socket(fileno=int(sys.argv[1])))
    code = process.run()
    logging.shutdown()
    os._exit(code)  # threads of the operator's code are not waited for


class Awaited(threading.Event):
    """One value that another thread gives."""

    value: object = None

    def give(self, value: object) -> None:
        self.value = value
        self.set()

    def wait_for(self, what: str, seconds: float) -> None:
        """WaitTimeout: `what` did not happen in time, e.g. `not all replicas have switched`."""
        if not self.wait(seconds):
            raise WaitTimeout(f"{what} within {seconds:g} s")
