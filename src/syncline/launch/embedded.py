"""Coordinator, server and worker in one process: what `init()` starts without a launcher."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pathlib
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from syncline import config as configuration
from syncline.coordinator.service import Coordinator
from syncline.core.checkpoint.schedule import check_words
from syncline.core.members import Member
from syncline.core.ring import partner_of
from syncline.core.settings import check_settings
from syncline.core.wire.control import Join, Joined, Over
from syncline.errors import ConnectionLost, FencedError
from syncline.launch import jobfile
from syncline.launch.membership import join, myself, reach, say, waiter_reads
from syncline.launch.saving import settle_saving
from syncline.net import memory, tcp
from syncline.net.device_channel import DeviceChannel
from syncline.net.link import Link
from syncline.net.memory import HeapMemory
from syncline.net.rpc import Call, Endpoint, Stamp
from syncline.net.transport import Connection, Peer
from syncline.worker.collectives.peers import Peers
from syncline.worker.job import Job
from syncline.worker.session import CoordinatorHandlers


class InProcess:
    """A coordinator and servers in this process. Workers are added to it, and any member may be killed."""

    def __init__(self, given: Mapping[str, Any], folder: pathlib.Path, job: str = "in-process") -> None:
        self._job = job
        self.folder = folder
        self.coordinator = Coordinator(given, log=say("coordinator"), watches=False, job=job)
        self.servers: dict[str, Any] = {}
        self.endpoints: dict[str, list[Endpoint]] = {}  # by the member that they belong to
        self.links: dict[str, Link] = {}
        self.num_cores = configuration.num_cores()  #: of every simulated host
        self.shares_memory = True  #: between workers and servers; False: bytes are copied, as over sockets
        self._hosts: dict[str, str] = {}  # of members
        self._peers: dict[str, Peers] = {}  # of workers, by name
        self._device_channels: dict[str, DeviceChannel] = {}  # by worker
        self._change = threading.Condition()  # notified when these change

    def stamp(self) -> Stamp:
        return Stamp(self._job)

    def pair(self, one: Peer, two: Peer, theirs: Any) -> Connection:
        """A connection of `one` whose other end answers with `theirs`."""
        left, right = memory.pair(one, two)
        if not self._are_near(one, two):
            left.shares_memory = right.shares_memory = False
        other = Endpoint(right, self.stamp(), theirs)
        for name in (one.name, two.name):
            self.endpoints.setdefault(name, []).append(other)
        greet = getattr(theirs, "greet", None)
        if greet is not None:
            greet(other)
        return left

    def _are_near(self, one: Peer, two: Peer) -> bool:
        """Whether two members share memory; those of one process in a ring always do."""
        if not self.coordinator.config.is_ring:
            return self.shares_memory or (one.role, two.role) != ("worker", "server")
        same = self._hosts.get(one.name) == self._hosts.get(two.name)
        return (self.shares_memory and same) or one.name == partner_of(two.name)

    def link(self, role: str, name: str, service: Any, stamp: Stamp) -> Link:
        """A member's link to the coordinator."""

        def dial() -> Connection:
            return self.pair(Peer(role, name, 0), Peer("coordinator", "coordinator", 0), self.coordinator)

        def fenced(error: FencedError) -> None:
            hear = getattr(service, "fenced", None)
            if hear is not None:
                hear(error)

        made = Link(
            dial, service, stamp, patience_seconds=0.0, say=say(name), fenced=fenced, gone=lambda reason: None
        )
        self.links[name] = made
        return made

    def add_server(self, name: str, host: str = "local") -> Call:
        # As in a server's own process. (A script that has not loaded it has its server in a child process.)
        with contextlib.suppress(ImportError):
            importlib.import_module("torch")
        # Imported here: a worker with its server in a child process needs none of this.
        from syncline.server.pool import InlinePool
        from syncline.server.service import Server
        from syncline.server.storage import storage_of

        storage = self._channel_storage(name) or storage_of(self.coordinator.config.server_device, say(name))
        stamp, self._hosts[name] = self.stamp(), host

        def dial(member: Member) -> Endpoint:
            me = Peer("server", name, stamp.incarnation)
            there = Peer("server", member.name, 0)
            return Endpoint(self.pair(me, there, self._server(member.name)), stamp)

        server = Server(
            name, InlinePool(), create_memory=HeapMemory, log=say(name), over=_ignore, storage=storage, dial=dial
        )
        self.servers[name] = server
        link = self.link("server", name, server, stamp)

        def joined(call: Call) -> None:
            if isinstance(call.answer, Joined):
                stamp.incarnation = call.answer.incarnation
                stamp.generation = call.answer.generation
                link.begin(
                    name,
                    call.answer.incarnation,
                    beat=None,
                    beat_seconds=1.0,
                    silent_seconds=1.0,
                    on_roster=server.hear,
                )
                server.form(call.answer)

        return link.try_call(self._greeting("server", name, host, {}), joined)

    def _greeting(self, role: str, name: str, host: str, defaults: Mapping[str, Any]) -> Join:
        process = self._process_of(name)
        return Join(role, name, host, 0, None, dict(defaults), process, "in-process", "", self.num_cores)

    def _channel_storage(self, name: str) -> Any:
        """With `--sums nccl`; without a GPU on the CPU."""
        if self.coordinator.config.sums != "nccl":
            return None
        import torch

        from syncline.server.device_storage import ChannelStorage

        device_channel = self._device_channels[partner_of(name)] = DeviceChannel(
            "cuda:0" if torch.cuda.is_available() else "cpu"
        )
        return ChannelStorage(device_channel, say(name))

    def _server(self, name: str) -> Any:
        if name not in self.servers:
            raise ConnectionLost(f"{name} is gone")
        return self.servers[name]

    def ask_to_join(
        self, name: str, defaults: Mapping[str, Any], host: str = "local"
    ) -> tuple[Link, CoordinatorHandlers, Stamp, Call]:
        """A worker's request to join; does not wait."""
        stamp, handlers, self._hosts[name] = self.stamp(), CoordinatorHandlers(), host
        link = self.link("worker", name, handlers, stamp)
        call = link.try_call(self._greeting("worker", name, host, defaults))
        return link, handlers, stamp, call

    def _process_of(self, name: str) -> str:
        """In a ring the two members with the same number are one process."""
        token, partner = secrets.token_hex(8), partner_of(name)
        known = self.coordinator.membership.state.processes
        return known.get(partner, token) if self.coordinator.config.is_ring else token

    def dial(self, me: Member, stamp: Stamp, member: Member) -> Endpoint:
        one, two = Peer("worker", me.name, me.incarnation), Peer("server", member.name, 0)
        return Endpoint(self.pair(one, two, self._server(member.name)), stamp)

    def make_job(
        self, link: Link, handlers: CoordinatorHandlers, stamp: Stamp, joined: Joined, embedded: bool
    ) -> Job:
        me = myself(joined)
        stamp.incarnation = me.incarnation
        peers = Peers(handlers.rosters, stamp, WorkerTwin(self, me), say(me.name))
        with self._change:
            self._peers[me.name] = peers
            self._change.notify_all()
        job = Job(
            joined,
            me,
            link,
            handlers,
            lambda member: self.dial(me, stamp, member),
            stamp,
            folder=self.folder,
            say=say(me.name),
            embedded=embedded,
            beats=False,
            peers=peers,
            on_close=self.close if embedded else peers.close,
        )
        job.exchange.routes.device_channel = self._device_channels.get(me.name)
        return job

    def peers_of(self, member: Member) -> Peers:
        """The links of another worker in this process. A worker that has just joined may not have them yet."""

        def found() -> Peers | None:
            peers = self._peers.get(member.name)
            return peers if peers is not None and peers.incarnation >= member.incarnation else None

        with self._change:
            seconds = self.coordinator.config.start_seconds
            self._change.wait_for(lambda: found() is not None or member.name not in self.links, seconds)
            peers = found()
        if peers is None or peers.incarnation != member.incarnation:
            raise ConnectionLost(f"{member.name} is gone")
        return peers

    def kill(self, name: str) -> None:
        """Kills this member: its connections break without notice. In a ring its partner dies too."""
        names = [name, partner_of(name)] if self.coordinator.config.is_ring else [name]
        servers = [self.servers.pop(one) for one in names if one in self.servers]
        for endpoint in [endpoint for one in names for endpoint in self.endpoints.pop(one, [])]:
            endpoint.close("killed")
        with self._change:
            peers = [self._peers.pop(one) for one in names if one in self._peers]
            links = [self.links.pop(one) for one in names if one in self.links]
            self._change.notify_all()
        for each in peers:
            each.close("killed")
        for link in links:
            link.close()
        for server in servers:
            server.close()

    def close(self) -> None:
        self.coordinator.close()
        for link in list(self.links.values()):
            link.close()
        with self._change:
            self.links.clear()
            self._change.notify_all()
        for peers in list(self._peers.values()):
            peers.close()
        for server in list(self.servers.values()):
            server.close()
        for endpoints in list(self.endpoints.values()):
            for endpoint in list(endpoints):
                endpoint.close()


class WorkerTwin:
    """Connects two workers of this process. On different hosts, or with `--transport tcp`, they share no memory."""

    def __init__(self, process: InProcess, me: Member) -> None:
        self.process, self.me = process, me

    def connect(self, member: Member) -> Connection:
        others = self.process.peers_of(member)
        one, two = (Peer("worker", who.name, who.incarnation) for who in (self.me, member))
        connection = memory.dialled(one, two, others.accept)
        if self.process.coordinator.config.transport == "tcp" or self.me.host != member.host:
            connection.share_nothing()
        return connection

    def knock(self, member: Member) -> None:
        others = self.process.peers_of(member)
        threading.Thread(target=others.knocked, args=(self.me,), name="knock", daemon=True).start()

    def create_memory(self, num_bytes: int) -> HeapMemory:
        return HeapMemory(num_bytes)


def _ignore(over: Over) -> None:
    """In one process the worker's end is enough for all."""


def start_embedded(defaults: Mapping[str, Any]) -> Job:
    """A job of one worker in this process. If torch is installed and not loaded, the server is a child process."""
    toml = configuration.read_toml(pathlib.Path.cwd())
    elsewhere = ("hosts", "remote", "env", "bind", "replicas", "ack", "least_workers", "most_workers")
    given = {key: value for key, value in toml.items() if key not in elsewhere}
    check_settings(configuration.resolve(given, defaults))
    given.update(workers=1, stages=1, servers=1, exchange="servers")  # with one worker both exchanges are the same
    name = str(given.get("name") or f"{_script_name()}-{time.strftime('%Y%m%d-%H%M%S')}")
    given["name"] = name
    given = settle_saving(given, is_shared=False)
    check_words(configuration.resolve(given, defaults))
    folder = pathlib.Path(str(given.get("runs", "runs"))) / name
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is not None:
        return _with_child_server(given, folder, defaults)
    process = InProcess(given, folder)
    link, handlers, stamp, call = process.ask_to_join("worker-0", defaults)
    process.add_server("server-0")
    joined = call.wait(process.coordinator.config.start_seconds)
    assert isinstance(joined, Joined)
    return process.make_job(link, handlers, stamp, joined, embedded=True)


def _with_child_server(given: dict[str, Any], folder: pathlib.Path, defaults: Mapping[str, Any]) -> Job:
    from syncline.launch.processes import MemberPlan, start_member

    sock = tcp.bind("127.0.0.1", 0)
    file = jobfile.new("127.0.0.1", sock.getsockname()[1], given)
    process = InProcess(given, folder, file.job)
    identity = tcp.Identity(file.job, file.token_bytes, Peer("coordinator", "coordinator", 0))

    def accept(connection: Any) -> None:
        Endpoint(connection, Stamp(file.job), process.coordinator)

    listener = tcp.Listener(identity, accept, sock=sock, log=say("coordinator"))
    child = start_member(MemberPlan(role="server", name="server-0", host="local", file=file))

    def close() -> None:
        process.close()
        listener.close()
        child.stop(5.0)

    try:
        stamp, handlers = process.stamp(), CoordinatorHandlers()
        link = process.link("worker", "worker-0", handlers, stamp)
        process.coordinator.start_deadline()
        joined = join(link, "worker", "worker-0", "local", None, defaults, process.coordinator.config.start_seconds)
        me = myself(joined)
        proven = tcp.Identity(file.job, file.token_bytes, Peer("worker", me.name, me.incarnation))
        return Job(
            joined,
            me,
            link,
            handlers,
            lambda member: Endpoint(reach(member, proven, joined.config), stamp, waiter_reads=waiter_reads(joined)),
            stamp,
            folder=folder,
            say=say(me.name),
            embedded=True,
            beats=False,
            peers=Peers(handlers.rosters, stamp, WorkerTwin(process, me), say(me.name)),
            on_close=close,
        )
    except BaseException:
        with contextlib.suppress(Exception):
            close()
        raise


def _script_name() -> str:
    stem = pathlib.Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    return stem or "session"
