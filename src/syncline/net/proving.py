"""The handshake over a socket: limits on bytes and time, and reasons for refusals."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from syncline.errors import ConnectionLost, FrameError, NoAnswer, ProtocolError, SynclineError
from syncline.net import handshake
from syncline.net.transport import Peer


def connecting(sock: socket.socket, side: handshake.Connecting) -> Peer:
    """Mutual proof with the listening side. Silence raises NoAnswer, not a refusal."""
    parts = _Parts(sock, 2 * handshake.MAX_BYTES, time.monotonic() + handshake.SECONDS, NoAnswer)
    sock.sendall(side.hello())
    proof, peer = side.answer(parts.read())
    sock.sendall(proof)
    side.finish(parts.read())
    return peer


def listening(sock: socket.socket, side: handshake.Listening, until: float) -> Peer:
    """Mutual proof with a connecting stranger; one that is refused is told why."""
    parts = _Parts(sock, handshake.MAX_BYTES, until, FrameError)
    try:
        challenge = side.challenge(parts.read())
        if _is_gone(sock):  # it gave up while we were suspended, and dials again
            raise ConnectionLost(
                f"{side.asker} closed it before this process, which was busy, could answer; it tries again by itself"
            )
        sock.sendall(challenge)
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
        # It may have seen from our proof that the tokens differ, and closed.
        raise ConnectionLost(f"{side.asker} did not prove the token of this job: {error}") from None
    sock.sendall(welcome)
    return peer


def _is_gone(sock: socket.socket) -> bool:
    """Whether the peer has closed the connection, as far as visible without reading (not under TLS)."""
    if isinstance(sock, ssl.SSLSocket):
        return False
    seconds = sock.gettimeout()
    sock.setblocking(False)
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        sock.settimeout(seconds)


class _Parts:
    """Reads the parts of a handshake: limited in bytes and by one deadline, after which it raises `silence`."""

    def __init__(self, sock: socket.socket, most_bytes: int, until: float, silence: type[SynclineError]) -> None:
        self._sock, self._most, self._left, self._until = sock, most_bytes, most_bytes, until
        self._silence = silence

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
                raise self._silence(f"no handshake within {handshake.SECONDS:g} s") from None
            except ConnectionError:
                chunk = b""  # reset: the same as an end
            except OSError as error:
                raise ConnectionLost(f"the connection broke during the handshake: {error}") from None
            if not chunk:
                raise ConnectionLost("the other side closed the connection during the handshake")
            data += chunk
        return data
