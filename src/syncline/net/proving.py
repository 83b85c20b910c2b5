"""The handshake over a socket: its parts within their bytes and seconds, and a reason for whoever is refused."""

from __future__ import annotations

import contextlib
import socket
import time

from syncline.errors import ConnectionLost, FrameError, ProtocolError
from syncline.net import handshake
from syncline.net.transport import Peer


def connecting(sock: socket.socket, side: handshake.Connecting) -> Peer:
    """Proves the token to the side that listens, and has it proved by it."""
    parts = _Parts(sock, 2 * handshake.MAX_BYTES, time.monotonic() + handshake.SECONDS)
    sock.sendall(side.hello())
    proof, peer = side.answer(parts.read_first())
    sock.sendall(proof)
    side.finish(parts.read())
    return peer


def listening(sock: socket.socket, side: handshake.Listening, until: float) -> Peer:
    """The same for a stranger that has connected; one that is refused is told why."""
    parts = _Parts(sock, handshake.MAX_BYTES, until)
    try:
        sock.sendall(side.challenge(parts.read()))
    except ProtocolError as error:
        with contextlib.suppress(OSError):
            sock.sendall(handshake.refuse(error))
        raise
    try:
        welcome, peer = side.welcome(parts.read())
    except ProtocolError as error:
        with contextlib.suppress(OSError):
            sock.sendall(handshake.refuse_proof(error))
        raise
    except ConnectionLost as error:
        # It may have seen by our proof that the tokens differ: it is gone without a word then.
        raise ConnectionLost(f"{side.asker} did not prove the token of this job: {error}") from None
    sock.sendall(welcome)
    return peer


class _Parts:
    """The parts of a handshake as they come: so many bytes, until then, all of them together."""

    def __init__(self, sock: socket.socket, most_bytes: int, until: float) -> None:
        self._sock, self._most, self._left, self._until = sock, most_bytes, most_bytes, until
        self._is_silent = False  # nothing came in time

    def read_first(self) -> bytes:
        """As `read`; silence is no refusal: the other side may listen already, and not be awake yet."""
        try:
            return self.read()
        except FrameError as error:
            if self._is_silent:
                raise ConnectionLost(str(error)) from None
            raise

    def read(self) -> bytes:
        return self._exactly(handshake.body_bytes(self._exactly(handshake.PREFIX_BYTES)))

    def _exactly(self, count: int) -> bytes:
        self._left -= count
        if self._left < 0:
            raise FrameError(f"a handshake of more than {self._most} bytes")
        data = b""
        while len(data) < count:
            try:
                self._sock.settimeout(max(0.001, self._until - time.monotonic()))
                chunk = self._sock.recv(count - len(data))
            except TimeoutError:
                self._is_silent = True
                raise FrameError(f"no handshake within {handshake.SECONDS:g} s") from None
            except ConnectionError:
                chunk = b""  # reset: the same as an end
            except OSError as error:
                raise ConnectionLost(f"the connection broke during the handshake: {error}") from None
            if not chunk:
                raise ConnectionLost("the other side closed the connection during the handshake")
            data += chunk
        return data
