"""A process that has loaded this package and the frameworks of its environment. It forks the commands that tests
start (see `tests/forked.py`).

A forked command does what a new interpreter would do with the same words, without seconds of imports. Frameworks are
imported here and run nothing: they start their threads in the forked processes. `syncline` has a fork server of its
own, forked before it has any thread: from that come the processes that it starts itself.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import os
import pathlib
import pkgutil
import random
import runpy
import socket
import sys
import warnings
from types import ModuleType
from typing import NoReturn

import msgspec
import numpy.random
from tests import forked

import syncline
from syncline.errors import ConfigError
from syncline.launch.compiler import leave_out_the_compiler
from syncline.launch.preloaded import fork_twice, show_as

#: Parts of the package that tests need and that everything else does without.
_LAZY = ("syncline.cli", "syncline.launch", "syncline.coordinator", "syncline.page", "syncline.torch")
#: Loaded where they are installed: in the environments of `make test-frameworks`.
_FRAMEWORKS = ("keras", "tensorflow", "jax.numpy", "optax", "flax", "sklearn.linear_model")
#: Descriptors that come with a request wait above this number for their own.
_ABOVE = 500

#: With which exit code this forked command ends, as soon as that is known.
_code: int | None = None


def _load() -> None:
    for name in _LAZY:
        if (package := _import(name)) is not None:
            for module in pkgutil.iter_modules(package.__path__):
                if not module.name.startswith("__"):
                    _import(f"{name}.{module.name}")
    for name in _FRAMEWORKS:
        _import(name)
    assert syncline.__version__


def _import(name: str) -> ModuleType | None:
    """None: it needs a package that is not installed here."""
    try:
        return importlib.import_module(name)
    except (ModuleNotFoundError, ConfigError):
        return None


def serve(control: socket.socket) -> NoReturn:
    """Forks what is asked for until nobody can ask any more."""
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(control, 1 << 20, 64)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        request = msgspec.json.decode(data, type=forked.Request)
        if "--stages" in request.words:  # once for all pipelines
            importlib.import_module("torch.distributed.pipelining")
        pid = fork_twice()
        if pid == 0:
            control.close()
            _become(request, fds)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            control.send(b"%d" % pid)


def _become(request: forked.Request, fds: list[int]) -> NoReturn:
    """This process is a new interpreter that was started with these words, as far as they can see."""
    os.setsid()
    waiting = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(waiting, request.numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = _stream(number, is_unbuffered=bool(request.environment.get("PYTHONUNBUFFERED")))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    random.seed()
    numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    show_as([sys.executable, *request.words])
    if request.words[:2] == ["-m", "syncline"]:
        _offer_fork_server()
    _run(request.words, request.folder)


def _stream(number: int, *, is_unbuffered: bool) -> io.TextIOWrapper:
    raw = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),  # type: ignore[type-var]
        encoding=sys.__stdout__.encoding if sys.__stdout__ else "utf-8",
        errors="backslashreplace" if number == 2 else "strict",
        write_through=is_unbuffered,
        line_buffering=number == 2 and not is_unbuffered,
    )


def _offer_fork_server() -> None:
    """What this command starts as `python -m syncline…` is forked too, from a process that is still as it is now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(0, 2)
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, _ABOVE)
        serve(theirs)
    theirs.close()
    forked.use(ours)


def _run(words: list[str], folder: str) -> NoReturn:
    global _code
    try:
        if words[0] == "-m":
            sys.path[0], sys.argv = folder, words[1:]
            warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0], sys.argv = str(pathlib.Path(words[0]).absolute().parent), words
            runpy.run_path(words[0], run_name="__main__")
        sys.exit(0)
    except SystemExit as end:
        _code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except Exception:
        _code = 1
        raise


def _end_soon() -> None:
    """The exit handler that runs last: threads have ended, and all other handlers have run. An interpreter would now
    take apart what it has loaded, and here that is all that the fork server has: it takes a third of a second. `make
    proof` has it done, with TESTS_END_WHOLLY=1.
    """
    if _code is None:  # the fork server itself, or Ctrl-C
        return
    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):  # what the script has left open
        for file in [found for found in gc.get_objects() if type(found) is kind]:
            with contextlib.suppress(OSError, ValueError):
                file.flush()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return  # closed, or broken: the interpreter knows what to say
    os._exit(_code)


if __name__ == "__main__":
    if not os.environ.get("TESTS_END_WHOLLY"):
        atexit.register(_end_soon)  # before all others, so it runs last
    gc.disable()  # much is made and nothing is thrown away
    _load()
    leave_out_the_compiler()
    gc.enable()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
