"""Two hosts on one machine: network namespaces with a wire between them, and a job that spans both."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence

from syncline.bench.row import NotMeasured
from syncline.bench.sides import WAIT_SECONDS, WORKER, ProcessSide
from syncline.bench.task import Task, to_arguments
from syncline.errors import WaitTimeout

NEEDS = "needs root and iproute2"
#: Nobody else is in these namespaces: the addresses are free.
SERVER_ADDRESS, WORKER_ADDRESS = "10.77.0.1", "10.77.0.2"
_DELETE = 'read -r _; for name; do ip netns delete "$name"; done'
_DELETE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Wire:
    """The two namespaces: where the server is, and where the worker is."""

    server: str
    worker: str


def inside(namespace: str) -> list[str]:
    """The words that run a command in there."""
    return ["ip", "netns", "exec", namespace]


@contextlib.contextmanager
def wire() -> Iterator[Wire]:
    """Makes the namespaces; deletes them however this ends. Raises NotMeasured where they cannot be made."""
    tag = secrets.token_hex(3)
    made = Wire(f"syncline{tag}s", f"syncline{tag}w")
    with _deleted_at_the_end((made.server, made.worker)):
        try:
            _make(made, f"sl{tag}")
        except (OSError, subprocess.SubprocessError):
            raise NotMeasured(NEEDS) from None
        yield made


@contextlib.contextmanager
def _deleted_at_the_end(namespaces: Sequence[str]) -> Iterator[None]:
    """By a process that waits for its lifeline to close: whether we end well, by Ctrl-C or by SIGKILL."""
    try:
        process = subprocess.Popen(
            ["sh", "-c", _DELETE, "sh", *namespaces],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        raise NotMeasured(NEEDS) from None
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(_DELETE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise WaitTimeout(
                f"ip netns delete has taken {_DELETE_SECONDS:g} s for {', '.join(namespaces)}"
            ) from None


def _make(made: Wire, card: str) -> None:
    ends = ((made.server, f"{card}s", SERVER_ADDRESS), (made.worker, f"{card}w", WORKER_ADDRESS))
    for namespace, _, _ in ends:
        _ip("netns", "add", namespace)
    _ip("link", "add", f"{card}s", "netns", made.server, "type", "veth", "peer", f"{card}w", "netns", made.worker)
    for namespace, name, address in ends:
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", name)
        _ip("-n", namespace, "link", "set", name, "up")
        _ip("-n", namespace, "link", "set", "lo", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_DELETE_SECONDS)


class SpannedJobSide(ProcessSide):
    """`syncline run -H` over both namespaces: the server in one, the worker that works in the other.

    A host has a worker at least, so that the server's has one too: it registers, and then rests.
    """

    def __init__(self, task: Task, over: Wire) -> None:
        super().__init__(WORKER, task, processes=2, side="ours")
        assert task.num_bystanders == 1
        self._over = over

    def commands(self, folder: pathlib.Path, path: str) -> list[list[str]]:
        options = [
            "-H", f"{self._over.server}:1,{self._over.worker}:1", "-s", "1", "--remote", " ".join(inside("{host}")),
            "--bind", SERVER_ADDRESS, "--name", self._side, "--runs", str(folder),
            "--wait-seconds", f"{WAIT_SECONDS:g}", "-m", WORKER,
        ]  # fmt: skip
        run = [sys.executable, "-m", "syncline", "run", *options, *to_arguments(self._task, self._side, path)]
        return [[*inside(self._over.server), *run]]
