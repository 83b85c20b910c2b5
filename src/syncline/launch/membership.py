"""Joining a job by its job file: connect to the coordinator, join, wait until the job is formed."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy

from syncline import config as configuration
from syncline.config import JobConfig
from syncline.core.cores import describe
from syncline.core.members import Address, Member
from syncline.core.policy import parse_policy
from syncline.core.versions import InstalledVersions
from syncline.core.wire.control import Join, Joined
from syncline.errors import ConfigError, ConnectionLost, NoAnswer, WaitTimeout
from syncline.launch.jobfile import JobFile
from syncline.net import tcp
from syncline.net.connection import SocketConnection
from syncline.net.link import Link
from syncline.net.rpc import Call, Endpoint, Service, Stamp
from syncline.net.transport import Connection, Peer
from syncline.worker.session import CoordinatorHandlers

#: A member may start before its coordinator listens. A coordinator that listens but is silent is still starting: then
#: a member waits as long as for the job to be formed.
CONNECT_SECONDS = 20.0
#: After so long of waiting for a coordinator, a line says so.
PATIENT_SECONDS = 5.0
#: Pause before a busy server on this host is dialled again.
AGAIN_SECONDS = 0.5


def say(who: str) -> Callable[[str], None]:
    """Prints lines to standard error, with the member's name."""

    def line(text: str) -> None:
        sys.stderr.write(f"syncline: {who}: {text}\n")
        sys.stderr.flush()

    return line


def connect(file: JobFile, identity: tcp.Identity) -> SocketConnection:
    """Connects to the coordinator, with retries."""
    began, listens, start_seconds = time.monotonic(), False, configuration.resolve(file.given).start_seconds
    while True:
        try:
            return tcp.connect_tcp(file.host, file.port, identity, 5.0)
        except OSError as error:
            # Abandoned connections may fill its queue: then no handshake succeeds.
            listens = isinstance(error, NoAnswer) or (listens and isinstance(error, TimeoutError))
            passed, seconds = time.monotonic() - began, max(CONNECT_SECONDS, start_seconds if listens else 0.0)
            if passed > seconds:
                raise ConnectionLost(
                    f"no coordinator at {file.host}:{file.port} within {passed:.0f} s: {error}; is its job "
                    "still running? if not, start a new one: syncline coordinator --job FILE"
                ) from None
            time.sleep(0.05)


def await_coordinator(file: JobFile, log: Callable[[str], None], remedy: str) -> None:
    """In a cluster whose coordinator may start much later: waits until its name is known and it listens, for
    `start_seconds` at most. `remedy`: where to look.
    """
    began, said, seconds = time.monotonic(), False, configuration.resolve(file.given).start_seconds
    while True:
        try:
            socket.create_connection((file.host, file.port), 5.0).close()
            return
        except OSError as error:
            waited = time.monotonic() - began
            if waited > seconds:
                raise ConnectionLost(
                    f"no coordinator at {file.host}:{file.port} within {seconds:g} s: {error}; {remedy}; if it needs "
                    "longer, make the job with a higher --start-seconds"
                ) from None
            if waited > PATIENT_SECONDS and not said:
                said = True
                log(f"waits for the coordinator at {file.host}:{file.port} ({error}); {remedy}")
            time.sleep(AGAIN_SECONDS)


def local_address(file: JobFile) -> str:
    """This host's address as seen from the coordinator."""
    with socket.socket(socket.AF_INET6 if ":" in file.host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((file.host, file.port))  # sends nothing; asks the routing table
        return str(probe.getsockname()[0])


def unix_name() -> str:
    """A name for a Unix socket; abstract if the system supports it."""
    if platform.system() == "Linux":
        return f"@syncline-{secrets.token_hex(16)}"
    return os.path.join(tempfile.gettempdir(), f"syncline-{secrets.token_hex(8)}")


def process_kind() -> str:
    """Processor of this process, and what its server computes with: equal ones compute bit-equal results."""
    words = [platform.machine(), _processor()]
    torch = sys.modules.get("torch")
    words.append(f"torch {torch.__version__}" if torch is not None else f"numpy {numpy.__version__}")
    return ", ".join(word for word in words if word)


def _processor() -> str:
    """The name of this host's processor, if known."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""


def greeting(
    role: str,
    name: str,
    host: str,
    address: Address | None,
    defaults: Mapping[str, Any],
    process: str = "",
    versions: InstalledVersions | None = None,
) -> Join:
    """The request to join. A repeated one is recognized as from the same process.

    `process`: in a ring the same for a worker and its server. `versions`: where nothing has compared them yet.
    """
    process, own = process or secrets.token_hex(8), describe(configuration.own_cores())
    return Join(
        role, name, host, os.getpid(), address, dict(defaults), process, process_kind(), own,
        configuration.num_cores(), versions,
    )  # fmt: skip


def join(
    way: Link | Endpoint,
    role: str,
    name: str,
    host: str,
    address: Address | None,
    defaults: Mapping[str, Any],
    seconds: float,
    on_joined: Callable[[Joined], None] = lambda joined: None,
    *,
    process: str = "",
    check: Callable[[], None] = lambda: None,
    versions: InstalledVersions | None = None,
) -> Joined:
    """Joins and waits until the job is formed; over a link, repeated when the connection breaks.

    `on_joined` runs before any other frame is read. `process`, `versions`: as in `greeting`. `check` is called before
    each attempt and may raise.
    """
    message = greeting(role, name, host, address, defaults, process, versions)
    then = functools.partial(_hand_over, on_joined)
    # The coordinator's own deadline comes first, and it knows who is missing.
    until = time.monotonic() + seconds + 10.0
    while True:
        check()
        try:
            call = way.try_call(message, then) if isinstance(way, Link) else way.call(message, then=then)
            answer = call.wait(max(0.0, until - time.monotonic()))
            assert isinstance(answer, Joined)
            return answer
        except WaitTimeout:
            raise WaitTimeout(f"not all members joined the job within {seconds:g} s") from None
        except ConnectionLost:
            if not isinstance(way, Link) or time.monotonic() > until:
                raise
            time.sleep(0.05)


def _hand_over(on_joined: Callable[[Joined], None], call: Call) -> None:
    if isinstance(call.answer, Joined):
        on_joined(call.answer)


def myself(joined: Joined) -> Member:
    return next(member for member in joined.members if member.incarnation == joined.incarnation)


def open_link(file: JobFile, identity: tcp.Identity, handlers: CoordinatorHandlers, stamp: Stamp, who: str) -> Link:
    """A worker's link to its coordinator, re-established when it breaks."""
    first = True

    def dial() -> Connection:
        nonlocal first
        if not first:
            return tcp.connect_tcp(file.host, file.port, identity, 5.0)
        first = False
        return connect(file, identity)

    config = configuration.resolve(file.given)
    return Link(
        dial,
        handlers,
        stamp,
        patience_seconds=config.coordinator_seconds,
        say=say(who),
        fenced=handlers.fenced,
        gone=handlers.gone,
    )


def waiter_reads(joined: Joined) -> bool:
    """Whether a worker's replies may stay in the socket until it waits for them.

    Not with several servers and a window, nor with spare workers: there a commit must act on replies while the script
    computes.
    """
    config, num_servers = joined.config, sum(member.role == "server" for member in joined.members)
    return num_servers == 1 or (config.window == 0 and not parse_policy(config.policy).has_spare)


def reach(member: Member, identity: tcp.Identity, config: JobConfig, *, is_own: bool = False) -> SocketConnection:
    """Connects to a server or another worker: with shared memory if a file descriptor can be passed, else over
    TCP. `is_own`: it is in this process and always shares memory.
    """
    address = member.address
    assert address is not None
    if (config.transport != "tcp" or is_own) and address.unix:
        try:
            return _reach_beside(address.unix, identity)
        except NoAnswer as error:  # it is on this host: retry instead of using TCP
            raise ConnectionLost(f"{member.name} does not answer: {error}") from None
        except OSError as error:
            if config.transport == "shm":
                raise ConfigError(
                    f"--transport shm: {member.name} is not on this host ({error}); use auto or tcp"
                ) from None
    try:
        return tcp.connect_tcp(address.host, address.port, identity, 10.0)
    except OSError as error:
        raise ConnectionLost(f"{member.name} cannot be reached at {address.host}:{address.port}: {error}") from None


def _reach_beside(path: str, identity: tcp.Identity) -> SocketConnection:
    """A listener that is silent is busy: tries once more."""
    with contextlib.suppress(NoAnswer):
        return tcp.connect_unix(path, identity, 5.0)
    time.sleep(AGAIN_SECONDS)
    return tcp.connect_unix(path, identity, 5.0)


def connect_service(file: JobFile, peer: Peer, stamp: Stamp, service: Service | None) -> Endpoint:
    """An endpoint to the coordinator for roles other than workers."""
    return Endpoint(connect(file, tcp.Identity(file.job, file.token_bytes, peer)), stamp, service)
