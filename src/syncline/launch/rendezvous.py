"""How ranks of another launcher find each other's job: a secret that all have, and an address.

Such a launcher hands no secret of ours to its processes. Ranks that are all on one host share a file of mode 0600,
which rank 0 writes into a folder of the user's own. Ranks on several hosts read `SYNCLINE_TOKEN_FILE`. The job's id,
its token and the ports that the coordinator tries follow from the secret and the start; nothing else is exchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import os
import pathlib
import re
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from syncline import config as configuration
from syncline.core.wire.control import Standings, Watch
from syncline.errors import ConfigError, ConnectionLost, ProtocolError, SynclineError, TokenError, WrongLauncher
from syncline.launch import jobfile
from syncline.launch.jobfile import JobFile
from syncline.launch.watching import reach_coordinator
from syncline.launch.world import LOOPBACK, StartedRanks
from syncline.net import tcp

#: The coordinator listens on one of these many ports, which all ranks can compute.
NUM_PORTS = 8
FIRST_PORT, LAST_PORT = 20_000, 32_000  # below the range from which systems take ports by themselves
#: For one answer while a rank looks for its coordinator, which may be starting.
ANSWER_SECONDS = 10.0
LEAST_TOKEN, MOST_TOKEN = 16, 1 << 10
HOW = "(umask 077; openssl rand -hex 32 > token)"
#: Settings with which a worker connects, before it knows those of the job.
SAME = ("exchange", "transport", "sums")


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where and with what secret the ranks of one start meet."""

    job: str
    token: str
    ports: list[int]

    def file(self, host: str, port: int, given: dict[str, Any]) -> JobFile:
        return JobFile(job=self.job, token=self.token, host=host, port=port, given=given)


def meeting_of(secret: bytes, run: str, given: Mapping[str, Any]) -> Meeting:
    """What follows from the secret: other starts, and ranks with other settings, compute something else."""
    config = configuration.resolve(given)
    same = {name: getattr(config, name) for name in SAME}
    told = msgspec.json.encode([run, given["workers"], same])

    def derived(what: bytes) -> bytes:
        return hmac.new(secret, what + b"|" + told, hashlib.sha256).digest()

    numbers = derived(b"ports")
    ports = [
        FIRST_PORT + int.from_bytes(numbers[2 * k : 2 * k + 2]) % (LAST_PORT - FIRST_PORT) for k in range(NUM_PORTS)
    ]
    if fixed := fixed_port(config.bind):
        ports = [fixed]
    return Meeting(job=derived(b"job").hex()[:16], token=derived(b"token").hex(), ports=ports)


def fixed_port(bind: str) -> int:
    """The port of `bind`; 0: none is said."""
    found = re.fullmatch(r"(?:[^:]*|\[.*\]):(\d{1,5})", bind)
    return int(found[1]) if found else 0


# -- the secret ---------------------------------------------------------------------------------------------


def read_token(path: pathlib.Path) -> bytes:
    """The secret of this file; refuses one that others can read, and one that is too short to be a secret."""
    how = f"make one with {HOW}, and copy it to every host with its mode"
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(MOST_TOKEN + 1).strip()
    except OSError as error:
        raise WrongLauncher(
            f"SYNCLINE_TOKEN_FILE: {path} cannot be read on {socket.gethostname()}: {error.strerror or error}; {how}"
        ) from None
    if status.st_uid not in (os.geteuid(), 0):
        raise WrongLauncher(f"SYNCLINE_TOKEN_FILE: {path} belongs to another user (id {status.st_uid}); {how}")
    if status.st_mode & 0o077:
        raise WrongLauncher(
            f"SYNCLINE_TOKEN_FILE: {path} can be read by others (mode {status.st_mode & 0o777:o}); run chmod 600 "
            f"{path}"
        )
    if not LEAST_TOKEN <= len(data) <= MOST_TOKEN:
        raise WrongLauncher(
            f"SYNCLINE_TOKEN_FILE: {path} has {len(data)} bytes; a secret has {LEAST_TOKEN} to {MOST_TOKEN}: {how}"
        )
    return data


def own_token_path(world: StartedRanks) -> pathlib.Path:
    """Where ranks that are all on this host have their secret: rank 0 writes it, and removes it at the end."""
    name = hashlib.sha256(f"{world.run}|{world.size}".encode()).hexdigest()[:24]
    return _own_folder() / f"{name}.token"


def write_token(path: pathlib.Path, secret: bytes) -> None:
    """In the place of what an earlier start may have left."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def remove_token(path: pathlib.Path, secret: bytes) -> None:
    """Unless a later start has put its own there."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == secret:
            path.unlink()


def _own_folder() -> pathlib.Path:
    """A folder that only this user can enter."""
    folder = configuration.cache_folder() / "ranks"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used: {error.strerror or error}; set SYNCLINE_TOKEN_FILE") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(f"{folder} is open to others; run chmod 700 {folder}, or set SYNCLINE_TOKEN_FILE")
    return folder


# -- the address --------------------------------------------------------------------------------------------


def address_of(world: StartedRanks, bind: str) -> str:
    """The host of the coordinator, as every rank can tell."""
    if bind:
        found = re.fullmatch(r"\[(.*)\](?::\d+)?|([^:]*)(?::\d+)?", bind)
        return (found[1] or found[2] if found else bind) or "127.0.0.1"
    if world.is_here:
        return "127.0.0.1"
    if not world.address:
        raise WrongLauncher(
            f"{world.launcher} has started ranks on several hosts ({world.found}) and does not say where rank 0 is; "
            'set MASTER_ADDR to its host (mpirun -x MASTER_ADDR=HOST), or bind = "HOST:PORT" in syncline.toml'
        )
    return world.address


def listen(meeting: Meeting, world: StartedRanks, host: str) -> socket.socket:
    """Rank 0 binds the first of the ports that is free."""
    last: ConfigError | None = None
    own = _own_address(host) if not world.is_here else host
    for port in meeting.ports:
        try:
            return tcp.bind(own, port)
        except ConfigError as error:
            last = error
    raise WrongLauncher(f"{world.describe(0)} on {socket.gethostname()} cannot listen for the others: {last}")


def _own_address(host: str) -> str:
    """The address of this host under which others know it; /etc/hosts may say 127.0.1.1."""
    try:
        found = str(socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise WrongLauncher(f"the host of rank 0, {host}, is not known here: {error}") from None
    if not tcp.is_loopback(found) or host in LOOPBACK:
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; asks the routing table
        return str(probe.getsockname()[0])


def find(
    meeting: Meeting, host: str, given: dict[str, Any], refused: set[str], seconds: float = math.inf
) -> JobFile | None:
    """The job of this start, if its coordinator listens and has not begun without us. Adds why not to `refused`.

    `seconds`: for all ports together, in equal shares: a firewall may drop what is sent to them.
    """
    until = time.monotonic() + seconds
    for number, port in enumerate(meeting.ports):
        file, left = meeting.file(host, port, given), until - time.monotonic()
        if left <= 0:
            break
        try:
            if _awaits_us(file, min(ANSWER_SECONDS, left / (len(meeting.ports) - number))):
                return file
        except (TokenError, ProtocolError) as error:
            refused.add(f"port {port}: {error}")
        except TimeoutError:
            refused.add(f"port {port}: no answer; does a firewall drop what is sent there?")
        except (ConnectionLost, SynclineError, OSError):
            continue
    return None


def _awaits_us(file: JobFile, seconds: float) -> bool:
    """An earlier start with the same secret may be ending there: its job has begun, or is over."""
    until = time.monotonic() + seconds
    endpoint = reach_coordinator(file, seconds)
    try:
        standings = endpoint.call(Watch()).wait(max(0.0, until - time.monotonic()))
    finally:
        endpoint.close()
    return isinstance(standings, Standings) and not standings.formed and not standings.verdict


def no_coordinator(
    world: StartedRanks, host: str, ports: list[int], seconds: float, refused: set[str]
) -> WrongLauncher:
    """Why a rank has found no job, and what to look at."""
    where = f"{host}, ports {', '.join(str(port) for port in ports)}" if ports else "this host"
    why = f" ({'; '.join(sorted(refused))})" if refused else ""
    return WrongLauncher(
        f"{world.describe(world.rank)} ({world.found}) has found no job within {seconds:g} s at {where}{why}; does "
        "rank 0 run this script, and come to syncline.init()? do all ranks have one token, and the same exchange, "
        "transport and sums in syncline.toml? for a separate training in each process, call "
        "syncline.init(embedded=True)"
    )


def given_job() -> JobFile | None:
    """The job that the ranks are to join, where one was started by hand: SYNCLINE_JOB names its job file."""
    path = configuration.given_job()
    return jobfile.read(pathlib.Path(path)) if path else None
