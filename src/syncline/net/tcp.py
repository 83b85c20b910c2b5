"""Connections over sockets: Unix sockets on one host, TCP on loopback, TLS 1.3 between hosts."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from syncline.core.messages import Address
from syncline.errors import ConfigError, ConnectionLost, FrameError, ProtocolError
from syncline.net import frame, handshake, shm
from syncline.net.certificate import Certificate, client_context, peer_digest
from syncline.net.frame import Header
from syncline.net.streams import PlainStream, Stream, TlsStream
from syncline.net.transport import Buffer, Connection, Memory, Peer, Receiver
from syncline.stats import WireStats

#: A host that vanishes without a word is noticed after about this long.
KEEPALIVE_SECONDS = 20


class SocketConnection(Connection):
    """Frames over one stream. A thread of its own reads; a bad frame closes the connection."""

    def __init__(self, stream: Stream, peer: Peer, label: str) -> None:
        self.peer, self.shares_memory = peer, stream.carries_fds
        self._stream, self._label = stream, label
        self._send_lock = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        self._receiver: Receiver | None = None
        self._sent = [0, 0]
        self._received = [0, 0]

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        threading.Thread(target=self._read_frames, name=f"read {self._label}", daemon=True).start()

    def send(
        self, header: Header, body: bytes, buffers: Iterable[Buffer] = (), attachment: Memory | None = None
    ) -> None:
        fd = attachment.fd if isinstance(attachment, shm.SharedMemory) else None
        with self._send_lock:
            if header.payload_bytes < 1 << 16:
                self._stream.write([memoryview(header.pack() + body), *buffers], fd)
            else:
                # The buffers may be made one by one, each while the one before it is on its way.
                self._stream.write([memoryview(header.pack() + body)], fd)
                for buffer in buffers:
                    self._stream.write([buffer])
            self._sent[0] += 1
            self._sent[1] += frame.HEADER.size + len(body) + header.payload_bytes

    def _read_frames(self) -> None:
        reason = "closed"
        try:
            while True:
                self._read_frame()
        except ConnectionLost as error:
            reason = str(error)
        except ProtocolError as error:
            reason = f"refused what {self.peer} sent: {type(error).__name__}: {error}"
        except Exception as error:  # a bug of ours must end in a verdict, not in silence
            reason = f"{type(error).__name__}: {error}"
        self.close(reason)

    def _read_frame(self) -> None:
        assert self._receiver is not None
        raw, fds = bytearray(frame.HEADER.size), list[int]()
        try:
            self._stream.read(memoryview(raw), fds)
            header = frame.parse_header(raw)
            body = bytearray(header.body_bytes)
            self._stream.read(memoryview(body))
            message = frame.decode(header.kind, body)
            payload: Sequence[Buffer] = ()
            if header.payload_bytes:
                payload = self._receiver.landing(header, message)
                if sum(len(buffer) for buffer in payload) != header.payload_bytes:
                    raise FrameError(f"a payload of {header.payload_bytes} bytes does not fit its message")
                for buffer in payload:
                    self._stream.read(buffer)
            attachment = self._attachment(header, message, fds)
        except BaseException:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
            raise
        self._received[0] += 1
        self._received[1] += frame.HEADER.size + header.body_bytes + header.payload_bytes
        self._receiver.deliver(header, message, payload, attachment)

    def _attachment(self, header: Header, message: Any, fds: list[int]) -> shm.SharedMemory | None:
        if not header.flags & frame.ATTACHED:
            if fds:
                raise FrameError("a file descriptor that was not announced")
            return None
        if len(fds) != 1 or not isinstance(getattr(message, "num_bytes", None), int):
            raise FrameError("shared memory was announced and did not come")
        return shm.accept(fds.pop(), message.num_bytes)

    def create_memory(self, num_bytes: int) -> Memory:
        return shm.create(num_bytes)

    def can_carry(self, memory: Memory) -> bool:
        return self.shares_memory and isinstance(memory, shm.SharedMemory)

    def close(self, reason: str = "closed") -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._stream.close()
        if self._receiver is not None:
            self._receiver.lost(reason)

    def stats(self) -> WireStats:
        return WireStats(
            frames_sent=self._sent[0],
            bytes_sent=self._sent[1],
            frames_received=self._received[0],
            bytes_received=self._received[1],
        )


def is_loopback(host: str) -> bool:
    """Whether this address never leaves the host: there, and on Unix sockets, TLS is left out."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False


def _tune(sock: socket.socket) -> None:
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_SECONDS * 1000)


class Identity:
    """What a process needs to prove who it is: the job, its token, and its own name."""

    def __init__(self, job: str, token: bytes, me: Peer) -> None:
        self.job, self.token, self.me = job, token, me

    def as_incarnation(self, incarnation: int) -> Identity:
        return Identity(self.job, self.token, Peer(self.me.role, self.me.name, incarnation))


def connect_unix(path: str, identity: Identity, seconds: float) -> SocketConnection:
    """Over a Unix socket of this host; an OSError when there is none of that name here."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(seconds)
    try:
        sock.connect(_unix_name(path))
        return _connected(sock, identity, "")
    except BaseException:
        sock.close()
        raise


def connect_tcp(host: str, port: int, identity: Identity, seconds: float) -> SocketConnection:
    """Over TCP: in the clear on loopback, TLS 1.3 everywhere else."""
    sock = socket.create_connection((host, port), timeout=seconds)
    try:
        _tune(sock)
        certificate = ""
        if not is_loopback(sock.getpeername()[0]):
            sock = client_context().wrap_socket(sock)
            certificate = peer_digest(sock)
        return _connected(sock, identity, certificate)
    except BaseException:
        sock.close()
        raise


def _connected(sock: socket.socket, identity: Identity, certificate: str) -> SocketConnection:
    sock.settimeout(handshake.SECONDS)
    side = handshake.Connecting(identity.token, identity.job, identity.me, certificate)
    sock.sendall(side.hello())
    proof, peer = side.answer(_read_part(sock))
    sock.sendall(proof)
    side.finish(_read_part(sock))
    return _open(sock, peer)


def _open(sock: socket.socket, peer: Peer) -> SocketConnection:
    sock.settimeout(None)
    stream: Stream = TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else PlainStream(sock)
    return SocketConnection(stream, peer, peer.name)


def _read_part(sock: socket.socket) -> bytes:
    """One part of a handshake: never more than it may have, within the socket's time-out."""

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                chunk = sock.recv(count - len(data))
            except TimeoutError:
                raise FrameError(f"no handshake within {handshake.SECONDS:g} s") from None
            except OSError as error:
                raise ConnectionLost(f"the connection broke during the handshake: {error}") from None
            if not chunk:
                raise ConnectionLost("the other side closed the connection during the handshake")
            data += chunk
        return data

    return exactly(handshake.body_bytes(exactly(handshake.PREFIX_BYTES)))


def _unix_name(path: str) -> str | bytes:
    """A name that begins with @ is in Linux's abstract space: it goes with its process."""
    return b"\0" + path[1:].encode() if path.startswith("@") else path


class Listener:
    """Accepts authenticated connections on a TCP address and, if wanted, on a Unix socket."""

    def __init__(
        self,
        identity: Identity,
        accept: Callable[[Connection], None],
        *,
        sock: socket.socket,
        unix: str = "",
        log: Callable[[str], None],
    ) -> None:
        self._identity, self._accept, self._log = identity, accept, log
        self._certificate: Certificate | None = None
        self._certificate_lock = threading.Lock()
        self._closed = False
        self._unix_path = ""
        self._sockets = [sock]
        host, port = sock.getsockname()[:2]
        if unix:
            self._sockets.append(self._listen_unix(unix))
        self.address = Address(unix if unix else "", str(host), int(port))
        for listening in self._sockets:
            listening.listen(128)
            threading.Thread(target=self._serve, args=(listening,), name="accept", daemon=True).start()

    def _listen_unix(self, path: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(_unix_name(path))
        self._unix_path = "" if path.startswith("@") else path
        return sock

    def rename(self, incarnation: int) -> None:
        """From now on, handshakes name this incarnation of us."""
        self._identity = self._identity.as_incarnation(incarnation)

    def _serve(self, listening: socket.socket) -> None:
        while not self._closed:
            try:
                sock, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(sock,), name="greet", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        """A stranger until it has proved the token: 512 bytes and five seconds at most."""
        try:
            sock.settimeout(handshake.SECONDS)
            certificate = ""
            if sock.family != socket.AF_UNIX:
                _tune(sock)
                if not is_loopback(sock.getpeername()[0]):
                    with self._certificate_lock:
                        self._certificate = self._certificate or Certificate.create()
                    sock = self._certificate.server_context().wrap_socket(sock, server_side=True)
                    certificate = self._certificate.digest
            connection = self._prove(sock, certificate)
        except (OSError, ProtocolError, ConnectionLost) as error:
            if not self._closed:
                self._log(f"a connection was refused: {type(error).__name__}: {error}")
            with contextlib.suppress(OSError):
                sock.close()
            return
        self._accept(connection)

    def _prove(self, sock: socket.socket, certificate: str) -> SocketConnection:
        side = handshake.Listening(self._identity.token, self._identity.job, self._identity.me, certificate)
        try:
            sock.sendall(side.challenge(_read_part(sock)))
        except ProtocolError as error:
            with contextlib.suppress(OSError):
                sock.sendall(handshake.refuse(error))
            raise
        try:
            welcome, peer = side.welcome(_read_part(sock))
        except ProtocolError as error:
            with contextlib.suppress(OSError):
                sock.sendall(handshake.refuse_proof(error))
            raise
        sock.sendall(welcome)
        return _open(sock, peer)

    def close(self) -> None:
        self._closed = True
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        if self._unix_path:
            with contextlib.suppress(OSError):
                os.unlink(self._unix_path)


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket; a port in use is an error that says so."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        where = f"{host}:{port}" if port else host
        hint = "choose another port with --bind, or 0 for any" if port else "is it an address of this host?"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}; {hint}") from None
    return sock
