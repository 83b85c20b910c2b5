"""Members that are forked from a process with torch loaded, so that each of them starts in milliseconds.

Loading torch takes seconds of processor time. One process of this host does it once (`launch/preloaded.py`) and forks
the servers and workers that the launcher asks for, at the start and whenever one starts again. Linux only: elsewhere,
and whenever the fork server does not answer, a member is started as a new interpreter.

A forked member is a child of the launcher, not of the fork server: the launcher is its subreaper for that moment, so
its exit code, its signals and its death with the launcher are those of any other child.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

import msgspec

from syncline import config as configuration

#: For the fork server to load torch, on a machine that has other work too.
ANSWER_SECONDS = 60.0
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
#: Room in the fork server's command line for that of a member, which a forked process writes over it.
TITLE_BYTES = 128


class Fork(msgspec.Struct, frozen=True):
    """A request: fork a member of this name. Its standard input and output come with the message."""

    name: str
    environment: dict[str, str] = {}


class Forked(msgspec.Struct, frozen=True):
    """The answer: the new process, or None where the system has no room for one."""

    pid: int | None


class ForkedProcess:
    """A forked member as a child of this process; the part of `subprocess.Popen` that the launcher uses."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        # Without waiting: a second Ctrl-C sends signals from a handler, perhaps inside of this very call.
        if self._lock.acquire(blocking=False):
            try:
                if self.returncode is None:
                    self._collect()
            finally:
                self._lock.release()
        return self.returncode

    def _collect(self) -> None:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # collected elsewhere: how it ended is lost
            pid, status = self.pid, signal.SIGKILL
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(["member", str(self.pid)], timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """The launcher's side. `fork()` returns None wherever a member has to be started in the plain way."""

    def __init__(self, say: Callable[[str], None] = lambda text: None, also: Sequence[str] = ()) -> None:
        """`say`: is told when members start in the plain way from now on, and why. `also`: more modules to load."""
        self._say, self._also, self._is_interrupted = say, tuple(also), False
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Starts the process, which begins to load torch; does not wait for it."""
        if sys.platform != "linux" or self._process is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [str(theirs.fileno()), "-" * TITLE_BYTES, *self._also]
        command = [sys.executable, "-m", "syncline.launch.preloaded", *words]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                    env=configuration.inherited_environment({"PYTHONUNBUFFERED": "1"}),
                )
            except OSError:  # no room for it: members start in the plain way
                ours.close()
                return
        ours.settimeout(ANSWER_SECONDS)
        self._control = ours

    def fork(self, name: str, environment: Mapping[str, str]) -> ForkedProcess | None:
        """A new process that waits for its plan on its standard input."""
        if self._control is None:
            return None
        try:
            (stdin, own_stdin), (own_stdout, stdout) = _two_pipes()
        except OSError:  # too many open files: the plain way says so
            return None
        pid = None
        try:
            with SUBREAPER.adopting():
                request = msgspec.json.encode(Fork(name, dict(environment)))
                socket.send_fds(self._control, [request], [stdin, stdout])
                pid = msgspec.json.decode(self._control.recv(1 << 10), type=Forked).pid
        except (OSError, msgspec.DecodeError) as error:
            is_silent = isinstance(error, TimeoutError)
            self._give_up(f"has not answered within {ANSWER_SECONDS:g} s" if is_silent else "has ended")
        finally:
            os.close(stdin)
            os.close(stdout)
        if pid and _is_own_child(pid):
            return ForkedProcess(pid, open(own_stdin, "wb"), open(own_stdout, "rb"))
        self._give_up("could not start a member")
        os.close(own_stdin)  # if there is a process, it ends with this
        os.close(own_stdout)
        return None

    def interrupt(self) -> None:
        """Ends a wait in `fork`, which returns None then, and later ones. A signal handler may call it."""
        control, self._is_interrupted = self._control, True
        if control is not None:
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)

    def _give_up(self, why: str) -> None:
        is_news = self._control is not None and not self._is_interrupted
        self.close()
        if is_news:
            self._say(f"the process that loads torch for all members {why}; from now on each member loads it itself")

    def close(self) -> None:
        """Ends the process; members that it has forked live on."""
        process, control = self._process, self._control
        self._control = None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()


def _two_pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    first = os.pipe()
    try:
        return first, os.pipe()
    except OSError:
        for fd in first:
            os.close(fd)
        raise


class Subreaper:
    """Adopts processes whose parents end. This belongs to the whole process, which may have several launchers in
    threads, and may have asked for it itself: it ends with the last of them, and leaves what was before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users, self._before = 0, False

    @contextlib.contextmanager
    def adopting(self) -> Iterator[None]:
        """While this lasts, a process below us whose parent ends becomes a child of ours."""
        with self._lock:
            if not self._num_users:
                self._before = self.is_on()
                self._set(True)
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if not self._num_users:
                    self._set(self._before)

    @staticmethod
    def is_on() -> bool:
        found = ctypes.c_int(0)
        ctypes.CDLL(None, use_errno=True).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
        return bool(found.value)

    @staticmethod
    def _set(is_on: bool) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


SUBREAPER = Subreaper()


def _is_own_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
