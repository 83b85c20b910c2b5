"""The processes of a pipeline: one worker of the job, made of several processes on one host.

The worker's own process is the *leader*. Before the script runs, it forks the *stage processes*; they run the script
up to its `Pipeline`, and do what the leader says from then on. Only the leader is a member of the job, so servers and
coordinator know nothing of stages. All processes of a pipeline live and die together: when one dies, the leader ends
as if it had been killed, and the launcher starts the whole worker again.

Leader and stage process have two pairs of sockets, made before the fork: one for orders and answers in turn, and one
by which the stage process shows that it lives, or says why it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec

from syncline import errors
from syncline.config import JobConfig
from syncline.core.liveness import PIPELINE_OF
from syncline.errors import ConfigError, ConnectionLost, SynclineError
from syncline.stats import StageStats, Wait

#: Between two signs of life.
BEAT_SECONDS = 0.25
_IDLE, _COMPUTING = b".", b"+"
#: A step that takes less says nothing of who waits for whom, and neither does a shorter silence.
_LOUD_SECONDS = 1.0
_MOST_BYTES = 1 << 30
#: Bytes of the reason of an end, and of the message that carries it.
_MOST_TEXT, _MOST_SAID = 60_000, 1 << 16
#: For the leader to learn why a connection between two stages broke.
_VERDICT_SECONDS = 10.0


class Failure(msgspec.Struct, frozen=True):
    """Why a stage process ends: an error of ours by its class, or the traceback of another."""

    kind: str
    text: str


class Channel:
    """Orders and answers between two processes, with file descriptors beside them."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        data = msgspec.msgpack.encode(message)
        head = len(data).to_bytes(8, "little")
        try:
            socket.send_fds(self._socket, [head], list(fds))
            self._socket.sendall(data)
        except OSError as error:
            raise ConnectionLost(f"the other process of this pipeline is gone: {error}") from None

    def receive(self, kind: Any) -> tuple[Any, list[int]]:
        """The next message, of this type or union of types, and its file descriptors."""
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, 8, 64)
            while head and len(head) < 8:
                head += self._socket.recv(8 - len(head))
            left = int.from_bytes(head, "little") if head else 0
            if not head or left > _MOST_BYTES:
                raise ConnectionLost("the other process of this pipeline is gone")
            data = bytearray()
            while len(data) < left:
                chunk = self._socket.recv(min(1 << 20, left - len(data)))
                if not chunk:
                    raise ConnectionLost("the other process of this pipeline is gone")
                data += chunk
        except OSError as error:
            raise ConnectionLost(f"the other process of this pipeline is gone: {error}") from None
        return msgspec.msgpack.decode(data, type=kind), fds

    def close(self) -> None:
        self._socket.close()


class Activity:
    """What a process of a pipeline does now: its engine writes it, other threads read it."""

    def __init__(self) -> None:
        self.is_computing = False


class StageProcess:
    """One stage process, as its leader sees it."""

    def __init__(self, number: int, pid: int, orders: socket.socket, pulse: socket.socket) -> None:
        self.number, self.pid = number, pid  #: 1, 2, …; the leader is 0
        self.channel, self.pulse = Channel(orders), pulse
        self.heard = time.monotonic()
        self.is_computing = False  #: as it said last


class StageProcesses:
    """The leader's stage processes, and a thread that watches them."""

    def __init__(
        self,
        processes: Sequence[StageProcess],
        store_fd: int,
        say: Callable[[str], None],
        silent_seconds: float,
        start_seconds: float,
    ) -> None:
        """`store_fd`: memory in which the processes of this pipeline find each other. `silent_seconds`: without a
        sign of life from a stage process, until it counts as dead; `start_seconds`: likewise until `are_ready`.
        """
        self.processes, self.store_fd = list(processes), store_fd
        self._say, self._silent_seconds, self._ready_seconds = say, max(start_seconds, silent_seconds), silent_seconds
        self.activity = Activity()  #: of the leader itself
        self._measure: Callable[[], tuple[StageStats, ...]] | None = None
        self.step_began: float | None = None  #: since when all stages compute a step together
        self._failure: Failure | None = None
        self._has_failed = threading.Event()
        threading.Thread(target=self._watch, name="stages", daemon=True).start()

    def measure_by(self, measure: Callable[[], tuple[StageStats, ...]]) -> None:
        """From now on `stats` answers with what this returns, from any thread."""
        self._measure = measure

    def stats(self) -> tuple[StageStats, ...]:
        """Of all processes of this pipeline; empty before its model is cut."""
        return self._measure() if self._measure is not None else ()

    def are_ready(self) -> None:
        """All have made their parts of the model. Before, a process that loads libraries may be silent for long."""
        for process in self.processes:
            process.heard = time.monotonic()
        self._silent_seconds = self._ready_seconds

    @property
    def num_processes(self) -> int:
        """The leader included."""
        return len(self.processes) + 1

    def waits(self, name: str) -> list[Wait]:
        """Whom this pipeline waits for, in a step that takes long: silent processes, else those that compute."""
        began, now = self.step_began, time.monotonic()
        if began is None or now - began < _LOUD_SECONDS:
            return []
        silent = [
            f"stage {process.number} (process {process.pid}, silent for {now - process.heard:.1f} s)"
            for process in self.processes
            if now - process.heard >= _LOUD_SECONDS
        ]
        computing = [f"stage 0 (process {os.getpid()}, computing)"] if self.activity.is_computing else []
        computing += [
            f"stage {process.number} (process {process.pid}, computing)"
            for process in self.processes
            if process.is_computing
        ]
        found = silent or computing
        is_all = len(found) == self.num_processes and not silent
        return [] if is_all or not found else [Wait(name, 0, found, now - began, f"{PIPELINE_OF}{name}")]

    def check(self) -> None:
        """Raises why a stage process has ended."""
        if self._failure is not None:
            raise _error_of(self._failure)

    def explain(self, error: Exception) -> Exception:
        """The reason for a broken connection: what a stage process has said. Where one was killed, this process ends
        too, meanwhile.
        """
        self._has_failed.wait(_VERDICT_SECONDS)
        return _error_of(self._failure) if self._failure is not None else error

    def _watch(self) -> None:
        alive = {process.pulse.fileno(): process for process in self.processes}
        looked = time.monotonic()
        while alive:
            ready, _, _ = select.select(list(alive), [], [], BEAT_SECONDS)
            now = time.monotonic()
            if now - looked > 8 * BEAT_SECONDS:  # this process stood still itself
                for process in alive.values():
                    process.heard = now
            looked = now
            for fd in ready:
                if not self._hear(alive[fd], now):
                    del alive[fd]
            for process in alive.values():
                if now - process.heard > self._silent_seconds:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                    self._die(
                        f"stage {process.number} (process {process.pid}) was silent for {self._silent_seconds:g} s"
                    )

    def _hear(self, process: StageProcess, now: float) -> bool:
        """Takes a sign of life or the reason of an end; False at the end."""
        try:
            said = process.pulse.recv(_MOST_SAID)
        except OSError:
            said = b""
        process.heard = now
        if said in (_IDLE, _COMPUTING):
            process.is_computing = said == _COMPUTING
            return True
        if said:
            try:
                self._failure = msgspec.msgpack.decode(said, type=Failure)
            except msgspec.DecodeError:
                self._failure = Failure(
                    "", f"stage {process.number} (process {process.pid}) failed, with no clear word"
                )
            self._has_failed.set()
            return False
        self._die(f"stage {process.number} (process {process.pid}) {_end_of(process.pid)}")
        return False

    def _die(self, why: str) -> None:
        """A pipeline lives and dies as a whole: this worker ends as if it had been killed."""
        self._say(f"{why}: the pipeline ends and starts again")
        os.kill(os.getpid(), signal.SIGKILL)


def _bytes_of(text: str) -> bytes:
    """Names of files may have characters that have no bytes."""
    return text.encode(errors="replace")


def _end_of(pid: int) -> str:
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return "has ended"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def _error_of(failure: Failure) -> Exception:
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, SynclineError):
        return kind(failure.text)
    return RuntimeError(failure.text)


class StagePlace:
    """A stage process, as it sees itself."""

    def __init__(
        self, number: int, num_processes: int, orders: socket.socket, pulse: socket.socket, store_fd: int
    ) -> None:
        self.number, self.num_processes = number, num_processes
        self.channel, self.store_fd = Channel(orders), store_fd
        self._pulse = pulse
        self.activity = Activity()

    def begin(self, name: str) -> None:
        """From now on this process shows that it lives, and leaves signals and standard output to its leader."""
        self._who = f"stage {self.number} of {name}"
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)  # a line that a script prints counts once
        os.close(null)
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def _beat(self) -> None:
        while True:
            try:
                self._pulse.send(_COMPUTING if self.activity.is_computing else _IDLE)
            except OSError:
                os._exit(0)  # the leader is gone
            time.sleep(BEAT_SECONDS)

    def fail(self, error: BaseException, trace: str = "") -> NoReturn:
        """Tells the leader why this process ends, and ends."""
        if isinstance(error, SynclineError):
            failure = Failure(
                type(error).__name__, _bytes_of(f"{self._who}: {error}")[:_MOST_TEXT].decode(errors="ignore")
            )
        else:
            text = _bytes_of(trace or "".join(traceback.format_exception(error)))[-_MOST_TEXT:]
            failure = Failure("", f"{self._who} failed:\n{text.decode(errors='ignore')}")
        with contextlib.suppress(OSError):
            self._pulse.send(msgspec.msgpack.encode(failure))
        os._exit(1)


class StageFacts(msgspec.Struct, frozen=True):
    """What a stage process is told of its leader's place in the job."""

    name: str
    rank: int
    world_size: int
    local_rank: int
    config: JobConfig


class StageJob:
    """The job, as a script sees it in a stage process before its Pipeline is made: facts only."""

    is_embedded = False

    def __init__(self, place: StagePlace) -> None:
        self.place = place
        facts, _ = place.channel.receive(StageFacts)
        self.name, self.rank, self.world_size, self.local_rank = (
            facts.name,
            facts.rank,
            facts.world_size,
            facts.local_rank,
        )
        self.config = facts.config
        self.is_chief = False  #: so that what only the chief prints or writes is done once

    @property
    def device(self) -> Any:
        """Stages compute on CPUs."""
        torch = sys.modules.get("torch")
        return torch.device("cpu") if torch is not None else "cpu"

    def __enter__(self) -> StageJob:
        return self

    def __exit__(self, *caught: object) -> None:
        """The leader leaves the job."""

    def notice(self, text: str, *, is_own: bool = False) -> None:
        """The leader tells."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ConfigError(
            f"job.{name} is used before the Pipeline is made: with --stages, every process of a pipeline runs the "
            "script up to syncline.torch.Pipeline(...), and only the first one goes on; use it after that"
        )


def fork_stages(config: JobConfig, say: Callable[[str], None]) -> StageProcesses | StagePlace:
    """Forks the stage processes of this worker: the leader's view of them, or in a stage process its place.

    Call it before this process has threads, and before torch has computed anything.
    """
    if not hasattr(os, "fork") or sys.platform != "linux":
        raise ConfigError("--stages needs Linux: its processes share memory that has no name")
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # they end with this worker's group
    store_fd = os.memfd_create("stages", 0)
    pairs = [(socket.socketpair(), socket.socketpair(type=socket.SOCK_SEQPACKET)) for _ in range(1, config.stages)]
    processes, leader = [], os.getpid()
    for number, (orders, pulse) in enumerate(pairs, 1):
        pid = os.fork()
        if pid == 0:
            for other, sockets in enumerate(pairs, 1):
                for pair in sockets:
                    pair[0].close()
                    if other != number:
                        pair[1].close()
            _die_with_parent(leader)
            return StagePlace(number, config.stages, orders[1], pulse[1], store_fd)
        processes.append(StageProcess(number, pid, orders[0], pulse[0]))
    for orders, pulse in pairs:
        orders[1].close()
        pulse[1].close()
    return StageProcesses(processes, store_fd, say, config.longest_deadline_seconds, config.start_seconds)


def _die_with_parent(parent: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # it died before this process asked for the signal
        os._exit(1)
