"""A server's process."""

from __future__ import annotations

import queue
import traceback

import torch

from syncline import config as configuration
from syncline.core.membership import Address
from syncline.core.messages import Joined, Over
from syncline.launch.jobfile import JobFile
from syncline.launch.membership import connect, join, local_address, say, unix_name
from syncline.net import shm, tcp
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.transport import Connection, Peer
from syncline.roles.homes import home_of
from syncline.roles.pool import ThreadPool
from syncline.roles.rules import leave_out_the_compiler
from syncline.roles.server import Server


def run_server(file: JobFile, name: str, host: str) -> int:
    """Hosts slices until the job has ended."""
    torch.set_num_threads(1)  # the pool's threads are the parallelism
    log = say(name or "server")
    ends: queue.SimpleQueue[Over] = queue.SimpleQueue()

    def broken(error: Exception) -> None:
        traceback.print_exception(error)
        ends.put(Over(True, name, f"{name} has a bug: {type(error).__name__}: {error}"))

    config = configuration.resolve(file.given)
    home = home_of(config.server_device, log)
    server = Server(name, ThreadPool(broken), create_memory=shm.create, log=log, over=ends.put, home=home)
    stamp = Stamp(file.job)
    identity = tcp.Identity(file.job, file.token_bytes, Peer("server", name or "server", 0))

    def accept(connection: Connection) -> None:
        server.greet(Endpoint(connection, stamp, server))

    leave_out_the_compiler()
    here = local_address(file)
    wants_unix = file.given.get("transport") != "tcp"
    listener = tcp.Listener(identity, accept, sock=tcp.bind(here, 0), unix=unix_name() if wants_unix else "", log=log)
    endpoint = Endpoint(connect(file, identity), stamp, server)

    def joined(answer: Joined) -> None:
        me = next(m for m in answer.members if m.incarnation == answer.incarnation)
        server.name = me.name
        stamp.incarnation, stamp.generation = answer.incarnation, answer.generation
        listener.rename(answer.incarnation)
        server.form(answer)

    address = Address(listener.address.unix, here, listener.address.port)
    join(endpoint, "server", name, host, address, {}, config.start_seconds, joined)
    over = ends.get()
    if over.failed:
        log(f"JobFailed: the job has ended: {over.reason}")
    listener.close()
    server.close()
    return 1 if over.failed else 0
