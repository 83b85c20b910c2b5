"""A worker's process joins its job: it listens for the other workers, which are dialled when they are needed."""

from __future__ import annotations

import pathlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from syncline import config as configuration
from syncline.core.members import Address, Member
from syncline.core.ring import partner_of
from syncline.core.versions import InstalledVersions
from syncline.core.wire.control import Joined
from syncline.errors import ConfigError, ConnectionLost
from syncline.launch import lifeline
from syncline.launch.jobfile import JobFile
from syncline.launch.membership import (
    join,
    local_address,
    myself,
    open_link,
    reach,
    say,
    unix_name,
    waiter_reads,
)
from syncline.launch.ringing import OwnServer
from syncline.net import shm, tcp
from syncline.net.connection import SocketConnection
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.transport import Memory, Peer
from syncline.worker.collectives.peers import Peers
from syncline.worker.job import Job
from syncline.worker.session import CoordinatorHandlers, Rosters
from syncline.worker.stages import StageFacts, StageProcesses


class Sockets:
    """A worker's listener, and its way to dial others; as a server's, between hosts with TLS."""

    def __init__(self, file: JobFile, name: str, rosters: Rosters, stamp: Stamp, log: Callable[[str], None]) -> None:
        self._config = configuration.resolve(file.given)
        self._identity = tcp.Identity(file.job, file.token_bytes, Peer("worker", name or "worker", 0))
        self.peers = Peers(rosters, stamp, self, log)
        here = local_address(file)
        unix = unix_name() if self._config.transport != "tcp" else ""
        self._listener = tcp.Listener(
            self._identity, self.peers.accept, sock=tcp.bind(here, 0), unix=unix, log=log, needs_incarnation=True
        )
        self.address = Address(self._listener.address.unix, here, self._listener.address.port)

    def is_in(self, joined: Joined) -> None:
        """This process is a member now: it says so to each peer that connects."""
        me = myself(joined)
        self._identity = tcp.Identity(
            self._identity.job, self._identity.token, Peer("worker", me.name, me.incarnation)
        )
        self._listener.become(self._identity)

    def connect(self, member: Member) -> SocketConnection:
        if member.address is None:
            raise ConnectionLost(f"{member.name} does not listen; use one version of syncline")
        return reach(member, self._identity, self._config)

    def knock(self, member: Member) -> None:
        self.connect(member).close()

    def create_memory(self, num_bytes: int) -> Memory:
        return shm.create(num_bytes, for_all=True)

    def close(self) -> None:
        self._listener.close()
        self.peers.close()


def join_as_worker(
    file: JobFile,
    name: str,
    host: str,
    defaults: Mapping[str, Any],
    own_server: OwnServer | None = None,
    stages: StageProcesses | None = None,
    versions: InstalledVersions | None = None,
) -> Job:
    """A worker's way into its job; in a ring, with its own server; with `--stages`, with its stage processes.

    `versions`: of this process, where no launcher of ours has compared them.
    """
    if defaults.get("exchange") == "ring" and "exchange" not in file.given:
        raise ConfigError(
            'init(exchange="ring"): this job has servers, in processes of their own; set it at launch: syncline run '
            '--exchange ring, or exchange = "ring" in syncline.toml'
        )
    stamp, handlers, process = Stamp(file.job), CoordinatorHandlers(lifeline.job_ends), secrets.token_hex(8)
    identity = tcp.Identity(file.job, file.token_bytes, Peer("worker", name or "worker", 0))
    link = open_link(file, identity, handlers, stamp, name or "worker")
    sockets = Sockets(file, name, handlers.rosters, stamp, say(name or "worker"))

    def on_joined(joined: Joined) -> None:
        stamp.incarnation, stamp.generation = joined.incarnation, joined.generation
        sockets.is_in(joined)
        handlers.begin(link, joined, myself(joined).name, beats=True)

    try:
        seconds = configuration.resolve(file.given).start_seconds
        check = own_server.check if own_server is not None else lambda: None
        if own_server is not None:
            own_server.begin(process, on_refused=link.close)
        joined = join(
            link, "worker", name, host, sockets.address, defaults, seconds, on_joined, process=process, check=check,
            versions=versions,
        )  # fmt: skip
        if own_server is not None:
            own_server.wait_until_in(seconds)
        me = myself(joined)
        proven = tcp.Identity(file.job, file.token_bytes, Peer("worker", me.name, me.incarnation))

        own_name = partner_of(me.name) if own_server is not None else ""

        def dial(member: Member) -> Endpoint:
            way = reach(member, proven, joined.config, is_own=member.name == own_name)
            return Endpoint(way, stamp, waiter_reads=waiter_reads(joined))

        folder = pathlib.Path(joined.config.runs) / (joined.config.name or file.job)
        job = Job(
            joined, me, link, handlers, dial, stamp,
            folder=folder, say=say(me.name), embedded=False, peers=sockets.peers, on_close=sockets.close,
        )  # fmt: skip
        job.exchange.routes.device_channel = own_server.device_channel if own_server is not None else None
        if stages is not None:
            job.stages = stages
            for stage in stages.processes:
                stage.channel.send(StageFacts(me.name, job.rank, job.world_size, job.local_rank, job.config))
        return job
    except BaseException:
        link.close()
        sockets.close()
        raise
