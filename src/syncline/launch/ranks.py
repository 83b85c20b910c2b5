"""`init()` in a process of torchrun, mpirun or srun: rank k joins as worker-k; rank 0 also starts the rest."""

from __future__ import annotations

import atexit
import contextlib
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import msgspec

from syncline import config as configuration
from syncline import faults
from syncline.core.ring import protection_of
from syncline.core.settings import check_settings
from syncline.core.units import counted
from syncline.errors import ConfigError, SynclineError, WrongLauncher
from syncline.launch import rendezvous, threads
from syncline.launch.folder import claim_name
from syncline.launch.jobfile import JobFile
from syncline.launch.rank_host import RankHostPlan
from syncline.launch.ringing import OwnServer
from syncline.launch.running import Script, default_name, page_socket, settle_servers
from syncline.launch.saving import settle_saving
from syncline.launch.tracebacks import shorten_tracebacks
from syncline.launch.versions import versions_here
from syncline.launch.world import StartedRanks
from syncline.page import serving
from syncline.worker.job import Job

#: Said for `syncline run`, which starts processes itself.
_OF_RUN = ("hosts", "remote", "env", "least_workers", "most_workers", "auto_workers", "max_restarts")
AGAIN_SECONDS = 0.1
#: How often a rank looks whether its job has failed, and for its script to end by itself then.
LOOK_SECONDS, NOTICE_SECONDS = 0.25, 5.0
#: Signals to end within so long are one.
SAME_SECONDS = 1.0
#: For the coordinator and the servers to end after a failure, before rank 0 ends.
END_SECONDS = 10.0
#: For the job of an earlier start to let go of the page's port.
PORT_SECONDS = 10.0


def settle(world: StartedRanks) -> dict[str, Any]:
    """The settings of a job of ranks: what `syncline worker-env` was told, over syncline.toml."""
    said = {**configuration.read_toml_here(), **configuration.said_to_ranks()}
    given = {key: value for key, value in said.items() if key not in _OF_RUN}
    given["workers"] = world.size
    config = configuration.resolve(given)
    check_settings(config)
    if config.has_process_group and not world.is_here:
        raise ConfigError(
            f"sums = {config.sums} with {world.launcher} on several hosts: use syncline run -H a:4,b:4 --sums "
            f"{config.sums}, or sums = ours"
        )
    hosts = [f"server {number}" if not world.is_here else "" for number in range(1)] * config.servers
    return settle_servers(given, config, hosts)


def join_world(world: StartedRanks, defaults: Mapping[str, Any]) -> Job:
    """This rank's way into its job."""
    from syncline.launch.working import join_as_worker

    shorten_tracebacks()
    _share_cores(world)
    name, host = f"worker-{world.rank}", "local" if world.is_here else socket.gethostname()
    rank_host: HostProcess | None = None
    file = rendezvous.given_job()
    if file is None:
        given = settle(world)
        if world.rank == 0:
            rank_host = HostProcess(world, given, host)
            file = rank_host.file
        else:
            file = _find(world, given)
    own_server = OwnServer(file, name, host) if configuration.resolve(file.given).is_ring else None
    faults.arm(name, file.folder)
    try:
        job = join_as_worker(file, name, host, defaults, own_server, versions=versions_here())
    except BaseException:
        if rank_host is not None:
            rank_host.close(END_SECONDS)
        raise
    RankEnd(job, own_server, rank_host)
    return job


def _share_cores(world: StartedRanks) -> None:
    """Ranks on one host share its cores, unless their launcher has bound each to its own, or said a number."""
    is_bound = configuration.num_cores() < (os.cpu_count() or 1)
    if is_bound or world.local_size < 2 or configuration.environment_names(("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        return
    number = max(1, configuration.num_cores() // world.local_size)
    configuration.add_to_environment({"OMP_NUM_THREADS": str(number)})
    threads.settle()


def _find(world: StartedRanks, given: dict[str, Any]) -> JobFile:
    """Waits until rank 0 has started the job. The secret is read each time: an earlier start may have left one."""
    host = rendezvous.address_of(world, configuration.resolve(given).bind)
    seconds = configuration.resolve(given).start_seconds
    until, refused, ports = time.monotonic() + seconds, set[str](), list[int]()
    while True:
        if (secret := secret_of(world)) is not None:
            meeting = rendezvous.meeting_of(secret, world.run, given)
            ports = meeting.ports
            left = until - time.monotonic()
            if (file := rendezvous.find(meeting, host, given, refused, left)) is not None:
                return file
        if time.monotonic() > until:
            raise rendezvous.no_coordinator(world, host, ports, seconds, refused)
        time.sleep(AGAIN_SECONDS)


def secret_of(world: StartedRanks) -> bytes | None:
    """The secret of the ranks; None: rank 0 has not made it yet."""
    if said := configuration.token_file():
        return rendezvous.read_token(pathlib.Path(said))
    if world.is_here:
        path = rendezvous.own_token_path(world)
        return rendezvous.read_token(path) if path.exists() else None
    raise WrongLauncher(
        f"{world.launcher} has started ranks on several hosts ({world.found}), and hands them no secret; make one "
        f"with {rendezvous.HOW}, copy it to every host with its mode, and set SYNCLINE_TOKEN_FILE to its path "
        "(mpirun -x SYNCLINE_TOKEN_FILE); for a separate training in each process, call syncline.init(embedded=True)"
    )


class HostProcess:
    """The process beside rank 0 with the coordinator and the servers, as rank 0 sees it."""

    def __init__(self, world: StartedRanks, given: dict[str, Any], host: str) -> None:
        self._closed = False
        self.file = self._start(world, settle_saving(given), host)

    def _start(self, world: StartedRanks, given: dict[str, Any], host: str) -> JobFile:
        config, script, token_path = configuration.resolve(given), own_script(), ""
        if configuration.token_file() or not world.is_here:
            secret = secret_of(world) or b""
        else:
            secret, token_path = secrets.token_hex(32).encode(), str(rendezvous.own_token_path(world))
        meeting = rendezvous.meeting_of(secret, world.run, given)
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(rendezvous.listen(meeting, world, rendezvous.address_of(world, config.bind)))
            page, page_code = page_socket(config, PORT_SECONDS), serving.new_code()
            if page is not None:
                stack.enter_context(page)
            if not config.name:
                given = {**given, "name": claim_name(pathlib.Path(config.runs), default_name(script))}
                config = configuration.resolve(given)
            address, port = sock.getsockname()[:2]
            file = meeting.file(str(address), int(port), given)
            plan = RankHostPlan(
                file=file,
                host=host,
                listen_fd=sock.fileno(),
                page_fd=page.fileno() if page is not None else None,
                page_code=page_code,
                num_servers=0 if config.is_ring else config.servers,
                launcher=world.launcher,
                restarts=world.restarts,
                secret=secret.decode("latin-1"),
                token_path=token_path,
                script=script.path,
                is_module=script.is_module,
            )
            self._process = subprocess.Popen(
                [sys.executable, "-m", "syncline.launch.rank_host"],
                stdin=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[one.fileno() for one in (sock, page) if one is not None],
                env=configuration.inherited_environment({"PYTHONUNBUFFERED": "1"}),
            )
            link = serving.link_of(page, page_code) if page is not None else ""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and said why
            self._process.stdin.write(msgspec.json.encode(plan) + b"\n")
            self._process.stdin.flush()
        rest = "as a ring" if config.is_ring else f"and {counted(config.servers, 'server')} beside rank 0"
        for line in (
            f"{config.name}: {counted(world.size, 'worker')} of {world.launcher} {rest}, {config.policy}",
            f"the death of any rank ends the job: {world.restarts}"
            + ("" if config.checkpoint else "; without a checkpoint folder it starts over"),
            protection_of(config, ()) if config.is_ring else "",
            f"logs are in {pathlib.Path(config.runs) / config.name}/; `syncline why {config.name}` says what the job "
            "waits for",
            f"the page: {link}" if link else "",
        ):
            if line:
                sys.stderr.write(f"syncline: {line}\n")
        sys.stderr.flush()
        return file

    def end(self) -> None:
        """Has the job saved, where it has a folder for that, and ended."""
        self._process.terminate()

    def close(self, seconds: float | None) -> None:
        """Waits until the job is over; after so many seconds it ends what is left. None: as long as others work."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.wait()


class RankEnd:
    """What a rank does when its script ends: a good end leaves the job, an error is a death."""

    def __init__(self, job: Job, own_server: OwnServer | None, rank_host: HostProcess | None) -> None:
        self._job, self._own_server, self._rank_host = job, own_server, rank_host
        self._failed, self._owner = False, os.getpid()
        self._told_at: dict[int, float] = {}  # to end, by this signal
        self._previous = sys.excepthook
        sys.excepthook = self._see_error
        atexit.register(self._at_exit)
        threading.Thread(target=self._watch, name="rank", daemon=True).start()
        if job.config.checkpoint and threading.current_thread() is threading.main_thread():
            # Hydra passes Ctrl-C on as it is; Open MPI makes SIGTERM of it.
            for number, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
                if signal.getsignal(number) == handler:
                    signal.signal(number, self._told_to_end)

    def _watch(self) -> None:
        """A launcher may not see that another rank has died: a script that computes on is ended when the job is."""
        while not self._job.has_failed:
            if self._job.is_closed:
                return
            time.sleep(LOOK_SECONDS)
        time.sleep(NOTICE_SECONDS)  # most scripts come to a call that raises the reason
        sys.stderr.write(
            f"syncline: {self._job.name}: the job has failed, and this script has not ended: it ends now\n"
        )
        sys.stderr.flush()
        os._exit(1)

    def _told_to_end(self, number: int, frame: object) -> None:
        """A launcher ends all its ranks: the job is saved first, which needs their steps. Again: at once. One Ctrl-C
        may come twice, from the terminal and from the launcher.
        """
        now, is_first = time.monotonic(), number not in self._told_at
        if os.getpid() != self._owner or now - self._told_at.setdefault(number, now) > SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)  # a script's fork has inherited this
            os.kill(os.getpid(), number)
        elif is_first and self._rank_host is not None:
            self._rank_host.end()

    def _see_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._failed = True
        self._previous(kind, error, trace)

    def _at_exit(self) -> None:
        if os.getpid() != self._owner:  # a fork of the script's
            return
        if self._failed:
            self._job.abandon()
        else:
            try:
                self._job.close()
            except SynclineError as error:
                self._failed = True
                sys.stderr.write(f"syncline: {self._job.name}: {type(error).__name__}: {error}\n")
        if self._own_server is not None:
            self._own_server.finish(1 if self._failed else 0)
        if self._rank_host is not None:
            self._rank_host.close(END_SECONDS if self._failed else None)


def own_script() -> Script:
    """The script of this process."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return Script(path=str(spec.name).removesuffix(".__main__"), is_module=True, arguments=sys.argv[1:])
    path = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "session"
    return Script(path=path, arguments=sys.argv[1:])
