"""Connecting and listening: Unix sockets on one host, TCP on loopback, TLS 1.3 between hosts."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable

from syncline.core import repeats
from syncline.core.members import Address
from syncline.errors import ConfigError, ConnectionLost, NoAnswer
from syncline.net import handshake, proving
from syncline.net.certificate import Certificate, client_context, peer_digest
from syncline.net.connection import SocketConnection
from syncline.net.streams import PlainStream, Stream, TlsStream
from syncline.net.transport import Connection, Peer

#: A vanished host is noticed after about this long.
KEEPALIVE_SECONDS = 45
#: Between two tries to bind a port that is in use.
_AGAIN_SECONDS = 0.1


def is_loopback(host: str) -> bool:
    """Whether this address never leaves the host: TLS is not used there, nor on Unix sockets."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        # A listener on `::` sees 127.0.0.1 as ::ffff:127.0.0.1; both sides must decide the same.
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback
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
    """What a process needs to authenticate: the job, its token, and its name."""

    def __init__(self, job: str, token: bytes, me: Peer) -> None:
        self.job, self.token, self.me = job, token, me

    def as_incarnation(self, incarnation: int) -> Identity:
        return Identity(self.job, self.token, Peer(self.me.role, self.me.name, incarnation))


def connect_unix(path: str, identity: Identity, seconds: float) -> SocketConnection:
    """Connects over a Unix socket; an OSError if it does not exist."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(seconds)
    try:
        try:
            sock.connect(_unix_name(path))
        except (BlockingIOError, TimeoutError) as error:
            raise NoAnswer(f"too many wait to be heard there: {error}") from None
        return connected(sock, identity, "")
    except BaseException:
        sock.close()
        raise


def connect_tcp(host: str, port: int, identity: Identity, seconds: float) -> SocketConnection:
    """Connects over TCP: in the clear on loopback, TLS 1.3 everywhere else."""
    sock = socket.create_connection((host, port), timeout=seconds)
    try:
        _tune(sock)
        certificate = ""
        if not is_loopback(sock.getpeername()[0]):
            sock = _encrypted(sock)
            certificate = peer_digest(sock)
        return connected(sock, identity, certificate)
    except BaseException:
        sock.close()
        raise


def _encrypted(sock: socket.socket) -> ssl.SSLSocket:
    try:
        return client_context().wrap_socket(sock)
    except TimeoutError as error:
        raise NoAnswer(f"no TLS handshake within {sock.gettimeout() or 0.0:g} s") from error


def connected(sock: socket.socket, identity: Identity, certificate: str) -> SocketConnection:
    side = handshake.Connecting(identity.token, identity.job, identity.me, certificate)
    return _open(sock, proving.connecting(sock, side))


def _open(sock: socket.socket, peer: Peer) -> SocketConnection:
    sock.settimeout(None)
    name = peer.name
    stream: Stream = TlsStream(sock, name) if isinstance(sock, ssl.SSLSocket) else PlainStream(sock, name)
    return SocketConnection(stream, peer, name)


def _unix_name(path: str) -> str | bytes:
    """A name with @ is in Linux's abstract namespace and ends with its process."""
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
        needs_incarnation: bool = False,
    ) -> None:
        """`needs_incarnation`: connections are closed until handshakes name an incarnation of us. A member that dials
        drops them as well and dials again; accepted late, such a connection would replace its newer one.
        """
        self._identity, self._accept, self._log = identity, accept, log
        self._needs_incarnation = needs_incarnation
        self._certificate: Certificate | None = None
        self._lock = threading.Lock()
        self._strangers: dict[int, socket.socket] = {}  # by the handshake thread
        self._refusals = repeats.Repeats("failed connections")
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._unix_path = ""
        self._sockets = [sock]
        self._ends = socket.socketpair()  # wakes accepting threads: the socket may be shared with other processes
        host, port = sock.getsockname()[:2]
        if unix:
            self._sockets.append(self._listen_unix(unix))
        self.address = Address(unix if unix else "", str(host), int(port))
        for listening in self._sockets:
            listening.listen(128)
            listening.setblocking(False)
            thread = threading.Thread(target=self.serve, args=(listening,), name="accept", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _listen_unix(self, path: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(_unix_name(path))
        self._unix_path = "" if path.startswith("@") else path
        return sock

    def rename(self, incarnation: int) -> None:
        """Handshakes use this incarnation from now on."""
        self.become(self._identity.as_incarnation(incarnation))

    def become(self, identity: Identity) -> None:
        """Handshakes use this identity from now on."""
        self._identity = identity

    @property
    def num_strangers(self) -> int:
        """Connections that have not proved yet who they are."""
        return len(self._strangers)

    def serve(self, listening: socket.socket) -> None:
        with selectors.DefaultSelector() as looks:
            for sock in (listening, self._ends[0]):
                looks.register(sock, selectors.EVENT_READ)
            self._accept_all(listening, looks)

    def _accept_all(self, listening: socket.socket, looks: selectors.BaseSelector) -> None:
        trouble = ""
        while True:
            try:
                looks.select(repeats.SECONDS)
                if self._closed:
                    return
                with self._lock:
                    folded = self._refusals.flush(time.monotonic())
                for line in folded:
                    self._log(line)
                sock, _ = listening.accept()
                sock.setblocking(True)
            except BlockingIOError:
                continue  # another process that shares the socket was faster, or the peer is gone
            except OSError as error:
                if self._closed or error.errno in (errno.EBADF, errno.EINVAL):
                    return
                # For example too many open files: temporary; others go on.
                if str(error) != trouble:
                    trouble = str(error)
                    self._log(f"a connection could not be accepted: {error}")
                time.sleep(0.1)
                continue
            threading.Thread(target=self._greet, args=(sock,), name="greet", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        """Authenticates a stranger: at most 512 bytes and five seconds."""
        where, until = "this host", time.monotonic() + handshake.SECONDS
        try:
            certificate = ""
            self._know(sock)
            if sock.family != socket.AF_UNIX:
                where = "{}:{}".format(*sock.getpeername()[:2])
                _tune(sock)
                if not is_loopback(sock.getpeername()[0]):
                    sock, certificate = self._wrap(sock, until)
            me = self._identity
            side = handshake.Listening(me.token, me.job, me.me, certificate)
            connection = _open(sock, proving.listening(sock, side, until))
        except Exception as error:  # errors of strangers only go to the log
            if not self._closed:
                with self._lock:
                    lines = self._refusals.add(f"a connection from {where} {_why_not(error)}", time.monotonic())
                for line in lines:
                    self._log(line)
            with contextlib.suppress(OSError):
                sock.close()
            return
        finally:
            with self._lock:
                self._strangers.pop(threading.get_ident(), None)
        if self._closed or (self._needs_incarnation and not me.me.incarnation):
            connection.close()
        else:
            self._accept(connection)

    def _know(self, sock: socket.socket) -> None:
        """Registers the stranger's socket, so that closing the listener ends its wait."""
        with self._lock:
            if self._closed:
                raise ConnectionLost("the listener is closed")
            self._strangers[threading.get_ident()] = sock

    def _wrap(self, sock: socket.socket, until: float) -> tuple[ssl.SSLSocket, str]:
        with self._lock:
            self._certificate = self._certificate or Certificate.create()
        context = self._certificate.server_context()
        wrapped = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        try:
            self._know(wrapped)
            wrapped.settimeout(max(0.001, until - time.monotonic()))
            wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
        return wrapped, self._certificate.digest

    def close(self) -> None:
        with self._lock:
            self._closed = True
            strangers = list(self._strangers.values())
            folded = self._refusals.flush(time.monotonic(), is_over=True)
        for line in folded:
            self._log(line)
        self._ends[1].close()
        for thread in self._threads:
            thread.join(1.0)
        for sock in (*self._sockets, self._ends[0]):
            sock.close()
        for stranger in strangers:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(stranger, socket.SHUT_RDWR)  # below TLS, whose thread is using it
        if self._unix_path:
            with contextlib.suppress(OSError):
                os.unlink(self._unix_path)


def _why_not(error: Exception) -> str:
    """The reason: refused by us, or ended by the peer, for example a killed member."""
    if isinstance(error, ConnectionLost):
        return f"ended: {error}"
    if isinstance(error, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "ended: the other side is gone"
    return f"was refused: {type(error).__name__}: {error}"


def bind(host: str, port: int, option: str = "--bind", seconds: float = 0.0) -> socket.socket:
    """A listening TCP socket; an error that says so if the port is in use. `option`: with which it can be said.
    `seconds`: for a process that ends to let go of the port.
    """
    family, until = socket.AF_INET6 if ":" in host else socket.AF_INET, time.monotonic() + seconds
    while True:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(128)  # before this, two sockets could be bound to one port
            return sock
        except (OSError, OverflowError, UnicodeError) as error:
            sock.close()
            if getattr(error, "errno", None) != errno.EADDRINUSE or time.monotonic() >= until:
                where = f"{host}:{port}" if port else host
                hint = (
                    f"choose another port with {option}, or 0 for any" if port else "is it an address of this host?"
                )
                raise ConfigError(f"cannot listen on {where}: {getattr(error, 'strerror', error)}; {hint}") from None
        time.sleep(_AGAIN_SECONDS)
