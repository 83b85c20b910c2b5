"""A server as a member of its job, and the process of a dedicated server."""

from __future__ import annotations

import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from typing import NamedTuple

from syncline import config as configuration
from syncline import faults
from syncline.core.liveness import beat_seconds
from syncline.core.members import Address, Member
from syncline.core.wire.control import Joined, Over, Retire, Roster
from syncline.errors import ConfigError, FencedError, SynclineError
from syncline.launch import lifeline
from syncline.launch.compiler import leave_out_the_compiler
from syncline.launch.jobfile import JobFile
from syncline.launch.lives import LEAVES
from syncline.launch.membership import connect, join, local_address, myself, reach, say, unix_name
from syncline.launch.restarts import EVICTED, LEFT
from syncline.net import shm, tcp
from syncline.net.device_channel import DeviceChannel
from syncline.net.link import SILENT, Link
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.tracing import SpanSender
from syncline.net.transport import Connection, Peer
from syncline.server.pool import ThreadPool
from syncline.server.service import Server
from syncline.server.storage import SliceStorage, storage_of


class End(NamedTuple):
    """How a server's part in its job ends, and its message."""

    code: int
    line: str = ""
    error: SynclineError | None = None  # why it could not join
    is_bug: bool = False  # an internal error
    is_without_coordinator: bool = False  # that was told to end, or is gone: the job may begin again


def run_server(file: JobFile, name: str, host: str, *, comes_back: bool = False) -> int:
    """Hosts slices until the job has ended, or until others have them all.

    `comes_back`: what started this process starts it again when SIGTERM has made it leave.
    """
    _load_torch()
    process = _Process(file, name, comes_back=comes_back)
    try:
        process.join(host)
        return process.wait()
    finally:
        process.serving.close()


def _load_torch() -> None:
    """Rules are applied by torch if it is installed, else by NumPy."""
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)  # the pool's threads provide the parallelism
    leave_out_the_compiler()


class Serving:
    """A server with its listener and its link to the coordinator; `ends` is called at its end.

    `process`: identifies a process shared with another member; `device_channel`: to that member, on a GPU. `leave`:
    called when the coordinator asks it to leave.
    """

    def __init__(
        self,
        file: JobFile,
        name: str,
        ends: Callable[[End], None],
        *,
        num_threads: int | None = None,
        process: str = "",
        device_channel: DeviceChannel | None = None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self._file, self._name, self._ends, self._process = file, name, ends, process
        self._say = say(name or "server")
        self._config = configuration.resolve(file.given)
        self._stamp = Stamp(file.job)
        self._identity = tcp.Identity(file.job, file.token_bytes, Peer("server", name or "server", 0))
        self._joined: Joined | None = None
        self._is_leaving = False
        self._spans: SpanSender | None = None  # with --trace
        self._server = Server(
            name,
            ThreadPool(self._broken, num_threads),
            create_memory=shm.create,
            log=self.log,
            over=self._over,
            storage=_storage(device_channel, self._config.server_device, self.log),
            dial=self._dial,
            retire=leave,
            ending=lifeline.job_ends,
        )
        here = local_address(file)
        unix = unix_name() if process or file.given.get("transport") != "tcp" else ""
        self._listener = tcp.Listener(self._identity, self._accept, sock=tcp.bind(here, 0), unix=unix, log=self.log)
        self._address = Address(self._listener.address.unix, here, self._listener.address.port)
        self._link = Link(
            self._connector(),
            self._server,
            self._stamp,
            patience_seconds=self._config.coordinator_seconds,
            say=self.log,
            fenced=self._fenced,
            gone=lambda reason: ends(End(1, f"JobFailed: {reason}", is_without_coordinator=True)),
        )

    def log(self, line: str) -> None:
        self._say(line)

    # -- ways ---------------------------------------------------------------------------------------------

    def _accept(self, connection: Connection) -> None:
        self._server.greet(Endpoint(connection, self._stamp, self._server))

    def _connector(self) -> Callable[[], Connection]:
        """Connects to the coordinator: the first time with retries; later the link retries."""
        times: list[int] = []

        def dial() -> Connection:
            times.append(1)
            if len(times) == 1:
                return connect(self._file, self._identity)
            return tcp.connect_tcp(self._file.host, self._file.port, self._identity, 5.0)

        return dial

    def _dial(self, member: Member) -> Endpoint:
        """To another server."""
        me = Peer("server", self._server.name, self._stamp.incarnation)
        proven = tcp.Identity(self._file.job, self._file.token_bytes, me)
        return Endpoint(reach(member, proven, self._config), self._stamp)

    # -- a member -----------------------------------------------------------------------------------------

    def join(self, host: str) -> None:
        """Asks to join; does not wait."""
        threading.Thread(target=self._join, args=(host,), name="join", daemon=True).start()

    def _join(self, host: str) -> None:
        seconds = self._config.start_seconds
        try:
            join(
                self._link,
                "server",
                self._name,
                host,
                self._address,
                {},
                seconds,
                self.hear_joined,
                process=self._process,
            )
        except SynclineError as error:
            self._ends(End(1, error=error))

    @property
    def is_in(self) -> bool:
        """Whether it has joined."""
        return self._joined is not None

    def hear_joined(self, joined: Joined) -> None:
        """Called before anything else is read from the coordinator; a repeated request is answered again."""
        if self._joined is not None:
            return
        self._joined, me = joined, myself(joined)
        self._server.name, self._say = me.name, say(me.name)
        self._stamp.incarnation, self._stamp.generation = joined.incarnation, joined.generation
        faults.arm(me.name, self._file.folder)
        self._listener.rename(joined.incarnation)
        try:
            self._server.form(joined)
        except ConfigError as error:  # missing in this process: a user-defined codec
            self._ends(End(1, error=error))
            raise
        self._link.begin(
            me.name,
            joined.incarnation,
            beat=self._server.beat,
            beat_seconds=beat_seconds(joined.config, len(joined.members)),
            silent_seconds=SILENT * joined.config.deadline_seconds,
            on_roster=self._hear,
        )
        if self._server.spans is not None:
            self._spans = SpanSender(self._link, self._server.spans)
            self._spans.start()

    def _hear(self, roster: Roster) -> None:
        self._stamp.generation = max(self._stamp.generation, roster.generation)
        self._server.hear(roster)

    # -- the end ------------------------------------------------------------------------------------------

    def _over(self, over: Over) -> None:
        line = f"JobFailed: the job has ended: {over.reason}" if over.failed else ""
        is_without = over.failed and over.culprit == "coordinator"
        self._ends(End(1 if over.failed else 0, line, is_without_coordinator=is_without))

    def _fenced(self, error: FencedError) -> None:
        if self._is_leaving:
            return  # it is out because it has left: the answer is on its way
        self._ends(End(EVICTED, f"FencedError: {error}"))

    def _broken(self, error: Exception) -> None:
        traceback.print_exception(error)
        self._ends(End(1, f"{self._server.name} has a bug: {type(error).__name__}: {error}", is_bug=True))

    def leave(self) -> None:
        """Asks to leave, and returns when others have all its slices; raises if that fails."""
        self._is_leaving = True
        try:
            self._link.call(Retire(), self._config.leave_seconds)
        except FencedError:
            return  # it is out already: the answer was lost, or a heartbeat came after it
        except SynclineError:
            self._is_leaving = False
            raise

    def close(self) -> None:
        if self._spans is not None:
            self._spans.close()
        self._link.close()
        self._listener.close()
        self._server.close()


class _Process:
    """A dedicated server process."""

    def __init__(self, file: JobFile, name: str, *, comes_back: bool) -> None:
        self._comes_back, self._is_told = comes_back, False
        self._saves = bool(configuration.resolve(file.given).checkpoint)
        self._ends: queue.SimpleQueue[End] = queue.SimpleQueue()
        self._leaving = threading.Lock()
        self.serving = Serving(file, name, self._ends.put, leave=self._leave)

    def join(self, host: str) -> None:
        """Asks to join, and starts the thread that handles the end of this process."""
        self._leave_on_sigterm()
        self.serving.join(host)

    def _leave_on_sigterm(self) -> None:
        """On SIGTERM: hands over all slices, then ends; at the second one ends at once. If the whole job ends, it
        is saved first.
        """
        if threading.current_thread() is threading.main_thread():
            seconds = lifeline.POD_WORD_SECONDS if self._comes_back else lifeline.WORD_SECONDS
            told = lifeline.ToldToEnd(self._told_to_end, saves=self._saves, word_seconds=seconds)
            signal.signal(signal.SIGTERM, told)

    def _told_to_end(self) -> None:
        if not self.serving.is_in:
            os._exit(LEFT)
        self._is_told = True
        self._leave()

    def _leave(self) -> None:
        """Asks to leave, in a thread of its own."""
        threading.Thread(target=self._retire, name="retire", daemon=True).start()

    def _retire(self) -> None:
        if not self._leaving.acquire(blocking=False):
            return
        try:
            self.serving.log(LEAVES)
            self.serving.leave()
            self._ends.put(End(LEFT if self._comes_back and self._is_told else 0))
        except SynclineError as error:
            self.serving.log(f"cannot leave: {error}")
            self._leaving.release()

    def wait(self) -> int:
        end = self._ends.get()
        if isinstance(end.error, FencedError):
            end = End(EVICTED, f"FencedError: {end.error}")
        if end.error is not None:
            raise end.error
        if end.line:
            self.serving.log(end.line)
        return LEFT if self._comes_back and end.is_without_coordinator else end.code


def _storage(device_channel: DeviceChannel | None, device: str, log: Callable[[str], None]) -> SliceStorage:
    if device_channel is None:
        return storage_of(device, log)
    from syncline.server.device_storage import ChannelStorage  # imports torch

    return ChannelStorage(device_channel, log)
