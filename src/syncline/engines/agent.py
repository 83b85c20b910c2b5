"""An agent: starts members on its host for a launcher on another one, and ends them when that is gone.

The engine of a cluster (Slurm, Ray) starts one process of this kind for each of its places. The agent connects to the
launcher, proves the agents' token, and then does what it is told. It decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from syncline import config as configuration
from syncline.core.wire.agents import (
    AgentAlive,
    AgentJoin,
    EndAgent,
    MemberEnded,
    MemberOutput,
    SignalMember,
    StartMember,
    TellMember,
)
from syncline.core.wire.message import Message
from syncline.errors import ConnectionLost, ProtocolError, SynclineError
from syncline.launch.forkserver import ForkServer
from syncline.launch.forwarding import Forwarder
from syncline.launch.jobfile import JobFile
from syncline.launch.processes import LocalProcess, MemberPlan, start_member
from syncline.launch.versions import versions_here
from syncline.net import tcp
from syncline.net.rpc import Endpoint, Request, Stamp
from syncline.net.transport import Buffer, Peer

#: Between two signs of life; a launcher that hears none for `LOST_SECONDS` counts the agent as lost.
ALIVE_SECONDS, LOST_SECONDS = 1.0, 10.0
POLL_SECONDS = 0.02
AGAIN_SECONDS = 0.2
ANSWER_SECONDS = 10.0
#: For a member's last output, which a process that it has left behind may hold back.
LAST_OUTPUT_SECONDS = 0.5
#: The most output in one message.
CHUNK_BYTES = 1 << 20
#: Exit code of an agent whose launcher is gone.
GONE = 1


class AgentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent is given: the agents' meeting place with its token, and who it is."""

    file: JobFile
    host: str
    number: int
    preload: bool = True

    @property
    def name(self) -> str:
        return f"agent-{self.number}"


class _Started:
    """A member of this agent: its process, and its output on the way to the launcher."""

    def __init__(self, number: int, process: LocalProcess, endpoint: Endpoint) -> None:
        self._number, self.process, self._endpoint = number, process, endpoint
        self.forwarder = Forwarder(process.name, process.output, self._send)

    def _send(self, raw: bytes) -> None:
        for begin in range(0, len(raw), CHUNK_BYTES):
            self._endpoint.mention(MemberOutput(self._number, raw[begin : begin + CHUNK_BYTES]))


class Agent:
    """Serves one launcher. Members are started by the main thread: on Linux they end with the thread that has."""

    def __init__(self, plan: AgentPlan) -> None:
        self._plan = plan
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._members: dict[int, _Started] = {}
        self._fork_server = ForkServer(self._say) if plan.preload else None
        self._endpoint: Endpoint | None = None
        self._is_told_to_end = False

    def run(self, seconds: float) -> int:
        """Until the launcher says that the job is over, or is gone; its exit code. `seconds`: to reach it at all."""
        previous = signal.signal(signal.SIGTERM, self._told_to_end)
        try:
            self._endpoint = self._connect(seconds)
            if self._endpoint is None:
                return 128 + signal.SIGTERM
            return self._serve(self._endpoint)
        finally:
            self._end_all()
            signal.signal(signal.SIGTERM, previous)

    def _told_to_end(self, number: int, frame: object) -> None:
        """A cluster tells all processes of a job; the launcher hears it too, saves the job and ends its agents."""
        self._is_told_to_end = True

    def _say(self, text: str) -> None:
        sys.stderr.write(f"syncline: {self._plan.name} on {self._plan.host}: {text}\n")
        sys.stderr.flush()

    # -- the connection -----------------------------------------------------------------------------------

    def _connect(self, seconds: float) -> Endpoint | None:
        plan, until = self._plan, time.monotonic() + seconds
        identity = tcp.Identity(plan.file.job, plan.file.token_bytes, Peer("agent", plan.name, 0))
        while not self._is_told_to_end:
            try:
                connection = tcp.connect_tcp(plan.file.host, plan.file.port, identity, ANSWER_SECONDS)
            except (OSError, ConnectionLost) as error:
                if time.monotonic() > until:
                    raise ConnectionLost(
                        f"{plan.name} on {plan.host} does not reach the launcher at {plan.file.host}:"
                        f"{plan.file.port} within {seconds:g} s ({error}); give an address that all hosts reach with "
                        "--bind ADDRESS"
                    ) from None
                time.sleep(AGAIN_SECONDS)
                continue
            endpoint = Endpoint(connection, Stamp(plan.file.job), self)
            here = versions_here()
            endpoint.call(AgentJoin(plan.host, plan.number, here.python, here.syncline, here.torch)).wait(
                ANSWER_SECONDS
            )
            return endpoint
        return None

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        if payload_bytes:
            raise ProtocolError(f"{peer} sends an agent a payload")
        return ()

    def handle(self, request: Request) -> None:
        self._queue.put(request.message)

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        self._queue.put(None)

    # -- its work -----------------------------------------------------------------------------------------

    def _say_alive(self, endpoint: Endpoint) -> None:
        """In a thread of its own: a start waits for torch to be loaded, which may take longer than the deadline."""
        while endpoint.is_open:
            endpoint.mention(AgentAlive())
            time.sleep(ALIVE_SECONDS)

    def _serve(self, endpoint: Endpoint) -> int:
        threading.Thread(target=self._say_alive, args=(endpoint,), name="alive", daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                message = self._queue.get(timeout=POLL_SECONDS)
                if message is None:
                    self._say("the launcher is gone; this agent ends what it has started")
                    return GONE
                if isinstance(message, EndAgent):
                    return message.code
                self._obey(message, endpoint)
            self._reap(endpoint)

    def _obey(self, message: Message, endpoint: Endpoint) -> None:
        if isinstance(message, StartMember):
            self._start(message, endpoint)
            return
        if not isinstance(message, TellMember | SignalMember):
            return
        member = self._members.get(message.number)
        if member is None:
            return  # it has ended meanwhile
        if isinstance(message, SignalMember):
            member.process.signal(message.signal)
            return
        if message.words:
            member.process.tell(message.words)
        if message.ends:
            member.process.close_lifeline()

    def _start(self, message: StartMember, endpoint: Endpoint) -> None:
        try:
            plan = msgspec.json.decode(message.plan, type=MemberPlan)
            if self._fork_server is not None and plan.loads_torch:
                self._fork_server.start()
            process = start_member(plan, fork_server=self._fork_server)
        except (SynclineError, msgspec.MsgspecError, OSError) as error:
            endpoint.mention(MemberEnded(message.number, 1, str(error)))
            return
        self._members[message.number] = _Started(message.number, process, endpoint)

    def _reap(self, endpoint: Endpoint) -> None:
        for number, member in list(self._members.items()):
            code = member.process.poll()
            if code is not None:
                member.process.close_lifeline()
                member.forwarder.wait(LAST_OUTPUT_SECONDS)
                del self._members[number]
                endpoint.mention(MemberEnded(number, code))

    def _end_all(self) -> None:
        for member in self._members.values():
            member.process.close_lifeline()
            member.process.kill()
        if self._fork_server is not None:
            self._fork_server.close()
        if self._endpoint is not None:
            self._endpoint.close()


def main() -> int:
    """An agent whose plan comes over its standard input, which stays open: it ends when that is closed."""
    from syncline.launch import lifeline

    data = b""
    while not data.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return GONE
        data += chunk
    plan = msgspec.json.decode(data, type=AgentPlan)
    lifeline.hold()
    try:
        return Agent(plan).run(configuration.resolve(plan.file.given).start_seconds)
    except SynclineError as error:
        sys.stderr.write(f"syncline: {plan.name} on {plan.host}: {error}\n")
        return GONE


if __name__ == "__main__":
    sys.exit(main())
