"""`local_job`: coordinator, servers and workers in one process, over the in-process twin of the transport."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from syncline import config as configuration
from syncline.coordinator.service import Coordinator
from syncline.core.ring import check_said, partner_of, ring_settings
from syncline.core.settings import check_settings
from syncline.core.wire.control import Joined
from syncline.errors import JobFailed, Stopped, SynclineError
from syncline.launch.embedded import InProcess
from syncline.worker.current import current_in_thread
from syncline.worker.job import Job

T = TypeVar("T")
#: A machine may stand still for a while: a test that goes well waits for none of it.
RUN_SECONDS, CLOSE_SECONDS = 300.0, 60.0


class LocalJob:
    """All workers of a job. `run` calls a function once per worker, each in a thread of its own."""

    def __init__(self, process: InProcess, jobs: list[Job]) -> None:
        self.process, self.jobs = process, jobs

    @property
    def coordinator(self) -> Coordinator:
        """The service that keeps the membership, the leases and the saves; `coordinator.debug_state()` sums it up."""
        return self.process.coordinator

    @property
    def servers(self) -> Mapping[str, Any]:
        """The services of the servers that live, by name; each has a `debug_state()`."""
        return self.process.servers

    def __getitem__(self, rank: int) -> Job:
        return self.jobs[rank]

    def __len__(self) -> int:
        return len(self.jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def run(self, function: Callable[[Job], T], timeout_seconds: float = RUN_SECONDS) -> list[T]:
        """The results in the order of ranks; None for a worker that `syncline.Stopped` has ended. If one worker
        raises, the job fails and its error is raised here."""
        results: dict[int, Any] = {}
        errors: list[Exception] = []

        def work(rank: int, job: Job) -> None:
            try:
                with current_in_thread(job):
                    results[rank] = function(job)
            except Stopped:
                return
            except Exception as error:
                errors.append(error)
                self.fail(job.name, f"raised {type(error).__name__}")

        threads = [
            threading.Thread(target=work, args=(rank, job), name=job.name, daemon=True)
            for rank, job in enumerate(self.jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_seconds)
        stuck = [thread.name for thread in threads if thread.is_alive()]
        if errors:
            raise next((error for error in errors if not isinstance(error, JobFailed)), errors[0])
        if stuck:
            raise TimeoutError(f"{', '.join(stuck)} did not finish within {timeout_seconds:g} s")
        found: list[Any] = [results.get(rank) for rank in range(len(self.jobs))]
        return found

    def fail(self, name: str, reason: str) -> None:
        """The job takes this worker for dead."""
        self.coordinator.job.fail(name, reason)

    def kill(self, name: str) -> None:
        """This member is gone from one moment to the next, as by SIGKILL; the job continues as far as it can. In a
        ring worker-1 and server-1 are one process."""
        self.process.kill(name)

    def add_server(self, name: str, on: str = "local") -> None:
        """A server joins, or one that was killed comes back; `on`: its host, by name."""
        self.process.add_server(name, on).wait(CLOSE_SECONDS)

    def add_worker(self, name: str, on: str = "local") -> Job:
        """A worker joins the running job, or one that was killed comes back; in a ring, with its server. `on`: its
        host, by name."""
        if self.coordinator.config.is_ring:
            self.add_server(partner_of(name), on)
        link, handlers, stamp, call = self.process.ask_to_join(name, {}, on)
        joined = call.wait(CLOSE_SECONDS)
        assert isinstance(joined, Joined)
        job = self.process.make_job(link, handlers, stamp, joined, embedded=False)
        self.jobs.append(job)
        return job

    def close(self) -> None:
        """Every worker leaves, and everything is given back."""
        # At the same time: what one still has to send may need the others.
        threads = [threading.Thread(target=_leave, args=(job,), daemon=True) for job in self.jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(CLOSE_SECONDS)
        self.process.close()


def _leave(job: Job) -> None:
    with contextlib.suppress(SynclineError):
        job.close()


@contextlib.contextmanager
def local_job(
    workers: int = 2, servers: int | None = None, policy: str = "sync", *, folder: str = "runs/local",
    on: Sequence[str] = (), num_cores: int = 0, **settings: Any,
) -> Iterator[LocalJob]:  # fmt: skip
    """A whole job inside this process; `settings` are those of syncline.toml.

    `on`: the host of each worker, by name. Workers of different hosts share no memory among themselves.
    `num_cores`: as if every host had so many; 0: as many as this one has.
    With `transport="tcp"` workers and servers share no memory: bytes travel, as they would over sockets.
    There is one server if nothing is said; with `exchange="ring"` every worker has its own.
    """
    said = {} if servers is None else {"servers": servers}
    given = configuration.check_known({"workers": workers, "policy": policy, **said, **settings}, "local_job()")
    check_said(given)
    config = configuration.resolve(given)
    check_settings(config)
    if config.is_ring:
        given |= ring_settings(config)
    process = InProcess(given, pathlib.Path(folder))
    process.shares_memory = given.get("transport") != "tcp"
    process.num_cores = num_cores or process.num_cores
    local: LocalJob | None = None
    try:
        hosts = [*on, *["local"] * (workers - len(on))]
        asked = [process.ask_to_join(f"worker-{rank}", {}, hosts[rank]) for rank in range(workers)]
        for number in range(process.coordinator.config.servers):
            process.add_server(f"server-{number}", hosts[number] if config.is_ring else "local")
        jobs = []
        for link, handlers, stamp, call in asked:
            joined = call.wait(process.coordinator.config.start_seconds)
            assert isinstance(joined, Joined)
            jobs.append(process.make_job(link, handlers, stamp, joined, embedded=False))
        local = LocalJob(process, jobs)
        yield local
    finally:
        if local is not None:
            local.close()
        else:
            process.close()
