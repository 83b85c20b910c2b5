"""The process that members are forked from: loads what they need, then waits for requests of the launcher.

It has one thread, runs nothing of torch's and does not touch a GPU, so a forked process may do all of that.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pathlib
import socket
import sys
import warnings

import msgspec
import numpy.random

from syncline import config as configuration
from syncline.launch.forkserver import Fork, Forked

#: What servers and workers import at their start, beside the script.
_MODULES = ("syncline.launch.member", "syncline.launch.serving", "syncline.launch.working", "syncline.torch")


def main() -> int:
    """Serves requests until the launcher is gone. In a forked process: the member's exit code."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    gc.disable()  # much is made and nothing is thrown away
    for name in (*_MODULES, *sys.argv[3:]):
        importlib.import_module(name)
    gc.enable()
    gc.freeze()
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(control, 1 << 16, 2)
        except OSError:
            return 0
        if not data:
            return 0
        request = msgspec.json.decode(data, type=Fork)
        try:
            pid = fork_twice()
        except OSError:
            pid = None
        if pid == 0:
            control.close()
            return _become(request, *fds)
        for fd in fds:
            os.close(fd)
        try:
            control.send(msgspec.json.encode(Forked(pid)))
        except OSError:
            return 0


def fork_twice() -> int:
    """The new process's number; 0 inside it. The process between has ended, so the launcher adopts the new one."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the threads of a BLAS, which closes them before a fork
        between = os.fork()
        if between == 0:
            pid = -1
            try:
                pid = os.fork()
            finally:
                if pid:
                    os.write(write, str(pid).encode())
                    os._exit(0)
    os.close(write)
    if between == 0:
        os.close(read)
        return 0
    with open(read, "rb") as answer:
        pid = int(answer.read())
    os.waitpid(between, 0)
    if pid < 0:
        raise OSError("no room for another process")
    return pid


def _become(request: Fork, stdin: int, stdout: int) -> int:
    """This process is a member from now on, as if `python -m syncline.launch.member NAME` had started it."""
    from syncline.launch.member import member

    os.setsid()
    for fd, number in ((stdin, 0), (stdout, 1), (stdout, 2)):
        os.dup2(fd, number)
    os.close(stdin)
    os.close(stdout)
    configuration.add_to_environment(request.environment)
    sys.argv[1:] = [request.name]
    show_as([sys.executable, "-m", "syncline.launch.member", request.name])
    # As a new interpreter does; else all members would draw the same numbers. (`random` does so by itself.)
    numpy.random.seed()
    sys.modules["torch"].default_generator.seed()
    return member()


def show_as(words: list[str]) -> None:
    """Writes another command line over this process's own, for `ps` and `top`, if the system allows it."""
    try:
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        text = b"".join(word.encode() + b"\0" for word in words)
        if 0 < start < end and len(text) <= end - start:
            ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
    except (OSError, ValueError, IndexError):
        return


if __name__ == "__main__":
    sys.exit(main())
