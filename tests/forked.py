"""Commands as tests start them: `python -m syncline …` and `python script.py`, forked from a process that has loaded
torch, or the frameworks of its environment (`tests/fork_server.py`). Everything else starts as always; so does a
command whose environment would make its interpreter or a library load differently. What a new interpreter does is for
tests/launch/test_forkserver.py and tests/test_readme.py, which start real ones.
"""

from __future__ import annotations

import atexit
import os
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from syncline.launch.forkserver import SUBREAPER

ROOT = pathlib.Path(__file__).parents[1]
#: What is read when a process starts or a library is loaded, and so never by a forked process.
_READ_EARLY = (
    *("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "TORCH_", "CUDA_", "LC_", "LANG", "MALLOC_"),
    *("KERAS_", "TF_", "JAX_", "XLA_"),
)
#: A replica that answers requests tells torch itself how many threads it has, which is all that a forked one can do.
_TOLD_LATER = "syncline.serve.replicas."
#: The server's own command line, which a forked command writes its own over.
_TITLE_BYTES = 4096


class Request(msgspec.Struct, frozen=True):
    """Fork this command: the words behind the interpreter's name. Descriptors come along and get these numbers."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    numbers: list[int]


class Server:
    """The way to the process that forks."""

    def __init__(self, control: socket.socket | None = None) -> None:
        """`control`: to one that runs already."""
        self._control, self._lock = control, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._early = _read_early(os.environ)

    def serves(self, environment: dict[str, str]) -> bool:
        early = _read_early(os.environ) if self._control is None else self._early
        return _read_early(environment) == early

    def fork(self, request: Request, descriptors: Sequence[int]) -> int:
        with self._lock, SUBREAPER.adopting():
            control = self._control or self._start()
            socket.send_fds(control, [msgspec.json.encode(request)], descriptors)
            answer = control.recv(64)
        assert answer, "the fork server of the tests has ended"
        return int(answer)

    def _start(self) -> socket.socket:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._early = _read_early(os.environ)
        with theirs:
            self._process = _Plain(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), "-" * _TITLE_BYTES],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._end)
        return self._control

    def _end(self) -> None:
        assert self._control is not None and self._process is not None
        self._control.close()
        self._process.wait()

    def is_its_own(self, pid: int) -> bool:
        return self._process is not None and pid == self._process.pid

    def is_its_way(self, number: str) -> bool:
        return self._control is not None and number == str(self._control.fileno())


def _read_early(environment: Any) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_EARLY) and name != "PYTHONUNBUFFERED"
    }


_Plain = subprocess.Popen
SERVER = Server()


def use(control: socket.socket) -> None:
    """In a forked command: all that it starts from now on comes from there."""
    global SERVER
    SERVER = Server(control)
    subprocess.Popen = Popen  # type: ignore[misc]


class Popen(_Plain):  # type: ignore[type-arg]
    """`subprocess.Popen`, which forks where it can."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        # The places of these are those of Python 3.11 to 3.13.
        executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell = rest[:9]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[9:15]
        environment = dict(os.environ if env is None else env)
        words = [] if isinstance(args, str | bytes | os.PathLike) else [os.fsdecode(word) for word in args]
        early = _without_threads(environment) if _TOLD_LATER in "".join(words[1:3]) else environment
        if shell or preexec_fn or executable or not _can_fork(words) or not SERVER.serves(early):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        first = [p2cread, c2pwrite, errwrite]
        descriptors = [number if given == -1 else given for number, given in enumerate(first)] + list(pass_fds)
        request = Request(words[1:], os.fspath(cwd or os.getcwd()), environment, [0, 1, 2, *pass_fds])
        self.pid = SERVER.fork(request, descriptors)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _without_threads(environment: dict[str, str]) -> dict[str, str]:
    """With the numbers of threads that this process has."""
    kept = {name: value for name, value in environment.items() if not name.endswith("_THREADS")}
    return kept | {name: value for name, value in os.environ.items() if name.endswith("_THREADS")}


def _can_fork(words: Sequence[str]) -> bool:
    if sys.platform != "linux" or len(words) < 2 or words[0] != sys.executable:
        return False
    return words[1].endswith(".py") or (words[1] == "-m" and words[2].startswith(("syncline", "tests.")))


def run(
    words: Sequence[str],
    *,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    **how: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` for such a command."""
    if capture_output:
        how.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with Popen(words, **how) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done
