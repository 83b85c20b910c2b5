"""A TCP proxy on loopback that does harm on demand: for tests of real processes, without root and namespaces.

    with Proxy(host, port) as proxy:
        ...                       # connect to proxy.host, proxy.port instead
        proxy.stop("down")        # the target's answers get lost; the sockets stay open
        proxy.resume()
        proxy.cut_after(100, "up")

Offsets count the bytes of a direction from the moment of the call, over all connections of the proxy. What is on its
way at that moment may count or not: be quiet when you say it. Loopback is in the clear, so a test can aim at a field
of a frame; between hosts there is TLS, and a changed byte ends the connection.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import NamedTuple

from syncline.testing.links import CHUNK_BYTES, JOIN_SECONDS, CutLink, Direction, ProxiedLink, Recording

__all__ = ["Direction", "Proxy", "Recording", "Replayed"]

_DIRECTIONS: tuple[Direction, ...] = ("up", "down")


class _Fault:
    """At this many bytes from now: a byte is changed, or everything is cut."""

    def __init__(self, after_bytes: int, *, flip: int = 0, cut: CutLink | None = None) -> None:
        self.after_bytes, self.flip, self.cut = after_bytes, flip, cut


class Replayed(NamedTuple):
    """What the target said to a replay, and whether it closed the connection."""

    answer: bytes
    was_closed: bool


class Proxy:
    """Passes on whatever connects to `host`:`port` to the target, until it is told otherwise."""

    host = "127.0.0.1"

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self._changed = threading.Condition()
        self._links: list[ProxiedLink] = []
        self._cuts: list[CutLink] = []  # that were asked for so far
        self._faults: dict[Direction, list[_Fault]] = {"up": [], "down": []}
        self._stopped: set[Direction] = set()
        self._delay_seconds = 0.0
        self._holds = self._records = self._closed = False
        self.recordings: list[Recording] = []  #: of connections since `record`, oldest first
        self._listening = socket.create_server((self.host, 0))
        self.port = int(self._listening.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="proxy accept", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- harm ---------------------------------------------------------------------------------------------

    def delay(self, seconds: float) -> None:
        """Every chunk is passed on so much later from now on; 0 ends it."""
        with self._changed:
            self._delay_seconds = seconds
            self._changed.notify_all()

    def stop(self, *directions: Direction) -> None:
        """These directions carry nothing from now on, not even an end; without any: both. The sockets stay open."""
        with self._changed:
            self._stopped.update(directions or _DIRECTIONS)

    def resume(self) -> None:
        """Both directions flow again; what was held back comes now."""
        with self._changed:
            self._stopped.clear()
            self._changed.notify_all()

    def hold(self) -> None:
        """New connections are made and then wait: nothing of theirs reaches the target until `let_in`."""
        with self._changed:
            self._holds = True

    def let_in(self) -> None:
        """Connections that were held are passed on."""
        with self._changed:
            self._holds = False
            self._changed.notify_all()

    def turn_to(self, target_host: str, target_port: int) -> None:
        """New connections go to another target from now on, as when an address moves to another host."""
        with self._changed:
            self._target = (target_host, target_port)

    def cut(self, *, reset: bool = False) -> None:
        """Ends all connections there are: with a FIN, or a `reset` (RST). New ones are welcome."""
        self._end_all(CutLink(reset))

    def cut_after(self, num_bytes: int, direction: Direction, *, reset: bool = False) -> None:
        """Cuts the connection that carries it after exactly so many more bytes of this direction."""
        self._add(direction, _Fault(num_bytes, cut=CutLink(reset)))

    def corrupt(self, offset: int, direction: Direction, flip: int = 0xFF) -> None:
        """Changes one byte: the one that has so many others before it, from now on. `flip`: which of its bits."""
        self._add(direction, _Fault(offset, flip=flip))

    def _add(self, direction: Direction, fault: _Fault) -> None:
        with self._changed:
            self._faults[direction].append(fault)

    # -- recordings ---------------------------------------------------------------------------------------

    def record(self) -> None:
        """Keeps what connections carry that are made from now on, in `recordings`."""
        with self._changed:
            self._records = True

    def replay(self, recording: Recording, seconds: float = 5.0) -> Replayed:
        """Says to the target, on a new connection, what was said up in a recording; hears it for so long at most."""
        answer, until = bytearray(), time.monotonic() + seconds
        with socket.create_connection(self._target, seconds) as sock:
            try:
                sock.sendall(bytes(recording.up))
                while (left := until - time.monotonic()) > 0:
                    sock.settimeout(left)
                    data = sock.recv(CHUNK_BYTES)
                    if not data:
                        return Replayed(bytes(answer), True)
                    answer += data
            except TimeoutError:
                pass
            except OSError:  # a reset: it closed with bytes of ours unread
                return Replayed(bytes(answer), True)
        return Replayed(bytes(answer), False)

    # -- passing on ---------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._holds)
                if self._closed:
                    client.close()
                    return
            try:
                self._connect(client)
            except OSError:  # the target is not there: the client sees the end at once
                client.close()

    def _connect(self, client: socket.socket) -> None:
        num_cuts = len(self._cuts)
        target = socket.create_connection(self._target, JOIN_SECONDS)
        with self._changed:
            if self._closed:
                client.close()
                target.close()
                return
            recording = Recording() if self._records else None
            if recording is not None:
                self.recordings.append(recording)
            self._links = [link for link in self._links if not link.is_over]
            link = ProxiedLink(client, target, self._may_read, self._pass_on, self._wake, recording)
            self._links.append(link)
        if len(self._cuts) > num_cuts:  # the target may know of it longer than this thread: it was meant too
            link.end(self._cuts[-1])

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _may_read(self, link: ProxiedLink, direction: Direction) -> bool:
        """Waits until this direction flows; False when the link has ended."""
        with self._changed:
            self._changed.wait_for(lambda: link.ended or direction not in self._stopped)
        return not link.ended

    def _pass_on(self, link: ProxiedLink, direction: Direction, data: bytes) -> tuple[bytes, CutLink | None]:
        with self._changed:
            until = time.monotonic() + self._delay_seconds
            self._changed.wait_for(lambda: link.ended or not self._delay_seconds, max(0.0, until - time.monotonic()))
            self._changed.wait_for(lambda: link.ended or direction not in self._stopped)
            return self._harmed(direction, data)

    def _harmed(self, direction: Direction, data: bytes) -> tuple[bytes, CutLink | None]:
        """What faults make of this chunk; those that are over are taken off."""
        changed, due = bytearray(data), [f for f in self._faults[direction] if f.after_bytes <= len(data)]
        for fault in sorted(due, key=lambda f: f.after_bytes):
            if fault.cut is not None:
                self._faults[direction].remove(fault)
                return bytes(changed[: fault.after_bytes]), fault.cut
            if fault.after_bytes < len(data):
                self._faults[direction].remove(fault)
                changed[fault.after_bytes] ^= fault.flip
        for fault in self._faults[direction]:
            fault.after_bytes -= len(data)
        return bytes(changed), None

    # -- the end ------------------------------------------------------------------------------------------

    def _end_all(self, cut: CutLink) -> None:
        with self._changed:
            self._cuts.append(cut)
            links, self._links = self._links, []
        for link in links:
            link.end(cut)
        for link in links:
            link.join()

    def close(self) -> None:
        """Ends all connections and listens no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()
        self._end_all(CutLink(reset=False))
        self._thread.join(JOIN_SECONDS)
