"""An agent: starts members on its host for a launcher on another one, and ends them when that is gone.

The engine of a cluster (Slurm, Ray) starts one process of this kind for each of its places. The agent connects to the
launcher, proves the agents' token, and then does what it is told. It decides nothing.

The agents of a detached job keep their members when the launcher is gone, and wait for the next one. The agent on the
launcher's own host starts that one.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from syncline import config as configuration
from syncline.core.wire import agents as wire
from syncline.core.wire.message import Message
from syncline.engines.awake import AwakeClock
from syncline.errors import ConfigError, ConnectionLost, ProtocolError, SynclineError, WaitTimeout
from syncline.launch.forkserver import ForkServer
from syncline.launch.forwarding import Forwarder
from syncline.launch.jobfile import JobFile
from syncline.launch.processes import LocalProcess, MemberPlan, start_member
from syncline.launch.versions import versions_here
from syncline.net import tcp
from syncline.net.rpc import Endpoint, Request, Stamp
from syncline.net.transport import Buffer, Connection, Peer

#: Between two signs of life; a launcher that hears none for `LOST_SECONDS` counts the agent as lost.
ALIVE_SECONDS, LOST_SECONDS = 1.0, 10.0
POLL_SECONDS = 0.02
AGAIN_SECONDS = 0.2
#: For a launcher to see that an agent's connection is lost, before its refusal of another one counts.
REFUSED_SECONDS = 3 * LOST_SECONDS
ANSWER_SECONDS = 10.0
#: For a member's last output, which a process that it has left behind may hold back.
LAST_OUTPUT_SECONDS = 0.5
#: The most output in one message.
CHUNK_BYTES = 1 << 20
#: Exit code of an agent whose launcher is gone.
GONE = 1
#: The most output that waits for another launcher.
MOST_KEPT_BYTES = 1 << 20
#: Without a launcher for so long, another one is started; so often in a row, unless one lasts.
SUCCESSOR_SECONDS, MOST_SUCCESSORS, LASTING_SECONDS = 0.4, 5, 30.0
#: Exit code of a launcher that finds another one: only the connection to that was lost.
THERE_ALREADY = 3


class AgentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent is given: the agents' meeting place with its token, and who it is."""

    file: JobFile
    host: str
    number: int
    preload: bool = True
    stays: bool = False  #: keeps its members when the launcher is gone, until another one comes
    folder: str = ""  #: working folder of what it starts itself
    log: str = ""  #: file for its own words
    launcher: list[str] = []  #: command that starts a launcher in place of one that is gone
    kept: list[int] = []  #: open descriptors, for that launcher and the coordinator

    @property
    def name(self) -> str:
        return f"agent-{self.number}"


class _Post:
    """Words for the launcher. While there is none, the newest output of members waits for the next one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None
        self._kept: collections.deque[wire.MemberOutput] = collections.deque()
        self._kept_bytes = 0
        self.keeps = False

    def say(self, message: Message) -> None:
        with self._lock:
            endpoint = self._endpoint
            if endpoint is None or not endpoint.is_open:
                if self.keeps and isinstance(message, wire.MemberOutput):
                    self._keep(message)
                return
        endpoint.mention(message)

    def _keep(self, message: wire.MemberOutput) -> None:
        self._kept.append(message)
        self._kept_bytes += len(message.data)
        while self._kept_bytes > MOST_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft().data)

    def open(self, endpoint: Endpoint) -> None:
        """There is a launcher: it gets what was kept, then what comes."""
        while True:
            with self._lock:
                kept, self._kept, self._kept_bytes = self._kept, collections.deque(), 0
                if not kept:
                    self._endpoint = endpoint
                    return
            for message in kept:
                endpoint.mention(message)

    def close(self) -> None:
        with self._lock:
            self._endpoint = None


class _Started:
    """A member of this agent: its process, and its output on the way to the launcher."""

    def __init__(self, number: int, plan: bytes, process: LocalProcess, post: _Post) -> None:
        self.number, self.plan, self.process, self._post = number, plan, process, post
        self.code: int | None = None
        self.forwarder = Forwarder(process.name, process.output, self._send)

    def _send(self, raw: bytes) -> None:
        for begin in range(0, len(raw), CHUNK_BYTES):
            self._post.say(wire.MemberOutput(self.number, raw[begin : begin + CHUNK_BYTES]))


class Agent:
    """Serves one launcher. Members are started by the main thread: on Linux they end with the thread that has."""

    def __init__(self, plan: AgentPlan, fork_server: ForkServer | None = None) -> None:
        """`fork_server`: one that has begun to load torch already; this agent closes it."""
        self._plan = plan
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._members: dict[int, _Started] = {}
        self._ended: dict[str, _Started] = {}  # by name, where the next launcher has to hear of it
        self._post = _Post()
        self._post.keeps = plan.stays
        self._fork_server = fork_server or (ForkServer(self._say) if plan.preload else None)
        self._endpoint: Endpoint | None = None
        self._successor: subprocess.Popen[bytes] | None = None  # a launcher that this agent has started
        self._num_successors = 0  # since the last one that lasted
        self._is_told_to_end = False
        self.has_lost_launcher = False  #: which has not said that the job is over

    def run(self, seconds: float) -> int:
        """Until the launcher says that the job is over, or is gone; its exit code. `seconds`: to reach it at all.

        If this agent stays, another launcher has as long to come.
        """
        previous = signal.signal(signal.SIGTERM, self._told_to_end)
        try:
            self._endpoint = self._connect(seconds)
            while self._endpoint is not None:
                code = self._serve(self._endpoint)
                if code is not None:
                    return code
                self._endpoint = self._connect(seconds, again=True)
            return 128 + signal.SIGTERM
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

    def _has_to_end(self) -> bool:
        return self._is_told_to_end  # set in another thread

    def _connect(self, seconds: float, *, again: bool = False) -> Endpoint | None:
        """`again`: there was a launcher, and its members are looked after meanwhile."""
        plan, clock = self._plan, AwakeClock()
        identity = tcp.Identity(plan.file.job, plan.file.token_bytes, Peer("agent", plan.name, 0))
        while not self._is_told_to_end:
            answers: queue.SimpleQueue[Connection | Exception] = queue.SimpleQueue()
            threading.Thread(target=_attempt, args=(plan.file, identity, answers), daemon=True).start()
            answer: Connection | Exception | None = None
            while answer is None and not self._has_to_end():
                with contextlib.suppress(queue.Empty):
                    answer = answers.get(timeout=POLL_SECONDS)
                waited = clock.seconds()
                if again:
                    self._reap()
                    self._look_after_launcher(waited)
            if answer is None:
                break
            try:
                connection = _raised(answer)
            except (OSError, ConnectionLost) as error:
                if clock.seconds() > seconds:
                    raise ConnectionLost(
                        f"{plan.name} on {plan.host} does not reach the launcher at {plan.file.host}:"
                        f"{plan.file.port} within {seconds:g} s ({error}); give an address that all hosts reach with "
                        "--bind ADDRESS"
                    ) from None
                time.sleep(AGAIN_SECONDS)
                continue
            endpoint = Endpoint(connection, Stamp(plan.file.job), self)
            try:
                self._join(endpoint)
            except (ConnectionLost, WaitTimeout):
                endpoint.close()
                if not again:
                    raise
                continue
            except ConfigError:
                endpoint.close()
                if not again or clock.seconds() > REFUSED_SECONDS:
                    raise
                time.sleep(AGAIN_SECONDS)  # the launcher may not have noticed yet that the connection before is lost
                continue
            return endpoint
        return None

    def _join(self, endpoint: Endpoint) -> None:
        held = [
            wire.HeldMember(one.number, one.plan, one.code is not None)
            for one in (*self._members.values(), *self._ended.values())
        ]
        here = versions_here()
        join = wire.AgentJoin(self._plan.host, self._plan.number, here.python, here.syncline, here.torch, held)
        endpoint.call(join).wait(ANSWER_SECONDS)
        self._post.open(endpoint)
        for one in self._ended.values():
            self._tell_end(one)

    def _look_after_launcher(self, seconds: float) -> None:
        """While there is none, for so long: the agent on the launcher's own host starts another one."""
        if not self._plan.launcher or seconds < SUCCESSOR_SECONDS:
            return
        if self._successor is not None:
            code = self._successor.poll()
            if code is None:
                return
            if code == THERE_ALREADY:
                self._num_successors -= 1
                self._successor = None
        if self._num_successors >= MOST_SUCCESSORS:
            raise ConnectionLost(
                f"{self._plan.name}: the launcher ended {MOST_SUCCESSORS} times in a row; see {self._plan.log}"
            )
        self._num_successors += 1
        self._say("the launcher is gone; this agent starts another one, and members go on meanwhile")
        self._successor = subprocess.Popen(
            self._plan.launcher, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=self._plan.kept,
            cwd=self._plan.folder or None, env=configuration.inherited_environment({"PYTHONUNBUFFERED": "1"}),
        )  # fmt: skip

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        if payload_bytes:
            raise ProtocolError(f"{peer} sends an agent a payload")
        return ()

    def handle(self, request: Request) -> None:
        self._queue.put(request.message)

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        if endpoint is self._endpoint:
            self._queue.put(None)

    # -- its work -----------------------------------------------------------------------------------------

    def _say_alive(self, endpoint: Endpoint) -> None:
        """In a thread of its own: a start waits for torch to be loaded, which may take longer than the deadline."""
        while endpoint.is_open:
            endpoint.mention(wire.AgentAlive())
            time.sleep(ALIVE_SECONDS)

    def _serve(self, endpoint: Endpoint) -> int | None:
        """The exit code of this agent; None: the launcher is gone, and this agent stays."""
        threading.Thread(target=self._say_alive, args=(endpoint,), name="alive", daemon=True).start()
        begun = time.monotonic()
        while True:
            message: Message | None = None
            with contextlib.suppress(queue.Empty):
                message = self._queue.get(timeout=POLL_SECONDS)
            if isinstance(message, wire.EndAgent):
                return message.code
            if message is not None:
                self._obey(message)
            self._reap()
            if not endpoint.is_open and self._queue.empty():
                break
            if self._is_told_to_end and self._plan.stays:
                return 128 + signal.SIGTERM
        self._post.close()
        if not self._plan.stays:
            self._say("the launcher is gone; this agent ends what it has started")
            self.has_lost_launcher = True
            return GONE
        if time.monotonic() - begun > LASTING_SECONDS:
            self._num_successors = 0
        return None

    def _obey(self, message: Message) -> None:
        if isinstance(message, wire.StartMember):
            self._start(message)
            return
        if not isinstance(message, wire.TellMember | wire.SignalMember):
            return
        member = self._members.get(message.number)
        if member is None:
            return  # it has ended meanwhile
        if isinstance(message, wire.SignalMember):
            member.process.signal(message.signal)
            return
        if message.words:
            member.process.tell(message.words)
        if message.ends:
            member.process.close_lifeline()

    def _start(self, message: wire.StartMember) -> None:
        try:
            plan = msgspec.json.decode(message.plan, type=MemberPlan)
            if self._fork_server is not None and plan.loads_torch:
                self._fork_server.start()
            process = start_member(plan, fork_server=self._fork_server)
        except (SynclineError, msgspec.MsgspecError, OSError) as error:
            self._post.say(wire.MemberEnded(message.number, 1, str(error)))
            return
        self._ended.pop(plan.name, None)
        self._members[message.number] = _Started(message.number, message.plan, process, self._post)

    def _reap(self) -> None:
        for number, member in list(self._members.items()):
            member.code = member.process.poll()
            if member.code is not None:
                member.process.close_lifeline()
                member.forwarder.wait(LAST_OUTPUT_SECONDS)
                del self._members[number]
                if self._plan.stays:
                    self._ended[member.process.name] = member
                self._tell_end(member)

    def _tell_end(self, member: _Started) -> None:
        assert member.code is not None
        self._post.say(wire.MemberEnded(member.number, member.code))

    def _end_all(self) -> None:
        for member in self._members.values():
            member.process.close_lifeline()
            member.process.kill()
        if self._fork_server is not None:
            self._fork_server.close()
        if self._endpoint is not None:
            self._endpoint.close()


def _attempt(file: JobFile, identity: tcp.Identity, answers: queue.SimpleQueue[Connection | Exception]) -> None:
    try:
        answers.put(tcp.connect_tcp(file.host, file.port, identity, ANSWER_SECONDS))
    except Exception as error:
        answers.put(error)


def _raised(answer: Connection | Exception) -> Connection:
    if isinstance(answer, Exception):
        raise answer
    return answer


def main() -> int:
    """An agent whose plan comes over its standard input, which stays open: it ends when that is closed. An agent that
    stays leaves its starter once it has its plan."""
    from syncline.launch import lifeline

    data = b""
    while not data.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return GONE
        data += chunk
    plan = msgspec.json.decode(data, type=AgentPlan)
    if plan.stays:
        try:
            log = _opened_log(plan)
        except OSError as error:  # its launcher still reads this
            sys.stderr.write(f"{plan.name} cannot write its log {plan.log}: {error.strerror or error}\n")
            return GONE
        if os.fork():
            os._exit(0)
        _leave_the_starter(log)
    else:
        lifeline.hold()
    try:
        return Agent(plan).run(configuration.resolve(plan.file.given).start_seconds)
    except SynclineError as error:
        sys.stderr.write(f"syncline: {plan.name} on {plan.host}: {error}\n")
        return GONE


def _opened_log(plan: AgentPlan) -> int:
    """A host that does not have the job's folder keeps no log."""
    log = plan.log if plan.log and os.path.isdir(os.path.dirname(plan.log)) else os.devnull
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)


def _leave_the_starter(log: int) -> None:
    """A session of its own, without the terminal, pipes and connection of the process that has started it."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for number, own in ((null, 0), (log, 1), (log, 2)):
        os.dup2(number, own)
    for number in (null, log):
        if number > 2:
            os.close(number)


if __name__ == "__main__":
    sys.exit(main())
