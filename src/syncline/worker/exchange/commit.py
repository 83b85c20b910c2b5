"""One commit: staged on every server, committed on every server, clipped if asked, answered.

A `Push` says what is committed. A `ServerCommit` is one server's part: what it is told, and where its answer goes.
The `CommitFlow` is the state machine over all servers. The `ServersTicket` has all that a retry needs.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from syncline import faults
from syncline.core.codecs.pieces import Encoded
from syncline.core.layout import Ranges
from syncline.core.rounds import RoundMembership
from syncline.core.rule import Option
from syncline.core.wire.leases import LeaseAck
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import AskClip, CommitStaged, Committed, GiveClip, Stage
from syncline.errors import (
    ConnectionLost,
    FencedError,
    ProtocolError,
    Refresh,
    SynclineError,
    WaitTimeout,
)
from syncline.net.rpc import Call, Endpoint, Latch
from syncline.net.transport import Buffer
from syncline.worker.exchange.receiver import CommitReceiver
from syncline.worker.exchange.targets import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Push:
    """One commit: which parameters have a gradient in the arena, and what the round needs to know."""

    pushed: Ranges
    weight: float = 1.0
    nominal: float = 1.0  #: the weight of a push that counts in full, in `bounded` and `async`
    squared_norm: float = 0.0  #: of its gradients, with `--aggregate norm-clipped`
    skip: bool = False  #: an overflow: the clock advances, the round changes nothing
    clip_norm: float | None = None
    overrides: Sequence[tuple[int, int, Mapping[str, Option]]] = ()
    as_staged: frozenset[int] = frozenset()  #: slices that were staged early, and are what they were then
    finite: Ranges = ()  #: pushed parameters found finite while they were copied; others are checked


_MOMENT = 0.002
#: Errors that the next roster resolves: the commit is replayed.
MENDED = (ConnectionLost, Refresh)


_NOBODY: list[CommitFlow] = []


class CommitFlow:
    """The state machine of one commit over all servers.

    With a window there are several: commits are sent in clock order (`before`), whichever is acknowledged first.
    `squared_norm`: the norm that a replayed commit was clipped by. `decider`: the server that decides, with spare
    workers. `at_once`: staging also commits.
    """

    def __init__(
        self,
        clock: int,
        server_commits: Sequence[ServerCommit],
        before: CommitFlow | None = None,
        squared_norm: float | None = None,
        decider: ServerCommit | None = None,
        at_once: bool = False,
    ) -> None:
        self.clock, self.server_commits, self.squared_norm, self._decider = (
            clock,
            server_commits,
            squared_norm,
            decider,
        )
        self._before, self._is_told = before, False
        self._behind: list[CommitFlow] = _NOBODY
        self._latch = Latch()
        self._lock = threading.Lock()
        self._left = 0
        self._next: Callable[[], None] = self._staged
        self._at_once, self._is_staging, self._is_deciding = at_once or len(server_commits) == 1, False, False
        self._is_given_up = False
        self._following = 0
        self.error: SynclineError | None = None

    def start(self) -> None:
        self._is_staging = not self._at_once
        self._next = self._staged if self._is_staging else self._answered
        self._ask_all(lambda server_commit: server_commit.stage(), self.server_commits)

    def _ask_all(self, ask: Callable[[ServerCommit], Call], server_commits: Sequence[ServerCommit]) -> None:
        self._left = len(server_commits)
        try:
            for server_commit in server_commits:
                server_commit.call = ask(server_commit)
            for server_commit in server_commits:
                assert server_commit.call is not None
                server_commit.call.when_done(self._one_done)
        except SynclineError as error:
            self.end(error)

    def _follow(self, ask: Callable[[ServerCommit], Call], server_commits: Sequence[ServerCommit]) -> None:
        """Acts on the answers, in the thread that delivers the last one, unless the commit was given up."""
        with self._lock:
            if self._is_given_up:
                return
            self._following += 1
        try:
            self._ask_all(ask, server_commits)
        finally:
            with self._lock:
                self._following -= 1

    def _one_done(self) -> None:
        if len(self.server_commits) > 1:
            with self._lock:
                self._left -= 1
                last = self._left == 0
            if not last:
                self._see_what_broke()
                return
        try:
            self._next()
        except SynclineError as error:
            self.end(error)

    def _see_what_broke(self) -> None:
        """A server is gone or knows of a reconfiguration: end early, since the others may not answer before this
        worker follows.
        """
        error = self.refusal()
        if isinstance(error, (*MENDED, FencedError)):
            self.end(error)  # other errors are raised when all have answered, or after a timeout

    def refusal(self) -> SynclineError | None:
        """A server's error; errors that a replay resolves come first."""
        found: SynclineError | None = None
        for server_commit in self.server_commits:
            if server_commit.call is not None and server_commit.call.is_done and server_commit.call.answer is None:
                try:
                    server_commit.call.wait(0)
                except MENDED as error:
                    return error
                except SynclineError as error:
                    found = found or error
        return found

    def give_up(self) -> None:
        """Stops this attempt, because servers have changed; returns when nothing more is sent. A replay makes another
        flow for the same commit.
        """
        with self._lock:
            self._is_given_up = True
        while self._following:
            time.sleep(_MOMENT)

    def _answers(self) -> list[Message]:
        answers = []
        for server_commit in self.server_commits:
            for early in server_commit.earlier:
                early.wait(0)
            assert server_commit.call is not None
            answers.append(server_commit.call.wait(0))
        return answers

    def _staged(self) -> None:
        """Every server has the bytes: commits, or waits for the commit of the clock before."""
        self._answers()
        if faults.armed is not None:
            faults.reach("commit.staged")
        before, self._before = self._before, None
        if before is None or before._let_pass(self):
            self._tell()

    def _let_pass(self, other: CommitFlow) -> bool:
        """Whether the next commit may be sent now; if not, this one releases it."""
        with self._lock:
            if self._latch.is_open and self.error is not None:
                raise self.error
            if not self._is_told and not self._latch.is_open:
                self._behind = [*self._behind, other]
                return False
        return True

    def _tell(self) -> None:
        """Commits what is staged, on every server."""
        if self._decider is not None:
            self._next, self._is_deciding = self._decided, True
            self._is_staging = False
            self._follow(lambda server_commit: server_commit.commit(self.clock), [self._decider])
            return
        self._next = self._answered
        self._follow(lambda server_commit: server_commit.commit(self.clock), self.server_commits)
        if faults.armed is not None:
            faults.reach("commit.told")
        self._is_staging = False
        with self._lock:
            self._is_told = True
            behind, self._behind = self._behind, _NOBODY
        for other in behind:
            other._tell()

    def _decided(self) -> None:
        """The round is closed, with or without this commit: tells the other servers."""
        decider = self._decider
        assert decider is not None and decider.call is not None
        answer = decider.call.wait(0)
        if not isinstance(answer, Committed | AskClip):
            raise ProtocolError(f"a commit was answered with {type(answer).__name__}")
        if faults.armed is not None:
            faults.reach("commit.decided")
        self._next, round_membership = self._answered, answer.round_membership
        self._follow(
            lambda server_commit: server_commit.commit(self.clock, round_membership),
            [server_commit for server_commit in self.server_commits if server_commit is not decider],
        )
        if faults.armed is not None:
            faults.reach("commit.told")
        self._is_deciding = False

    def _answered(self) -> None:
        """Every server has answered the commit: ends it, or sends the norm that clipping needs."""
        answers = self._answers()
        shares = [answer.squared_norm for answer in answers if isinstance(answer, AskClip)]
        if shares:
            self._clip(shares)
            return
        for server_commit, answer in zip(self.server_commits, answers, strict=True):
            if not isinstance(answer, Committed):
                raise ProtocolError(f"a commit was answered with {type(answer).__name__}")
            server_commit.answer = answer
        self.end(None)

    def _clip(self, shares: Sequence[float]) -> None:
        if len(shares) == len(self.server_commits):
            # In server order: every worker computes the same sum.
            self.squared_norm = sum(shares)
        elif self.squared_norm is None:
            # The norm was lost with another server; another worker may bring it meanwhile. ConnectionLost retries in
            # a moment, where a Refresh would wait for the next roster.
            raise ConnectionLost(f"step {self.clock} is clipped on some servers, and its norm is not known here")
        norm = self.squared_norm
        asking = [
            server_commit
            for server_commit in self.server_commits
            if server_commit.call is not None and isinstance(server_commit.call.answer, AskClip)
        ]
        self._follow(lambda server_commit: server_commit.clip(self.clock, norm), asking)

    def end(self, error: SynclineError | None) -> None:
        """Ends the commit, with this error if any. Later calls have no effect."""
        with self._lock:
            if self._latch.is_open:
                return
            self.error = error
            self._latch.open()
            behind, self._behind = self._behind, _NOBODY
        if error is not None:
            for other in behind:  # they would be refused without this one
                other.end(error)

    @property
    def is_over(self) -> bool:
        return self._latch.is_open

    def done(self) -> bool:
        """Whether it is over. Reads connections that no other thread reads."""
        if not self._latch.is_open:
            for server_commit in self.server_commits:
                if server_commit.call is not None:
                    server_commit.call.done()
        return self._latch.is_open

    def arrives(self, seconds: float) -> bool:
        """Waits; returns whether the commit ended in time."""
        if self.is_over:
            return True
        until = time.monotonic() + seconds
        while not self._latch.is_open:
            if not self.go_on(until - time.monotonic()):
                return self._latch.is_open
        return True

    def wait_until_staged(self, timeout_seconds: float) -> None:
        """If this thread reads: waits until all servers have staged and were told to commit, or the decider was."""
        self._go_on_while(lambda: self._is_staging, timeout_seconds)

    @property
    def waits_for_decision(self) -> bool:
        """If this thread reads: whether it must tell the other servers when the round is closed."""
        return self._is_deciding and not self._latch.is_open and self._is_read_by_waiter

    def wait_until_decided(self, timeout_seconds: float) -> None:
        """Waits until the other servers are told to commit, too."""
        self._go_on_while(lambda: self._is_deciding, timeout_seconds)

    @property
    def _is_read_by_waiter(self) -> bool:
        return any(
            server_commit.call is not None and server_commit.call.is_read_by_waiter
            for server_commit in self.server_commits
        )

    def _go_on_while(self, lasts: Callable[[], bool], timeout_seconds: float) -> None:
        if not self._is_read_by_waiter:
            return
        until = time.monotonic() + timeout_seconds
        while lasts() and not self._latch.is_open:
            if not self.go_on(until - time.monotonic()):
                raise WaitTimeout(f"no answer within {timeout_seconds:g} s")

    def go_on(self, seconds: float) -> bool:
        """Waits for progress, reading connections if this thread reads; False on timeout."""
        if seconds < 0:
            return False
        for server_commit in self.server_commits:
            call = server_commit.call
            if call is not None and call.is_read_by_waiter and not call.is_done:
                return call.read(seconds)
        # Other threads deliver their own connections, or are about to act on an answer.
        mixed = self._is_read_by_waiter
        return self._latch.wait(min(seconds, _MOMENT) if mixed else seconds) or mixed


_LOOK_SECONDS = 0.05


class ServerCommit:
    """One server's part of a commit: the request and its answer."""

    __slots__ = ("_buffers", "_endpoint", "_message", "_parts", "answer", "call", "earlier", "receiver", "server")

    def __init__(
        self,
        server: str,
        endpoint: Endpoint,
        message: Stage,
        buffers: Sequence[Buffer],
        receiver: CommitReceiver | None,
        earlier: Sequence[Call],
    ) -> None:
        self.server, self._endpoint, self._message, self._buffers = server, endpoint, message, buffers
        self.receiver, self.earlier = receiver, earlier
        self._parts = receiver is not None and receiver.in_parts
        self.call: Call | None = None
        self.answer: Committed | None = None

    def stage(self) -> Call:
        return self._ask(self._message, self._buffers)

    def commit(self, clock: int, round_membership: RoundMembership | None = None) -> Call:
        return self._ask(CommitStaged(clock, self._pull, self._parts, round_membership, self.receiver is not None))

    def clip(self, clock: int, squared_norm: float) -> Call:
        return self._ask(GiveClip(clock, squared_norm, self._pull, self._parts, self.receiver is not None))

    @property
    def is_read_by_waiter(self) -> bool:
        return self._endpoint.waiter_reads

    @property
    def _pull(self) -> list[int]:
        return self.receiver.pull if self.receiver is not None else []

    def _ask(self, message: Message, buffers: Sequence[Buffer] = ()) -> Call:
        size = sum(map(len, buffers)) if buffers else 0
        if self.receiver is None:
            return self._endpoint.call(message, buffers=buffers, payload_bytes=size)
        receiver = self.receiver
        return self._endpoint.call(
            message, buffers=buffers, payload_bytes=size, into=receiver.buffers, on_part=receiver.arrived
        )

    def await_more(self, flow: CommitFlow, numbers: set[int], seconds: float) -> None:
        """Waits for more from this server, or for its commit to end."""
        if self.is_read_by_waiter:
            if self.call is not None and not self.call.is_done:
                self.call.read(seconds)
            else:
                flow.go_on(seconds)
        elif not flow.done():  # reads the connections that no other thread reads
            assert self.receiver is not None
            self.receiver.wait_for(numbers, min(seconds, _LOOK_SECONDS))

    def finish(self) -> None:
        """The commit is answered everywhere: receives the remaining parameters."""
        if self.receiver is not None:
            assert self.answer is not None
            self.receiver.finish(self.answer)

    def give_up(self) -> None:
        """The commit is replayed with other servers: nothing more is received from this one."""
        if self.receiver is not None:
            self.receiver.give_up()


_NOT_YET = CommitFlow(0, ())


class ServersTicket:
    """A push under way, with all that a replay needs. `wait` may be called again after a WaitTimeout."""

    __slots__ = (
        "_finish",
        "_wait_for",
        "acks",
        "back_at",
        "clock",
        "encoded",
        "flow",
        "generation",
        "is_early",
        "is_edited",
        "landed",
        "phase",
        "push",
        "server_commits",
        "slot",
        "target",
    )  # fmt: skip

    def __init__(
        self,
        push: Push,
        target: Target | None,
        clock: int,
        phase: int,
        back_at: int | None,
        slot: int,
        finish: Callable[[ServersTicket, float | None], None],
        wait_for: Callable[[ServersTicket, Collection[int]], bool],
    ) -> None:
        """`finish` waits for the answers and receives the parameters; `wait_for` returns whether these slices are
        here.
        """
        self.push, self.target, self._finish, self._wait_for = push, target, finish, wait_for
        self.clock, self.phase, self.back_at, self.slot = clock, phase, back_at, slot
        self.server_commits: Sequence[ServerCommit] = ()
        self.flow = _NOT_YET  # in flight
        self.generation = 0  # of the attempt in flight
        self.landed = False
        self.acks: list[LeaseAck] = []  # of leases
        self.encoded: dict[int, Encoded] = {}  # by slice: as it goes out, again and again
        self.is_early = self.is_edited = False  # slices were staged early; some of them have changed since

    def done(self) -> bool:
        return self.landed or self.flow.done()

    def wait(self, timeout_seconds: float | None = None) -> None:
        if not self.landed:
            self._finish(self, timeout_seconds)

    def wait_for(self, slices: Collection[int]) -> None:
        """Returns when these slices are in the target; others may still be under way."""
        if not self.landed and not self._wait_for(self, slices):
            self.wait()

    def unanswered(self) -> list[str]:
        """The servers that have not answered."""
        return [
            server_commit.server
            for server_commit in self.server_commits
            if server_commit.call is None or not server_commit.call.is_done
        ]

    def failed_by(self, error: SynclineError) -> SynclineError:
        """The user's codec failed: `wait` raises this error."""
        self.flow = CommitFlow(self.clock, ())
        self.flow.end(error)
        return error

    def give_up(self) -> None:
        """Stops sending and receiving until it is replayed."""
        self.flow.give_up()
        for server_commit in self.server_commits:
            server_commit.give_up()
