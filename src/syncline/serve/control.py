"""What `syncline serve-ctl` says to a serving process: one JSON line each way, over a socket of its own user."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pathlib
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from syncline.errors import ConfigError, SynclineError

log = logging.getLogger("syncline.serve")

SOCKET, LOCK, TOKEN = "control", "lock", "token"
VERBS = ("status", "load", "rollback", "pin", "unpin", "canary")
_MOST_BYTES = 1 << 16
_SECONDS = 600.0  # loading a version takes as long as it takes
_END_SECONDS = 0.3  # a version that is being loaded is not waited for
_MOST_CALLS = 32
_FOLDER = "serve"


class ControlRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One of `VERBS`, and what it needs."""

    verb: str
    version: str = ""
    share: float = 0.0


def folder_of(runs: str, name: str) -> pathlib.Path:
    """Where a serving process of this name keeps its socket and its token."""
    if "/" in name or name in ("", ".", "..") or not name.isprintable() or len(name.encode()) > 200:
        raise ConfigError(f"--name {name[:20]!r}: it is also the name of a folder: no '/', at most 200 bytes")
    return pathlib.Path(runs) / _FOLDER / name


@contextlib.contextmanager
def held(folder: pathlib.Path) -> Iterator[None]:
    """Holds the folder, which only its user may enter: one serving process for each name."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise ConfigError(f"{folder} belongs to another user; choose another --name or --runs")
        folder.chmod(0o700)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be used: {error.strerror}; use another: --runs DIR") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder.name} is served already; end it, or choose another --name") from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def control_socket(folder: pathlib.Path) -> Iterator[socket.socket]:
    """A listening socket that `ask` finds there, until this ends."""
    path = folder / SOCKET
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with _short(path) as address:
            listener.bind(address)
        path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        listener.listen(8)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


class Control:
    """Answers callers, each in a thread of its own: one may load a version for long while another rolls back."""

    def __init__(self, listener: socket.socket, answer: Callable[[ControlRequest], dict[str, Any]]) -> None:
        """`listener`: of `control_socket`; this object's from now on."""
        self._answer, self._listener = answer, listener
        self._is_closed = False
        self._calls: set[threading.Thread] = set()
        self._room = threading.Semaphore(_MOST_CALLS)
        self._thread = threading.Thread(target=self._run, name="syncline serve control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)
        until = time.monotonic() + _END_SECONDS
        for thread in list(self._calls):
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))
        self._listener.close()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            thread = threading.Thread(target=self._call, args=(sock,), name="syncline serve control", daemon=True)
            self._calls.add(thread)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads
                log.warning("a caller of serve-ctl cannot be answered: %s", error)
                self._let_go(thread, sock)

    def _call(self, sock: socket.socket) -> None:
        sock.settimeout(5.0)
        try:
            self._serve(sock)
        except OSError as error:
            log.debug("a caller of serve-ctl went away: %s", error)
        finally:
            self._let_go(threading.current_thread(), sock)

    def _let_go(self, thread: threading.Thread, sock: socket.socket) -> None:
        sock.close()
        self._calls.discard(thread)
        self._room.release()

    def _serve(self, sock: socket.socket) -> None:
        """OSError: the caller went away, or says nothing."""
        try:
            line = _line(sock)
        except ConfigError as error:
            reply: dict[str, Any] = {"error": str(error)}
        else:
            reply = self._reply(line)
        sock.sendall(msgspec.json.encode(reply) + b"\n")

    def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            return self._answer(msgspec.json.decode(line, type=ControlRequest))
        except (SynclineError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            return {"error": str(error)}
        except BaseException as error:  # of the operator's code, or a lack of memory
            log.exception("a request of serve-ctl failed")
            return {"error": f"{type(error).__name__}: {error}"}


def ask(folder: pathlib.Path, request: ControlRequest) -> dict[str, Any]:
    """The answer of the process that serves there. ConfigError: it refuses, or there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with sock:
        sock.settimeout(_SECONDS)
        try:
            with _short(folder / SOCKET) as address:
                sock.connect(address)
            sock.sendall(msgspec.json.encode(request) + b"\n")
            reply = msgspec.json.decode(_line(sock), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"nothing serves {folder.name} here ({folder}): {error}; see --runs and --name"
            ) from None
    if "error" in reply:
        raise ConfigError(str(reply["error"]))
    return reply


def _line(sock: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        part = sock.recv(4096)
        if not part:
            break
        found += part
        if len(found) > _MOST_BYTES:
            raise ConfigError(f"more than {_MOST_BYTES} bytes in one line")
    return found


@contextlib.contextmanager
def _short(path: pathlib.Path) -> Iterator[str]:
    """An address for this path: a socket's may have 107 bytes only."""
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
