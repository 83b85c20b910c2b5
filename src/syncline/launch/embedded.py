"""Coordinator, server and worker inside one process: what `init()` starts without a launcher."""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from syncline import config as configuration
from syncline.client.job import FromCoordinator, Job
from syncline.core.membership import Member
from syncline.core.messages import Join, Joined, Over
from syncline.launch import jobfile
from syncline.launch.membership import join, myself, reach, say, waiter_reads
from syncline.net import memory, tcp
from syncline.net.memory import HeapMemory
from syncline.net.rpc import Call, Endpoint, Stamp
from syncline.net.transport import Peer
from syncline.roles.coordinator import Coordinator


class InProcess:
    """A coordinator and some servers in this process; workers are added to it."""

    def __init__(self, given: Mapping[str, Any], folder: pathlib.Path, job: str = "in-process") -> None:
        self._job = job
        self.folder = folder
        self.coordinator = Coordinator(given, log=say("coordinator"))
        self._servers: dict[str, Any] = {}
        self._endpoints: list[Endpoint] = []

    def stamp(self) -> Stamp:
        return Stamp(self._job)

    def _pair(self, one: Peer, two: Peer, mine: Any, theirs: Any, stamp: Stamp) -> Endpoint:
        left, right = memory.pair(one, two)
        other = Endpoint(right, self.stamp(), theirs)
        self._endpoints.append(other)
        greet = getattr(theirs, "greet", None)
        if greet is not None:
            greet(other)
        return Endpoint(left, stamp, mine)

    def to_coordinator(self, role: str, name: str, service: Any, stamp: Stamp) -> Endpoint:
        peer = Peer("coordinator", "coordinator", 0)
        return self._pair(Peer(role, name, 0), peer, service, self.coordinator, stamp)

    def add_server(self, name: str) -> None:
        # Imported here: a worker without torch has its server in a child process.
        from syncline.roles.homes import home_of
        from syncline.roles.pool import InlinePool
        from syncline.roles.server import Server

        home = home_of(self.coordinator.config.server_device, say(name))
        server = Server(name, InlinePool(), create_memory=HeapMemory, log=say(name), over=_ignore, home=home)
        self._servers[name] = server
        stamp = self.stamp()
        endpoint = self.to_coordinator("server", name, server, stamp)
        call = endpoint.call(Join("server", name, "local", 0, None, {}))

        def joined() -> None:
            if isinstance(call.answer, Joined):
                stamp.incarnation = call.answer.incarnation
                server.form(call.answer)

        call.when_done(joined)

    def ask_to_join(self, name: str, defaults: Mapping[str, Any]) -> tuple[Endpoint, FromCoordinator, Stamp, Call]:
        """A worker's question to be a member, not waited for."""
        stamp, hearing = self.stamp(), FromCoordinator()
        endpoint = self.to_coordinator("worker", name, hearing, stamp)
        return endpoint, hearing, stamp, endpoint.call(Join("worker", name, "local", 0, None, dict(defaults)))

    def dial(self, me: Member, stamp: Stamp, member: Member) -> Endpoint:
        one, two = Peer("worker", me.name, me.incarnation), Peer("server", member.name, 0)
        return self._pair(one, two, None, self._servers[member.name], stamp)

    def make_job(
        self, endpoint: Endpoint, hearing: FromCoordinator, stamp: Stamp, joined: Joined, embedded: bool
    ) -> Job:
        me = myself(joined)
        stamp.incarnation, stamp.generation = joined.incarnation, joined.generation
        return Job(
            joined,
            me,
            endpoint,
            hearing,
            lambda member: self.dial(me, stamp, member),
            folder=self.folder,
            say=say(me.name),
            embedded=embedded,
            on_close=self.close if embedded else lambda: None,
        )

    def close(self) -> None:
        self.coordinator.close()
        for server in self._servers.values():
            server.close()
        for endpoint in self._endpoints:
            endpoint.close()


def _ignore(over: Over) -> None:
    """In one process the worker's own end is everybody's."""


def start_embedded(defaults: Mapping[str, Any]) -> Job:
    """A job of one worker in this process. Without torch in it, the server is a child process."""
    toml = configuration.read_toml(pathlib.Path.cwd())
    given = {key: value for key, value in toml.items() if key not in ("hosts", "remote", "env", "bind")}
    given.update(workers=1, servers=1)
    name = str(given.get("name") or f"{_script_name()}-{time.strftime('%Y%m%d-%H%M%S')}")
    given["name"] = name
    folder = pathlib.Path(str(given.get("runs", "runs"))) / name
    if "torch" not in sys.modules:
        return _with_child_server(given, folder, defaults)
    process = InProcess(given, folder)
    endpoint, hearing, stamp, call = process.ask_to_join("worker-0", defaults)
    process.add_server("server-0")
    joined = call.wait(process.coordinator.config.start_seconds)
    assert isinstance(joined, Joined)
    return process.make_job(endpoint, hearing, stamp, joined, embedded=True)


def _with_child_server(given: dict[str, Any], folder: pathlib.Path, defaults: Mapping[str, Any]) -> Job:
    from syncline.launch.processes import Plan, start_member

    sock = tcp.bind("127.0.0.1", 0)
    file = jobfile.new("127.0.0.1", sock.getsockname()[1], given)
    process = InProcess(given, folder, file.job)
    identity = tcp.Identity(file.job, file.token_bytes, Peer("coordinator", "coordinator", 0))

    def accept(connection: Any) -> None:
        Endpoint(connection, Stamp(file.job), process.coordinator)

    listener = tcp.Listener(identity, accept, sock=sock, log=say("coordinator"))
    child = start_member(Plan(role="server", name="server-0", host="local", file=file))

    def close() -> None:
        process.close()
        listener.close()
        child.stop(5.0)

    try:
        stamp, hearing = process.stamp(), FromCoordinator()
        endpoint = process.to_coordinator("worker", "worker-0", hearing, stamp)
        process.coordinator.start_deadline()
        joined = join(
            endpoint, "worker", "worker-0", "local", None, defaults, process.coordinator.config.start_seconds
        )
        me = myself(joined)
        stamp.incarnation, stamp.generation = joined.incarnation, joined.generation
        proven = tcp.Identity(file.job, file.token_bytes, Peer("worker", me.name, me.incarnation))
        return Job(
            joined,
            me,
            endpoint,
            hearing,
            lambda member: Endpoint(reach(member, proven, joined.config), stamp, waiter_reads=waiter_reads(joined)),
            folder=folder,
            say=say(me.name),
            embedded=True,
            on_close=close,
        )
    except BaseException:
        close()
        raise


def _script_name() -> str:
    stem = pathlib.Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    return stem or "session"
