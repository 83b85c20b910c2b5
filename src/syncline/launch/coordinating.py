"""A coordinator's process."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from syncline import faults
from syncline.coordinator.recording import Recorder
from syncline.coordinator.service import Coordinator
from syncline.core.membership import Outcome
from syncline.errors import ConfigError, SynclineError
from syncline.launch import lifeline
from syncline.launch.jobfile import JobFile
from syncline.launch.membership import say
from syncline.launch.restarts import LEFT
from syncline.launch.watching import ask_to_save
from syncline.net import tcp
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.transport import Connection, Peer
from syncline.page.access import Access
from syncline.page.serving import TOKEN_FILE, PageServer, link_of
from syncline.sinks.choosing import choices
from syncline.sinks.sink import SinkRun
from syncline.sinks.thread import SinkThread
from syncline.store.journal import Journal

#: After the end: time for members to learn of it and for the launcher to ask for the outcome.
LINGER_SECONDS = 1.5
JOURNAL = "journal.db"


class PagePlan(NamedTuple):
    """The web page of a job."""

    sock: socket.socket  # listens already
    code: str  # opens the page once


def run_coordinator(
    file: JobFile,
    listen_fd: int | None,
    sock: socket.socket | None = None,
    *,
    resumes: bool = False,
    page: PagePlan | None = None,
    ends_job: bool = False,
) -> int:
    """Serves until the job has ended; returns the exit code. `resumes`: an earlier coordinator has died. `ends_job`:
    on SIGTERM the job is saved and ends, since no other process has the journal.
    """
    outcomes: list[Outcome] = []
    log = say("coordinator")
    faults.arm("coordinator", file.folder)
    journal = open_journal(file, resumes=resumes)
    access = Access(file.job, file.token_bytes)
    coordinator = Coordinator(
        file.given,
        log=log,
        ended=outcomes.append,
        journal=journal,
        job=file.job,
        term=journal.term,
        new_page_link=functools.partial(_new_link, page, access),
    )
    if sock is None:
        sock = socket.socket(fileno=listen_fd) if listen_fd is not None else tcp.bind(file.host, file.port)

    def superseded(term: int) -> None:
        coordinator.superseded(f"a coordinator of term {term} has the job")

    stamp = Stamp(file.job, superseded=superseded)
    stamp.term, stamp.is_coordinators = journal.term, True

    def accept(connection: Connection) -> None:
        Endpoint(connection, stamp, coordinator)

    identity = tcp.Identity(file.job, file.token_bytes, Peer("coordinator", "coordinator", 0))
    listener = tcp.Listener(identity, accept, sock=sock, log=log)
    end = _JobEnd(file, sock, coordinator) if ends_job else None
    if end is None:
        _wait_for_the_save(file)
    else:
        signal.signal(signal.SIGTERM, end)
    recorder = Recorder(coordinator.job, coordinator.status, file.folder)
    sinks = _begin_sinks(file, coordinator, recorder)
    recorder.start()
    coordinator.tracing.start(file.folder)
    page_server = _begin_page(file, page, access, recorder, coordinator.config.page_host)
    coordinator.start_deadline()
    coordinator.wait()
    threading.Event().wait(LINGER_SECONDS)
    recorder.close()
    for sink in sinks:
        sink.close(has_failed=bool(outcomes and outcomes[0].failed))
    coordinator.tracing.close()
    if page_server is not None:
        page_server.close()
    listener.close()
    coordinator.close()
    journal.close()
    if not (outcomes and outcomes[0].failed):
        return 0
    return LEFT if end is not None and end.is_told else 1


class _JobEnd:
    """Handles SIGTERM in a coordinator whose job ends with it. The signal may have gone to all members, which stay
    until the job is saved. A second one ends this process at once.
    """

    def __init__(self, file: JobFile, sock: socket.socket, coordinator: Coordinator) -> None:
        self._file = msgspec.structs.replace(file, host=str(sock.getsockname()[0]))
        self._coordinator = coordinator
        self._seconds = coordinator.config.save_seconds
        self.is_told = False  # before the job had ended

    def __call__(self, number: int, frame: object) -> None:
        if self._coordinator.job.over.is_set():
            return  # it ends already
        if self.is_told:
            os._exit(LEFT)
        self.is_told = True
        threading.Thread(target=self._end, name="end of the job", daemon=True).start()

    def _end(self) -> None:
        log = self._coordinator.job.log_line
        try:
            if self._coordinator.config.checkpoint and self._coordinator.membership.formed:
                log("SIGTERM: the job is saved, then it ends")
                self._coordinator.announce_end(self._seconds + LINGER_SECONDS)
                log(f"saved {ask_to_save(self._file, self._seconds, 'SIGTERM').name}")
        except (SynclineError, OSError) as error:
            log(f"the job is not saved: {error}")
        finally:
            self._coordinator.end_early("SIGTERM has ended the coordinator, and the job with it")


def _begin_sinks(file: JobFile, coordinator: Coordinator, recorder: Recorder) -> list[SinkThread]:
    """Starts a thread for each sink of the job."""
    settings = msgspec.to_builtins(coordinator.config)
    run = SinkRun(name=file.folder.name, job=file.job, folder=file.folder.absolute(), settings=settings)
    try:
        found = [SinkThread(choice, run, coordinator.job.log_line) for choice in choices(coordinator.config)]
    except ConfigError as error:  # the launcher has the package, and this host does not
        coordinator.job.log_line(f"{error}; the job goes on without it")
        return []
    for sink in found:
        recorder.give_to(sink.take)
        sink.start()
    return found


def _new_link(page: PagePlan | None, access: Access) -> str:
    """A link that opens the page once; "" where the job has none."""
    return link_of(page.sock, access.new_code(time.time())) if page is not None else ""


def _begin_page(
    file: JobFile, page: PagePlan | None, access: Access, recorder: Recorder, hosts: Sequence[str]
) -> PageServer | None:
    """Starts the page's thread."""
    if page is None:
        return None
    if page.code:
        access.add_code(page.code, time.time())
    server = PageServer(page.sock, access, file.folder.parent, file.folder.name, recorder, hosts)
    _write_token(file, access)
    server.start()
    return server


def _write_token(file: JobFile, access: Access) -> None:
    """For machines, such as Prometheus: a file that only its owner can read."""
    path = file.folder / TOKEN_FILE
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(access.token)


def _wait_for_the_save(file: JobFile) -> None:
    """On SIGTERM of the whole job: the job is saved first, also by this process. If only this process is told to
    end, it ends.
    """
    if file.given.get("checkpoint") and threading.current_thread() is threading.main_thread():
        told = lifeline.ToldToEnd(lambda: os.kill(os.getpid(), signal.SIGTERM), saves=True)
        signal.signal(signal.SIGTERM, told)


def open_journal(file: JobFile, *, resumes: bool) -> Journal:
    """The job's journal: a new one for a new job, the existing one for a running job."""
    path = pathlib.Path(file.folder) / JOURNAL
    if resumes:
        return Journal.open(path, file.job)
    path.parent.mkdir(parents=True, exist_ok=True)
    return Journal.create(path, file.job)
