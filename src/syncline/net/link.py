"""A member's link to the coordinator, which may die and return: requests are repeated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from syncline.core.wire.control import Heartbeat, Rejoin, Roster
from syncline.core.wire.message import Message
from syncline.errors import ConnectionLost, FencedError, ProtocolError, SynclineError, WaitTimeout
from syncline.net.rpc import Call, Endpoint, Request, Service, Stamp
from syncline.net.transport import Buffer, Connection, Peer
from syncline.stats import WireStats

#: Pause between attempts to reach the coordinator.
_AGAIN_SECONDS = 0.05
#: How often an interruptible wait is checked.
_LOOK_SECONDS = 0.1
#: A coordinator silent for this part of the deadline is dialled again.
SILENT = 0.6
#: How long a reconnected coordinator may take to send the roster. It has just authenticated, so it is alive; giving
#: up on a slow one would look like a broken connection to it.
_ANSWER_SECONDS = 10.0


class Link:
    """Calls to the coordinator over successive connections. Every request is repeatable.

    `dial` makes a connection. `fenced` is called when this process was evicted, `gone` when the coordinator did not
    return within `patience_seconds`.
    """

    def __init__(
        self,
        dial: Callable[[], Connection],
        service: Service,
        stamp: Stamp,
        *,
        patience_seconds: float,
        say: Callable[[str], None],
        fenced: Callable[[FencedError], None],
        gone: Callable[[str], None],
    ) -> None:
        self._dial, self._service, self._stamp = dial, service, stamp
        self._patience_seconds, self._say, self._trouble = patience_seconds, say, ""
        self._fenced, self._gone = fenced, gone
        self._change = threading.Condition()
        self._closed = threading.Event()
        self._failed: SynclineError | None = None
        self._member: Rejoin | None = None
        self._on_roster: Callable[[Roster], None] = lambda roster: None
        self._wire = WireStats()
        self._is_looking = False  # a thread is reconnecting
        self._endpoint: Endpoint | None = None
        self._endpoint = endpoint = Endpoint(dial(), stamp, _CoordinatorHandlers(self, service))
        if not endpoint.is_open:
            self._lost(endpoint, "closed at once")

    # -- asking -------------------------------------------------------------------------------------------

    def call(self, message: Message, seconds: float, look: Callable[[], None] | None = None) -> Message:
        """Returns the answer; repeats the request over new connections until the deadline.

        `look` is called now and then; an exception from it ends the wait.
        """
        until = time.monotonic() + seconds
        while True:
            endpoint = self._open_endpoint(until, message, seconds)
            try:
                call = endpoint.call(message)
                while look is not None and not call.arrives(min(_LOOK_SECONDS, until - time.monotonic())):
                    look()
                    if time.monotonic() >= until:
                        break
                return call.wait(max(0.0, until - time.monotonic()))
            except ConnectionLost:
                self._lost(endpoint, "closed")  # whichever thread sees it first
            except WaitTimeout:
                raise WaitTimeout(f"{type(message).__name__}: no answer within {seconds:g} s") from None

    def _open_endpoint(self, until: float, message: Message, seconds: float) -> Endpoint:
        with self._change:
            while self._endpoint is None:
                if self._failed is not None:
                    raise self._failed
                if self._closed.is_set():
                    raise ConnectionLost("the link to the coordinator is closed")
                if not self._change.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    raise WaitTimeout(f"{type(message).__name__}: no coordinator within {seconds:g} s")
            return self._endpoint

    def try_call(self, message: Message, then: Callable[[Call], None] | None = None) -> Call:
        """One attempt, without waiting; ConnectionLost if there is no connection. `then`: as in `Endpoint.call`."""
        endpoint = self._endpoint
        if endpoint is None:
            raise ConnectionLost("the coordinator is gone for the moment")
        return endpoint.call(message, then=then)

    def tell(self, message: Message) -> None:
        """Sends an unanswered message, if there is a connection."""
        endpoint = self._endpoint
        if endpoint is not None:
            endpoint.tell(message)

    @property
    def is_open(self) -> bool:
        return self._endpoint is not None

    def stats(self) -> WireStats:
        endpoint = self._endpoint
        return self._wire + endpoint.stats() if endpoint is not None else self._wire

    # -- being a member -----------------------------------------------------------------------------------

    def begin(
        self,
        name: str,
        incarnation: int,
        *,
        beat: Callable[[], Heartbeat] | None,
        beat_seconds: float,
        silent_seconds: float,
        on_roster: Callable[[Roster], None],
    ) -> None:
        """This process is a member now: sends heartbeats, and rejoins over every new connection.

        A half-open connection returns nothing: after `silent_seconds` without a reply another one is made, before
        this member counts as silent. The old one is kept until then, since a slow coordinator would take its end for
        a death.
        """
        self._on_roster = on_roster
        self._member = Rejoin(name, incarnation)
        if beat is not None:
            args = (beat, beat_seconds, silent_seconds)
            threading.Thread(target=self._beat, args=args, name="beat", daemon=True).start()

    def _beat(self, make: Callable[[], Heartbeat], every_seconds: float, silent_seconds: float) -> None:
        """All members of a host beat at the same moments, by its clock. Together they disturb a round once, and wake
        the coordinator while it is awake.
        """
        rtt = 0.0
        while not self._closed.wait(seconds_to_beat(time.monotonic(), every_seconds)):
            endpoint = self._endpoint
            if endpoint is None:
                continue
            began = time.monotonic()
            try:
                call = endpoint.call(_with_rtt(self._made(make), rtt))
                if not call.arrives(silent_seconds):
                    self._is_silent(endpoint, call, f"the coordinator has not answered for {silent_seconds:g} s")
                call.wait(None)  # answered, or lost when there is another connection
                rtt = time.monotonic() - began
            except FencedError as error:
                self._is_fenced(error)
                return
            except SynclineError:
                continue  # lost: the reader handles it

    def _made(self, make: Callable[[], Heartbeat]) -> Heartbeat:
        """Builds a heartbeat; an empty one on an error, since a bug must not look like a death."""
        try:
            return make()
        except Exception as error:
            text = f"a sign of life without news: {type(error).__name__}: {error}"
            if text != self._trouble:
                self._trouble = text
                self._say(text)
            return Heartbeat()

    # -- when it breaks -----------------------------------------------------------------------------------

    def _lost(self, endpoint: Endpoint, reason: str) -> None:
        """The first thread that notices a broken connection reconnects, in a new thread."""
        with self._change:
            if self._endpoint is not endpoint or self._closed.is_set():
                return
            self._endpoint = None
            self._wire += endpoint.stats()
            is_looked_for, self._is_looking = self._is_looking, True
        endpoint.close(reason)
        if not is_looked_for:
            self._look_for_it(reason)

    def _is_silent(self, endpoint: Endpoint, call: Call, reason: str) -> None:
        """Reconnects unless this call is answered meanwhile."""
        with self._change:
            if self._endpoint is not endpoint or self._is_looking or self._closed.is_set():
                return
            self._is_looking = True
        self._look_for_it(reason, call)

    def _look_for_it(self, reason: str, silent: Call | None = None) -> None:
        threading.Thread(target=self._connect_again, args=(reason, silent), name="rejoin", daemon=True).start()

    def _connect_again(self, reason: str, silent: Call | None) -> None:
        until = time.monotonic() + self._patience_seconds
        while not self._closed.is_set():
            try:
                if self._connect_once(silent):
                    return
            except FencedError as error:
                self._is_fenced(error)
                return
            except (SynclineError, OSError) as error:
                if time.monotonic() > until:
                    why = f"the coordinator is gone ({reason}) and did not come back: {error}"
                    self._fail(ConnectionLost(why))
                    self._gone(why)
                    return
            self._closed.wait(_AGAIN_SECONDS)

    def _connect_once(self, silent: Call | None) -> bool:
        """Whether there is a connection: a new one, or the silent one again."""
        if self._is_heard_again(silent):
            return True
        endpoint = Endpoint(self._dial(), self._stamp, _CoordinatorHandlers(self, self._service))
        try:
            if self._is_heard_again(silent):
                endpoint.close()
                return True
            roster = endpoint.call(self._member).wait(_ANSWER_SECONDS) if self._member is not None else None
        except BaseException:
            endpoint.close()
            raise
        with self._change:
            if self._closed.is_set():
                endpoint.close()
                return True
            before, self._endpoint, self._is_looking = self._endpoint, endpoint, False
            self._wire += before.stats() if before is not None else WireStats()
            self._change.notify_all()
        if before is not None:
            before.close("there is another connection")  # its requests are repeated
        if not endpoint.is_open:
            self._lost(endpoint, "closed again")
        if isinstance(roster, Roster):
            self._on_roster(roster)
        return True

    def _is_heard_again(self, silent: Call | None) -> bool:
        """Whether the coordinator was only slow and the old connection works."""
        with self._change:
            if silent is None or self._endpoint is None or not silent.is_done:
                return False
            self._is_looking = False
            return True

    def _is_fenced(self, error: FencedError) -> None:
        self._fail(error)
        self._fenced(error)

    def _fail(self, error: SynclineError) -> None:
        with self._change:
            self._failed = error
            endpoint, self._endpoint = self._endpoint, None
            self._change.notify_all()
        if endpoint is not None:
            endpoint.close()

    def close(self) -> None:
        self._closed.set()
        with self._change:
            endpoint, self._endpoint = self._endpoint, None
            self._change.notify_all()
        if endpoint is not None:
            self._wire += endpoint.stats()
            endpoint.close()


def seconds_to_beat(now: float, every_seconds: float) -> float:
    """Until the next moment at which all members of this host beat; `now` by the clock that they share."""
    return every_seconds - now % every_seconds


class _CoordinatorHandlers:
    """Passes the coordinator's messages to the member's service, and its loss to the link."""

    def __init__(self, link: Link, service: Service) -> None:
        self._link, self._service = link, service

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        raise ProtocolError(f"{type(message).__name__} has no payload")

    def handle(self, request: Request) -> None:
        if isinstance(request.message, Roster):
            self._link._on_roster(request.message)
        else:
            self._service.handle(request)

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        self._link._lost(endpoint, reason)


def _with_rtt(beat: Heartbeat, rtt_seconds: float) -> Heartbeat:
    return msgspec.structs.replace(beat, rtt_seconds=rtt_seconds)
