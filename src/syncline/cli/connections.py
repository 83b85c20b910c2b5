"""Checks of `syncline doctor`: how processes connect on this machine, tested for real, including a small job."""

from __future__ import annotations

import importlib.util
import queue
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import threading

import numpy as np

from syncline.cli.checks import Finding
from syncline.core.rule import Rule
from syncline.errors import SynclineError
from syncline.launch.embedded import start_embedded
from syncline.net import shm, tcp
from syncline.net.certificate import Certificate, client_context, peer_digest
from syncline.net.transport import Connection, Peer

STEP_SECONDS = 5.0  # for any wait
_OVER_TCP = "use --transport tcp"


def shared_memory() -> Finding:
    """Creates, seals, passes over an abstract Unix socket, checks and maps memory, as for an arena."""
    try:
        mine, theirs = unix_pair()
    except OSError as error:
        return Finding("problem", f"no abstract Unix socket: {error.strerror or error}", _OVER_TCP)
    with mine, theirs:
        return _hand_over(mine, theirs)


def unix_pair() -> tuple[socket.socket, socket.socket]:
    if sys.platform != "linux":
        return socket.socketpair()
    name = f"\0syncline-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen(1)
        mine = socket.socket(socket.AF_UNIX)
        try:
            mine.connect(name)
            theirs, _ = listener.accept()
        except BaseException:
            mine.close()
            raise
        return mine, theirs


def _hand_over(mine: socket.socket, theirs: socket.socket) -> Finding:
    num_bytes = 1 << 20
    slower = "nothing has to be done: jobs fall back to TCP, which is slower"
    try:
        sent = shm.create(num_bytes)
    except OSError as error:
        return Finding("warning", f"cannot be made: {error.strerror or error}", slower)
    try:
        socket.send_fds(mine, [b"m"], [sent.fd])
        theirs.settimeout(STEP_SECONDS)
        fds = socket.recv_fds(theirs, 1, 1)[1]
        if not fds:
            return Finding("problem", "no file descriptor came over a Unix socket", _OVER_TCP)
        received = shm.accept(fds[0], num_bytes)
        sent.array[-1] = 7
        arrived = int(received.array[-1]) == 7
        received.close()
    except (OSError, SynclineError) as error:
        return Finding("problem", str(error), _OVER_TCP)
    finally:
        sent.close()
    if not arrived:
        return Finding("problem", "what is written on one side is not read on the other", _OVER_TCP)
    return Finding("ok", "made, sealed, handed over a Unix socket, mapped read-only")


def loopback() -> Finding:
    """An authenticated connection, like every member's."""
    token, refused = secrets.token_bytes(32), list[str]()
    arrived: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    remedy = "bring up the loopback interface: ip link set lo up"
    try:
        here = tcp.Identity("doctor", token, Peer("coordinator", "coordinator", 0))
        listener = tcp.Listener(here, arrived.put, sock=tcp.bind("127.0.0.1", 0), log=refused.append)
        try:
            asking = tcp.Identity("doctor", token, Peer("worker", "worker-0", 0))
            connection = tcp.connect_tcp("127.0.0.1", listener.address.port, asking, STEP_SECONDS)
            connection.close()
            arrived.get(timeout=STEP_SECONDS).close()
        finally:
            listener.close()
    except (OSError, SynclineError, queue.Empty) as error:
        return Finding("problem", f"no connection over TCP: {'; '.join([str(error), *refused])}", remedy)
    return Finding("ok", "a connection with the token's handshake")


def tls() -> Finding:
    """A TLS connection between two local ends, as between hosts."""
    remedy = "use a Python whose ssl has TLS 1.3; one host needs none"
    try:
        certificate = Certificate.create()
        mine, theirs = socket.socketpair()
        errors: list[Exception] = []

        def greet() -> None:
            try:
                theirs.settimeout(STEP_SECONDS)
                with certificate.server_context().wrap_socket(theirs, server_side=True) as secured:
                    secured.recv(1)
            except OSError as error:
                errors.append(error)

        thread = threading.Thread(target=greet, name="doctor tls", daemon=True)
        with mine, theirs:
            thread.start()
            mine.settimeout(STEP_SECONDS)
            with client_context().wrap_socket(mine) as secured:
                same, version = peer_digest(secured) == certificate.digest, secured.version()
            thread.join(STEP_SECONDS)
    except (OSError, ValueError) as error:
        return Finding("warning", f"no handshake: {error}; jobs on several hosts cannot run", remedy)
    if errors or not same:
        return Finding("warning", f"the handshake failed: {errors or 'another certificate arrived'}", remedy)
    return Finding("ok", f"{version} with a certificate of our own ({ssl.OPENSSL_VERSION.partition('  ')[0]})")


def address() -> Finding:
    """The address under which other hosts see this one, from the routing table; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # an address reserved for documentation
            return Finding("ok", f"{probe.getsockname()[0]} (--bind says another)")
    except OSError as error:
        reason = error.strerror or error
        return Finding("warning", f"no way to other networks: {reason}", "for several hosts, say it with --bind")


def namespaces() -> Finding:
    """Needed by our own tests only, so their absence is no problem."""
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("ip") is None:
        return Finding("ok", "not possible without unshare and ip; only tests with several hosts use them")
    done = subprocess.run([unshare, "--net", "true"], capture_output=True, timeout=STEP_SECONDS, check=False)
    if done.returncode:
        return Finding("ok", "not allowed here; only tests with several hosts use them")
    return Finding("ok", "can be made: tests with several hosts run")


def small_job() -> Finding:
    """A whole job in this process: register, push_pull, compare."""
    if sys.modules.get("torch") is None and importlib.util.find_spec("torch") is not None:
        return Finding("problem", "not tried: torch cannot be used", "install torch 2.4 or newer")
    job = start_embedded({"policy": "sync"})
    try:
        # Not an optimizer: creating the first one imports torch's compiler, which takes a second.
        job.kv.register({"w": np.zeros(1000, np.float32)}, Rule("Add"))
        pulled = job.kv.push_pull({"w": np.ones(1000, np.float32)}).wait(STEP_SECONDS)
    finally:
        job.close()
    if pulled is None or not bool((pulled["w"] == 1).all()):
        remedy = "please report this, with what `syncline doctor` prints"
        return Finding("problem", "what was pushed is not what was pulled", remedy)
    return Finding("ok", "registered, pushed and pulled in this process, exactly")
