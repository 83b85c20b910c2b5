"""The launcher's way to the coordinator, which may die and come back: looks at the job, tells of deaths."""

from __future__ import annotations

import collections
import threading
import time
from typing import TypeVar

from syncline.core.wire.checkpoints import Save, Saved
from syncline.core.wire.control import Died, Standings, Watch
from syncline.core.wire.message import Message
from syncline.errors import ConnectionLost, ProtocolError, SynclineError, TokenError, WaitTimeout
from syncline.launch.jobfile import JobFile
from syncline.net import tcp
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.transport import Peer

WATCH_SECONDS = 0.25
#: For one connection, or one answer, while the launcher watches.
ANSWER_SECONDS = 2.0
_END_SECONDS = 0.5
#: For a command that asks a job something: one that is not there is said soon.
ASK_SECONDS = 3.0
AGAIN_SECONDS = 0.05

T = TypeVar("T", bound=Message)


def reach_coordinator(file: JobFile, seconds: float) -> Endpoint:
    """A connection for commands that look at the job from outside."""
    identity = tcp.Identity(file.job, file.token_bytes, Peer("launcher", "launcher", 0))
    return Endpoint(tcp.connect_tcp(file.host, file.port, identity, seconds), Stamp(file.job))


def ask(file: JobFile, message: Message, kind: type[T], seconds: float = ASK_SECONDS) -> T:
    """One question to a job's coordinator; a job that is not there is a ConnectionLost that says so."""
    until = time.monotonic() + seconds
    while True:
        left = max(0.05, until - time.monotonic())
        try:
            endpoint = reach_coordinator(file, left)
            try:
                answer = endpoint.call(message).wait(left)
            finally:
                endpoint.close()
            if not isinstance(answer, kind):
                raise ProtocolError(f"the coordinator answers {type(answer).__name__} to {type(message).__name__}")
            return answer
        except TokenError:
            raise
        except (OSError, ConnectionLost, WaitTimeout) as error:
            if time.monotonic() + AGAIN_SECONDS > until:
                raise ConnectionLost(
                    f"no answer from the coordinator at {file.host}:{file.port} within {seconds:g} s ({error}); "
                    "has the job ended?"
                ) from None
        time.sleep(AGAIN_SECONDS)


def ask_to_save(file: JobFile, seconds: float, reason: str) -> Saved:
    """Has the job saved, before it is ended; as long as it takes, or for so long at most."""
    return ask(file, Save(reason), Saved, seconds)


class Watching:
    """Looks at the job four times a second, in a thread of its own: a lost coordinator holds up only this thread."""

    def __init__(self, file: JobFile) -> None:
        self._file = file
        self._endpoint: Endpoint | None = None
        self._change = threading.Condition()
        self._seen: collections.deque[Standings] = collections.deque()
        self._begun = self._answered = 0  # number of the last look begun, answered
        self._untold: dict[str, Died] = {}
        self._is_poked = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_regularly, name="watch", daemon=True)

    @property
    def has_answered(self) -> bool:
        return self._answered > 0

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[Standings]:
        """What was seen since the last call."""
        with self._change:
            seen = list(self._seen)
            self._seen.clear()
        return seen

    def look_now(self, seconds: float) -> bool:
        """Waits until the job has been looked at again, for so long at most."""
        with self._change:
            wanted = self._begun + 1  # one that is under way may have been answered before now
            self._poke()
            return self._change.wait_for(lambda: self._answered >= wanted, seconds)

    def tell(self, died: Died, seconds: float = 0.0) -> bool:
        """Tells of a death, as often as needed; whether it has been heard within so many seconds."""
        with self._change:
            self._untold[died.name] = died
            self._poke()
            return self._change.wait_for(lambda: died.name not in self._untold, seconds)

    def is_told(self, name: str) -> bool:
        return name not in self._untold

    def stop(self) -> None:
        """No look begins any more."""
        self._closed.set()
        with self._change:
            self._change.notify_all()

    def close(self) -> None:
        self.stop()
        endpoint = self._endpoint
        if endpoint is not None:
            endpoint.close()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)  # it may be waiting for a coordinator that is gone: it ends with us

    # -- its thread ---------------------------------------------------------------------------------------

    def _poke(self) -> None:
        self._is_poked = True
        self._change.notify_all()

    def _look_regularly(self) -> None:
        while not self._closed.is_set():
            with self._change:
                untold, self._is_poked = list(self._untold.values()), False
                self._begun += 1
            try:
                if self._endpoint is None or not self._endpoint.is_open:
                    self._endpoint = reach_coordinator(self._file, ANSWER_SECONDS)
                for died in untold:
                    self._say(self._endpoint, died)
                self._look(self._endpoint)
                pause = WATCH_SECONDS
            except (SynclineError, OSError):
                self._let_go()
                pause = AGAIN_SECONDS
            with self._change:
                self._change.wait_for(lambda: self._is_poked or self._closed.is_set(), pause)
        self._let_go()

    def _say(self, endpoint: Endpoint, died: Died) -> None:
        endpoint.call(died).wait(ANSWER_SECONDS)
        with self._change:
            if self._untold.get(died.name) is died:
                del self._untold[died.name]
            self._change.notify_all()

    def _look(self, endpoint: Endpoint) -> None:
        answer = endpoint.call(Watch()).wait(ANSWER_SECONDS)
        if isinstance(answer, Standings):
            with self._change:
                self._seen.append(answer)
                self._answered = self._begun
                self._change.notify_all()

    def _let_go(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()
