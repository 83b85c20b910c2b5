"""Two hosts on one machine: network namespaces with a wire between them, and a job that spans both."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from benchmarks.row import NotMeasured
from benchmarks.sides import WAIT_SECONDS, WORKER, ProcessSide
from benchmarks.task import Task, to_arguments
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
    cards: tuple[str, str] = ("", "")  # the ends of the wire in each

    @property
    def hosts(self) -> tuple[str, str]:
        return self.server, self.worker


class Hosts(Protocol):
    """Namespaces that reach each other; the first one has SERVER_ADDRESS."""

    @property
    def hosts(self) -> tuple[str, ...]: ...


def inside(namespace: str) -> list[str]:
    """The words that run a command in there."""
    return ["ip", "netns", "exec", namespace]


@contextlib.contextmanager
def wire(rate: str = "") -> Iterator[Wire]:
    """Makes the namespaces; deletes them however this ends. Raises NotMeasured where they cannot be made.

    `rate`: of the wire, in each direction, as `tc` spells it (`1gbit`); without, as fast as it goes.
    """
    tag = secrets.token_hex(3)
    made = Wire(f"syncline{tag}s", f"syncline{tag}w", (f"sl{tag}s", f"sl{tag}w"))
    with deleted_at_the_end(made.hosts):
        try:
            _make(made)
            for namespace, card in zip(made.hosts, made.cards, strict=True) if rate else ():
                shape(namespace, card, rate)
        except (OSError, subprocess.SubprocessError):
            raise NotMeasured(NEEDS) from None
        yield made


@contextlib.contextmanager
def deleted_at_the_end(namespaces: Sequence[str]) -> Iterator[None]:
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


def _make(made: Wire) -> None:
    one, two = made.cards
    ends = ((made.server, one, SERVER_ADDRESS), (made.worker, two, WORKER_ADDRESS))
    for namespace, _, _ in ends:
        ip("netns", "add", namespace)
    ip("link", "add", one, "netns", made.server, "type", "veth", "peer", two, "netns", made.worker)
    for namespace, name, address in ends:
        ip("-n", namespace, "addr", "add", f"{address}/24", "dev", name)
        ip("-n", namespace, "link", "set", name, "up")
        ip("-n", namespace, "link", "set", "lo", "up")


def ip(*words: str) -> None:
    _run("ip", *words)


def shape(namespace: str, card: str, rate: str) -> None:
    """What leaves by this card goes at this rate."""
    burst = "256kb" if rate != "10gbit" else "1mb"
    _run(*inside(namespace), *f"tc qdisc add dev {card} root tbf rate {rate} burst {burst} latency 50ms".split())


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_DELETE_SECONDS)


class SpannedJobSide(ProcessSide):
    """`syncline run -H` over namespaces, with a worker in each, or several; with one server, it is in the first.

    A host has a worker at least, so that the server's has one too: it registers, and then rests, as a bystander; or
    all work.
    """

    def __init__(
        self,
        task: Task,
        over: Hosts,
        *,
        options: Sequence[str] = ("-s", "1"),
        side: str = "ours",
        each: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`each`: workers of a host."""
        super().__init__(WORKER, task, processes=each * len(over.hosts), side=side, environment=environment)
        self._over, self._options, self._each = over, options, each

    def commands(self, folder: pathlib.Path, path: str) -> list[list[str]]:
        options = [
            "-H", ",".join(f"{host}:{self._each}" for host in self._over.hosts), *self._options,
            "--remote", " ".join(inside("{host}")),
            "--bind", SERVER_ADDRESS, "--name", self._side, "--runs", str(folder),
            "--wait-seconds", f"{WAIT_SECONDS:g}", "-m", WORKER,
        ]  # fmt: skip
        run = [sys.executable, "-m", "syncline", "run", *options, *to_arguments(self._task, self._side, path)]
        return [[*inside(self._over.hosts[0]), *run]]


class SpannedProcessSide(ProcessSide):
    """Two plain processes, one in each namespace; gloo is told by which end of the wire it goes."""

    def __init__(self, module: str, task: Task, over: Wire) -> None:
        super().__init__(module, task, processes=2)
        self._over = over

    def commands(self, folder: pathlib.Path, path: str) -> list[list[str]]:
        ends = zip((self._over.server, self._over.worker), self._over.cards, strict=True)
        prefixes = [[*inside(namespace), "env", f"GLOO_SOCKET_IFNAME={card}"] for namespace, card in ends]
        return [[*prefix, *words] for prefix, words in zip(prefixes, super().commands(folder, path), strict=True)]
