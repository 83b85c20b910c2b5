"""A coordinator's process."""

from __future__ import annotations

import socket
import threading

from syncline.core.membership import Outcome
from syncline.launch.jobfile import JobFile
from syncline.launch.membership import say
from syncline.net import tcp
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.transport import Connection, Peer
from syncline.roles.coordinator import Coordinator

#: After the end, this long for the others to hear of it and for the launcher to ask for the verdict.
LINGER_SECONDS = 1.5


def run_coordinator(file: JobFile, listen_fd: int | None, sock: socket.socket | None = None) -> int:
    """Serves until the job has ended; the exit code says how."""
    outcomes: list[Outcome] = []
    log = say("coordinator")
    coordinator = Coordinator(file.given, log=log, ended=outcomes.append)
    if sock is None:
        sock = socket.socket(fileno=listen_fd) if listen_fd is not None else tcp.bind(file.host, file.port)
    stamp = Stamp(file.job)
    stamp.term = 1

    def accept(connection: Connection) -> None:
        Endpoint(connection, stamp, coordinator)

    identity = tcp.Identity(file.job, file.token_bytes, Peer("coordinator", "coordinator", 0))
    listener = tcp.Listener(identity, accept, sock=sock, log=log)
    coordinator.start_deadline()
    coordinator.over.wait()
    threading.Event().wait(LINGER_SECONDS)
    listener.close()
    coordinator.close()
    return 1 if outcomes and outcomes[0].failed else 0
